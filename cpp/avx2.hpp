// What the files for 256-bit registers share: 8 floats at once, quantizing, a product's frame, its
// start and its end. Half a line is 8 rows. Everything is `static`, like floats.hpp: each file has
// a copy of its own, compiled with its own flags. Roundings are those of scalar.cpp.
//
// A file gives the frame its inner loops as a type:
//
//   MOST<P>     rows of x taken at once, in P planes
//   HALVES<V>   half lines of a tile taken at once by V vectors of activations: 4, one pass over a
//               group; or 2, its lines of rows 0..15 and then those of rows 16..31
//   add<BITS, V, H>(lines, q, steps, t)   adds a group's products to t[v][h], 8 int32 each;
//               lines: the first of the half lines, one step 2 * LINE further
#pragma once

#include <immintrin.h>

#include "floats.hpp"
#include "tiles.hpp"

namespace weightpath {

[[maybe_unused]] static constexpr int TILE_HALVES = 4;  // half lines of a step, 8 rows each
[[maybe_unused]] static constexpr int64_t HALF = 32;    // bytes of one

[[maybe_unused]] static inline __m256 load8(const void* from, Kind kind, int64_t index) {
  if (kind == Kind::fp32) return _mm256_loadu_ps(static_cast<const float*>(from) + index);
  const __m128i bits = _mm_loadu_si128(
      reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(from) + index));
  if (kind == Kind::fp16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

[[maybe_unused]] static inline void store8(void* to, Kind kind, int64_t index, __m256 value) {
  if (kind == Kind::fp32) {
    _mm256_storeu_ps(static_cast<float*>(to) + index, value);
    return;
  }
  __m128i bits;
  if (kind == Kind::fp16) {
    bits = _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    const __m256i whole = _mm256_castps_si256(value);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(whole, 16), _mm256_set1_epi32(1));
    const __m256i even = _mm256_add_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(0x7FFF)), last);
    const __m256i quiet = _mm256_or_si256(whole, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i rounded = _mm256_srli_epi32(_mm256_blendv_epi8(even, quiet, nan), 16);
    bits = _mm_packus_epi32(_mm256_castsi256_si128(rounded),
                            _mm256_extracti128_si256(rounded, 1));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(to) + index), bits);
}

[[maybe_unused]] static inline __m256i load_half(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

[[maybe_unused]] static inline int32_t four_bytes(const int8_t* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, 4);
  return bytes;
}

[[maybe_unused]] static inline int32_t total(__m256i lanes) {
  alignas(32) int32_t parts[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts), lanes);
  int32_t sum = 0;
  for (const int32_t part : parts) sum += part;
  return sum;
}

[[maybe_unused]] static inline uint32_t largest_bits(const void* x, Kind kind, int64_t start,
                                                     int64_t count) {
  const __m256i positive = _mm256_set1_epi32(0x7FFFFFFF);
  __m256i lanes = _mm256_setzero_si256();
  int64_t k = 0;
  for (; k + 8 <= count; k += 8) {
    const __m256i bits = _mm256_castps_si256(load8(x, kind, start + k));
    lanes = _mm256_max_epi32(lanes, _mm256_and_si256(bits, positive));
  }
  alignas(32) uint32_t parts[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts), lanes);
  uint32_t largest = 0;
  for (const uint32_t part : parts) largest = part > largest ? part : largest;
  for (; k < count; ++k) {
    const uint32_t bits = std::bit_cast<uint32_t>(load_float(x, kind, start + k)) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Eight int32 of -128..127 to eight bytes.
[[maybe_unused]] static inline void store_bytes(int8_t* to, __m256i values) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
}

