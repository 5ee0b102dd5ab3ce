// NEON with FEAT_I8MM: usdot is 4 rows x 4 columns, smmla 2 rows x 8 columns by 2 vectors of x.
//
// Up to 3 vectors go by usdot, which takes unsigned codes and signed x as they are stored; sums
// start at -zero * sum(q), 128 for 8 bits. smmla does twice the products, but wants 8 columns of a
// row side by side: two shuffles a piece, 16 a step of 32 x 8. For 2 vectors that is 32 usdot, or
// 16 smmla and 16 shuffles; 3 would cost smmla as much as 4. From 4 on smmla wins, the more so as
// lines are then unpacked once for all. Not usmmla: with signed codes, code - zero, there is
// nothing to take off afterwards for every vector.
//
// Many rows: 16 outputs x 6 vectors. 8 columns are 8 loads of codes and 6 half loads of x for 24
// smmla; 24 sums, 3 pairs of x and a pair of codes are 28 of the 32 registers.

#include "neon_product.hpp"

namespace weightpath {
namespace {

constexpr int OUTPUTS = 16, MOST_PAIRS = 3;  // rows of the weight, pairs of vectors in registers
constexpr int OUTPUT_PAIRS = OUTPUTS / 2;
constexpr int64_t COLUMNS = 8;               // of a product

template <int PAIRS>
void block(const int8_t* codes, int64_t columns, const int8_t* const* q, int64_t offset,
           bool more, Sums* t) {
  for (int64_t n = 0; n < TILE_ROWS; n += OUTPUTS) {
    int32x4_t sums[OUTPUT_PAIRS][PAIRS];  // output 0 by vectors 0 and 1, output 1 by them
#pragma GCC unroll 8
    for (int j = 0; j < OUTPUT_PAIRS; ++j) {
#pragma GCC unroll 3
      for (int p = 0; p < PAIRS; ++p) sums[j][p] = vdupq_n_s32(0);
    }
    for (int64_t k = offset; k < offset + columns; k += COLUMNS) {
      int8x16_t x[PAIRS];
#pragma GCC unroll 3
      for (int p = 0; p < PAIRS; ++p) {
        x[p] = vcombine_s8(vld1_s8(q[2 * p] + k), vld1_s8(q[2 * p + 1] + k));
      }
#pragma GCC unroll 8
      for (int j = 0; j < OUTPUT_PAIRS; ++j) {
        const int8x16_t code = vld1q_s8(codes + j * PIECE);
        if constexpr (PAIRS == MOST_PAIRS) keep_order(codes, sums[j][0]);
#pragma GCC unroll 3
        for (int p = 0; p < PAIRS; ++p) sums[j][p] = vmmlaq_s32(sums[j][p], code, x[p]);
      }
      codes += OUTPUT_PAIRS * PIECE;
    }
#pragma GCC unroll 8
    for (int j = 0; j < OUTPUT_PAIRS; j += 2) {
#pragma GCC unroll 3
      for (int p = 0; p < PAIRS; ++p) {
        int32_t* const even = t[2 * p] + n + 2 * j;
        int32_t* const odd = t[2 * p + 1] + n + 2 * j;
        int32x4_t here[2] = {vuzp1q_s32(sums[j][p], sums[j + 1][p]),
                             vuzp2q_s32(sums[j][p], sums[j + 1][p])};
        if (more) {
          here[0] = vaddq_s32(here[0], vld1q_s32(even));
          here[1] = vaddq_s32(here[1], vld1q_s32(odd));
        }
        vst1q_s32(even, here[0]);
        vst1q_s32(odd, here[1]);
      }
    }
  }
}

struct I8mm {
  static constexpr bool SIGNED_CODES = false;

  template <int LANE>
  static int32x4_t dot(int32x4_t sums, uint8x16_t codes, int8x8_t x) {
    return vusdotq_lane_s32(sums, codes, x, LANE);
  }

  // Codes - zero to [16 outputs of 32][8 columns][8 pairs of outputs]. At 8 bits two steps make 8
  // columns; where the second is missing there are zeros, and x reads on into the next group, or
  // into its row's spare bytes.
  template <int BITS>
  static int64_t unpack(const uint8_t* lines, int64_t steps, const uint8x16_t (&zero)[PIECES],
                        int8_t* codes) {
    constexpr int64_t STEPS = BITS == 4 ? 1 : 2;
    for (int half = 0; half < 2; ++half) {
      for (int64_t step = 0; step < steps; step += STEPS) {
        const uint8_t* from = lines + (2 * step + half) * LINE;
        for (int i = 0; i < 4; ++i) {
          const uint8x16_t bytes = vld1q_u8(from + i * PIECE), off = zero[4 * half + i];
          uint8x16_t first = bytes, second = off;
          if constexpr (BITS == 4) {
            first = vandq_u8(bytes, vdupq_n_u8(15));
            second = vshrq_n_u8(bytes, 4);
          } else if (step + 1 < steps) {
            second = vld1q_u8(from + 2 * LINE + i * PIECE);
          }
          const int32x4_t a = vreinterpretq_s32_u8(vsubq_u8(first, off));
          const int32x4_t b = vreinterpretq_s32_u8(vsubq_u8(second, off));
          vst1q_s8(codes, vreinterpretq_s8_s32(vzip1q_s32(a, b)));
          vst1q_s8(codes + PIECE, vreinterpretq_s8_s32(vzip2q_s32(a, b)));
          codes += 2 * PIECE;
        }
      }
    }
    return (steps + STEPS - 1) / STEPS * COLUMNS;
  }

  // t[v] = codes times q[v] from column `offset`, or onto t[v] where there is `more` than before;
  // in blocks of at most MOST_PAIRS pairs, as even as they go. An odd count takes q and t one
  // further: a vector that nobody reads.
  static void multiply(const int8_t* codes, int64_t columns, const int8_t* const* q,
                       int64_t offset, bool more, int64_t vectors, Sums* t) {
    constexpr decltype(&block<1>) BLOCKS[] = {block<1>, block<2>, block<3>};
    const int64_t pairs = (vectors + 1) / 2;
    for (int64_t pair = 0; pair < pairs;) {
      const int64_t blocks = (pairs - pair + MOST_PAIRS - 1) / MOST_PAIRS;
      const int64_t count = (pairs - pair + blocks - 1) / blocks;
      BLOCKS[count - 1](codes, columns, q + 2 * pair, offset, more, t + 2 * pair);
      pair += count;
    }
  }
};

// 32 products an instruction, 16 independent chains: 4 pipes of 4 cycles.
int64_t burn(int64_t rounds) {
  constexpr int CHAINS = 16;
  int32x4_t sums[CHAINS];
#pragma GCC unroll 16
  for (int c = 0; c < CHAINS; ++c) sums[c] = vdupq_n_s32(c);
  int8x16_t codes = vdupq_n_s8(3), x = vdupq_n_s8(-5);
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : "+w"(codes), "+w"(x));  // or the compiler would take products out
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; ++c) sums[c] = vmmlaq_s32(sums[c], codes, x);
  }
#pragma GCC unroll 16
  for (int c = 0; c < CHAINS; ++c) __asm__ volatile("" : : "w"(sums[c]));
  return rounds * CHAINS * 32;
}

}  // namespace

const InstructionSet NEON_I8MM = {
    "neon-i8mm", quantize, product<I8mm>, burn, sum_of_words,
    {384 << 10, {2 * MOST_PAIRS, MOST_PAIRS}, MOST_VECTORS}};

}  // namespace weightpath
