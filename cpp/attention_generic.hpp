// Attention over one block of the cache, over a vector of W floats (as in step_generic.hpp).
//
// R query rows are taken at once. Scores: R x (positions / W) accumulators; a line of keys comes
// apart into two vectors, one a column, and each meets R broadcast queries. Values: R x (columns
// / W) accumulators; a line comes apart into two positions. Each result is one chain of fused
// multiply-adds in the order of columns (scores) or positions (values), whatever R is; lanes that
// are masked add zero. That is what makes a prompt's cut invisible.
#pragma once

#include "keep_generic.hpp"
#include "step_generic.hpp"

namespace weightpath {
namespace {

constexpr int PARTS = LANES / W;  // vectors of a line's 16 lanes

template <CacheKind K>
inline void line_pair(const uint8_t* base, int64_t line, int part, Vec& even, Vec& odd) {
  if constexpr (K == CacheKind::bf16) {
    pair_bf16(base + line * 64 + part * W * 4, even, odd);
  } else if constexpr (K == CacheKind::int8) {
    pair_int8(base + line * 32 + part * W * 2, even, odd);
  } else {
    const float* at = reinterpret_cast<const float*>(base + line * 128) + part * W;
    even = load(at);
    odd = load(at + LANES);
  }
}

// Scores of R rows against S lines of 16 positions from `line` on.
template <CacheKind K, int R, int S>
inline void scores(const float* q, const uint8_t* keys, int64_t line, int64_t head_dim, float* to) {
  Vec t[R][S * PARTS];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int s = 0; s < S * PARTS; ++s) t[r][s] = set(0.0f);
  }
  const int64_t pairs = head_dim / 2;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    Vec even[S * PARTS], odd[S * PARTS];
#pragma GCC unroll 8
    for (int s = 0; s < S * PARTS; ++s) {
      line_pair<K>(keys, (line + s / PARTS) * pairs + pair, s % PARTS, even[s], odd[s]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec a = set(q[r * head_dim + 2 * pair]), b = set(q[r * head_dim + 2 * pair + 1]);
#pragma GCC unroll 8
      for (int s = 0; s < S * PARTS; ++s) t[r][s] = fma(a, even[s], t[r][s]);
#pragma GCC unroll 8
      for (int s = 0; s < S * PARTS; ++s) t[r][s] = fma(b, odd[s], t[r][s]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int s = 0; s < S * PARTS; ++s) store(to + r * BLOCK + line * LANES + s * W, t[r][s]);
  }
}

#ifdef WEIGHTPATH_BF16_PAIRS
// The same with queries in bf16 [R, head_dim]: two columns a product.
template <int R, int S>
inline void scores_of_pairs(const uint16_t* q, const uint8_t* keys, int64_t line, int64_t head_dim,
                            float* to) {
  Vec t[R][S];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int s = 0; s < S; ++s) t[r][s] = set(0.0f);
  }
  const int64_t pairs = head_dim / 2;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    Line lines[S];
#pragma GCC unroll 8
    for (int s = 0; s < S; ++s) lines[s] = load_line(keys + ((line + s) * pairs + pair) * 64);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int s = 0; s < S; ++s) {
        t[r][s] = dot_pairs(t[r][s], lines[s], q + r * head_dim + 2 * pair);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int s = 0; s < S; ++s) store(to + r * BLOCK + (line + s) * LANES, t[r][s]);
  }
}

// Softmax weights in bf16 [R, BLOCK]: two positions a product.
template <int R, int D>
inline void weigh_pairs(const uint16_t* e, const uint8_t* values, int64_t head_dim, int64_t d,
                        int64_t begin, int64_t end, const Vec (&old_factor)[R],
                        const Vec (&new_factor)[R], float* acc) {
  Vec t[R][D];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < D; ++v) t[r][v] = set(0.0f);
  }
  const int64_t lines = head_dim / LANES;
  for (int64_t pair = begin; pair < end; ++pair) {
#pragma GCC unroll 8
    for (int v = 0; v < D; ++v) {
      const Line line = load_line(values + (pair * lines + d / LANES + v) * 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) t[r][v] = dot_pairs(t[r][v], line, e + r * BLOCK + 2 * pair);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < D; ++v) {
      float* at = acc + r * head_dim + d + v * W;
      store(at, fma(t[r][v], new_factor[r], mul(load(at), old_factor[r])));
    }
  }
}
#endif

