#include "products.hpp"

#include <algorithm>

namespace weightpath {
namespace {

constexpr int64_t MOST_AHEAD = 128 << 10;  // bytes that a waiting thread fetches
constexpr int64_t LEAST_PANEL = 64;        // rows
constexpr int64_t FLOAT_PANEL_BYTES = 512 << 10;  // fp32 activations that stay in the L2 cache

}  // namespace

bool Matrix::same_activations(const Matrix& other) const {
  return shape.k == other.shape.k && shape.group == other.shape.group &&
         shape.padded_group() == other.shape.padded_group() && planes == other.planes &&
         per_group == other.per_group && order == other.order &&
         column_scales == other.column_scales;
}

Group::Group(std::vector<Matrix> all, bool pairs) : matrices(std::move(all)), paired(pairs) {
  for (size_t i = 0; i < matrices.size(); ++i) {
    int found = -1;
    if (matrices[i].packed) {
      for (size_t s = 0; s < makers.size() && found < 0; ++s) {
        if (matrices[i].same_activations(matrices[makers[s]])) found = static_cast<int>(s);
      }
      if (found < 0) {
        found = static_cast<int>(makers.size());
        makers.push_back(static_cast<int>(i));
      }
    }
    slot.push_back(found);
  }
}

int64_t Group::units() const {
  if (paired) return matrices[0].shape.tiles();
  int64_t all = 0;
  for (const Matrix& one : matrices) all += one.shape.tiles();
  return all;
}

int64_t Group::activation_bytes(int64_t rows) const {
  int64_t all = 0;
  for (const int maker : makers) all += matrices[maker].activation_bytes(rows);
  return all;
}

int64_t Group::cut(int index, int count) const {
  if (paired) return units() * index / count;
  int64_t total = 0;
  for (const Matrix& one : matrices) total += one.shape.tiles() * one.tile_bytes();
  int64_t target = total * index / count, unit = 0;
  for (const Matrix& one : matrices) {
    const int64_t tiles = one.shape.tiles(), bytes = one.tile_bytes();
    if (target < tiles * bytes) return unit + (target + bytes / 2) / bytes;
    target -= tiles * bytes;
    unit += tiles;
  }
  return unit;
}

Ahead Group::ahead(int index, int count) const {
  int64_t unit = cut(index, count), stop = cut(index + 1, count);
  for (const Matrix& one : matrices) {
    const int64_t tiles = one.shape.tiles();
    if (unit < tiles || paired) {
      if (!one.packed) return {};
      stop = std::min(stop, tiles);
      const uint8_t* from = one.packed + unit * one.stride;
      return {from, from + std::min((stop - unit) * one.stride, MOST_AHEAD)};
    }
    unit -= tiles;
    stop -= tiles;
  }
  return {};
}

Panels Group::panels(const InstructionSet& set, int64_t rows, int threads) const {
  for (const Matrix& one : matrices) {
    if (!one.packed) continue;
    Panels best = panels_of(set, one.shape, one.planes, rows);
    if (rows < SHARED_ROWS) return best;
    // Rows' worth of time until the last thread is done, if all are equally fast: its items, each
    // with the cost of a tile's unpacking.
    const auto cost = [&](int64_t count) {
      const int64_t items = (units() * count + threads - 1) / threads;
      return items * (rows + set.panel.tile_rows * count) / count;
    };
    const int64_t most = (rows + LEAST_PANEL - 1) / LEAST_PANEL;
    for (int64_t count = best.count + 1; count <= most; ++count) {
      if (cost(count) < cost(best.count)) best.count = count;
    }
    return best;
  }
  const int64_t block = 4, blocks = (rows + block - 1) / block;
  const int64_t count = (rows * k() * 4 + FLOAT_PANEL_BYTES - 1) / FLOAT_PANEL_BYTES;
  return {rows, block, blocks, count < blocks ? count : blocks};
}

void place_activations(const Group& group, int64_t rows, char* memory, Prepared& to) {
  for (size_t s = 0; s < group.makers.size(); ++s) {
    const Matrix& maker = group.matrices[group.makers[s]];
    to.slot[s] = activations_in(memory, maker.shape, maker.planes, maker.per_group, rows);
    memory += maker.activation_bytes(rows);
  }
}

void quantize_row(const InstructionSet& set, const Group& group, const Prepared& to,
                  const float* x, int64_t m, float* gathered) {
  for (size_t s = 0; s < group.makers.size(); ++s) {
    const Matrix& maker = group.matrices[group.makers[s]];
    const int64_t k = maker.shape.k;
    if (!maker.order && !maker.column_scales) {
      set.quantize(x, Kind::fp32, maker.shape, to.slot[s], m);
      continue;
    }
    const float* row = x + m * k;
    for (int64_t i = 0; i < k; ++i) {
      const int64_t from = maker.order ? maker.order[i] : i;
      gathered[i] = row[from] * (maker.column_scales ? maker.column_scales[from] : 1.0f);
    }
    // The kernel looks for row m; the only row here is in its place.
    const Activations here = row_of(to.slot[s], maker.shape, m);
    set.quantize(gathered, Kind::fp32, maker.shape, here, 0);
  }
}

void multiply(const InstructionSet& set, const StepKernels& kernels, const Group& group, int which,
              const Prepared& from, int64_t tile, int64_t m0, int64_t m1, float* y) {
  const Matrix& one = group.matrices[static_cast<size_t>(which)];
  const int64_t n0 = tile * TILE_ROWS, n = std::min(TILE_ROWS, one.shape.n - n0);
  if (!one.packed) {
    kernels.product({one.floats, one.kind, one.shape.n, one.shape.k, one.bias}, from.x, m0, m1, n0,
                    n0 + n, y);
    return;
  }
  Shape alone = one.shape;  // this tile as a weight of its own
  alone.n = n;
  const Output out{y, Kind::fp32, one.bias ? one.bias + n0 : nullptr, Kind::fp32};
  const Activations rows = row_of(from.slot[group.slot[static_cast<size_t>(which)]], alone, m0);
  set.product(one.packed + tile * one.stride, alone, rows, out, 0, 0, m1 - m0);
}

}  // namespace weightpath
