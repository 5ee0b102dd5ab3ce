// AMX tile instructions (Intel's SDM, volume 2), or the same in plain C++ where the build asks for
// emulated tiles (WEIGHTPATH_EMULATED_AMX: tests on a CPU without AMX).
// Tile numbers are literals: an instruction names its tiles.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace weightpath {

// The 64 bytes of ldtilecfg, palette 1: bytes of a row and rows of each of 8 tiles.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

// GCC 12 tells its optimizer neither that ldtilecfg reads all 64 bytes nor what a tile load reads:
// every store before must be kept before.
static inline void finish_stores() { __asm__ volatile("" ::: "memory"); }

#ifdef WEIGHTPATH_EMULATED_AMX

static thread_local TileConfig tile_config;
static thread_local uint8_t tile_bytes[8][16][64];

static void tile_load(int to, const void* from, int64_t stride) {
  std::memset(tile_bytes[to], 0, sizeof tile_bytes[to]);
  for (int row = 0; row < tile_config.rows[to]; ++row) {
    std::memcpy(tile_bytes[to][row], static_cast<const char*>(from) + row * stride,
                tile_config.row_bytes[to]);
  }
}

static void tile_store(int from, void* to, int64_t stride) {
  for (int row = 0; row < tile_config.rows[from]; ++row) {
    std::memcpy(static_cast<char*>(to) + row * stride, tile_bytes[from][row],
                tile_config.row_bytes[from]);
  }
}

// TDPBSSD of Intel's SDM, volume 2: to[m][n] += sum of 4 a[m][4 k + j] * b[k][4 n + j].
[[maybe_unused]] static void tile_products(int to, int a, int b) {
  for (int m = 0; m < tile_config.rows[to]; ++m) {
    for (int n = 0; n < tile_config.row_bytes[to] / 4; ++n) {
      uint32_t sum;
      std::memcpy(&sum, tile_bytes[to][m] + 4 * n, 4);
      for (int k = 0; k < tile_config.row_bytes[a] / 4; ++k) {
        for (int j = 0; j < 4; ++j) {
          sum += static_cast<uint32_t>(static_cast<int8_t>(tile_bytes[a][m][4 * k + j]) *
                                       static_cast<int8_t>(tile_bytes[b][k][4 * n + j]));
        }
      }
      std::memcpy(tile_bytes[to][m] + 4 * n, &sum, 4);
    }
  }
}

// TDPBF16PS, likewise: pairs of bf16; the first products of the pairs in one chain of fp32 and the
// second ones in another, which meet at the end. (Denormals are not flushed here.)
[[maybe_unused]] static void tile_products_bf16(int to, int a, int b) {
  const auto widen = [](const uint8_t* from) {
    uint16_t half;
    std::memcpy(&half, from, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  };
  for (int m = 0; m < tile_config.rows[to]; ++m) {
    for (int n = 0; n < tile_config.row_bytes[to] / 4; ++n) {
      float chains[2] = {0.0f, 0.0f}, sum;
      for (int k = 0; k < tile_config.row_bytes[a] / 4; ++k) {
        for (int j = 0; j < 2; ++j) {
          chains[j] = __builtin_fmaf(widen(tile_bytes[a][m] + 4 * k + 2 * j),
                                     widen(tile_bytes[b][k] + 4 * n + 2 * j), chains[j]);
        }
      }
      std::memcpy(&sum, tile_bytes[to][m] + 4 * n, 4);
      sum += chains[0] + chains[1];
      std::memcpy(tile_bytes[to][m] + 4 * n, &sum, 4);
    }
  }
}

#define TILE_LOAD(to, from, stride) tile_load(to, from, stride)
#define TILE_STORE(from, to, stride) tile_store(from, to, stride)
#define TILE_ZERO(to) std::memset(tile_bytes[to], 0, sizeof tile_bytes[to])
#define TILE_PRODUCTS(to, a, b) tile_products(to, a, b)
#define TILE_PRODUCTS_BF16(to, a, b) tile_products_bf16(to, a, b)
static void configure_tiles(const TileConfig& config) {
  tile_config = config;
  std::memset(tile_bytes, 0, sizeof tile_bytes);
}
static void release_tiles() { tile_config = {}; }

#else

#define TILE_LOAD(to, from, stride) _tile_loadd(to, from, stride)
#define TILE_STORE(from, to, stride) _tile_stored(from, to, stride)
#define TILE_ZERO(to) _tile_zero(to)
#define TILE_PRODUCTS(to, a, b) _tile_dpbssd(to, a, b)
#define TILE_PRODUCTS_BF16(to, a, b) _tile_dpbf16ps(to, a, b)

static inline void configure_tiles(const TileConfig& config) {
  __asm__ volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}
static inline void release_tiles() { _tile_release(); }

#endif

}  // namespace weightpath
