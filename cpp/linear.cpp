// Work is cut into (panel of rows) x (tile of 32 outputs). A panel's activations stay in the L2
// cache while tiles stream past; within a panel a tile (K / 2 bytes a row) does. One panel at few
// rows: every thread then reads its tiles once, one linear stream.

#include "linear.hpp"

#include <cstdlib>

#include "pool.hpp"

namespace weightpath {
namespace {

constexpr int64_t PANEL_BYTES = 384 << 10;
constexpr int64_t QUANTIZE_ALONE = 1 << 16;  // activations below which threads only cost

// The activations' memory, one a calling thread, kept between calls.
struct Scratch {
  void* memory = nullptr;
  int64_t bytes = 0;
  ~Scratch() { std::free(memory); }

  char* at_least(int64_t wanted) {
    if (wanted > bytes) {
      std::free(memory);
      bytes = (wanted + 4095) / 4096 * 4096;
      memory = std::aligned_alloc(64, static_cast<size_t>(bytes));
      if (!memory) bytes = 0;
    }
    return static_cast<char*>(memory);
  }
};

thread_local Scratch scratch;

int64_t lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

}  // namespace

bool linear(const InstructionSet& set, const Shape& shape, const uint8_t* packed, const void* x,
            Kind x_kind, int64_t m, int planes, bool per_group, const Output& out, int threads) {
  const int64_t groups = shape.groups();
  const int64_t plane_bytes = lines(m * shape.row_stride()), sum_bytes = lines(4 * m * groups);
  const int64_t scale_bytes = lines(4 * m * (per_group ? groups : 1));
  char* memory = scratch.at_least(planes * (plane_bytes + sum_bytes) + scale_bytes);
  if (!memory) return false;
  Activations a{};
  a.rows = m;
  a.planes = planes;
  a.per_group = per_group;
  for (int p = 0; p < planes; ++p) {
    a.plane[p] = reinterpret_cast<int8_t*>(memory + p * plane_bytes);
    a.sums[p] = reinterpret_cast<int32_t*>(memory + planes * plane_bytes + p * sum_bytes);
  }
  a.scales = reinterpret_cast<float*>(memory + planes * (plane_bytes + sum_bytes));

  parallel(m, m * shape.k < QUANTIZE_ALONE ? 1 : threads, [&](int64_t start, int64_t stop) {
    for (int64_t row = start; row < stop; ++row) set.quantize(x, x_kind, shape, a, row);
  });

  // Panels of whole blocks, as even as they go: threads get equal counts of panels x tiles.
  const int64_t block = planes == 2 ? 4 : 6, blocks = (m + block - 1) / block;
  int64_t most = PANEL_BYTES / (planes * shape.row_stride() * block);
  if (most < 1) most = 1;
  const int64_t panels = (blocks + most - 1) / most, tiles = shape.tiles();
  parallel(panels * tiles, threads, [&](int64_t start, int64_t stop) {
    for (int64_t item = start; item < stop; ++item) {
      const int64_t tile = item % tiles, panel = item / tiles;
      const int64_t m0 = blocks * panel / panels * block;
      const int64_t end = blocks * (panel + 1) / panels * block, m1 = end < m ? end : m;
      set.product(packed + tile * shape.tile_bytes(), shape, a, out, tile, m0, m1);
    }
  });
  return true;
}

}  // namespace weightpath
