// 16-bit floats, activation scales and a plain read, in C++ for every file. Everything here is
// `static`: files compiled for different instruction sets must never share an inline function,
// since the linker would keep one of them for all.
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

// What a row or group of activations is multiplied by as it becomes integers, and the scale that
// undoes it. `counts` is false where it is taken for zeros; a scale of NaN marks x that is not
// finite.
struct ActivationScale {
  float inverse, scale;
  bool counts;
};

// From the bits of the largest |x|; planes as in Activations.
[[maybe_unused]] static ActivationScale activation_scale(uint32_t largest, int planes) {
  const float top = planes == 2 ? 32512.0f : 127.0f, size = std::bit_cast<float>(largest);
  if (largest >= INFINITY_BITS) return {0.0f, std::bit_cast<float>(0x7FC00000u), false};
  if (largest < SMALLEST_BITS) return {0.0f, 0.0f, false};
  return {top / size, size / top, true};
}

// Sum of all 8-byte words of `lines` lines, with as many chains as a line has words.
[[maybe_unused]] static uint64_t sum_of_words(const uint8_t* from, int64_t lines) {
  uint64_t sums[8] = {};
  for (int64_t line = 0; line < lines; ++line) {
    uint64_t words[8];
    std::memcpy(words, from + line * LINE, LINE);
    for (int i = 0; i < 8; ++i) sums[i] += words[i];
  }
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace weightpath
