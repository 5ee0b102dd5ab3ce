// Both NEON files' products: the layout's 16-byte piece, 4 rows x 4 columns, is one operand of a
// dot product by lanes, whose other operand is 4 columns of x that the instruction broadcasts.
//
//   few rows    up to 3 vectors of activations (rows x planes): a step's 8 pieces are unpacked in
//               registers and meet them at once; nothing but x and the packed weight is read
//   many rows   256 columns of a group are unpacked once, in the set's own order, and meet up to
//               96 vectors; int32 sums t and results y wait in the first cache. Zero points go off
//               while a line is unpacked: code - zero is -15..15, code - 128 is int8
//
// `Set` is a file's own: dot<LANE>, unpack<BITS>, multiply and whether dot takes signed codes.
// Everything is `static`, as in floats.hpp. Roundings are those of scalar.cpp.
#pragma once

#include "neon.hpp"
#include "tiles.hpp"

namespace weightpath {

constexpr int PIECES = 8;             // of 4 rows, in 32
constexpr int64_t PIECE = 16;         // bytes
constexpr int FEW_VECTORS = 3;        // whose 24 sums, with what meets them, fill the registers
constexpr int MOST_VECTORS = 96;      // that share an unpacking
constexpr int64_t SLICE_COLUMNS = 256;

using Sums = int32_t[TILE_ROWS];

// Later loads from `from` stay behind what `sum` has waited for. With 24 sums in registers GCC
// would load a step's codes at its beginning and keep sums in memory instead (5 stores a step);
// Clang does not.
template <typename Byte>
static inline void keep_order([[maybe_unused]] const Byte*& from, [[maybe_unused]] int32x4_t sum) {
#ifndef __clang__
  __asm__ volatile("" : "+r"(from) : "w"(sum));
#endif
}

// What is taken off each of 32 rows' codes in group g: stored, or the midpoint that is left.
template <typename Set, int BITS>
static inline void zero_points(const uint8_t* line, int64_t g, uint32x4_t (&zero)[PIECES]) {
  if (!line) {
    constexpr uint32_t MIDDLE = BITS == 4 ? 8 : Set::SIGNED_CODES ? 0 : 128;
    for (auto& piece : zero) piece = vdupq_n_u32(MIDDLE);
    return;
  }
  const uint8x16_t pairs = vld1q_u8(line + g % 4 * 16);
  const uint8x16_t halves[2] = {vandq_u8(pairs, vdupq_n_u8(15)), vshrq_n_u8(pairs, 4)};
  for (int h = 0; h < 2; ++h) {
    const uint16x8_t low = vmovl_u8(vget_low_u8(halves[h])), high = vmovl_high_u8(halves[h]);
    zero[4 * h] = vmovl_u16(vget_low_u16(low));
    zero[4 * h + 1] = vmovl_high_u16(low);
    zero[4 * h + 2] = vmovl_u16(vget_low_u16(high));
    zero[4 * h + 3] = vmovl_high_u16(high);
  }
}

// The same as pieces hold codes, each row's four times, for codes that are to be signed.
template <int BITS>
static inline void zero_bytes(const uint8_t* line, int64_t g, uint8x16_t (&zero)[PIECES]) {
  if (!line) {
    for (auto& piece : zero) piece = vdupq_n_u8(BITS == 4 ? 8 : 128);
    return;
  }
  const uint8x16_t pairs = vld1q_u8(line + g % 4 * 16);
  const uint8x16_t halves[2] = {vandq_u8(pairs, vdupq_n_u8(15)), vshrq_n_u8(pairs, 4)};
  for (int i = 0; i < 4; ++i) {
    const uint8x16_t half = halves[i / 2];
    const uint16x8_t twice =
        vreinterpretq_u16_u8(i % 2 ? vzip2q_u8(half, half) : vzip1q_u8(half, half));
    zero[2 * i] = vreinterpretq_u8_u16(vzip1q_u16(twice, twice));
    zero[2 * i + 1] = vreinterpretq_u8_u16(vzip2q_u16(twice, twice));
  }
}

// -zero * sum(q), wrapped: where a group's sums begin.
static inline int32x4_t beginning(uint32x4_t zero, int32_t sum) {
  return vreinterpretq_s32_u32(vmulq_n_u32(zero, 0u - static_cast<uint32_t>(sum)));
}

// One group's sums, high and low plane, onto y.
template <int P, bool PER_GROUP>
static inline float32x4_t add_group(float32x4_t y, int32x4_t high, int32x4_t low,
                                    float32x4_t scale, float x_scale) {
  float32x4_t exact = vcvtq_f32_s32(high);
  if constexpr (P == 2) exact = vfmaq_n_f32(vcvtq_f32_s32(low), exact, 256.0f);
  if constexpr (PER_GROUP) exact = vmulq_n_f32(exact, x_scale);
  return vfmaq_f32(y, exact, scale);
}

static inline void write_row(const Output& out, const Shape& shape, int64_t n0, int64_t m,
                             const float* y, float scale) {
  const int64_t at = m * shape.n + n0;
  if (shape.n - n0 >= TILE_ROWS) {
    for (int i = 0; i < PIECES; ++i) {
      const float32x4_t bias =
          out.bias ? load4(out.bias, out.bias_kind, n0 + 4 * i) : vdupq_n_f32(0.0f);
      store4(out.y, out.kind, at + 4 * i, vfmaq_n_f32(bias, vld1q_f32(y + 4 * i), scale));
    }
    return;
  }
  for (int64_t i = 0; i < shape.n - n0; ++i) {
    const float bias = out.bias ? load_float(out.bias, out.bias_kind, n0 + i) : 0.0f;
    store_float(out.y, out.kind, at + i, std::fma(y[i], scale, bias));
  }
}

// R rows of x, from m: R * P <= FEW_VECTORS.
template <typename Set, int BITS, int R, int P, bool PER_GROUP>
static void few_rows(const uint8_t* tile, const Shape& shape, const Activations& a,
                     const Output& out, int64_t tile_index, int64_t m) {
  constexpr int V = R * P;
  const int64_t groups = shape.groups(), steps = shape.steps(), padded = shape.padded_group();
  const int8_t* q[V];
  for (int v = 0; v < V; ++v) q[v] = a.plane[v % P] + (m + v / P) * shape.row_stride();
  const uint8_t* zero_line = nullptr;
  float32x4_t y[R][PIECES];
  for (auto& row : y) {
    for (auto& piece : row) piece = vdupq_n_f32(0.0f);
  }
  for (int64_t g = 0; g < groups; ++g) {
    if (shape.zeros && g % 4 == 0) {
      zero_line = tile;
      tile += LINE;
    }
    uint32x4_t zero[PIECES];
    zero_points<Set, BITS>(zero_line, g, zero);
    int32x4_t t[V][PIECES];
#pragma GCC unroll 3
    for (int v = 0; v < V; ++v) {
      const int32_t sum = a.sums[v % P][(m + v / P) * groups + g];
#pragma GCC unroll 8
      for (int i = 0; i < PIECES; ++i) t[v][i] = beginning(zero[i], sum);
    }
    for (int64_t step = 0; step < steps; ++step) {
      int8x8_t x[V];  // 8 columns; at 8 bits the first 4 count
#pragma GCC unroll 3
      for (int v = 0; v < V; ++v) x[v] = vld1_s8(q[v] + step * (BITS == 4 ? 8 : 4));
#pragma GCC unroll 8
      for (int i = 0; i < PIECES; ++i) {
        const uint8x16_t bytes = vld1q_u8(tile + i * PIECE);
        if constexpr (V == FEW_VECTORS) keep_order(tile, t[0][i]);
        const uint8x16_t high = vshrq_n_u8(bytes, 4);
        const uint8x16_t low = BITS == 4           ? vandq_u8(bytes, vdupq_n_u8(15))
                               : Set::SIGNED_CODES ? veorq_u8(bytes, vdupq_n_u8(128))
                                                   : bytes;
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) {
          t[v][i] = Set::template dot<0>(t[v][i], low, x[v]);
          if constexpr (BITS == 4) t[v][i] = Set::template dot<1>(t[v][i], high, x[v]);
        }
      }
      tile += 2 * LINE;
    }
    for (auto& vector : q) vector += padded;
#pragma GCC unroll 8
    for (int i = 0; i < PIECES; ++i) {
      const float32x4_t scale = load4(tile, shape.scales, 4 * i);
#pragma GCC unroll 3
      for (int r = 0; r < R; ++r) {
        const float x_scale = PER_GROUP ? a.scales[(m + r) * groups + g] : 1.0f;
        y[r][i] = add_group<P, PER_GROUP>(y[r][i], t[r * P][i], t[r * P + P - 1][i], scale,
                                          x_scale);
      }
    }
    tile += TILE_ROWS * bytes_of(shape.scales);
  }
  for (int r = 0; r < R; ++r) {
    float row[TILE_ROWS];
    for (int i = 0; i < PIECES; ++i) vst1q_f32(row + 4 * i, y[r][i]);
    write_row(out, shape, tile_index * TILE_ROWS, m + r, row, PER_GROUP ? 1.0f : a.scales[m + r]);
  }
}

