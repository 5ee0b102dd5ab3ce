// The oracle in C++: every operator, one product at a time, for any CPU.
//
//   y[m, n] = x_scale[m] * sum_g scale[n, g] * t[m, g] + bias[n]          one scale a row
//   y[m, n] = sum_g scale[n, g] * (x_scale[m, g] * t[m, g]) + bias[n]     one scale a group
//   t[m, g] = sum_k (code[n, k] - zero[n, g]) * q[m, k], exact in int32
//   two planes: t = 256 * t_high + t_low, one fused multiply-add of the two as fp32
//
// The order of the roundings is the contract: the vector files repeat it, and their results are
// equal bit for bit.

#include <cmath>

#include "floats.hpp"
#include "tiles.hpp"

namespace weightpath {
namespace {

// Bits of the largest |x|. Compared as integers, so that a NaN is the largest of all.
uint32_t largest_bits(const void* x, Kind kind, int64_t start, int64_t count) {
  uint32_t largest = 0;
  for (int64_t k = start; k < start + count; ++k) {
    const uint32_t bits = std::bit_cast<uint32_t>(load_float(x, kind, k)) & 0x7FFFFFFFu;
    if (bits > largest) largest = bits;
  }
  return largest;
}

void quantize(const void* x, Kind kind, const Shape& shape, const Activations& a, int64_t m) {
  const int64_t groups = shape.groups(), padded = shape.padded_group();
  uint32_t largest = a.per_group ? 0 : largest_bits(x, kind, m * shape.k, shape.k);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t start = m * shape.k + g * shape.group;
    if (a.per_group) largest = largest_bits(x, kind, start, shape.group);
    const auto [inverse, scale, counts] = activation_scale(largest, a.planes);
    if (a.per_group) a.scales[m * groups + g] = scale;
    else a.scales[m] = scale;
    int8_t* high = a.plane[0] + m * shape.row_stride() + g * padded;
    int8_t* low = a.planes == 2 ? a.plane[1] + m * shape.row_stride() + g * padded : nullptr;
    int32_t sum_high = 0, sum_low = 0;
    for (int64_t k = 0; k < padded; ++k) {
      const float value = k < shape.group && counts ? load_float(x, kind, start + k) : 0.0f;
      const int32_t q = static_cast<int32_t>(std::nearbyint(value * inverse));
      const int32_t h = low ? (q + 128) >> 8 : q;
      high[k] = static_cast<int8_t>(h);
      sum_high += h;
      if (low) {
        low[k] = static_cast<int8_t>(q - h * 256);
        sum_low += q - h * 256;
      }
    }
    a.sums[0][m * groups + g] = sum_high;
    if (low) a.sums[1][m * groups + g] = sum_low;
  }
}

// Sum over a group of code * q, for row r of the tile. Wraps like the vector instructions do.
uint32_t dot(const uint8_t* lines, const int8_t* q, int64_t r, const Shape& shape) {
  const int64_t half = r / 16 * LINE + r % 16 * 4;
  uint32_t sum = 0;
  for (int64_t step = 0; step < shape.steps(); ++step) {
    const uint8_t* bytes = lines + step * 2 * LINE + half;
    const int8_t* part = q + step * shape.line_columns();
    for (int j = 0; j < 4; ++j) {
      if (shape.bits == 8) {
        sum += static_cast<uint32_t>(bytes[j] * part[j]);
      } else {
        sum += static_cast<uint32_t>((bytes[j] & 15) * part[j] + (bytes[j] >> 4) * part[4 + j]);
      }
    }
  }
  return sum;
}

void product(const uint8_t* tile, const Shape& shape, const Activations& a, const Output& out,
             int64_t tile_index, int64_t m0, int64_t m1) {
  const int64_t groups = shape.groups(), n0 = tile_index * TILE_ROWS;
  const int64_t rows = shape.n - n0 < TILE_ROWS ? shape.n - n0 : TILE_ROWS;
  for (int64_t m = m0; m < m1; ++m) {
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* here = tile;
      const uint8_t* zero_line = nullptr;
      float y = 0.0f;
      for (int64_t g = 0; g < groups; ++g) {
        if (shape.zeros && g % 4 == 0) {
          zero_line = here;
          here += LINE;
        }
        uint32_t zero = shape.bits == 8 ? 128 : 8;
        if (zero_line) zero = (zero_line[g % 4 * 16 + r % 16] >> (r < 16 ? 0 : 4)) & 15;
        int32_t t[2] = {0, 0};
        for (int p = 0; p < a.planes; ++p) {
          const int8_t* q = a.plane[p] + m * shape.row_stride() + g * shape.padded_group();
          const uint32_t sum = static_cast<uint32_t>(a.sums[p][m * groups + g]);
          t[p] = static_cast<int32_t>(dot(here, q, r, shape) - zero * sum);
        }
        float exact = static_cast<float>(t[0]);
        if (a.planes == 2) exact = std::fma(exact, 256.0f, static_cast<float>(t[1]));
        if (a.per_group) exact *= a.scales[m * groups + g];
        here += shape.steps() * 2 * LINE;
        y = std::fma(exact, load_float(here, shape.scales, r), y);
        here += TILE_ROWS * bytes_of(shape.scales);
      }
      const float bias = out.bias ? load_float(out.bias, out.bias_kind, n0 + r) : 0.0f;
      y = std::fma(y, a.per_group ? 1.0f : a.scales[m], bias);
      store_float(out.y, out.kind, m * shape.n + n0 + r, y);
    }
  }
}

}  // namespace

const InstructionSet SCALAR = {"scalar", quantize, product, nullptr, sum_of_words};

}  // namespace weightpath
