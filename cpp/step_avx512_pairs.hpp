// Products of bf16 pairs on AVX-512 (vdpbf16ps), as attention_generic.hpp wants them, for the files
// that have them.
#pragma once

#define WEIGHTPATH_BF16_PAIRS

#include <cstring>

#include "step_avx512.hpp"

namespace weightpath {
namespace {

using Line = __m512i;  // 16 pairs of bf16

inline Line load_line(const uint8_t* from) { return _mm512_loadu_si512(from); }

// sums + line * pair, both products of a lane; `pair` is two bf16.
inline Vec dot_pairs(Vec sums, Line line, const uint16_t* pair) {
  int32_t both;
  std::memcpy(&both, pair, 4);
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(line),
                          reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)));
}

inline void store_bf16(uint16_t* to, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}

}  // namespace
}  // namespace weightpath
