// The passes of sampling in AVX2.

#include "sample_passes.hpp"

namespace weightpath {

const SamplePasses SAMPLE_AVX2{block_maxima, weigh, pick, split, kept};

}  // namespace weightpath
