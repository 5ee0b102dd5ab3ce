// The float arithmetic of a step on AVX-512.

#include "step_avx512.hpp"

#include "attention_generic.hpp"

namespace weightpath {

const StepKernels STEP_AVX512 = {"avx512", norm,   add_to, silu,   widen, product,
                                 rotate,   keep,   attend, merge,  finish};

}  // namespace weightpath
