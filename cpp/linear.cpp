// Work is cut into (panel of rows) x (tile of 32 outputs). A panel's activations stay in the L2
// cache while tiles stream past; within a panel a tile (K / 2 bytes a row) does. One panel at few
// rows: every thread then reads its tiles once, one linear stream. At many, free threads take the
// next tile.

#include "linear.hpp"

#include <atomic>

#include "memory.hpp"
#include "pool.hpp"

namespace weightpath {
namespace {

constexpr int64_t TOGETHER = 4;              // rows of x quantized at once
constexpr int64_t QUANTIZE_ALONE = 1 << 16;  // activations below which threads only cost

// Calls one(i) for i in [0, items), each on the thread that is free next.
template <typename F>
void share(int64_t items, int threads, F&& one) {
  std::atomic<int64_t> next{0};
  parallel(threads < items ? threads : items, threads, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) one(i);
  });
}

// The activations' memory, one a calling thread, kept between calls.
thread_local Scratch scratch;

int64_t lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

}  // namespace

Panels panels_of(const InstructionSet& set, const Shape& shape, int planes, int64_t rows) {
  const int64_t block = set.panel.block[planes - 1], blocks = (rows + block - 1) / block;
  int64_t most = set.panel.bytes / (planes * shape.row_stride() * block);
  if (most > set.panel.most_rows / block) most = set.panel.most_rows / block;
  if (most < 1) most = 1;
  return {rows, block, blocks, (blocks + most - 1) / most};
}

int64_t activation_bytes(const Shape& shape, int planes, bool per_group, int64_t rows) {
  const int64_t groups = shape.groups();
  return planes * (lines(rows * shape.row_stride()) + lines(4 * rows * groups)) +
         lines(4 * rows * (per_group ? groups : 1));
}

Activations activations_in(char* memory, const Shape& shape, int planes, bool per_group,
                           int64_t rows) {
  const int64_t plane_bytes = lines(rows * shape.row_stride());
  const int64_t sum_bytes = lines(4 * rows * shape.groups());
  Activations a{};
  a.rows = rows;
  a.planes = planes;
  a.per_group = per_group;
  for (int p = 0; p < planes; ++p) {
    a.plane[p] = reinterpret_cast<int8_t*>(memory + p * plane_bytes);
    a.sums[p] = reinterpret_cast<int32_t*>(memory + planes * plane_bytes + p * sum_bytes);
  }
  a.scales = reinterpret_cast<float*>(memory + planes * (plane_bytes + sum_bytes));
  return a;
}

Activations row_of(const Activations& a, const Shape& shape, int64_t m) {
  Activations rest = a;
  rest.rows = a.rows - m;
  for (int p = 0; p < a.planes; ++p) {
    rest.plane[p] += m * shape.row_stride();
    rest.sums[p] += m * shape.groups();
  }
  rest.scales += m * (a.per_group ? shape.groups() : 1);
  return rest;
}

bool linear(const InstructionSet& set, const Shape& shape, const uint8_t* packed, const void* x,
            Kind x_kind, int64_t m, int planes, bool per_group, const Output& out, int threads) {
  char* memory = scratch.at_least(activation_bytes(shape, planes, per_group, m));
  if (!memory) return false;
  const Activations a = activations_in(memory, shape, planes, per_group, m);

  share((m + TOGETHER - 1) / TOGETHER, m * shape.k < QUANTIZE_ALONE ? 1 : threads, [&](int64_t i) {
    const int64_t stop = (i + 1) * TOGETHER < m ? (i + 1) * TOGETHER : m;
    for (int64_t row = i * TOGETHER; row < stop; ++row) set.quantize(x, x_kind, shape, a, row);
  });

  const Panels panels = panels_of(set, shape, planes, m);
  const int64_t tiles = shape.tiles();
  const auto one = [&](int64_t item) {
    const int64_t tile = item % tiles, panel = item / tiles;
    set.product(packed + tile * shape.tile_bytes(), shape, a, out, tile, panels.begin(panel),
                panels.end(panel));
  };
  if (m < SHARED_ROWS) {
    parallel(panels.count * tiles, threads, [&](int64_t start, int64_t stop) {
      for (int64_t item = start; item < stop; ++item) one(item);
    });
    return true;
  }
  share(panels.count * tiles, threads, one);
  return true;
}

}  // namespace weightpath
