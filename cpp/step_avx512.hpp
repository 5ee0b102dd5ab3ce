// Vectors of 16 floats on AVX-512 (F, BW, VL, DQ), as step_generic.hpp wants them, for the two
// files that differ in bf16 products.
#pragma once

#include "avx512.hpp"

namespace weightpath {
namespace {

constexpr int W = 16;
constexpr int MOST_QUERIES = 6;  // rows of queries at once: 12 or 24 accumulators of 32 registers
constexpr int FEW_VECTORS = 3;   // up to so many rows meet four lines of keys at once
constexpr int FLOAT_ROWS = 4;    // rows of x at once in a float product: 16 accumulators

using Vec = __m512;

inline Vec set(float x) { return _mm512_set1_ps(x); }
inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline Vec load_some(const float* from, int64_t count) {
  return _mm512_maskz_loadu_ps(first(count), from);
}
inline void store(float* to, Vec x) { _mm512_storeu_ps(to, x); }
inline void store_some(float* to, Vec x, int64_t count) {
  _mm512_mask_storeu_ps(to, first(count), x);
}
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline float total(Vec x) { return _mm512_reduce_add_ps(x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps(x); }
inline float lane(Vec x) { return _mm512_cvtss_f32(x); }
inline Vec nearest(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// p * 2^whole, and 0 where x is under -126.
inline Vec scaled(Vec p, Vec whole, Vec x) {
  const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(counts, p, whole);
}

// Lanes whose position at + lane lies in [begin, end) keep x; the others are minus infinity.
inline Vec within(Vec x, int64_t at, int64_t begin, int64_t end) {
  const auto below = [&](int64_t limit) {
    return limit <= at ? __mmask16{0} : first(limit - at);
  };
  const __mmask16 keep = static_cast<__mmask16>(below(end) & ~below(begin));
  return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), keep, x);
}

template <Kind K>
inline Vec load_as(const void* from, int64_t index) {
  return load16(from, K, index, 0xFFFF);
}

inline void pair_bf16(const uint8_t* from, Vec& even, Vec& odd) {
  const __m512i line = _mm512_loadu_si512(from);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16));
  odd = _mm512_castsi512_ps(
      _mm512_and_si512(line, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

inline void pair_int8(const uint8_t* from, Vec& even, Vec& odd) {
  const __m512i pairs = _mm512_cvtepu16_epi32(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 24), 24));
  odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 24));
}

}  // namespace
}  // namespace weightpath
