// The float arithmetic of a step on AVX2 with FMA and F16C: vectors of 8.

#include <immintrin.h>

#include "floats.hpp"

namespace weightpath {
namespace {

constexpr int W = 8;
constexpr int MOST_QUERIES = 3;  // rows of queries at once: 12 accumulators of 16 registers
constexpr int FEW_VECTORS = 2;
constexpr int FLOAT_ROWS = 2;

using Vec = __m256;

inline __m256i lanes_below(int64_t count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const int limit = count < 0 ? 0 : count > 8 ? 8 : static_cast<int>(count);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(limit), lanes);
}

inline Vec set(float x) { return _mm256_set1_ps(x); }
inline Vec load(const float* from) { return _mm256_loadu_ps(from); }
inline Vec load_some(const float* from, int64_t count) {
  return _mm256_maskload_ps(from, lanes_below(count));
}
inline void store(float* to, Vec x) { _mm256_storeu_ps(to, x); }
inline void store_some(float* to, Vec x, int64_t count) {
  _mm256_maskstore_ps(to, lanes_below(count), x);
}
inline Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec smaller(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline float lane(Vec x) { return _mm256_cvtss_f32(x); }
inline float total(Vec x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(Vec x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline Vec nearest(Vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// p * 2^whole for whole in -126..126, and 0 where x is under -126.
inline Vec scaled(Vec p, Vec whole, Vec x) {
  const __m256i power = _mm256_slli_epi32(
      _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  const Vec counts = _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm256_and_ps(counts, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

// Lanes whose position at + lane lies in [begin, end) keep x; the others are minus infinity.
inline Vec within(Vec x, int64_t at, int64_t begin, int64_t end) {
  const __m256i keep = _mm256_andnot_si256(lanes_below(begin - at), lanes_below(end - at));
  return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, _mm256_castsi256_ps(keep));
}

template <Kind K>
inline Vec load_as(const void* from, int64_t index) {
  if constexpr (K == Kind::fp32) return load(static_cast<const float*>(from) + index);
  const __m128i bits = _mm_loadu_si128(
      reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(from) + index));
  if constexpr (K == Kind::fp16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline void pair_bf16(const uint8_t* from, Vec& even, Vec& odd) {
  const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(line, 16));
  odd = _mm256_castsi256_ps(
      _mm256_and_si256(line, _mm256_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

inline void pair_int8(const uint8_t* from, Vec& even, Vec& odd) {
  const __m256i pairs =
      _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 24), 24));
  odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 24));
}

}  // namespace
}  // namespace weightpath

#include "attention_generic.hpp"

namespace weightpath {

const StepKernels STEP_AVX2 = {"avx2", norm, add_to, silu,   widen, product,
                               rotate, keep, attend, merge, finish};

}  // namespace weightpath
