// The float arithmetic of a decoder step, for one instruction set each: norms, SiLU, rotation,
// attention over one block of positions, and products of float matrices.
//
// Every result depends only on its own row: not on how many rows a call takes, nor on where a
// prompt was cut. So a prompt in one chunk, in many, and token by token gives the same bits.
#pragma once

#include <cstdint>
#include <string>

#include "kv_cache.hpp"
#include "tiles.hpp"

namespace weightpath {

// Queries of one key-value head against one block of the cache: online softmax.
//
//   s[r, p] = q[r] . key[p]         for first[r] <= p < last[r], else minus infinity
//   m' = max_p s, e[p] = 2^(s - m'), l' = sum_p e[p], a' = sum_p e[p] * value[p]
//   M = max(m, m');  l = l 2^(m - M) + l' 2^(m' - M);  acc likewise;  m = M
//
// q carries log2(e) / sqrt(head_dim) already. A state begins as (EMPTY, 0, 0).
constexpr float EMPTY = -3.0e38f;

struct Attend {
  const float* q;                // [rows, head_dim]
  int64_t rows, head_dim;
  const int32_t *first, *last;   // [rows], positions within the block
  CacheHead cache;
  CacheKind kind;
  float *maxima, *sums, *acc;    // [rows], [rows], [rows, head_dim]
};

struct FloatMatrix {
  const void* weights;  // [N, K]
  Kind kind;
  int64_t n, k;
  const float* bias;    // [N] or null
};

struct StepKernels {
  const char* name;
  // y = x / sqrt(mean(x^2) + epsilon) * weight, all [count]; y may be x
  void (*norm)(const float* x, const float* weight, int64_t count, float epsilon, float* y);
  // y += x for rows of `count`; y's are `stride` apart, x's lie side by side.
  void (*add)(float* y, int64_t stride, const float* x, int64_t rows, int64_t count);
  // gate = gate / (1 + e^-gate) * up
  void (*silu)(float* gate, const float* up, int64_t count);
  void (*widen)(const void* from, Kind kind, int64_t index, int64_t count, float* to);
  // Columns [n0, n1) of x [M, K] W^T + bias, rows [m0, m1), to y [m1 - m0, n1 - n0].
  void (*product)(const FloatMatrix&, const float* x, int64_t m0, int64_t m1, int64_t n0,
                  int64_t n1, float* y);
  // The halves of x [2 * half] rotated: (a, b) -> (a cos - b sin, b cos + a sin); then x * scale,
  // for all `count` of x.
  void (*rotate)(float* x, const float* cosines, const float* sines, int64_t half, int64_t count,
                 float scale);
  // One position's key and value, fp32 [head_dim] each, to their places. newest: none is written
  // after it in this step, so that the values after it which `attend` reads along are zeroed.
  void (*keep)(const float* key, const float* value, const CacheShape&, const CacheHead&,
               int64_t position, bool newest);
  void (*attend)(const Attend&);
  // The state (m, l, acc) with that of another block.
  void (*merge)(float* m, float* l, float* acc, float m1, float l1, const float* acc1,
                int64_t head_dim);
  // y = acc / l
  void (*finish)(const float* acc, float l, int64_t head_dim, float* y);
};

extern const StepKernels STEP_SCALAR;
#ifdef WEIGHTPATH_STEP_AVX2
extern const StepKernels STEP_AVX2;
#endif
#ifdef WEIGHTPATH_STEP_AVX512
extern const StepKernels STEP_AVX512;
#endif
#ifdef WEIGHTPATH_STEP_AVX512_BF16
extern const StepKernels STEP_AVX512_BF16;
#endif
#ifdef WEIGHTPATH_STEP_AMX_BF16
extern const StepKernels STEP_AMX_BF16;
#endif

// The widest that runs here; with the name of an instruction set of products, the widest that
// belongs to it.
const StepKernels& step_kernels(const std::string& name);

}  // namespace weightpath