[[maybe_unused]] static void quantize(const void* x, Kind kind, const Shape& shape,
                                      const Activations& a, int64_t m) {
  const int64_t groups = shape.groups(), padded = shape.padded_group();
  uint32_t largest = a.per_group ? 0 : largest_bits(x, kind, m * shape.k, shape.k);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t start = m * shape.k + g * shape.group;
    if (a.per_group) largest = largest_bits(x, kind, start, shape.group);
    const auto [inverse, scale, counts] = activation_scale(largest, a.planes);
    if (a.per_group) a.scales[m * groups + g] = scale;
    else a.scales[m] = scale;
    const int64_t at = m * shape.row_stride() + g * padded;
    const __m256 factor = _mm256_set1_ps(inverse);
    __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    int64_t k = 0;
    for (; counts && k + 8 <= shape.group; k += 8) {
      const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(load8(x, kind, start + k), factor));
      if (a.planes == 1) {
        store_bytes(a.plane[0] + at + k, q);
        sums[0] = _mm256_add_epi32(sums[0], q);
      } else {
        const __m256i h = _mm256_srai_epi32(_mm256_add_epi32(q, _mm256_set1_epi32(128)), 8);
        const __m256i l = _mm256_sub_epi32(q, _mm256_slli_epi32(h, 8));
        store_bytes(a.plane[0] + at + k, h);
        store_bytes(a.plane[1] + at + k, l);
        sums[0] = _mm256_add_epi32(sums[0], h);
        sums[1] = _mm256_add_epi32(sums[1], l);
      }
    }
    int32_t sum_high = total(sums[0]), sum_low = total(sums[1]);
    for (; k < padded; ++k) {
      const float value = counts && k < shape.group ? load_float(x, kind, start + k) : 0.0f;
      const int32_t q = _mm_cvtss_si32(_mm_set_ss(value * inverse));
      const int32_t h = a.planes == 2 ? (q + 128) >> 8 : q;
      a.plane[0][at + k] = static_cast<int8_t>(h);
      sum_high += h;
      if (a.planes == 2) {
        a.plane[1][at + k] = static_cast<int8_t>(q - h * 256);
        sum_low += q - h * 256;
      }
    }
    a.sums[0][m * groups + g] = sum_high;
    if (a.planes == 2) a.sums[1][m * groups + g] = sum_low;
  }
}

// What half h of a tile starts a group at for activations that sum to `sum`: -zero * sum.
template <int BITS>
[[maybe_unused]] static inline __m256i start_of(const uint8_t* zeros, int64_t h, int32_t sum) {
  const __m256i minus = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_set1_epi32(sum));
  if (!zeros) return _mm256_slli_epi32(minus, BITS == 8 ? 7 : 3);
  const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros + h % 2 * 8));
  const __m128i nibbles = h < 2 ? pairs : _mm_srli_epi16(pairs, 4);
  const __m256i zero = _mm256_cvtepu8_epi32(_mm_and_si128(nibbles, _mm_set1_epi8(15)));
  return _mm256_mullo_epi32(zero, minus);
}

// Row m of y, 32 columns from n0 on or what is left of N.
[[maybe_unused]] static inline void write_row(const Output& out, const Shape& shape, int64_t m,
                                              int64_t n0, float scale,
                                              const __m256 (&y)[TILE_HALVES]) {
  const int64_t columns = shape.n - n0 < TILE_ROWS ? shape.n - n0 : TILE_ROWS;
  const int64_t at = m * shape.n + n0;
  const __m256 factor = _mm256_set1_ps(scale);
  if (columns == TILE_ROWS) {
    for (int h = 0; h < TILE_HALVES; ++h) {
      const __m256 bias =
          out.bias ? load8(out.bias, out.bias_kind, n0 + 8 * h) : _mm256_setzero_ps();
      store8(out.y, out.kind, at + 8 * h, _mm256_fmadd_ps(y[h], factor, bias));
    }
    return;
  }
  alignas(32) float bias[TILE_ROWS] = {}, row[TILE_ROWS];
  for (int64_t i = 0; i < columns && out.bias; ++i) {
    bias[i] = load_float(out.bias, out.bias_kind, n0 + i);
  }
  for (int h = 0; h < TILE_HALVES; ++h) {
    _mm256_store_ps(row + 8 * h, _mm256_fmadd_ps(y[h], factor, _mm256_load_ps(bias + 8 * h)));
  }
  for (int64_t i = 0; i < columns; ++i) store_float(out.y, out.kind, at + i, row[i]);
}

