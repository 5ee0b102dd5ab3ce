// Four floats at once in any of the three kinds, and the activations' integers, for both NEON
// files: neither needs more than ARMv8 for it. `static`, like floats.hpp, whose conversions these
// repeat.
#pragma once

#include <arm_neon.h>

#include <cmath>

#include "floats.hpp"

namespace weightpath {

static inline float32x4_t load4(const void* from, Kind kind, int64_t index) {
  if (kind == Kind::fp32) return vld1q_f32(static_cast<const float*>(from) + index);
  const uint16x4_t bits = vld1_u16(static_cast<const uint16_t*>(from) + index);
  if (kind == Kind::fp16) return vcvt_f32_f16(vreinterpret_f16_u16(bits));
  return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
}

static inline void store4(void* to, Kind kind, int64_t index, float32x4_t value) {
  if (kind == Kind::fp32) {
    vst1q_f32(static_cast<float*>(to) + index, value);
    return;
  }
  uint16x4_t bits;
  if (kind == Kind::fp16) {
    bits = vreinterpret_u16_f16(vcvt_f16_f32(value));
  } else {
    const uint32x4_t whole = vreinterpretq_u32_f32(value);
    const uint32x4_t last = vandq_u32(vshrq_n_u32(whole, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(vaddq_u32(whole, vdupq_n_u32(0x7FFF)), last);
    const uint32x4_t quiet = vorrq_u32(whole, vdupq_n_u32(0x400000));
    bits = vshrn_n_u32(vbslq_u32(vceqq_f32(value, value), rounded, quiet), 16);
  }
  vst1_u16(static_cast<uint16_t*>(to) + index, bits);
}

// Bits of the largest |x|. Compared as integers, so that a NaN is the largest of all.
static inline uint32_t largest_bits(const void* x, Kind kind, int64_t start, int64_t count) {
  const uint32x4_t positive = vdupq_n_u32(0x7FFFFFFF);
  uint32x4_t lanes = vdupq_n_u32(0);
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    const uint32x4_t bits = vreinterpretq_u32_f32(load4(x, kind, start + k));
    lanes = vmaxq_u32(lanes, vandq_u32(bits, positive));
  }
  uint32_t largest = vmaxvq_u32(lanes);
  for (; k < count; ++k) {
    const uint32_t bits = std::bit_cast<uint32_t>(load_float(x, kind, start + k)) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Eight int32 of -128..127 to eight bytes; their sum, lane by lane, to `sum`.
static inline void store_bytes(int8_t* to, int32x4_t first, int32x4_t second, int32x4_t& sum) {
  vst1_s8(to, vmovn_s16(vcombine_s16(vmovn_s32(first), vmovn_s32(second))));
  sum = vaddq_s32(sum, vaddq_s32(first, second));
}

static inline int32x4_t high_part(int32x4_t q) {
  return vshrq_n_s32(vaddq_s32(q, vdupq_n_s32(128)), 8);
}

static void quantize(const void* x, Kind kind, const Shape& shape, const Activations& a,
                     int64_t m) {
  const int64_t groups = shape.groups(), padded = shape.padded_group();
  uint32_t largest = a.per_group ? 0 : largest_bits(x, kind, m * shape.k, shape.k);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t start = m * shape.k + g * shape.group;
    if (a.per_group) largest = largest_bits(x, kind, start, shape.group);
    const auto [inverse, scale, counts] = activation_scale(largest, a.planes);
    if (a.per_group) a.scales[m * groups + g] = scale;
    else a.scales[m] = scale;
    const int64_t at = m * shape.row_stride() + g * padded;
    int32x4_t sums[2] = {vdupq_n_s32(0), vdupq_n_s32(0)};
    int64_t k = 0;
    for (; counts && k + 8 <= shape.group; k += 8) {
      const int32x4_t q0 = vcvtnq_s32_f32(vmulq_n_f32(load4(x, kind, start + k), inverse));
      const int32x4_t q1 = vcvtnq_s32_f32(vmulq_n_f32(load4(x, kind, start + k + 4), inverse));
      if (a.planes == 1) {
        store_bytes(a.plane[0] + at + k, q0, q1, sums[0]);
      } else {
        const int32x4_t h0 = high_part(q0), h1 = high_part(q1);
        store_bytes(a.plane[0] + at + k, h0, h1, sums[0]);
        store_bytes(a.plane[1] + at + k, vsubq_s32(q0, vshlq_n_s32(h0, 8)),
                    vsubq_s32(q1, vshlq_n_s32(h1, 8)), sums[1]);
      }
    }
    int32_t sum_high = vaddvq_s32(sums[0]), sum_low = vaddvq_s32(sums[1]);
    for (; k < padded; ++k) {
      const float value = counts && k < shape.group ? load_float(x, kind, start + k) : 0.0f;
      const int32_t q = static_cast<int32_t>(std::nearbyint(value * inverse));
      const int32_t h = a.planes == 2 ? (q + 128) >> 8 : q;
      a.plane[0][at + k] = static_cast<int8_t>(h);
      sum_high += h;
      if (a.planes == 2) {
        a.plane[1][at + k] = static_cast<int8_t>(q - h * 256);
        sum_low += q - h * 256;
      }
    }
    a.sums[0][m * groups + g] = sum_high;
    if (a.planes == 2) a.sums[1][m * groups + g] = sum_low;
  }
}

}  // namespace weightpath
