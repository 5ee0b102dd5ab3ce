// A weight's integers to the packed layout of layouts/cpu_tiles.py, byte for byte.
#pragma once

#include <cstdint>

#include "tiles.hpp"

namespace weightpath {

// How codes arrive: a byte a code, uint8 [N, K]; a nibble a code, uint8 [N, K/2], column 2i in the
// low one; or int8 [N, K], stored + 128.
enum class Codes : int { bytes = 0, nibbles = 1, int8 = 2 };

// scales [N, nG] in shape.scales; zeros uint8 [N, nG], or null where shape.zeros is false.
// Writes shape.tiles() * shape.tile_bytes() bytes, each tile by the thread that will read it.
void pack(const Shape& shape, const void* codes, Codes kind, const void* scales,
          const uint8_t* zeros, uint8_t* packed, int threads);

}  // namespace weightpath