// R rows of x (from m) times one tile.
template <typename Loops, int BITS, int R, int P, bool PER_GROUP>
[[maybe_unused]] static void product_rows(const uint8_t* tile, const Shape& shape,
                                          const Activations& a, const Output& out,
                                          int64_t tile_index, int64_t m) {
  constexpr int V = R * P, H = Loops::template HALVES<V>;
  const int64_t groups = shape.groups(), steps = shape.steps(), padded = shape.padded_group();
  const int8_t* q[V];
  for (int v = 0; v < V; ++v) q[v] = a.plane[v % P] + (m + v / P) * shape.row_stride();
  const uint8_t* zero_line = nullptr;
  __m256 y[R][TILE_HALVES];
  for (auto& row : y) {
    for (auto& part : row) part = _mm256_setzero_ps();
  }
  for (int64_t g = 0; g < groups; ++g) {
    if (shape.zeros && g % 4 == 0) {
      zero_line = tile;
      tile += LINE;
    }
    const uint8_t* zeros = zero_line ? zero_line + g % 4 * 16 : nullptr;
    const uint8_t* scales = tile + steps * 2 * LINE;
    for (int first = 0; first < TILE_HALVES; first += H) {
      __m256i t[V][H];
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v) {
        const int32_t sum = a.sums[v % P][(m + v / P) * groups + g];
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) t[v][h] = start_of<BITS>(zeros, first + h, sum);
      }
      Loops::template add<BITS, V, H>(tile + HALF * first, q, steps, t);
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        const __m256 scale = load8(scales, shape.scales, 8 * (first + h));
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
          __m256 exact = _mm256_cvtepi32_ps(t[r * P][h]);
          if constexpr (P == 2) {
            exact = _mm256_fmadd_ps(exact, _mm256_set1_ps(256.0f),
                                    _mm256_cvtepi32_ps(t[r * P + 1][h]));
          }
          if constexpr (PER_GROUP) {
            exact = _mm256_mul_ps(exact, _mm256_set1_ps(a.scales[(m + r) * groups + g]));
          }
          y[r][first + h] = _mm256_fmadd_ps(exact, scale, y[r][first + h]);
        }
      }
    }
    for (int v = 0; v < V; ++v) q[v] += padded;
    tile += shape.group_bytes();
  }
  for (int r = 0; r < R; ++r) {
    write_row(out, shape, m + r, tile_index * TILE_ROWS, PER_GROUP ? 1.0f : a.scales[m + r], y[r]);
  }
}

// `rows` of them, R or fewer.
template <typename Loops, int BITS, int R, int P, bool PER_GROUP>
[[maybe_unused]] static inline void product_block(const uint8_t* tile, const Shape& shape,
                                                  const Activations& a, const Output& out,
                                                  int64_t tile_index, int64_t m, int64_t rows) {
  if constexpr (R > 1) {
    if (rows < R) {
      product_block<Loops, BITS, R - 1, P, PER_GROUP>(tile, shape, a, out, tile_index, m, rows);
      return;
    }
  }
  product_rows<Loops, BITS, R, P, PER_GROUP>(tile, shape, a, out, tile_index, m);
}

// All rows in blocks of at most MOST, as even as they go: 7 rows are 4 and 3, not 6 and 1.
template <typename Loops, int BITS, int P, bool PER_GROUP>
[[maybe_unused]] static void product_blocks(const uint8_t* tile, const Shape& shape,
                                            const Activations& a, const Output& out,
                                            int64_t tile_index, int64_t m0, int64_t m1) {
  constexpr int MOST = Loops::template MOST<P>;
  int64_t blocks = (m1 - m0 + MOST - 1) / MOST;
  for (int64_t m = m0; blocks > 0; --blocks) {
    const int64_t rows = (m1 - m + blocks - 1) / blocks;
    product_block<Loops, BITS, MOST, P, PER_GROUP>(tile, shape, a, out, tile_index, m, rows);
    m += rows;
  }
}

template <typename Loops>
[[maybe_unused]] static void product(const uint8_t* tile, const Shape& shape, const Activations& a,
                                     const Output& out, int64_t tile_index, int64_t m0,
                                     int64_t m1) {
  const bool two = a.planes == 2;
  const auto four_bits = a.per_group ? two ? product_blocks<Loops, 4, 2, true>
                                           : product_blocks<Loops, 4, 1, true>
                                     : two ? product_blocks<Loops, 4, 2, false>
                                           : product_blocks<Loops, 4, 1, false>;
  const auto eight_bits = a.per_group ? two ? product_blocks<Loops, 8, 2, true>
                                            : product_blocks<Loops, 8, 1, true>
                                      : two ? product_blocks<Loops, 8, 2, false>
                                            : product_blocks<Loops, 8, 1, false>;
  (shape.bits == 4 ? four_bits : eight_bits)(tile, shape, a, out, tile_index, m0, m1);
}

}  // namespace weightpath
