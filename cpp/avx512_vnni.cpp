// AVX-512 with VNNI: one vpdpbusd is 16 rows x 4 columns.
//
// A line of 64 bytes is one register. 4-bit codes: `and` gives columns 0..3 of 16 rows, shift and
// `and` columns 4..7; the activations' 4 bytes are broadcast. R rows of x are taken at once against
// 32 rows of the weight: at R = 6 the 12 int32 and 12 fp32 accumulators, 4 registers of unpacked
// codes and the broadcast fill the register file, and 24 products share 2 loads and 6 unpackings.
// Zero points enter as the accumulator's start, -zero * sum(q): exact, and free of charge in the
// inner loop. Roundings are those of scalar.cpp.

#include "avx512.hpp"
#include "cpuid.hpp"
#include "tiles.hpp"

namespace weightpath {
namespace {


inline uint32_t largest_bits(const void* x, Kind kind, int64_t start, int64_t count) {
  const __m512i positive = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i largest = _mm512_setzero_si512();
  for (int64_t k = 0; k < count; k += 16) {
    const __m512 value = load16(x, kind, start + k, first(count - k));
    largest = _mm512_max_epi32(largest, _mm512_and_si512(_mm512_castps_si512(value), positive));
  }
  return static_cast<uint32_t>(_mm512_reduce_max_epi32(largest));
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
    const __m512 factor = _mm512_set1_ps(inverse);
    const int64_t at = m * shape.row_stride() + g * padded;
    __m512i sum_high = _mm512_setzero_si512(), sum_low = _mm512_setzero_si512();
    for (int64_t k = 0; k < padded; k += 16) {
      const __mmask16 read = counts && k < shape.group ? first(shape.group - k) : 0;
      const __m512 value = load16(x, kind, start + k, read);
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(value, factor));
      const __mmask16 write = first(padded - k);
      if (a.planes == 1) {
        _mm_mask_storeu_epi8(a.plane[0] + at + k, write, _mm512_cvtepi32_epi8(q));
        sum_high = _mm512_add_epi32(sum_high, q);
      } else {
        const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), 8);
        const __m512i l = _mm512_sub_epi32(q, _mm512_slli_epi32(h, 8));
        _mm_mask_storeu_epi8(a.plane[0] + at + k, write, _mm512_cvtepi32_epi8(h));
        _mm_mask_storeu_epi8(a.plane[1] + at + k, write, _mm512_cvtepi32_epi8(l));
        sum_high = _mm512_add_epi32(sum_high, h);
        sum_low = _mm512_add_epi32(sum_low, l);
      }
    }
    a.sums[0][m * groups + g] = _mm512_reduce_add_epi32(sum_high);
    if (a.planes == 2) a.sums[1][m * groups + g] = _mm512_reduce_add_epi32(sum_low);
  }
}

inline __m512i broadcast4(const int8_t* from) {
  int32_t bytes;
  std::memcpy(&bytes, from, 4);
  return _mm512_set1_epi32(bytes);
}

// sums + codes (unsigned) times x (signed), four columns a lane. Not _mm512_dpbusd_epi32: GCC 12
// copies each accumulator before and after it, 24 moves for 24 products, which the core must carry
// along while it runs ahead of its loads.
inline void dot(__m512i& sums, __m512i codes, __m512i x) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(x));
}

