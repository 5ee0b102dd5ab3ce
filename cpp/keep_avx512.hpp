// One position's bf16 key and value to their places (kv_cache.hpp), sixteen words at once; other
// kinds as keep_generic.hpp does. In an unnamed namespace: nothing is shared between files.
#pragma once

#include <cstring>

#include "avx512.hpp"
#include "keep_generic.hpp"

namespace weightpath {
namespace {

// TOGETHER: positions whose values `attend` reads at once. After the newest position those are
// zeroed to their end.
template <int TOGETHER>
void keep_wide(const float* key, const float* value, const CacheShape& shape, const CacheHead& to,
               int64_t position, bool newest) {
  if (shape.kind != CacheKind::bf16) {
    keep(key, value, shape, to, position, newest);
    return;
  }
  const int64_t p = position % BLOCK, size = shape.head_dim, pairs = size / 2;
  const __m512i lines = _mm512_mullo_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
      _mm512_set1_epi32(LANES));
  uint32_t* const keys =
      reinterpret_cast<uint32_t*>(to.keys) + p / LANES * pairs * LANES + p % LANES;
  for (int64_t d = 0; d < size; d += 32) {
    const int64_t left = size - d;
    const __m256i low = bf16_of(_mm512_maskz_loadu_ps(first(left), key + d));
    const __m256i high = left > 16
                             ? bf16_of(_mm512_maskz_loadu_ps(first(left - 16), key + d + 16))
                             : _mm256_setzero_si256();
    const __m512i words = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    _mm512_mask_i32scatter_epi32(keys + d / 2 * LANES, first(left / 2), lines, words, 4);
  }
  uint16_t* const values = reinterpret_cast<uint16_t*>(to.values) + p / 2 * 2 * size;
  const bool odd = p % 2, clears = newest && !odd;
  for (int64_t d = 0; d < size; d += 16) {
    const int64_t left = size - d;
    const __m512i halves =
        _mm512_cvtepu16_epi32(bf16_of(_mm512_maskz_loadu_ps(first(left), value + d)));
    if (clears) {
      _mm512_mask_storeu_epi32(values + 2 * d, first(left), halves);
    } else {
      const __mmask32 all = left >= 16 ? ~__mmask32{0} : (__mmask32{1} << 2 * left) - 1;
      _mm512_mask_storeu_epi16(values + 2 * d, all & (odd ? 0xAAAAAAAAu : 0x55555555u),
                               odd ? _mm512_slli_epi32(halves, 16) : halves);
    }
  }
  if (TOGETHER > 2 && newest) {
    const int64_t pair = p / 2 + 1, end = (p / TOGETHER + 1) * (TOGETHER / 2);
    std::memset(values + 2 * size, 0, static_cast<size_t>((end - pair) * 4 * size));
  }
}

}  // namespace
}  // namespace weightpath
