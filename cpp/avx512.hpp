// 16 floats at once in any of the three kinds, for the files compiled with AVX-512. `static`, like
// floats.hpp, since those files differ in their other instruction sets.
#pragma once

#include <immintrin.h>

#include "floats.hpp"

namespace weightpath {

[[maybe_unused]] static inline __mmask16 first(int64_t count) {
  return count >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << count) - 1);
}

[[maybe_unused]] static inline __m512 load16(const void* from, Kind kind, int64_t index,
                                             __mmask16 mask) {
  if (kind == Kind::fp32) {
    return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(from) + index);
  }
  const __m256i bits =
      _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(from) + index);
  if (kind == Kind::fp16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// 16 floats to bf16, to nearest even; a NaN stays one.
[[maybe_unused]] static inline __m256i bf16_of(__m512 value) {
  const __m512i whole = _mm512_castps_si512(value);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi32(whole, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(0x7FFF)), last);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, whole, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

[[maybe_unused]] static inline void store16(void* to, Kind kind, int64_t index, __mmask16 mask,
                                             __m512 value) {
  if (kind == Kind::fp32) {
    _mm512_mask_storeu_ps(static_cast<float*>(to) + index, mask, value);
    return;
  }
  __m256i bits;
  if (kind == Kind::fp16) {
    bits = _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {
    bits = bf16_of(value);
  }
  _mm256_mask_storeu_epi16(static_cast<uint16_t*>(to) + index, mask, bits);
}

}  // namespace weightpath
