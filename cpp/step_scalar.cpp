// The float arithmetic of a step in plain C++: vectors of 8 as arrays, for any CPU.

#include <cmath>

#include "floats.hpp"

namespace weightpath {
namespace {

constexpr int W = 8;
constexpr int MOST_QUERIES = 3;
constexpr int FEW_VECTORS = 2;
constexpr int FLOAT_ROWS = 2;

struct Vec {
  float x[W];
};

template <typename F>
inline Vec each(F&& of) {
  Vec y;
  for (int i = 0; i < W; ++i) y.x[i] = of(i);
  return y;
}

inline Vec set(float x) {
  return each([&](int) { return x; });
}
inline Vec load(const float* from) {
  return each([&](int i) { return from[i]; });
}
inline Vec load_some(const float* from, int64_t count) {
  return each([&](int i) { return i < count ? from[i] : 0.0f; });
}
inline void store(float* to, Vec x) {
  for (int i = 0; i < W; ++i) to[i] = x.x[i];
}
inline void store_some(float* to, Vec x, int64_t count) {
  for (int i = 0; i < W && i < count; ++i) to[i] = x.x[i];
}
inline Vec add(Vec a, Vec b) {
  return each([&](int i) { return a.x[i] + b.x[i]; });
}
inline Vec sub(Vec a, Vec b) {
  return each([&](int i) { return a.x[i] - b.x[i]; });
}
inline Vec mul(Vec a, Vec b) {
  return each([&](int i) { return a.x[i] * b.x[i]; });
}
inline Vec div(Vec a, Vec b) {
  return each([&](int i) { return a.x[i] / b.x[i]; });
}
// Not std::fma: a call to the C library where the CPU has none.
inline Vec fma(Vec a, Vec b, Vec c) {
  return each([&](int i) { return a.x[i] * b.x[i] + c.x[i]; });
}
inline Vec larger(Vec a, Vec b) {
  return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
}
inline Vec smaller(Vec a, Vec b) {
  return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
}
inline float lane(Vec x) { return x.x[0]; }
inline float total(Vec x) {
  float sum = 0.0f;
  for (const float part : x.x) sum += part;
  return sum;
}
inline float largest(Vec x) {
  float most = x.x[0];
  for (const float part : x.x) most = part > most ? part : most;
  return most;
}
inline Vec nearest(Vec x) {
  return each([&](int i) { return std::nearbyint(x.x[i]); });
}

// p * 2^whole for whole in -126..126, and 0 where x is under -126.
inline Vec scaled(Vec p, Vec whole, Vec x) {
  return each([&](int i) {
    if (x.x[i] < -126.0f) return 0.0f;
    if (!(whole.x[i] <= 126.0f)) return whole.x[i];  // NaN
    const uint32_t power = static_cast<uint32_t>(static_cast<int32_t>(whole.x[i]) + 127) << 23;
    return p.x[i] * std::bit_cast<float>(power);
  });
}

// Lanes whose position at + lane lies in [begin, end) keep x; the others are minus infinity.
inline Vec within(Vec x, int64_t at, int64_t begin, int64_t end) {
  return each([&](int64_t i) {
    return at + i >= begin && at + i < end ? x.x[i] : -__builtin_inff();
  });
}

template <Kind K>
inline Vec load_as(const void* from, int64_t index) {
  return each([&](int i) { return load_float(from, K, index + i); });
}

inline void pair_bf16(const uint8_t* from, Vec& even, Vec& odd) {
  uint16_t pairs[2 * W];
  std::memcpy(pairs, from, sizeof pairs);
  even = each([&](int i) { return from_bf16(pairs[2 * i]); });
  odd = each([&](int i) { return from_bf16(pairs[2 * i + 1]); });
}

inline void pair_int8(const uint8_t* from, Vec& even, Vec& odd) {
  int8_t pairs[2 * W];
  std::memcpy(pairs, from, sizeof pairs);
  even = each([&](int i) { return static_cast<float>(pairs[2 * i]); });
  odd = each([&](int i) { return static_cast<float>(pairs[2 * i + 1]); });
}

}  // namespace
}  // namespace weightpath

#include "attention_generic.hpp"
#include "cpuid.hpp"

namespace weightpath {

const StepKernels STEP_SCALAR = {"scalar", norm, add_to, silu,  widen, product,
                                 rotate,   keep, attend, merge, finish};

const StepKernels& step_kernels(const std::string& name) {
  [[maybe_unused]] const Features& cpu = features();
  [[maybe_unused]] const bool any = name.empty();
  [[maybe_unused]] const bool wide = any || name == "avx512-vnni" || name == "amx-int8";
#ifdef WEIGHTPATH_STEP_AMX_BF16
#ifdef WEIGHTPATH_EMULATED_AMX
  const bool tiles = true;
#else
  const bool tiles = cpu.amx_bf16;
#endif
  if ((any || name == "amx-int8") && tiles && cpu.avx512 && cpu.os_avx512 && cpu.avx512_bf16) {
    return STEP_AMX_BF16;
  }
#endif
#ifdef WEIGHTPATH_STEP_AVX512_BF16
  if (wide && cpu.avx512 && cpu.os_avx512 && cpu.avx512_bf16) return STEP_AVX512_BF16;
#endif
#ifdef WEIGHTPATH_STEP_AVX512
  if (wide && cpu.avx512 && cpu.os_avx512) return STEP_AVX512;
#endif
#ifdef WEIGHTPATH_STEP_AVX2
  if (name != "scalar" && cpu.avx2 && cpu.fma && cpu.f16c && cpu.os_avx) return STEP_AVX2;
#endif
  return STEP_SCALAR;
}

}  // namespace weightpath
