// One linear: quantize the activations, then every tile of the weight by every panel of rows.
#pragma once

#include <cstdint>

#include "tiles.hpp"

namespace weightpath {

// Rows of x cut into panels of whole blocks, as even as they go: a panel's activations stay in the
// L2 cache while tiles stream past.
struct Panels {
  int64_t rows, block, blocks, count;

  int64_t begin(int64_t panel) const { return blocks * panel / count * block; }
  int64_t end(int64_t panel) const {
    const int64_t stop = blocks * (panel + 1) / count * block;
    return stop < rows ? stop : rows;
  }
};

Panels panels_of(const InstructionSet& set, const Shape& shape, int planes, int64_t rows);

// Rows from which tiles are shared out. Fewer: each thread reads the tiles that it packed, one
// linear stream. A static cut waits for the thread whose core is taken in part by others: without
// it 512 rows on 16 threads of a shared Xeon ran 1.2 to 1.5 times faster (docs/experiments.md).
constexpr int64_t SHARED_ROWS = 16;

// Bytes that activations of so many rows take, and where they lie in such memory.
int64_t activation_bytes(const Shape& shape, int planes, bool per_group, int64_t rows);
Activations activations_in(char* memory, const Shape& shape, int planes, bool per_group,
                           int64_t rows);
// The same activations from row m on.
Activations row_of(const Activations& a, const Shape& shape, int64_t m);

// y [M, N] = x [M, K] times the packed weight [N, K], plus bias. planes 1 is int8 activations,
// planes 2 is 16 bits in two int8 planes. False where memory for the activations ran out.
bool linear(const InstructionSet& set, const Shape& shape, const uint8_t* packed, const void* x,
            Kind x_kind, int64_t m, int planes, bool per_group, const Output& out, int threads);

}  // namespace weightpath