// R rows of x (from m) times one tile. With few rows, each accumulator is kept twice, so that a
// product need not wait for the one before.
template <int BITS, int R, int P, bool PER_GROUP>
void product_rows(const uint8_t* tile, const Shape& shape, const Activations& a,
                  const Output& out, int64_t tile_index, int64_t m) {
  constexpr int CHAINS = R * P <= 3 ? 2 : 1;
  // Bytes between a line and the one asked for with it; measured. One row of 4 bits, in one plane
  // or two, is best left to the hardware on Zen 4; the Xeon that has AMX wants one row's lines in
  // its first cache, the others past it (docs/experiments.md, docs/decode-notes.md).
  constexpr int64_t AHEAD = R * P >= 4 ? 2048 : 4096, AHEAD_ONE = 2048;
  const bool keeps = R == 1 && features().amx_int8;
  const bool fetches = !keeps && (R >= 2 || BITS == 8);
  constexpr uint32_t MIDDLE = BITS == 8 ? 128 : 8;
  const int64_t groups = shape.groups(), steps = shape.steps(), padded = shape.padded_group();
  const int64_t stride = shape.row_stride();
  const int8_t* q[P];
  for (int p = 0; p < P; ++p) q[p] = a.plane[p] + m * stride;
  const __m512i nibble = _mm512_set1_epi8(15);
  const uint8_t* zero_line = nullptr;
  __m512 y[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) y[r][0] = y[r][1] = _mm512_setzero_ps();

  for (int64_t g = 0; g < groups; ++g) {
    __m512i t[CHAINS][R][P][2];
    __m512i zero[2];
    if (shape.zeros) {
      if (g % 4 == 0) {
        zero_line = tile;
        tile += LINE;
      }
      const __m128i pairs =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(zero_line + g % 4 * 16));
      const __m128i low = _mm_set1_epi8(15);
      zero[0] = _mm512_cvtepu8_epi32(_mm_and_si128(pairs, low));
      zero[1] = _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(pairs, 4), low));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        const uint32_t sum = static_cast<uint32_t>(a.sums[p][(m + r) * groups + g]);
        if (shape.zeros) {
          const __m512i minus = _mm512_set1_epi32(static_cast<int32_t>(0u - sum));
          t[0][r][p][0] = _mm512_mullo_epi32(zero[0], minus);
          t[0][r][p][1] = _mm512_mullo_epi32(zero[1], minus);
        } else {
          const int32_t start = static_cast<int32_t>(0u - MIDDLE * sum);
          t[0][r][p][0] = t[0][r][p][1] = _mm512_set1_epi32(start);
        }
        if constexpr (CHAINS == 2) {
          t[1][r][p][0] = t[1][r][p][1] = _mm512_setzero_si512();
        }
      }
    }
    for (int64_t step = 0; step < steps; ++step) {
      const __m512i line0 = _mm512_loadu_si512(tile);
      const __m512i line1 = _mm512_loadu_si512(tile + LINE);
      if (keeps) {
        _mm_prefetch(reinterpret_cast<const char*>(tile + AHEAD_ONE), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(tile + AHEAD_ONE + LINE), _MM_HINT_T0);
      } else if (fetches) {
        _mm_prefetch(reinterpret_cast<const char*>(tile + AHEAD), _MM_HINT_NTA);
        _mm_prefetch(reinterpret_cast<const char*>(tile + AHEAD + LINE), _MM_HINT_NTA);
      }
      tile += 2 * LINE;
      if constexpr (BITS == 4) {
        const __m512i low0 = _mm512_and_si512(line0, nibble);
        const __m512i low1 = _mm512_and_si512(line1, nibble);
        const __m512i high0 = _mm512_and_si512(_mm512_srli_epi16(line0, 4), nibble);
        const __m512i high1 = _mm512_and_si512(_mm512_srli_epi16(line1, 4), nibble);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
          for (int p = 0; p < P; ++p) {
            const __m512i x0 = broadcast4(q[p] + r * stride + step * 8);
            dot(t[0][r][p][0], low0, x0);
            dot(t[0][r][p][1], low1, x0);
            const __m512i x1 = broadcast4(q[p] + r * stride + step * 8 + 4);
            constexpr int c = CHAINS - 1;
            dot(t[c][r][p][0], high0, x1);
            dot(t[c][r][p][1], high1, x1);
          }
        }
      } else {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
          for (int p = 0; p < P; ++p) {
            const __m512i x0 = broadcast4(q[p] + r * stride + step * 4);
            dot(t[0][r][p][0], line0, x0);
            dot(t[0][r][p][1], line1, x0);
          }
        }
      }
    }
    for (int p = 0; p < P; ++p) q[p] += padded;
    const __m512 scale[2] = {load16(tile, shape.scales, 0, 0xFFFF),
                             load16(tile, shape.scales, 16, 0xFFFF)};
    tile += TILE_ROWS * bytes_of(shape.scales);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        if constexpr (CHAINS == 2) {
          for (int p = 0; p < P; ++p) {
            t[0][r][p][h] = _mm512_add_epi32(t[0][r][p][h], t[1][r][p][h]);
          }
        }
        __m512 exact = _mm512_cvtepi32_ps(t[0][r][0][h]);
        if constexpr (P == 2) {
          exact = _mm512_fmadd_ps(exact, _mm512_set1_ps(256.0f),
                                  _mm512_cvtepi32_ps(t[0][r][1][h]));
        }
        if constexpr (PER_GROUP) {
          exact = _mm512_mul_ps(exact, _mm512_set1_ps(a.scales[(m + r) * groups + g]));
        }
        y[r][h] = _mm512_fmadd_ps(exact, scale[h], y[r][h]);
      }
    }
  }

  const int64_t n0 = tile_index * TILE_ROWS;
  for (int h = 0; h < 2 && n0 + 16 * h < shape.n; ++h) {
    const int64_t n = n0 + 16 * h;
    const __mmask16 mask = first(shape.n - n);
    const __m512 bias =
        out.bias ? load16(out.bias, out.bias_kind, n, mask) : _mm512_setzero_ps();
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512 scale = _mm512_set1_ps(PER_GROUP ? 1.0f : a.scales[m + r]);
      store16(out.y, out.kind, (m + r) * shape.n + n, mask, _mm512_fmadd_ps(y[r][h], scale, bias));
    }
  }
}

