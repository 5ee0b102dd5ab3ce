// AVX2 with FMA and F16C, no VNNI: half a line is 8 rows.
//
// 4 bits: vpmaddubsw adds two products of 0..15 and -128..127 in int16, at most 3,840; eight such
// sums, 32 columns, stay below 32,767, and only then are widened to int32.
// 8 bits: vpmaddubsw would saturate (2 * 255 * 127) and its sign trick fails at -128, so bytes are
// widened to int16 first; exact for every code. Accumulators then hold two int32 a row, added at
// the end of the group.
// Roundings are those of scalar.cpp.

#include <immintrin.h>

#include <cmath>

#include "floats.hpp"
#include "tiles.hpp"

namespace weightpath {
namespace {

constexpr int HALVES = 4;       // half lines of a step, 8 rows each
constexpr int64_t WIDEN = 4;    // steps of 8 columns between two widenings

inline __m256 load8(const void* from, Kind kind, int64_t index) {
  if (kind == Kind::fp32) return _mm256_loadu_ps(static_cast<const float*>(from) + index);
  const __m128i bits = _mm_loadu_si128(
      reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(from) + index));
  if (kind == Kind::fp16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline __m256i load_line(const uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

inline __m256i broadcast4(const int8_t* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, 4);
  return _mm256_set1_epi32(bytes);
}

inline int32_t total(__m256i lanes) {
  alignas(32) int32_t parts[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(parts), lanes);
  int32_t sum = 0;
  for (const int32_t part : parts) sum += part;
  return sum;
}

inline uint32_t largest_bits(const void* x, Kind kind, int64_t start, int64_t count) {
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
inline void store_bytes(int8_t* to, __m256i values) {
  const __m128i words =
      _mm_packs_epi32(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
}

void quantize(const void* x, Kind kind, const Shape& shape, const Activations& a, int64_t m) {
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

// Adds one group's products, V = R * P vectors of activations, to t[v][h].
template <int V>
inline void group4(const uint8_t* lines, const int8_t* const* q, int64_t steps,
                   __m256i (&t)[V][HALVES]) {
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  for (int64_t begin = 0; begin < steps; begin += WIDEN) {
    const int64_t end = begin + WIDEN < steps ? begin + WIDEN : steps;
    __m256i narrow[V][HALVES];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
      for (int h = 0; h < HALVES; ++h) narrow[v][h] = _mm256_setzero_si256();
    }
    for (int64_t step = begin; step < end; ++step) {
#pragma GCC unroll 4
      for (int h = 0; h < HALVES; ++h) {
        const __m256i line = load_line(lines + step * 2 * LINE + 32 * h);
        const __m256i low = _mm256_and_si256(line, nibble);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(line, 4), nibble);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const __m256i x0 = broadcast4(q[v] + 8 * step), x1 = broadcast4(q[v] + 8 * step + 4);
          narrow[v][h] = _mm256_add_epi16(narrow[v][h], _mm256_maddubs_epi16(low, x0));
          narrow[v][h] = _mm256_add_epi16(narrow[v][h], _mm256_maddubs_epi16(high, x1));
        }
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
      for (int h = 0; h < HALVES; ++h) {
        t[v][h] = _mm256_add_epi32(t[v][h], _mm256_madd_epi16(narrow[v][h], ones));
      }
    }
  }
}

template <int V>
inline void group8(const uint8_t* lines, const int8_t* const* q, int64_t steps,
                   __m256i (&t)[V][HALVES]) {
  const __m256i none = _mm256_setzero_si256();
  __m256i pairs[V][HALVES][2];  // rows 0, 1 of each 128-bit lane, and rows 2, 3
  for (auto& row : pairs) {
    for (auto& half : row) half[0] = half[1] = none;
  }
  for (int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 4
    for (int h = 0; h < HALVES; ++h) {
      const __m256i line = load_line(lines + step * 2 * LINE + 32 * h);
      const __m256i first = _mm256_unpacklo_epi8(line, none);
      const __m256i second = _mm256_unpackhi_epi8(line, none);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        int32_t bytes;
        std::memcpy(&bytes, q[v] + 4 * step, 4);
        const __m256i x =
            _mm256_broadcastq_epi64(_mm_cvtepi8_epi16(_mm_cvtsi32_si128(bytes)));
        pairs[v][h][0] = _mm256_add_epi32(pairs[v][h][0], _mm256_madd_epi16(first, x));
        pairs[v][h][1] = _mm256_add_epi32(pairs[v][h][1], _mm256_madd_epi16(second, x));
      }
    }
  }
  for (int v = 0; v < V; ++v) {
    for (int h = 0; h < HALVES; ++h) {
      t[v][h] = _mm256_add_epi32(t[v][h], _mm256_hadd_epi32(pairs[v][h][0], pairs[v][h][1]));
    }
  }
}

template <int BITS, int R, int P, bool PER_GROUP>
void product_rows(const uint8_t* tile, const Shape& shape, const Activations& a,
                  const Output& out, int64_t tile_index, int64_t m) {
  constexpr uint32_t MIDDLE = BITS == 8 ? 128 : 8;
  const int64_t groups = shape.groups(), steps = shape.steps(), padded = shape.padded_group();
  const int8_t* q[R * P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) q[r * P + p] = a.plane[p] + (m + r) * shape.row_stride();
  }
  const uint8_t* zero_line = nullptr;
  __m256 y[R][HALVES];
  for (auto& row : y) {
    for (auto& part : row) part = _mm256_setzero_ps();
  }
  for (int64_t g = 0; g < groups; ++g) {
    if (shape.zeros && g % 4 == 0) {
      zero_line = tile;
      tile += LINE;
    }
    __m256i t[R * P][HALVES];
    for (int v = 0; v < R * P; ++v) {
      const uint32_t sum = static_cast<uint32_t>(a.sums[v % P][(m + v / P) * groups + g]);
      for (int h = 0; h < HALVES; ++h) {
        if (!shape.zeros) {
          t[v][h] = _mm256_set1_epi32(static_cast<int32_t>(0u - MIDDLE * sum));
          continue;
        }
        const __m128i pairs = _mm_loadl_epi64(
            reinterpret_cast<const __m128i*>(zero_line + g % 4 * 16 + h % 2 * 8));
        const __m128i shifted = h < 2 ? pairs : _mm_srli_epi16(pairs, 4);
        const __m256i zero =
            _mm256_cvtepu8_epi32(_mm_and_si128(shifted, _mm_set1_epi8(15)));
        t[v][h] = _mm256_mullo_epi32(zero, _mm256_set1_epi32(static_cast<int32_t>(0u - sum)));
      }
    }
    if constexpr (BITS == 4) group4<R * P>(tile, q, steps, t);
    else group8<R * P>(tile, q, steps, t);
    tile += steps * 2 * LINE;
    for (int v = 0; v < R * P; ++v) q[v] += padded;
    for (int h = 0; h < HALVES; ++h) {
      const __m256 scale = load8(tile, shape.scales, 8 * h);
      for (int r = 0; r < R; ++r) {
        __m256 exact = _mm256_cvtepi32_ps(t[r * P][h]);
        if constexpr (P == 2) {
          exact = _mm256_fmadd_ps(exact, _mm256_set1_ps(256.0f),
                                  _mm256_cvtepi32_ps(t[r * P + 1][h]));
        }
        if constexpr (PER_GROUP) {
          exact = _mm256_mul_ps(exact, _mm256_set1_ps(a.scales[(m + r) * groups + g]));
        }
        y[r][h] = _mm256_fmadd_ps(exact, scale, y[r][h]);
      }
    }
    tile += TILE_ROWS * bytes_of(shape.scales);
  }

  const int64_t n0 = tile_index * TILE_ROWS;
  const int64_t rows = shape.n - n0 < TILE_ROWS ? shape.n - n0 : TILE_ROWS;
  alignas(32) float bias[TILE_ROWS] = {}, row[TILE_ROWS];
  if (out.bias) {
    for (int64_t i = 0; i < rows; ++i) bias[i] = load_float(out.bias, out.bias_kind, n0 + i);
  }
  for (int r = 0; r < R; ++r) {
    const __m256 scale = _mm256_set1_ps(PER_GROUP ? 1.0f : a.scales[m + r]);
    for (int h = 0; h < HALVES; ++h) {
      _mm256_store_ps(row + 8 * h, _mm256_fmadd_ps(y[r][h], scale, _mm256_load_ps(bias + 8 * h)));
    }
    const int64_t at = (m + r) * shape.n + n0;
    if (rows == TILE_ROWS && out.kind == Kind::fp16) {
      for (int h = 0; h < HALVES; ++h) {
        _mm_storeu_si128(
            reinterpret_cast<__m128i*>(static_cast<uint16_t*>(out.y) + at + 8 * h),
            _mm256_cvtps_ph(_mm256_load_ps(row + 8 * h),
                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
      }
      continue;
    }
    for (int64_t i = 0; i < rows; ++i) store_float(out.y, out.kind, at + i, row[i]);
  }
}

template <int BITS, int P, bool PER_GROUP>
void product_blocks(const uint8_t* tile, const Shape& shape, const Activations& a,
                    const Output& out, int64_t tile_index, int64_t m0, int64_t m1) {
  constexpr int MOST = P == 2 ? 1 : 2;
  int64_t m = m0;
  if constexpr (MOST == 2) {
    for (; m + 2 <= m1; m += 2) {
      product_rows<BITS, 2, P, PER_GROUP>(tile, shape, a, out, tile_index, m);
    }
  }
  for (; m < m1; ++m) product_rows<BITS, 1, P, PER_GROUP>(tile, shape, a, out, tile_index, m);
}

void product(const uint8_t* tile, const Shape& shape, const Activations& a, const Output& out,
             int64_t tile_index, int64_t m0, int64_t m1) {
  const auto blocks =
      shape.bits == 4
          ? a.planes == 1 ? a.per_group ? product_blocks<4, 1, true> : product_blocks<4, 1, false>
                          : a.per_group ? product_blocks<4, 2, true> : product_blocks<4, 2, false>
          : a.planes == 1 ? a.per_group ? product_blocks<8, 1, true> : product_blocks<8, 1, false>
                          : a.per_group ? product_blocks<8, 2, true> : product_blocks<8, 2, false>;
  blocks(tile, shape, a, out, tile_index, m0, m1);
}

}  // namespace

const InstructionSet AVX2 = {"avx2", quantize, product, nullptr, sum_of_words};

}  // namespace weightpath