// D vectors of columns from d on: the block's part, joined to the state.
template <CacheKind K, int R, int D>
inline void weigh(const float* e, const uint8_t* values, int64_t head_dim, int64_t d,
                  int64_t begin, int64_t end, const Vec (&old_factor)[R],
                  const Vec (&new_factor)[R], float* acc) {
  Vec t[R][D];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < D; ++v) t[r][v] = set(0.0f);
  }
  const int64_t lines = head_dim / LANES;
  for (int64_t pair = begin; pair < end; ++pair) {
#pragma GCC unroll 8
    for (int v = 0; v < D; ++v) {
      Vec even, odd;
      const int64_t at = d + v * W;
      line_pair<K>(values, pair * lines + at / LANES, at % LANES / W, even, odd);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        t[r][v] = fma(set(e[r * BLOCK + 2 * pair]), even, t[r][v]);
        t[r][v] = fma(set(e[r * BLOCK + 2 * pair + 1]), odd, t[r][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < D; ++v) {
      float* at = acc + r * head_dim + d + v * W;
      store(at, fma(t[r][v], new_factor[r], mul(load(at), old_factor[r])));
    }
  }
}

template <CacheKind K, int R>
void attend_rows(const Attend& a, int64_t row) {
  alignas(64) float e[R * BLOCK];
  const float* q = a.q + row * a.head_dim;
  const int32_t *first = a.first + row, *last = a.last + row;
  int64_t low = BLOCK, high = 0;
  for (int r = 0; r < R; ++r) {
    if (first[r] >= last[r]) continue;
    low = first[r] < low ? first[r] : low;
    high = last[r] > high ? last[r] : high;
  }
  if (low >= high) return;
  const int64_t begin = low / LANES, end = (high + LANES - 1) / LANES;  // in lines
  int64_t line = begin;
  constexpr int MANY = R * PARTS <= FEW_VECTORS ? 4 : 2;
#ifdef WEIGHTPATH_BF16_PAIRS
  constexpr bool PAIRS = K == CacheKind::bf16;
  alignas(64) uint16_t rounded[PAIRS ? R * MOST_HEAD_DIM : 1];
  alignas(64) uint16_t weights[PAIRS ? R * BLOCK : 1];
  if constexpr (PAIRS) {
    for (int64_t d = 0; d < R * a.head_dim; d += W) store_bf16(rounded + d, load(q + d));
    for (; line + MANY <= end; line += MANY) {
      scores_of_pairs<R, MANY>(rounded, a.cache.keys, line, a.head_dim, e);
    }
    for (; line < end; ++line) {
      scores_of_pairs<R, 1>(rounded, a.cache.keys, line, a.head_dim, e);
    }
  }
#else
  constexpr bool PAIRS = false;
#endif
  for (; line + MANY <= end; line += MANY) {
    scores<K, R, MANY>(q, a.cache.keys, line, a.head_dim, e);
  }
  for (; line < end; ++line) scores<K, R, 1>(q, a.cache.keys, line, a.head_dim, e);

  Vec old_factor[R], new_factor[R];
  for (int r = 0; r < R; ++r) {
    float* s = e + r * BLOCK;
    Vec most = set(EMPTY);
    const int64_t stop = end * LANES;
    if (K != CacheKind::int8 && first[r] <= begin * LANES && last[r] >= stop) {  // nothing masked
      for (int64_t p = begin * LANES; p < stop; p += W) most = larger(most, load(s + p));
    } else {
      for (int64_t p = begin * LANES; p < stop; p += W) {
        Vec score = load(s + p);
        if constexpr (K == CacheKind::int8) score = mul(score, load(a.cache.key_scales + p));
        score = within(score, p, first[r], last[r]);
        store(s + p, score);
        most = larger(most, score);
      }
    }
    const Vec here = set(largest(most));
    Vec sum = set(0.0f);
    for (int64_t p = begin * LANES; p < end * LANES; p += W) {
      Vec power = power_of_two(sub(load(s + p), here));
      sum = add(sum, power);
      if constexpr (K == CacheKind::int8) power = mul(power, load(a.cache.value_scales + p));
#ifdef WEIGHTPATH_BF16_PAIRS
      if constexpr (PAIRS) store_bf16(weights + r * BLOCK + p, power);
#endif
      if constexpr (!PAIRS) store(s + p, power);
    }
    const Vec before = set(a.maxima[row + r]), top = larger(before, here);
    old_factor[r] = power_of_two(sub(before, top));
    new_factor[r] = power_of_two(sub(here, top));
    const Vec kept = mul(set(a.sums[row + r]), old_factor[r]);
    a.sums[row + r] = lane(fma(set(total(sum)), new_factor[r], kept));
    a.maxima[row + r] = lane(top);
  }

  float* acc = a.acc + row * a.head_dim;
  const int64_t pair0 = low / 2, pair1 = (high + 1) / 2;
  int64_t d = 0;
#ifdef WEIGHTPATH_BF16_PAIRS
  if constexpr (PAIRS) {
    for (; d + 4 * W <= a.head_dim; d += 4 * W) {
      weigh_pairs<R, 4>(weights, a.cache.values, a.head_dim, d, pair0, pair1, old_factor,
                        new_factor, acc);
    }
    for (; d < a.head_dim; d += W) {
      weigh_pairs<R, 1>(weights, a.cache.values, a.head_dim, d, pair0, pair1, old_factor,
                        new_factor, acc);
    }
  }
#endif
  for (; d + 4 * W <= a.head_dim; d += 4 * W) {
    weigh<K, R, 4>(e, a.cache.values, a.head_dim, d, pair0, pair1, old_factor, new_factor, acc);
  }
  for (; d < a.head_dim; d += W) {
    weigh<K, R, 1>(e, a.cache.values, a.head_dim, d, pair0, pair1, old_factor, new_factor, acc);
  }
}

template <CacheKind K>
void attend_kind(const Attend& a) {
  int64_t row = 0;
  for (; row + MOST_QUERIES <= a.rows; row += MOST_QUERIES) attend_rows<K, MOST_QUERIES>(a, row);
  switch (a.rows - row) {
    case 1: attend_rows<K, 1>(a, row); break;
    case 2: attend_rows<K, 2>(a, row); break;
    case 3: if constexpr (MOST_QUERIES > 3) attend_rows<K, 3>(a, row); break;
    case 4: if constexpr (MOST_QUERIES > 4) attend_rows<K, 4>(a, row); break;
    case 5: if constexpr (MOST_QUERIES > 5) attend_rows<K, 5>(a, row); break;
    default: break;
  }
}

void attend(const Attend& a) {
  switch (a.kind) {
    case CacheKind::bf16: attend_kind<CacheKind::bf16>(a); break;
    case CacheKind::int8: attend_kind<CacheKind::int8>(a); break;
    case CacheKind::fp32: attend_kind<CacheKind::fp32>(a); break;
  }
}

void merge(float* m, float* l, float* acc, float m1, float l1, const float* acc1,
           int64_t head_dim) {
  const Vec before = set(*m), here = set(m1), top = larger(before, here);
  const Vec old_factor = power_of_two(sub(before, top));
  const Vec new_factor = power_of_two(sub(here, top));
  *l = lane(fma(set(l1), new_factor, mul(set(*l), old_factor)));
  *m = lane(top);
  for (int64_t d = 0; d < head_dim; d += W) {
    store(acc + d, fma(load(acc1 + d), new_factor, mul(load(acc + d), old_factor)));
  }
}

void finish(const float* acc, float l, int64_t head_dim, float* y) {
  const Vec sum = set(l);
  for (int64_t d = 0; d < head_dim; d += W) store(y + d, div(load(acc + d), sum));
}

}  // namespace
}  // namespace weightpath
