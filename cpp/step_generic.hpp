// Bodies of StepKernels over a vector of W floats. A file that includes this has defined, in the
// unnamed namespace of weightpath: Vec, W, and the functions on Vec that are used below.
// Everything here is in an unnamed namespace too: nothing is shared between instruction sets.
#pragma once

#include <cmath>

#include "floats.hpp"
#include "step_kernels.hpp"

namespace weightpath {
namespace {

// 2^x to about 1 unit in the last place; 0 under 2^-126. Taylor's series of 2^f, |f| <= 1/2.
inline Vec power_of_two(Vec x) {
  const Vec whole = nearest(x), f = sub(x, whole);
  Vec p = set(1.54035304e-4f);
  p = fma(p, f, set(1.33335581e-3f));
  p = fma(p, f, set(9.61812911e-3f));
  p = fma(p, f, set(5.55041087e-2f));
  p = fma(p, f, set(2.40226507e-1f));
  p = fma(p, f, set(6.93147181e-1f));
  p = fma(p, f, set(1.0f));
  return scaled(p, whole, x);
}

void norm(const float* x, const float* weight, int64_t count, float epsilon, float* y) {
  Vec squares[2] = {set(0.0f), set(0.0f)};
  int64_t k = 0;
  for (; k + 2 * W <= count; k += 2 * W) {
    const Vec a = load(x + k), b = load(x + k + W);
    squares[0] = fma(a, a, squares[0]);
    squares[1] = fma(b, b, squares[1]);
  }
  for (; k < count; k += W) {
    const Vec a = load_some(x + k, count - k);
    squares[0] = fma(a, a, squares[0]);
  }
  const float mean = total(add(squares[0], squares[1])) / static_cast<float>(count);
  const Vec factor = set(1.0f / std::sqrt(mean + epsilon));
  for (k = 0; k + W <= count; k += W) store(y + k, mul(mul(load(x + k), factor), load(weight + k)));
  if (k < count) {
    const int64_t left = count - k;
    store_some(y + k, mul(mul(load_some(x + k, left), factor), load_some(weight + k, left)), left);
  }
}

void add_to(float* y, int64_t stride, const float* x, int64_t rows, int64_t count) {
  for (int64_t m = 0; m < rows; ++m, y += stride, x += count) {
    int64_t k = 0;
    for (; k + W <= count; k += W) store(y + k, add(load(y + k), load(x + k)));
    if (k < count) {
      store_some(y + k, add(load_some(y + k, count - k), load_some(x + k, count - k)), count - k);
    }
  }
}

void silu(float* gate, const float* up, int64_t count) {
  const Vec one = set(1.0f), minus_log2e = set(-1.44269504f), most = set(126.0f);
  for (int64_t k = 0; k < count; k += W) {
    const int64_t left = count - k;
    const Vec x = load_some(gate + k, left);
    // e^-x is cut at 2^126: x / (1 + 2^126) is as good as the zero that it stands for.
    const Vec power = power_of_two(smaller(mul(x, minus_log2e), most));
    store_some(gate + k, mul(div(x, add(one, power)), load_some(up + k, left)), left);
  }
}

void widen(const void* from, Kind kind, int64_t index, int64_t count, float* to) {
  for (int64_t k = 0; k < count; ++k) to[k] = load_float(from, kind, index + k);
}

void rotate(float* x, const float* cosines, const float* sines, int64_t half, int64_t count,
            float scale) {
  const Vec factor = set(scale);
  for (int64_t k = 0; k < half; k += W) {
    const int64_t left = half - k;
    const Vec a = load_some(x + k, left), b = load_some(x + half + k, left);
    const Vec c = load_some(cosines + k, left), s = load_some(sines + k, left);
    store_some(x + k, mul(sub(mul(a, c), mul(b, s)), factor), left);
    store_some(x + half + k, mul(add(mul(b, c), mul(a, s)), factor), left);
  }
  for (int64_t k = 2 * half; k < count; k += W) {
    store_some(x + k, mul(load_some(x + k, count - k), factor), count - k);
  }
}

// C outputs from n on, R rows from m on, to y and rows `stride` further; one accumulator a result,
// whatever R and C.
template <Kind K, int R, int C>
inline void dots(const FloatMatrix& w, const float* x, int64_t m, int64_t n, float* y,
                 int64_t stride) {
  Vec t[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) t[r][c] = set(0.0f);
  }
  int64_t k = 0;
  for (; k + W <= w.k; k += W) {
    Vec column[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) column[c] = load_as<K>(w.weights, (n + c) * w.k + k);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec row = load(x + (m + r) * w.k + k);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) t[r][c] = fma(row, column[c], t[r][c]);
    }
  }
  if (k < w.k) {
    alignas(64) float rest[C][W] = {};
    for (int c = 0; c < C; ++c) {
      for (int64_t i = k; i < w.k; ++i) {
        rest[c][i - k] = load_float(w.weights, K, (n + c) * w.k + i);
      }
    }
    for (int r = 0; r < R; ++r) {
      const Vec row = load_some(x + (m + r) * w.k + k, w.k - k);
      for (int c = 0; c < C; ++c) t[r][c] = fma(row, load(rest[c]), t[r][c]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      y[r * stride + c] = total(t[r][c]) + (w.bias ? w.bias[n + c] : 0.0f);
    }
  }
}

template <Kind K>
void product_of(const FloatMatrix& w, const float* x, int64_t m0, int64_t m1, int64_t n0,
                int64_t n1, float* y) {
  const int64_t stride = n1 - n0;
  const auto to = [&](int64_t row, int64_t column) {
    return y + (row - m0) * stride + column - n0;
  };
  int64_t m = m0;
  for (; m + FLOAT_ROWS <= m1; m += FLOAT_ROWS) {
    int64_t n = n0;
    for (; n + 4 <= n1; n += 4) dots<K, FLOAT_ROWS, 4>(w, x, m, n, to(m, n), stride);
    for (; n < n1; ++n) dots<K, FLOAT_ROWS, 1>(w, x, m, n, to(m, n), stride);
  }
  for (; m < m1; ++m) {
    int64_t n = n0;
    for (; n + 8 <= n1; n += 8) dots<K, 1, 8>(w, x, m, n, to(m, n), stride);
    for (; n < n1; ++n) dots<K, 1, 1>(w, x, m, n, to(m, n), stride);
  }
}

void product(const FloatMatrix& w, const float* x, int64_t m0, int64_t m1, int64_t n0, int64_t n1,
             float* y) {
  const auto one = w.kind == Kind::fp32   ? product_of<Kind::fp32>
                   : w.kind == Kind::bf16 ? product_of<Kind::bf16>
                                          : product_of<Kind::fp16>;
  one(w, x, m0, m1, n0, n1, y);
}

}  // namespace
}  // namespace weightpath
