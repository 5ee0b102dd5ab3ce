// One position's key and value to their places in the cache (kv_cache.hpp), in each element kind.
// In an unnamed namespace, like step_generic.hpp: nothing is shared between instruction sets.
#pragma once

#include <bit>
#include <cmath>

#include "floats.hpp"
#include "kv_cache.hpp"

namespace weightpath {
namespace {

ActivationScale scale_of(const float* x, int64_t count) {
  uint32_t largest = 0;  // as bits, so that a NaN is the largest of all
  for (int64_t d = 0; d < count; ++d) {
    const uint32_t bits = std::bit_cast<uint32_t>(x[d]) & 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  return activation_scale(largest, 1);
}

int8_t as_int8(float x, const ActivationScale& scale) {
  return static_cast<int8_t>(scale.counts ? std::nearbyint(x * scale.inverse) : 0.0f);
}

// The odd partner of an even position is zeroed where that is the newest one: what was there before
// meets a weight of zero, and zero times NaN is NaN.
void keep(const float* key, const float* value, const CacheShape& shape, const CacheHead& to,
          int64_t position, bool newest) {
  const int64_t p = position % BLOCK, pairs = shape.head_dim / 2;
  const int64_t key_at = p / LANES * pairs * LANES + p % LANES;  // in pairs
  const int64_t value_at = p / 2 * shape.head_dim;
  const bool even = newest && p % 2 == 0;
  if (shape.kind == CacheKind::bf16) {
    uint16_t *keys = reinterpret_cast<uint16_t*>(to.keys),
             *values = reinterpret_cast<uint16_t*>(to.values);
    for (int64_t i = 0; i < pairs; ++i) {
      uint16_t* at = keys + 2 * (key_at + i * LANES);
      at[0] = to_bf16(key[2 * i]);
      at[1] = to_bf16(key[2 * i + 1]);
    }
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      uint16_t* at = values + 2 * (value_at + d);
      at[p % 2] = to_bf16(value[d]);
      if (even) at[1] = 0;
    }
  } else if (shape.kind == CacheKind::fp32) {
    float *keys = reinterpret_cast<float*>(to.keys), *values = reinterpret_cast<float*>(to.values);
    for (int64_t i = 0; i < pairs; ++i) {
      float* at = keys + p / LANES * pairs * 2 * LANES + i * 2 * LANES + p % LANES;
      at[0] = key[2 * i];
      at[LANES] = key[2 * i + 1];
    }
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      float* at = values + (p / 2 * shape.head_dim + d / LANES * LANES) * 2 + d % LANES;
      at[p % 2 * LANES] = value[d];
      if (even) at[LANES] = 0.0f;
    }
  } else {
    int8_t *keys = reinterpret_cast<int8_t*>(to.keys),
           *values = reinterpret_cast<int8_t*>(to.values);
    const ActivationScale of_key = scale_of(key, shape.head_dim);
    const ActivationScale of_value = scale_of(value, shape.head_dim);
    for (int64_t i = 0; i < pairs; ++i) {
      keys[2 * (key_at + i * LANES)] = as_int8(key[2 * i], of_key);
      keys[2 * (key_at + i * LANES) + 1] = as_int8(key[2 * i + 1], of_key);
    }
    for (int64_t d = 0; d < shape.head_dim; ++d) {
      values[2 * (value_at + d) + p % 2] = as_int8(value[d], of_value);
      if (even) values[2 * (value_at + d) + 1] = 0;
    }
    to.key_scales[p] = of_key.scale;
    to.value_scales[p] = of_value.scale;
    if (even) to.value_scales[p + 1] = 0.0f;
  }
}

}  // namespace
}  // namespace weightpath
