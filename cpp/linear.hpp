// One linear: quantize the activations, then every tile of the weight by every panel of rows.
#pragma once

#include <cstdint>

#include "tiles.hpp"

namespace weightpath {

// y [M, N] = x [M, K] times the packed weight [N, K], plus bias. planes 1 is int8 activations,
// planes 2 is 16 bits in two int8 planes. False where memory for the activations ran out.
bool linear(const InstructionSet& set, const Shape& shape, const uint8_t* packed, const void* x,
            Kind x_kind, int64_t m, int planes, bool per_group, const Output& out, int threads);

}  // namespace weightpath
