// The linears of a decoder, in groups that share their input: what a group quantizes, once for
// every distinct format, and how its tiles are cut among the threads of a team.
#pragma once

#include <cstdint>
#include <vector>

#include "linear.hpp"
#include "pool.hpp"
#include "step_kernels.hpp"
#include "tiles.hpp"

namespace weightpath {

// A linear [N, K]: packed tiles, or floats row after row. Pointers are the caller's to keep.
struct Matrix {
  Shape shape{};                      // n and k always; the rest where packed
  const uint8_t* packed = nullptr;
  int64_t stride = 0;                 // bytes from a packed tile to the next
  const void* floats = nullptr;
  Kind kind = Kind::fp32;             // of floats
  const float* bias = nullptr;        // [N]
  int planes = 2;                     // of activations: 1 is int8, 2 is 16 bits
  bool per_group = false;             // a scale for each group of activations, or one a row
  const int64_t* order = nullptr;     // [K]: x[order[k]] meets column k
  const float* column_scales = nullptr;  // [K]: x[k] * column_scales[k] first

  int64_t tile_bytes() const {
    return packed ? shape.tile_bytes() : TILE_ROWS * shape.k * bytes_of(kind);
  }
  int64_t activation_bytes(int64_t rows) const {
    return packed ? weightpath::activation_bytes(shape, planes, per_group, rows) : 0;
  }
  bool same_activations(const Matrix& other) const;
};

constexpr int MOST_MATRICES = 3;

// paired: tile i of both matrices is one unit of work (gate and up).
struct Group {
  std::vector<Matrix> matrices;
  bool paired = false;
  std::vector<int> slot;    // of each matrix: which activations it takes; -1 is floats
  std::vector<int> makers;  // of each slot: the matrix whose format it has

  Group() = default;
  Group(std::vector<Matrix> all, bool pairs);

  int64_t k() const { return matrices[0].shape.k; }
  int64_t units() const;
  int64_t activation_bytes(int64_t rows) const;  // of all slots
  // First unit of thread `index` of `count`, cut so that each reads about as many bytes.
  int64_t cut(int index, int count) const;
  // The lines that thread `index` of `count` reads first, at few rows: its tiles of one matrix, or
  // of a pair whose tiles lie in turn.
  Ahead ahead(int index, int count) const;
  // Panels of `rows`, as many as shares them out best among `threads`.
  Panels panels(const InstructionSet& set, int64_t rows, int threads) const;
};

// A group's input, ready: floats [M, K], and activations for each slot.
struct Prepared {
  const float* x = nullptr;
  Activations slot[MOST_MATRICES];
};

// Slots of so many rows in this memory, which holds group.activation_bytes(rows).
void place_activations(const Group& group, int64_t rows, char* memory, Prepared& to);

// Row m of the slots from row m of x. `gathered` [K] is room for a column order.
void quantize_row(const InstructionSet& set, const Group& group, const Prepared& to,
                  const float* x, int64_t m, float* gathered);

// A tile of one matrix by rows [m0, m1): its columns, all of them side by side, to
// y [m1 - m0, min(32, N - 32 tile)]. Small enough to stay in a near cache, where what comes next
// (a residual, SiLU) finds them.
void multiply(const InstructionSet& set, const StepKernels& kernels, const Group& group, int which,
              const Prepared& from, int64_t tile, int64_t m0, int64_t m1, float* y);

}  // namespace weightpath
