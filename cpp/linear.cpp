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

// Rows from which tiles are shared out. Fewer: each thread reads the tiles that it packed, one
// linear stream. A static cut waits for the thread whose core is taken in part by others: without
// it 512 rows on 16 threads of a shared Xeon ran 1.2 to 1.5 times faster (docs/experiments.md).
constexpr int64_t SHARED_ROWS = 16;
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

  share((m + TOGETHER - 1) / TOGETHER, m * shape.k < QUANTIZE_ALONE ? 1 : threads, [&](int64_t i) {
    const int64_t stop = (i + 1) * TOGETHER < m ? (i + 1) * TOGETHER : m;
    for (int64_t row = i * TOGETHER; row < stop; ++row) set.quantize(x, x_kind, shape, a, row);
  });

  // Panels of whole blocks, as even as they go: threads get equal counts of panels x tiles.
  const int64_t block = set.panel.block[planes - 1], blocks = (m + block - 1) / block;
  int64_t most = set.panel.bytes / (planes * shape.row_stride() * block);
  if (most > set.panel.most_rows / block) most = set.panel.most_rows / block;
  if (most < 1) most = 1;
  const int64_t panels = (blocks + most - 1) / most, tiles = shape.tiles();
  const auto one = [&](int64_t item) {
    const int64_t tile = item % tiles, panel = item / tiles;
    const int64_t m0 = blocks * panel / panels * block;
    const int64_t end = blocks * (panel + 1) / panels * block, m1 = end < m ? end : m;
    set.product(packed + tile * shape.tile_bytes(), shape, a, out, tile, m0, m1);
  };
  if (m < SHARED_ROWS) {
    parallel(panels * tiles, threads, [&](int64_t start, int64_t stop) {
      for (int64_t item = start; item < stop; ++item) one(item);
    });
    return true;
  }
  share(panels * tiles, threads, one);
  return true;
}

}  // namespace weightpath
