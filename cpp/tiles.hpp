// The packed layout of a weight [N, K] and what a kernel is asked to do with it.
//
// The layout is specified in src/weightpath/layouts/cpu_tiles.py. In short: tiles of 32 rows; a
// 64-byte line holds 16 rows x 4 columns (8 bits), or x 8 columns (4 bits: columns 0..3 in the low
// nibbles, 4..7 in the high ones); each group's lines are followed by its 32 scales; zero points,
// where there are any, lie in a line before every fourth group.
#pragma once

#include <cstdint>

namespace weightpath {

constexpr int64_t TILE_ROWS = 32;
constexpr int64_t LINE = 64;

enum class Kind : int { fp32 = 0, bf16 = 1, fp16 = 2 };

// Inlined for good: files compiled for different instruction sets must not share a function.
[[gnu::always_inline]] inline constexpr int64_t bytes_of(Kind kind) {
  return kind == Kind::fp32 ? 4 : 2;
}

// Shape of a packed weight. group is the number of columns in a group (K for per channel).
struct Shape {
  int bits;  // 4 or 8
  int64_t n, k, group;
  bool zeros;  // zero points are stored; else the midpoint
  Kind scales;

  [[gnu::always_inline]] int64_t groups() const { return k / group; }
  [[gnu::always_inline]] int64_t tiles() const { return (n + TILE_ROWS - 1) / TILE_ROWS; }
  // Columns of a line, and lines of a group over 16 rows.
  [[gnu::always_inline]] int64_t line_columns() const { return bits == 4 ? 8 : 4; }
  [[gnu::always_inline]] int64_t steps() const {
    return (group + line_columns() - 1) / line_columns();
  }
  // Columns of a group as activations hold them, and bytes of one row of activations.
  [[gnu::always_inline]] int64_t padded_group() const { return steps() * line_columns(); }
  [[gnu::always_inline]] int64_t row_stride() const {
    return (groups() * padded_group() + 63) / 64 * 64 + 64;
  }
  [[gnu::always_inline]] int64_t group_bytes() const {
    return steps() * 2 * LINE + TILE_ROWS * bytes_of(scales);
  }
  [[gnu::always_inline]] int64_t tile_bytes() const {
    return groups() * group_bytes() + (zeros ? (groups() + 3) / 4 * LINE : 0);
  }
};

// Activations x [M, K] as int8 planes: x = scale * high, or scale * (256 * high + low).
// One scale a row, or one a group and row. Sums are over each group.
struct Activations {
  int64_t rows;
  int planes;           // 1 or 2
  bool per_group;       // scales [M, nG] instead of [M]
  int8_t* plane[2];     // [M, row_stride]; with two planes: high, low
  int32_t* sums[2];     // [M, nG]
  float* scales;
};

struct Output {
  void* y;  // [M, N]
  Kind kind;
  const void* bias;  // [N] or null
  Kind bias_kind;
};

// Rows of x that one product takes: their int8 activations stay in the L2 cache while tiles pass.
struct Panel {
  int64_t bytes = 384 << 10;
  int64_t block[2] = {6, 4};  // rows that are taken at once, in one plane and in two
  int64_t most_rows = 1 << 20;
  int64_t tile_rows = 4;  // rows of x that take as long as what is done once for a tile
};

// One instruction set. `quantize` fills row m of the activations from x; `product` computes rows
// [m0, m1) of one tile's columns of y.
// `burn` does int8 products from registers alone, `rounds` times, and returns how many: the peak
// that many rows are measured against. Null where unwritten.
struct InstructionSet {
  const char* name;
  void (*quantize)(const void* x, Kind kind, const Shape&, const Activations&, int64_t m);
  void (*product)(const uint8_t* tile, const Shape&, const Activations&, const Output&,
                  int64_t tile_index, int64_t m0, int64_t m1);
  int64_t (*burn)(int64_t rounds);
  // Sum of all 8-byte words of `lines` lines: the read bandwidth that few rows are
  // measured against.
  uint64_t (*read)(const uint8_t* from, int64_t lines);
  Panel panel = {};
  int64_t fewest_rows = 1;  // rows of x from which it is picked; fewer get it by name only
};

extern const InstructionSet SCALAR;
#ifdef WEIGHTPATH_AVX2
extern const InstructionSet AVX2;
#endif
#ifdef WEIGHTPATH_AVX2_VNNI
extern const InstructionSet AVX2_VNNI;
#endif
#ifdef WEIGHTPATH_AVX512_VNNI
extern const InstructionSet AVX512_VNNI;
#endif
#ifdef WEIGHTPATH_AMX
extern const InstructionSet AMX_INT8;
#endif
#ifdef WEIGHTPATH_NEON_DOTPROD
extern const InstructionSet NEON_DOTPROD;
#endif
#ifdef WEIGHTPATH_NEON_I8MM
extern const InstructionSet NEON_I8MM;
#endif

}  // namespace weightpath
