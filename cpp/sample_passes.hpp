// The passes over a whole vocabulary, as vector code that the compiler writes for each file that
// includes this. Everything is `static`: such files must never share an inline function.
//
// Lanes and the order of every sum are the same whatever the registers' width, and no product is
// fused, so all instruction sets give the same bits.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "sample.hpp"

namespace weightpath {
namespace {

constexpr int LANES = 8, WORDS_A_BLOCK = SAMPLE_BLOCK / LANES;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Words __attribute__((vector_size(4 * LANES)));
typedef float HalfOfFloats __attribute__((vector_size(2 * LANES)));
typedef double Doubles __attribute__((vector_size(4 * LANES)));
constexpr float LOWEST = -3.40282347e38f;

// A block from `from` on, of which `count` values are there; `fill` stands behind them.
[[gnu::always_inline]] static inline const float* whole_block(const float* from, int64_t count,
                                                              float* room, float fill) {
  if (count >= SAMPLE_BLOCK) return from;
  for (int64_t i = 0; i < SAMPLE_BLOCK; ++i) room[i] = i < count ? from[i] : fill;
  return room;
}

// Largest value of every block; false where a value is NaN or infinite.
static bool block_maxima(const float* x, int64_t n, float* maxima) {
  alignas(64) float room[SAMPLE_BLOCK];
  Words bad{};
  for (int64_t start = 0; start < n; start += SAMPLE_BLOCK) {
    const float* from = whole_block(x + start, n - start, room, x[n - 1]);
    Floats part[WORDS_A_BLOCK];
    std::memcpy(part, from, sizeof part);
    for (int i = 0; i < WORDS_A_BLOCK; ++i) bad |= (part[i] - part[i]) != Floats{};
    for (int width = WORDS_A_BLOCK / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) {
        part[i] = part[i] > part[i + width] ? part[i] : part[i + width];
      }
    }
    float top = part[0][0];
    for (int lane = 1; lane < LANES; ++lane) top = part[0][lane] > top ? part[0][lane] : top;
    maxima[start / SAMPLE_BLOCK] = top;
  }
  int32_t any = 0;
  for (int lane = 0; lane < LANES; ++lane) any |= bad[lane];
  return any == 0;
}

// exp(x) for x <= 0: 2^n times a polynomial of degree 7; under -87 about 1e-38.
[[gnu::always_inline]] static inline void exponential(Floats& x) {
  constexpr float LOG2_E = 1.44269504f, SHIFT = 12582912.0f;  // 1.5 * 2^23: rounds to an integer
  constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
  const Floats least = Floats{} - 87.0f;
  x = x > least ? x : least;
  const Floats shifted = x * LOG2_E + SHIFT;
  const Floats whole = shifted - SHIFT;
  const Floats r = (x - whole * LN2_HIGH) - whole * LN2_LOW;
  Floats p = r * (1.0f / 5040) + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  Words bits, power;
  std::memcpy(&bits, &p, sizeof bits);
  std::memcpy(&power, &shifted, sizeof power);
  bits += (power - std::bit_cast<int32_t>(SHIFT)) << 23;
  std::memcpy(&x, &bits, sizeof x);
}

// exp((x - largest) * inverse) of a block into `to` (or nowhere), and their sum.
[[gnu::always_inline]] static inline double block_weights(const float* x, float largest,
                                                          float inverse, float* to) {
  Floats sums[2] = {};
  for (int i = 0; i < WORDS_A_BLOCK; i += 2) {
    for (int half = 0; half < 2; ++half) {
      Floats value;
      std::memcpy(&value, x + (i + half) * LANES, sizeof value);
      value = (value - largest) * inverse;
      exponential(value);
      sums[half] += value;
      if (to) std::memcpy(to + (i + half) * LANES, &value, sizeof value);
    }
  }
  const Floats both = sums[0] + sums[1];
  double total = 0.0;
  for (int lane = 0; lane < LANES; ++lane) total += static_cast<double>(both[lane]);
  return total;
}

// The sum of the weights of every block, and of all; the weights too where `weights` (whole blocks)
// is given.
static double weigh(const float* x, int64_t n, float largest, float inverse, double* sums,
                    float* weights) {
  alignas(64) float room[SAMPLE_BLOCK];
  double total = 0.0;
  for (int64_t start = 0; start < n; start += SAMPLE_BLOCK) {
    const float* from = whole_block(x + start, n - start, room, LOWEST);
    total += sums[start / SAMPLE_BLOCK] =
        weights ? block_weights(from, largest, inverse, weights + start)
                : block_weights(from, largest, inverse, nullptr);
  }
  return total;
}

[[gnu::always_inline]] static inline bool any(const Words& mask) {
  uint64_t words[sizeof(Words) / 8];
  std::memcpy(words, &mask, sizeof mask);
  return (words[0] | words[1] | words[2] | words[3]) != 0;
}

// Adds the values at `from` whose lane is marked, in double: four lanes to each of two sums.
[[gnu::always_inline]] static inline void add_marked(const float* from, const Words& mask,
                                                     Doubles& first, Doubles& second) {
  Words bits;
  std::memcpy(&bits, from, sizeof bits);
  bits &= mask;
  const Floats values = (Floats)bits;  // the same bits
  first += __builtin_convertvector(__builtin_shufflevector(values, values, 0, 1, 2, 3), Doubles);
  second += __builtin_convertvector(__builtin_shufflevector(values, values, 4, 5, 6, 7), Doubles);
}

[[gnu::always_inline]] static inline double sum_of(const Doubles& first, const Doubles& second) {
  const Doubles both = first + second;
  return (both[0] + both[1]) + (both[2] + both[3]);
}

// Of a block's first `count` values those >= bound: their number, ids from `first` on, and values.
// Writes up to a block of each.
static int64_t pick(const float* x, int64_t count, float bound, int64_t first, int64_t* ids,
                    float* values) {
  alignas(64) float room[SAMPLE_BLOCK];
  const float* from = whole_block(x, count, room, LOWEST);
  const Floats least = Floats{} + bound;
  int64_t found = 0;
  for (int64_t i = 0; i < count; i += LANES) {
    Floats value;
    std::memcpy(&value, from + i, sizeof value);
    if (!any(value >= least)) continue;
    for (int64_t j = i; j < i + LANES && j < count; ++j) {  // no branch that the data decides
      ids[found] = first + j;
      values[found] = from[j];
      found += from[j] >= bound;
    }
  }
  return found;
}

// By d = (largest - x) * scale: sums[0] of the weights with d < low, sums[1] of those with
// low <= d < high; the values and weights of the latter are written out (room for n and a block),
// their number returned.
static int64_t split(const float* x, const float* weights, int64_t n, float largest, float scale,
                     float low, float high, double* sums, float* values, float* theirs) {
  alignas(64) float room[SAMPLE_BLOCK];
  const Floats lowest = Floats{} + low, highest = Floats{} + high;
  Doubles over[2] = {};
  int64_t found = 0;
  for (int64_t start = 0; start < n; start += SAMPLE_BLOCK) {
    const float* from = whole_block(x + start, n - start, room, LOWEST);
    for (int64_t i = 0; i < SAMPLE_BLOCK; i += LANES) {
      Floats d;
      std::memcpy(&d, from + i, sizeof d);
      d = (largest - d) * scale;
      add_marked(weights + start + i, d < lowest, over[0], over[1]);
      const Words between = (d < highest) & (d >= lowest);
      if (!any(between)) continue;
      for (int64_t j = 0; j < LANES; ++j) {  // no branch that the data decides
        values[found] = from[i + j];
        theirs[found] = weights[start + i + j];
        found -= between[j];
      }
    }
  }
  sums[0] = sum_of(over[0], over[1]);
  sums[1] = 0.0;
  for (int64_t i = 0; i < found; ++i) sums[1] += static_cast<double>(theirs[i]);
  return found;
}

// The sum of a block's weights whose value is >= bound; of its first `count`.
static double kept(const float* x, const float* weights, int64_t count, float bound) {
  alignas(64) float room[SAMPLE_BLOCK];
  const float* from = whole_block(x, count, room, LOWEST);
  const Floats least = Floats{} + bound;
  Doubles sums[2] = {};
  for (int64_t i = 0; i < SAMPLE_BLOCK; i += LANES) {
    Floats value;
    std::memcpy(&value, from + i, sizeof value);
    add_marked(weights + i, value >= least, sums[0], sums[1]);
  }
  return sum_of(sums[0], sums[1]);
}

}  // namespace
}  // namespace weightpath
