// NEON with the dot product of ARMv8.2 (FEAT_DotProd): one sdot is 4 rows x 4 columns.
//
// sdot takes signed bytes on both sides. Few rows: 4-bit codes are 0..15, the same number either
// way, and start their sums at -zero * sum(q); 8-bit codes are stored + 128, and turning the top
// bit back gives the signed code, from which nothing is to be taken off. udot would need unsigned
// x, and with it the sum of each row's codes, which the layout does not store.
//
// Many rows: 8 outputs x 8 vectors. 16 columns are 8 loads of x and 8 of codes for 64 sdot; 16
// sums, 8 vectors of x and 2 pieces of codes are 26 of the 32 registers.

#include "neon_product.hpp"

namespace weightpath {
namespace {

constexpr int OUTPUTS = 8, TOGETHER = 8;  // rows of the weight and vectors of x in registers
constexpr int64_t COLUMNS = 16;           // of one register of x

// One 4-column piece of 8 outputs by V vectors.
template <int LANE, int V>
inline void one_piece(const int8_t* codes, const int8x16_t (&x)[V], int32x4_t (&sums)[V][2]) {
  const int8x16_t code[2] = {vld1q_s8(codes), vld1q_s8(codes + PIECE)};
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    sums[v][0] = vdotq_laneq_s32(sums[v][0], code[0], x[v], LANE);
    sums[v][1] = vdotq_laneq_s32(sums[v][1], code[1], x[v], LANE);
  }
}

template <int V>
void block(const int8_t* codes, int64_t columns, const int8_t* const* q, int64_t offset,
           bool more, Sums* t) {
  for (int64_t n = 0; n < TILE_ROWS; n += OUTPUTS) {
    int32x4_t sums[V][2];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      sums[v][0] = more ? vld1q_s32(t[v] + n) : vdupq_n_s32(0);
      sums[v][1] = more ? vld1q_s32(t[v] + n + 4) : vdupq_n_s32(0);
    }
    for (int64_t k = 0; k < columns; k += COLUMNS) {
      int8x16_t x[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) x[v] = vld1q_s8(q[v] + offset + k);
      one_piece<0>(codes, x, sums);
      one_piece<1>(codes + 2 * PIECE, x, sums);
      one_piece<2>(codes + 4 * PIECE, x, sums);
      one_piece<3>(codes + 6 * PIECE, x, sums);
      codes += 8 * PIECE;
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      vst1q_s32(t[v] + n, sums[v][0]);
      vst1q_s32(t[v] + n + 4, sums[v][1]);
    }
  }
}

struct Dotprod {
  static constexpr bool SIGNED_CODES = true;

  template <int LANE>
  static int32x4_t dot(int32x4_t sums, uint8x16_t codes, int8x8_t x) {
    return vdotq_lane_s32(sums, vreinterpretq_s8_u8(codes), x, LANE);
  }

  // Codes - zero to [8 outputs of 32][4 columns][2 pieces]. Columns up to a multiple of 16, with 0
  // there: x reads on into the next group, or into its row's spare bytes.
  template <int BITS>
  static int64_t unpack(const uint8_t* lines, int64_t steps, const uint8x16_t (&zero)[PIECES],
                        int8_t* codes) {
    constexpr int64_t STEP = BITS == 4 ? 8 : 4;
    const int64_t columns = (steps * STEP + COLUMNS - 1) / COLUMNS * COLUMNS;
    for (int64_t n = 0; n < TILE_ROWS; n += OUTPUTS) {
      const uint8_t* from = lines + 4 * n;
      for (int64_t step = 0; step < steps; ++step) {
        for (int i = 0; i < 2; ++i) {
          const uint8x16_t bytes = vld1q_u8(from + i * PIECE), off = zero[n / 4 + i];
          if constexpr (BITS == 4) {
            const uint8x16_t low = vandq_u8(bytes, vdupq_n_u8(15)), high = vshrq_n_u8(bytes, 4);
            vst1q_s8(codes + i * PIECE, vreinterpretq_s8_u8(vsubq_u8(low, off)));
            vst1q_s8(codes + (2 + i) * PIECE, vreinterpretq_s8_u8(vsubq_u8(high, off)));
          } else {
            vst1q_s8(codes + i * PIECE, vreinterpretq_s8_u8(vsubq_u8(bytes, off)));
          }
        }
        codes += STEP * OUTPUTS;
        from += 2 * LINE;
      }
      std::memset(codes, 0, static_cast<size_t>((columns - steps * STEP) * OUTPUTS));
      codes += (columns - steps * STEP) * OUTPUTS;
    }
    return columns;
  }

  // t[v] = codes times q[v] from column `offset`, or onto t[v] where there is `more` than before;
  // in blocks of at most TOGETHER vectors, as even as they go.
  static void multiply(const int8_t* codes, int64_t columns, const int8_t* const* q,
                       int64_t offset, bool more, int64_t vectors, Sums* t) {
    constexpr decltype(&block<1>) BLOCKS[] = {block<1>, block<2>, block<3>, block<4>,
                                              block<5>, block<6>, block<7>, block<8>};
    for (int64_t v = 0; v < vectors;) {
      const int64_t blocks = (vectors - v + TOGETHER - 1) / TOGETHER;
      const int64_t count = (vectors - v + blocks - 1) / blocks;
      BLOCKS[count - 1](codes, columns, q + v, offset, more, t + v);
      v += count;
    }
  }
};

// 16 products an instruction, 16 independent chains: 4 pipes of 4 cycles.
int64_t burn(int64_t rounds) {
  constexpr int CHAINS = 16;
  int32x4_t sums[CHAINS];
#pragma GCC unroll 16
  for (int c = 0; c < CHAINS; ++c) sums[c] = vdupq_n_s32(c);
  int8x16_t codes = vdupq_n_s8(3), x = vdupq_n_s8(-5);
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : "+w"(codes), "+w"(x));  // or the compiler would take products out
#pragma GCC unroll 16
    for (int c = 0; c < CHAINS; ++c) sums[c] = vdotq_s32(sums[c], codes, x);
  }
#pragma GCC unroll 16
  for (int c = 0; c < CHAINS; ++c) __asm__ volatile("" : : "w"(sums[c]));
  return rounds * CHAINS * 16;
}

}  // namespace

const InstructionSet NEON_DOTPROD = {
    "neon-dotprod", quantize, product<Dotprod>, burn, sum_of_words,
    {384 << 10, {TOGETHER, TOGETHER / 2}, MOST_VECTORS}};

}  // namespace weightpath
