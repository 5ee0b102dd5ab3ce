// The float arithmetic of a step with AMX: attention's two products on bf16 tiles (tdpbf16ps: 16
// queries by 16 positions by 32 columns), the rest on AVX-512.
//
// The cache lies as tiles want it (kv_cache.hpp): 16 positions by 16 pairs of columns are a B tile
// of keys, 16 pairs of positions by 16 columns one of values. A query row's result depends on
// nothing but the row: tiles begin at multiples of 32 columns and 32 positions, whatever rows and
// positions a call takes, and what is masked adds zeros. So one token and a prompt give the same
// bits here too, since both come this way.

#include "amx_tiles.hpp"
#include "step_avx512_pairs.hpp"

#include "attention_generic.hpp"
#include "keep_avx512.hpp"

namespace weightpath {
namespace {

constexpr int64_t TILE = 16, DEPTH = 32;  // rows of a tile; columns (or positions) of a product
constexpr int64_t QUERIES = 2 * TILE;

// Tiles 0..3 are C, 4 and 5 are A, 6 and 7 are B, as in amx.cpp.
void configure(int64_t first_rows, int64_t second_rows) {
  TileConfig config{};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    const bool second = i == 2 || i == 3 || i == 5;
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<uint8_t>(i >= 6 ? TILE : second ? second_rows : first_rows);
  }
  configure_tiles(config);
}

// C [rows, 32] = A [rows, 32 * depths] B, to `to`; rows are `a_stride` bytes apart in A and
// `to_stride` floats in C, B's tiles of one depth `b_next` bytes, its two halves `b_half` apart.
void tile_block(const uint16_t* a, int64_t a_stride, const uint8_t* b, int64_t b_stride,
                int64_t b_next, int64_t b_half, int64_t depths, bool two, float* to,
                int64_t to_stride) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  if (two) {
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < depths; ++k, b += b_next) {
      TILE_LOAD(6, b, b_stride);
      TILE_LOAD(4, a + k * DEPTH, a_stride);
      TILE_PRODUCTS_BF16(0, 4, 6);
      TILE_LOAD(5, a + TILE * a_stride / 2 + k * DEPTH, a_stride);
      TILE_PRODUCTS_BF16(2, 5, 6);
      TILE_LOAD(7, b + b_half, b_stride);
      TILE_PRODUCTS_BF16(1, 4, 7);
      TILE_PRODUCTS_BF16(3, 5, 7);
    }
    TILE_STORE(2, to + TILE * to_stride, 4 * to_stride);
    TILE_STORE(3, to + TILE * to_stride + TILE, 4 * to_stride);
  } else {
    for (int64_t k = 0; k < depths; ++k, b += b_next) {
      TILE_LOAD(6, b, b_stride);
      TILE_LOAD(4, a + k * DEPTH, a_stride);
      TILE_PRODUCTS_BF16(0, 4, 6);
      TILE_LOAD(7, b + b_half, b_stride);
      TILE_PRODUCTS_BF16(1, 4, 7);
    }
  }
  TILE_STORE(0, to, 4 * to_stride);
  TILE_STORE(1, to + TILE, 4 * to_stride);
}

// `rows` (at most 32) queries from `row` on.
void attend_tiles(const Attend& a, int64_t row, int64_t rows) {
  alignas(64) uint16_t q[QUERIES * MOST_HEAD_DIM], weights[QUERIES * BLOCK];
  alignas(64) float scores[QUERIES * BLOCK], mixed[QUERIES * DEPTH];
  alignas(64) float old_factor[QUERIES], new_factor[QUERIES];
  const int64_t size = a.head_dim;
  const int32_t *first_seen = a.first + row, *last_seen = a.last + row;
  int64_t low = BLOCK, high = 0;
  for (int64_t r = 0; r < rows; ++r) {
    if (first_seen[r] >= last_seen[r]) continue;
    low = first_seen[r] < low ? first_seen[r] : low;
    high = last_seen[r] > high ? last_seen[r] : high;
  }
  if (low >= high) return;
  const int64_t begin = low / DEPTH * DEPTH, end = (high + DEPTH - 1) / DEPTH * DEPTH;
  const int64_t upper = rows < TILE ? rows : TILE, lower = rows - upper;
  configure(upper, lower ? lower : upper);

  for (int64_t i = 0; i < rows * size; i += DEPTH) {
    const float* from = a.q + row * size + i;
    store_bf16(q + i, load(from));
    store_bf16(q + i + W, load(from + W));
  }
  for (int64_t p = begin; p < end; p += DEPTH) {  // B: 16 pairs of columns by 16 positions
    tile_block(q, 2 * size, a.cache.keys + p * size * 2, 64, TILE * 64, TILE * size * 2,
               size / DEPTH, lower > 0, scores + p, BLOCK);
  }

  for (int64_t r = 0; r < rows; ++r) {
    float* s = scores + r * BLOCK;
    Vec most = set(EMPTY);
    if (first_seen[r] <= begin && last_seen[r] >= end) {
      for (int64_t p = begin; p < end; p += W) most = larger(most, load(s + p));
    } else {
      for (int64_t p = begin; p < end; p += W) {
        const Vec score = within(load(s + p), p, first_seen[r], last_seen[r]);
        store(s + p, score);
        most = larger(most, score);
      }
    }
    const Vec here = set(largest(most));
    Vec sums[2] = {set(0.0f), set(0.0f)};
    for (int64_t p = begin; p < end; p += DEPTH) {
      const Vec low_power = power_of_two(sub(load(s + p), here));
      const Vec high_power = power_of_two(sub(load(s + p + W), here));
      sums[0] = add(sums[0], low_power);
      sums[1] = add(sums[1], high_power);
      _mm512_store_si512(weights + r * BLOCK + p,
                         reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high_power, low_power)));
    }
    const Vec before = set(a.maxima[row + r]), top = larger(before, here);
    const Vec old_part = power_of_two(sub(before, top)), new_part = power_of_two(sub(here, top));
    const Vec kept = mul(set(a.sums[row + r]), old_part);
    a.sums[row + r] = lane(fma(set(total(add(sums[0], sums[1]))), new_part, kept));
    a.maxima[row + r] = lane(top);
    old_factor[r] = lane(old_part);
    new_factor[r] = lane(new_part);
  }

  for (int64_t d = 0; d < size; d += DEPTH) {  // B: 16 pairs of positions by 16 columns
    tile_block(weights + begin, 2 * BLOCK, a.cache.values + (begin / 2 * size + d) * 4, 4 * size,
               TILE * size * 4, TILE * 4, (end - begin) / DEPTH, lower > 0, mixed, DEPTH);
    for (int64_t r = 0; r < rows; ++r) {
      float* at = a.acc + (row + r) * size + d;
      const Vec old_part = set(old_factor[r]), new_part = set(new_factor[r]);
      for (int64_t v = 0; v < DEPTH; v += W) {
        store(at + v, fma(load(mixed + r * DEPTH + v), new_part, mul(load(at + v), old_part)));
      }
    }
  }
}

void attend_by_tiles(const Attend& a) {
  if (a.kind != CacheKind::bf16 || a.head_dim % DEPTH != 0) {
    attend(a);
    return;
  }
  for (int64_t row = 0; row < a.rows; row += QUERIES) {
    attend_tiles(a, row, a.rows - row < QUERIES ? a.rows - row : QUERIES);
  }
  release_tiles();
}

}  // namespace

const StepKernels STEP_AMX_BF16 = {
    "amx-bf16", norm,   add_to,        silu,           widen, product,
    rotate,     keep_wide<DEPTH>, attend_by_tiles, merge, finish};

}  // namespace weightpath