// All rows in blocks of at most MOST, as even as they go: 7 rows are 4 and 3, not 6 and 1.
template <int BITS, int P, bool PER_GROUP>
void product_blocks(const uint8_t* tile, const Shape& shape, const Activations& a,
                    const Output& out, int64_t tile_index, int64_t m0, int64_t m1) {
  constexpr int MOST = P == 2 ? 4 : 6;
  int64_t blocks = (m1 - m0 + MOST - 1) / MOST;
  for (int64_t m = m0; blocks > 0; --blocks) {
    const int64_t rows = (m1 - m + blocks - 1) / blocks;
    switch (rows) {
      case 1: product_rows<BITS, 1, P, PER_GROUP>(tile, shape, a, out, tile_index, m); break;
      case 2: product_rows<BITS, 2, P, PER_GROUP>(tile, shape, a, out, tile_index, m); break;
      case 3: product_rows<BITS, 3, P, PER_GROUP>(tile, shape, a, out, tile_index, m); break;
      case 4: product_rows<BITS, 4, P, PER_GROUP>(tile, shape, a, out, tile_index, m); break;
      case 5:
        if constexpr (MOST > 4) {
          product_rows<BITS, 5, P, PER_GROUP>(tile, shape, a, out, tile_index, m);
        }
        break;
      default:
        if constexpr (MOST > 4) {
          product_rows<BITS, 6, P, PER_GROUP>(tile, shape, a, out, tile_index, m);
        }
    }
    m += rows;
  }
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

// 64 products an instruction, 12 independent chains: more than latency times throughput.
int64_t burn(int64_t rounds) {
  constexpr int CHAINS = 12;
  __m512i sums[CHAINS];
#pragma GCC unroll 12
  for (int c = 0; c < CHAINS; ++c) sums[c] = _mm512_set1_epi32(c);
  __m512i codes = _mm512_set1_epi8(3), x = _mm512_set1_epi8(-5);
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : "+v"(codes), "+v"(x));  // or the compiler would take products out
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; ++c) sums[c] = _mm512_dpbusd_epi32(sums[c], codes, x);
  }
#pragma GCC unroll 12
  for (int c = 0; c < CHAINS; ++c) __asm__ volatile("" : : "v"(sums[c]));
  return rounds * CHAINS * 64;
}

uint64_t read(const uint8_t* from, int64_t lines) {
  __m512i even = _mm512_setzero_si512(), odd = even;
  for (int64_t line = 0; line + 2 <= lines; line += 2) {
    even = _mm512_add_epi64(even, _mm512_loadu_si512(from + line * LINE));
    odd = _mm512_add_epi64(odd, _mm512_loadu_si512(from + (line + 1) * LINE));
  }
  if (lines % 2) even = _mm512_add_epi64(even, _mm512_loadu_si512(from + (lines - 1) * LINE));
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(even, odd)));
}

}  // namespace

const InstructionSet AVX512_VNNI = {"avx512-vnni", quantize, product, burn, read};

}  // namespace weightpath
