// The float arithmetic of a step on AVX-512 with bf16 products: vdpbf16ps multiplies two pairs a
// lane at twice the rate of a fused multiply-add. Queries and softmax weights are rounded to bf16
// for it, as the cache's keys and values are; sums stay fp32.

#include "step_avx512_pairs.hpp"

#include "attention_generic.hpp"
#include "keep_avx512.hpp"

namespace weightpath {

const StepKernels STEP_AVX512_BF16 = {"avx512-bf16", norm,   add_to, silu,  widen, product, rotate,
                                      keep_wide<2>,  attend, merge,  finish};

}  // namespace weightpath