// Rows [m0, m1) of x, MOST_VECTORS / P at most.
template <typename Set, int BITS, int P, bool PER_GROUP>
static void many_rows(const uint8_t* tile, const Shape& shape, const Activations& a,
                      const Output& out, int64_t tile_index, int64_t m0, int64_t m1) {
  constexpr int64_t COLUMNS = BITS == 4 ? 8 : 4, SLICE = SLICE_COLUMNS / COLUMNS;
  const int64_t groups = shape.groups(), steps = shape.steps(), padded = shape.padded_group();
  const int64_t rows = m1 - m0, vectors = rows * P;
  alignas(64) int8_t codes[SLICE_COLUMNS * TILE_ROWS];
  alignas(64) Sums t[MOST_VECTORS + 1];  // one to spare, for a set that takes two at a time
  alignas(64) float y[MOST_VECTORS][TILE_ROWS];
  const int8_t* q[MOST_VECTORS + 1];
  for (int64_t v = 0; v < vectors; ++v) {
    q[v] = a.plane[v % P] + (m0 + v / P) * shape.row_stride();
  }
  q[vectors] = a.plane[P - 1] + (m1 - 1) * shape.row_stride();
  std::memset(y, 0, static_cast<size_t>(rows) * sizeof y[0]);
  const uint8_t* zero_line = nullptr;
  for (int64_t g = 0; g < groups; ++g) {
    if (shape.zeros && g % 4 == 0) {
      zero_line = tile;
      tile += LINE;
    }
    uint8x16_t zero[PIECES];
    zero_bytes<BITS>(zero_line, g, zero);
    for (int64_t step = 0; step < steps; step += SLICE) {
      const int64_t count = steps - step < SLICE ? steps - step : SLICE;
      const int64_t columns =
          Set::template unpack<BITS>(tile + step * 2 * LINE, count, zero, codes);
      Set::multiply(codes, columns, q, g * padded + step * COLUMNS, step > 0, vectors, t);
    }
    tile += steps * 2 * LINE;
    for (int i = 0; i < PIECES; ++i) {
      const float32x4_t scale = load4(tile, shape.scales, 4 * i);
      for (int64_t r = 0; r < rows; ++r) {
        const float x_scale = PER_GROUP ? a.scales[(m0 + r) * groups + g] : 1.0f;
        const int32x4_t high = vld1q_s32(t[r * P] + 4 * i);
        const int32x4_t low = vld1q_s32(t[r * P + P - 1] + 4 * i);
        float* const to = y[r] + 4 * i;
        const float32x4_t sum =
            add_group<P, PER_GROUP>(vld1q_f32(to), high, low, scale, x_scale);
        vst1q_f32(to, sum);  // in Clang a macro, whose arguments may hold no <,>
      }
    }
    tile += TILE_ROWS * bytes_of(shape.scales);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float scale = PER_GROUP ? 1.0f : a.scales[m0 + r];
    write_row(out, shape, tile_index * TILE_ROWS, m0 + r, y[r], scale);
  }
}

