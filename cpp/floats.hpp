// 16-bit floats in plain C++. Everything here is `static`: files compiled for different instruction
// sets must never share an inline function, since the linker would keep one of them for all.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "tiles.hpp"

namespace weightpath {

// Largest |x| below which a row or group of activations counts as zero: 127 / x stays finite above.
[[maybe_unused]] static constexpr uint32_t SMALLEST_BITS = 0x0D800000u;  // 2^-100
[[maybe_unused]] static constexpr uint32_t INFINITY_BITS = 0x7F800000u;

[[maybe_unused]] static float from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

[[maybe_unused]] static uint16_t to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > INFINITY_BITS) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
}

[[maybe_unused]] static float from_fp16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 31, mantissa = bits & 1023u;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
  }
  if (exponent == 31) return std::bit_cast<float>(sign | INFINITY_BITS | (mantissa << 13));
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Round to nearest, ties to even.
[[maybe_unused]] static uint16_t to_fp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u, size = bits & 0x7FFFFFFFu;
  if (size > INFINITY_BITS) return static_cast<uint16_t>(sign | 0x7E00u | ((bits >> 13) & 0x3FFu));
  if (size >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // 65520 and beyond
  if (size < 0x38800000u) {  // under 2^-14: the sum's last bit is worth 2^-24
    const float shifted = std::bit_cast<float>(size) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000u));
  }
  return static_cast<uint16_t>(
      sign | ((size - 0x38000000u + 0xFFFu + ((size >> 13) & 1)) >> 13));
}

[[maybe_unused]] static float load_float(const void* from, Kind kind, int64_t index) {
  if (kind == Kind::fp32) {
    float value;
    std::memcpy(&value, static_cast<const char*>(from) + 4 * index, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(from) + 2 * index, 2);
  return kind == Kind::bf16 ? from_bf16(bits) : from_fp16(bits);
}

[[maybe_unused]] static void store_float(void* to, Kind kind, int64_t index, float value) {
  if (kind == Kind::fp32) {
    std::memcpy(static_cast<char*>(to) + 4 * index, &value, 4);
    return;
  }
  const uint16_t bits = kind == Kind::bf16 ? to_bf16(value) : to_fp16(value);
  std::memcpy(static_cast<char*>(to) + 2 * index, &bits, 2);
}

}  // namespace weightpath
