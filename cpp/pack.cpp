// Eight codes are one 64-bit load (bytes) or one 32-bit load (nibbles), a few shifts and one 32-bit
// store; whatever does not fill a step goes code by code.

#include "pack.hpp"

#include <bit>
#include <cstring>

#include "pool.hpp"

namespace weightpath {
namespace {

static_assert(std::endian::native == std::endian::little, "lines are written as words");

uint8_t code_at(const uint8_t* row, Codes kind, int64_t k) {
  if (kind == Codes::nibbles) return (row[k / 2] >> (k % 2 * 4)) & 15;
  return kind == Codes::int8 ? row[k] ^ 0x80 : row[k];
}

// Four nibbles, 16 bits, to four bytes.
uint32_t spread(uint32_t nibbles) {
  nibbles = (nibbles | nibbles << 8) & 0x00FF00FFu;
  return (nibbles | nibbles << 4) & 0x0F0F0F0Fu;
}

// One row's four bytes of a line: columns k .. k + 3, and k + 4 .. k + 7 above them at 4 bits.
uint32_t whole_step(const uint8_t* row, Codes kind, int bits, int64_t k) {
  uint32_t word;
  if (bits == 8) {
    std::memcpy(&word, row + k, 4);
    return kind == Codes::int8 ? word ^ 0x80808080u : word;
  }
  if (kind == Codes::nibbles && k % 2 == 0) {
    std::memcpy(&word, row + k / 2, 4);
    return spread(word & 0xFFFFu) | spread(word >> 16) << 4;
  }
  uint64_t eight;
  std::memcpy(&eight, row + k, 8);
  return static_cast<uint32_t>(eight) | static_cast<uint32_t>(eight >> 32) << 4;
}

uint32_t part_step(const uint8_t* row, Codes kind, int bits, int64_t k, int64_t stop) {
  uint32_t word = 0;
  for (int64_t j = 0; j < (bits == 8 ? 4 : 8) && k + j < stop; ++j) {
    word |= static_cast<uint32_t>(code_at(row, kind, k + j)) << (j % 4 * 8 + j / 4 * 4);
  }
  return word;
}

void pack_tile(const Shape& shape, const uint8_t* codes, Codes kind, const uint8_t* scales,
               const uint8_t* zeros, uint8_t* to, int64_t tile) {
  const int64_t n0 = tile * TILE_ROWS, groups = shape.groups(), columns = shape.line_columns();
  const int64_t row_bytes = kind == Codes::nibbles ? shape.k / 2 : shape.k;
  const int64_t rows = shape.n - n0 < TILE_ROWS ? shape.n - n0 : TILE_ROWS;
  const int64_t scale_bytes = bytes_of(shape.scales);
  if (rows < TILE_ROWS) std::memset(to, 0, shape.tile_bytes());
  for (int64_t g = 0; g < groups; ++g) {
    if (shape.zeros && g % 4 == 0) {
      std::memset(to, 0, LINE);
      for (int64_t i = 0; i < 4 && g + i < groups; ++i) {
        for (int64_t r = 0; r < rows; ++r) {
          const uint8_t zero = zeros[(n0 + r) * groups + g + i];
          to[16 * i + r % 16] |= static_cast<uint8_t>(zero << (r < 16 ? 0 : 4));
        }
      }
      to += LINE;
    }
    const int64_t stop = (g + 1) * shape.group;
    for (int64_t step = 0; step < shape.steps(); ++step) {
      const int64_t k = g * shape.group + step * columns;
      const bool whole = k + columns <= stop;
      for (int64_t r = 0; r < rows; ++r) {
        const uint8_t* row = codes + (n0 + r) * row_bytes;
        const uint32_t word = whole ? whole_step(row, kind, shape.bits, k)
                                    : part_step(row, kind, shape.bits, k, stop);
        std::memcpy(to + step * 2 * LINE + 4 * r, &word, 4);
      }
    }
    to += shape.steps() * 2 * LINE;
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(to + r * scale_bytes, scales + ((n0 + r) * groups + g) * scale_bytes,
                  scale_bytes);
    }
    to += TILE_ROWS * scale_bytes;
  }
}

}  // namespace

void pack(const Shape& shape, const void* codes, Codes kind, const void* scales,
          const uint8_t* zeros, uint8_t* packed, int threads) {
  parallel(shape.tiles(), threads, [&](int64_t start, int64_t stop) {
    for (int64_t tile = start; tile < stop; ++tile) {
      pack_tile(shape, static_cast<const uint8_t*>(codes), kind,
                static_cast<const uint8_t*>(scales), zeros, packed + tile * shape.tile_bytes(),
                tile);
    }
  });
}

}  // namespace weightpath
