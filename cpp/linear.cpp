// Work is cut into (panel of rows) x (tile of 32 outputs). A panel's activations stay in the L2
// cache while tiles stream past; within a panel a tile (K / 2 bytes a row) does. One panel at few
// rows: every thread then reads its tiles once, one linear stream.

#include "linear.hpp"

#include "memory.hpp"
#include "pool.hpp"

namespace weightpath {
namespace {

constexpr int64_t PANEL_BYTES = 384 << 10;
constexpr int64_t PANEL_STEP = 12;            // whole blocks of 6 rows and of 4
constexpr int64_t LONG_PANEL = 512, SHORT_PANEL = 128;  // rows, for sets with `products`
constexpr int64_t SHARES = 4;                 // pieces of work a thread, if short panels give them
constexpr int64_t QUANTIZE_ALONE = 1 << 16;   // activations below which threads only cost

// The activations' memory, one a calling thread, kept between calls.
thread_local Scratch scratch;

int64_t lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

// The same for sets that take a run of tiles at once and unpack each once a panel.
void products(const InstructionSet& set, const Shape& shape, const uint8_t* packed,
              const Activations& a, const Output& out, int threads) {
  const int64_t tiles = shape.tiles();
  int64_t panel = LONG_PANEL;
  while (panel > SHORT_PANEL && (a.rows + panel - 1) / panel * tiles < SHARES * threads) panel /= 2;
  const int64_t panels = (a.rows + panel - 1) / panel;
  parallel(panels * tiles, threads, [&](int64_t start, int64_t stop) {
    while (start < stop) {
      const int64_t tile = start % tiles, m0 = start / tiles * panel;
      const int64_t m1 = m0 + panel < a.rows ? m0 + panel : a.rows;
      const int64_t end = tile + stop - start < tiles ? tile + stop - start : tiles;
      set.products(packed, shape, a, out, tile, end, m0, m1);
      start += end - tile;
    }
  });
}

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

  if (set.products) {
    products(set, shape, packed, a, out, threads);
    return true;
  }
  int64_t panel = PANEL_BYTES / (planes * shape.row_stride()) / PANEL_STEP * PANEL_STEP;
  if (panel < PANEL_STEP) panel = PANEL_STEP;
  const int64_t panels = (m + panel - 1) / panel, tiles = shape.tiles();
  parallel(panels * tiles, threads, [&](int64_t start, int64_t stop) {
    for (int64_t item = start; item < stop; ++item) {
      const int64_t tile = item % tiles, m0 = item / tiles * panel;
      const int64_t m1 = m0 + panel < m ? m0 + panel : m;
      set.product(packed + tile * shape.tile_bytes(), shape, a, out, tile, m0, m1);
    }
  });
  return true;
}

}  // namespace weightpath