template <typename Set, int BITS, int P, bool PER_GROUP>
static void product_rows(const uint8_t* tile, const Shape& shape, const Activations& a,
                         const Output& out, int64_t tile_index, int64_t m0, int64_t m1) {
  const int64_t rows = m1 - m0;
  if (rows * P <= FEW_VECTORS) {
    if (rows == 1) few_rows<Set, BITS, 1, P, PER_GROUP>(tile, shape, a, out, tile_index, m0);
    if constexpr (P == 1) {
      if (rows == 2) few_rows<Set, BITS, 2, P, PER_GROUP>(tile, shape, a, out, tile_index, m0);
      if (rows == 3) few_rows<Set, BITS, 3, P, PER_GROUP>(tile, shape, a, out, tile_index, m0);
    }
    return;
  }
  const int64_t parts = (rows * P + MOST_VECTORS - 1) / MOST_VECTORS;  // as even as they go
  for (int64_t i = 0; i < parts; ++i) {
    many_rows<Set, BITS, P, PER_GROUP>(tile, shape, a, out, tile_index, m0 + rows * i / parts,
                                       m0 + rows * (i + 1) / parts);
  }
}

template <typename Set>
static void product(const uint8_t* tile, const Shape& shape, const Activations& a,
                    const Output& out, int64_t tile_index, int64_t m0, int64_t m1) {
  const auto rows =
      shape.bits == 4
          ? a.planes == 1
                ? a.per_group ? product_rows<Set, 4, 1, true> : product_rows<Set, 4, 1, false>
                : a.per_group ? product_rows<Set, 4, 2, true> : product_rows<Set, 4, 2, false>
      : a.planes == 1
          ? a.per_group ? product_rows<Set, 8, 1, true> : product_rows<Set, 8, 1, false>
          : a.per_group ? product_rows<Set, 8, 2, true> : product_rows<Set, 8, 2, false>;
  rows(tile, shape, a, out, tile_index, m0, m1);
}

}  // namespace weightpath
