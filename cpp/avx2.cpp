// AVX2 with FMA and F16C, no VNNI: half a line is 8 rows.
//
// 4 bits: vpmaddubsw adds two products of 0..15 and -128..127 in int16, at most 3,840; eight such
// sums, 32 columns, stay below 32,767, and only then are widened to int32.
// 8 bits: vpmaddubsw would saturate (2 * 255 * 127) and its sign trick fails at -128, so bytes are
// widened to int16 first; exact for every code. Accumulators then hold two int32 a row, added at
// the end of the group.

#include "avx2.hpp"

namespace weightpath {
namespace {

constexpr int64_t WIDEN = 4;  // steps of 8 columns between two widenings

// sums + codes (unsigned) times x (signed), two columns a lane of 16 bits. The empty assembly keeps
// the order: left to itself, GCC 12 adds products to each other first and runs out of registers.
inline void dot(__m256i& sums, __m256i codes, __m256i x) {
  sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, x));
  __asm__ volatile("" : "+x"(sums));
}

// One step of 8 columns.
template <int V, int H>
[[gnu::always_inline]] inline void narrow_step(const uint8_t* lines, const int8_t* const* q,
                                               int64_t at, __m256i (&narrow)[V][H]) {
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i codes[H];
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) codes[h] = _mm256_and_si256(load_half(lines + HALF * h), nibble);
#pragma GCC unroll 6
  for (int v = 0; v < V; ++v) {
    const __m256i x = _mm256_set1_epi32(four_bytes(q[v] + at));
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) dot(narrow[v][h], codes[h], x);
  }
  __asm__("" : "+r"(lines));  // loaded again: kept, the lines would cost accumulators
#pragma GCC unroll 4
  for (int h = 0; h < H; ++h) {
    codes[h] = _mm256_and_si256(_mm256_srli_epi16(load_half(lines + HALF * h), 4), nibble);
  }
#pragma GCC unroll 6
  for (int v = 0; v < V; ++v) {
    const __m256i x = _mm256_set1_epi32(four_bytes(q[v] + at + 4));
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) dot(narrow[v][h], codes[h], x);
  }
}

template <int V, int H>
[[gnu::always_inline]] inline void add4(const uint8_t* lines, const int8_t* const* q,
                                        int64_t steps, __m256i (&t)[V][H]) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t step = 0; step < steps;) {
    __m256i narrow[V][H];
#pragma GCC unroll 6
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) narrow[v][h] = _mm256_setzero_si256();
    }
    if (steps - step >= WIDEN) {
#pragma GCC unroll 4
      for (int64_t i = 0; i < WIDEN; ++i) {
        narrow_step<V, H>(lines + 2 * LINE * i, q, 8 * (step + i), narrow);
      }
      step += WIDEN;
      lines += WIDEN * 2 * LINE;
    } else {
      for (; step < steps; ++step, lines += 2 * LINE) narrow_step<V, H>(lines, q, 8 * step, narrow);
    }
#pragma GCC unroll 6
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        t[v][h] = _mm256_add_epi32(t[v][h], _mm256_madd_epi16(narrow[v][h], ones));
      }
    }
  }
}

// Two columns a lane of 32 bits.
inline void wide_dot(__m256i& sums, __m256i codes, __m256i x) {
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(codes, x));
  __asm__ volatile("" : "+x"(sums));
}

template <int V, int H>
[[gnu::always_inline]] inline void add8(const uint8_t* lines, const int8_t* const* q,
                                        int64_t steps, __m256i (&t)[V][H]) {
  const __m256i none = _mm256_setzero_si256();
  __m256i pairs[V][H][2];  // rows 0, 1 of each 128-bit lane, and rows 2, 3
#pragma GCC unroll 6
  for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) pairs[v][h][0] = pairs[v][h][1] = none;
  }
  for (int64_t step = 0; step < steps; ++step, lines += 2 * LINE) {
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      const __m256i line = load_half(lines + HALF * h);
      const __m256i first = _mm256_unpacklo_epi8(line, none);
      const __m256i second = _mm256_unpackhi_epi8(line, none);
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v) {
        const __m256i x = _mm256_cvtepi8_epi16(_mm_set1_epi32(four_bytes(q[v] + 4 * step)));
        wide_dot(pairs[v][h][0], first, x);
        wide_dot(pairs[v][h][1], second, x);
      }
    }
  }
#pragma GCC unroll 6
  for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
      t[v][h] = _mm256_add_epi32(t[v][h], _mm256_hadd_epi32(pairs[v][h][0], pairs[v][h][1]));
    }
  }
}

struct Loops {
  template <int P>
  static constexpr int MOST = P == 2 ? 2 : 4;
  template <int V>
  static constexpr int HALVES = V <= 2 ? 4 : 2;

  template <int BITS, int V, int H>
  [[gnu::always_inline]] static void add(const uint8_t* lines, const int8_t* const* q,
                                         int64_t steps, __m256i (&t)[V][H]) {
    if constexpr (BITS == 4) add4(lines, q, steps, t);
    else add8(lines, q, steps, t);
  }
};

// What 4-bit codes cost without their unpacking and widening: one vpmaddubsw and one addition for
// 32 products, 12 independent chains.
int64_t burn(int64_t rounds) {
  constexpr int CHAINS = 12;
  __m256i sums[CHAINS];
#pragma GCC unroll 12
  for (int c = 0; c < CHAINS; ++c) sums[c] = _mm256_set1_epi16(static_cast<int16_t>(c));
  __m256i codes = _mm256_set1_epi8(3), x = _mm256_set1_epi8(-5);
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; ++c) {
      __asm__ volatile("" : "+x"(codes), "+x"(x));  // or one product would serve all chains
      dot(sums[c], codes, x);
    }
  }
#pragma GCC unroll 12
  for (int c = 0; c < CHAINS; ++c) __asm__ volatile("" : : "x"(sums[c]));
  return rounds * CHAINS * 32;
}

}  // namespace

const InstructionSet AVX2 = {"avx2", quantize, product<Loops>, burn, sum_of_words,
                             {384 << 10, {Loops::MOST<1>, Loops::MOST<2>}}};

}  // namespace weightpath
