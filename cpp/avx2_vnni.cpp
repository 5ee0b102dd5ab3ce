// AVX2 with AVX-VNNI: one vpdpbusd is 8 rows x 4 columns. For CPUs whose 256-bit registers have the
// instruction and that have no AVX-512 (Intel's Alder Lake and later, most of all).
//
// 16 registers: 6 rows of x against 16 rows of the weight are 12 accumulators, the codes of two
// half lines and the broadcast of x. So a group's lines of rows 0..15 pass first and those of rows
// 16..31, which lie between them, after; fp32 sums wait in memory. One or two vectors of x take all
// four half lines at once, one stream. GCC spills accumulators here unless it is told to allocate
// registers for the function as one region (-fira-region=one in CMakeLists.txt).
//
// WEIGHTPATH_EMULATED_AVX_VNNI: the same instructions, but vpdpbusd in its EVEX form, for tests on
// a CPU with AVX-512 VNNI and no AVX-VNNI (Ice Lake, Zen 4).

#include "avx2.hpp"

namespace weightpath {
namespace {

// sums + codes (unsigned) times x (signed), four columns a lane; registers 0..15 in both forms.
// Inline assembly, since GCC 12 copies each accumulator around the intrinsic (see avx512_vnni.cpp).
inline void dot(__m256i& sums, __m256i codes, __m256i x) {
#ifdef WEIGHTPATH_EMULATED_AVX_VNNI
  __asm__ volatile("%{evex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(codes), "x"(x));
#else
  __asm__ volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(codes), "x"(x));
#endif
}

alignas(32) constexpr uint32_t FIFTEENS[8] = {0x0F0F0F0F, 0x0F0F0F0F, 0x0F0F0F0F, 0x0F0F0F0F,
                                              0x0F0F0F0F, 0x0F0F0F0F, 0x0F0F0F0F, 0x0F0F0F0F};

// The mask from memory: in a register it would cost an accumulator.
inline __m256i low_nibbles(__m256i bytes) {
  __m256i low;
  __asm__("vpand %2, %1, %0"
          : "=x"(low)
          : "x"(bytes), "m"(*reinterpret_cast<const __m256i*>(FIFTEENS)));
  return low;
}

struct Loops {
  template <int P>
  static constexpr int MOST = P == 2 ? 3 : 6;
  template <int V>
  static constexpr int HALVES = V <= 2 ? 4 : 2;

  // With few vectors each accumulator is kept twice, so that a product need not wait for the one
  // before.
  template <int BITS, int V, int H>
  [[gnu::always_inline]] static void add(const uint8_t* lines, const int8_t* const* q,
                                         int64_t steps, __m256i (&t)[V][H]) {
    constexpr int CHAINS = BITS == 4 && V * H <= 6 ? 2 : 1;
    __m256i more[V][H];
#pragma GCC unroll 6
    for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) more[v][h] = _mm256_setzero_si256();
    }
    for (int64_t step = 0; step < steps; ++step, lines += 2 * LINE) {
      __m256i codes[H];
#pragma GCC unroll 4
      for (int h = 0; h < H; ++h) {
        codes[h] = load_half(lines + HALF * h);
        if constexpr (BITS == 4) codes[h] = low_nibbles(codes[h]);
      }
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v) {
        const __m256i x = _mm256_set1_epi32(four_bytes(q[v] + step * (BITS == 4 ? 8 : 4)));
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) dot(t[v][h], codes[h], x);
      }
      if constexpr (BITS == 4) {
        __asm__("" : "+r"(lines));  // loaded again: kept, the line would cost an accumulator
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
          codes[h] = _mm256_srli_epi16(load_half(lines + HALF * h), 4);
          codes[h] = low_nibbles(codes[h]);
        }
#pragma GCC unroll 6
        for (int v = 0; v < V; ++v) {
          const __m256i x = _mm256_set1_epi32(four_bytes(q[v] + step * 8 + 4));
#pragma GCC unroll 4
          for (int h = 0; h < H; ++h) dot(CHAINS == 2 ? more[v][h] : t[v][h], codes[h], x);
        }
      }
    }
    if constexpr (CHAINS == 2) {
#pragma GCC unroll 6
      for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) t[v][h] = _mm256_add_epi32(t[v][h], more[v][h]);
      }
    }
  }
};

// 32 products an instruction, 12 independent chains.
int64_t burn(int64_t rounds) {
  constexpr int CHAINS = 12;
  __m256i sums[CHAINS];
#pragma GCC unroll 12
  for (int c = 0; c < CHAINS; ++c) sums[c] = _mm256_set1_epi32(c);
  __m256i codes = _mm256_set1_epi8(3), x = _mm256_set1_epi8(-5);
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : "+x"(codes), "+x"(x));  // or the compiler would take products out
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; ++c) dot(sums[c], codes, x);
  }
#pragma GCC unroll 12
  for (int c = 0; c < CHAINS; ++c) __asm__ volatile("" : : "x"(sums[c]));
  return rounds * CHAINS * 32;
}

}  // namespace

const InstructionSet AVX2_VNNI = {
    "avx2-vnni", quantize, product<Loops>, burn, sum_of_words,
    {384 << 10, {Loops::MOST<1>, Loops::MOST<2>}}};

}  // namespace weightpath
