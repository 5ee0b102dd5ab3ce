// The float arithmetic of a step on AVX-512.

#include "step_avx512.hpp"

#include "attention_generic.hpp"
#include "keep_avx512.hpp"

namespace weightpath {

const StepKernels STEP_AVX512 = {"avx512", norm,   add_to, silu,   widen, product,
                                 rotate,   keep_wide<2>, attend, merge, finish};

}  // namespace weightpath
