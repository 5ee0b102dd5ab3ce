// AMX: one tile product (tdpbssd) is 16 rows of x by 16 outputs by 64 columns.
//
// Both sides are signed, so a zero point is taken off while a line is unpacked, once for all rows
// of x: code - zero is -15..15 (4 bits), code - 128 is int8. The sums are those of scalar.cpp,
// t = sum (code - zero) * q, exact in int32, and nothing is left to correct.
//
//   B tile    16 lines of 64 bytes: 4 columns of 16 outputs each, 8 lines of 4-bit codes
//   A tile    16 rows of x, 64 columns, read where `quantize` put them
//   C tiles   2 x 2: 32 rows of x (or 16, in two planes) by the 32 outputs of one packed tile
//
// A tile holds 64 columns of one group. What is left of them at a group's end (groups of 32, say)
// meets zeros in B; A reads on into the next group there, or into the row's 64 spare bytes.
//
// A slice of a packed tile's groups, at most 24 KiB of int8, is unpacked into the L1 cache and meets
// all rows of the panel, whose activations stay in the L2 cache; partial results [rows, 32] wait
// there as fp32. Where all groups are one slice, a block's results are written as soon as they are
// there.
// After a group its C tiles are stored, and scaled in vector registers a few rows after each of the
// next group's products (Intel's optimization manual, "Intel AMX": interleave post-processing).

#include "amx_tiles.hpp"
#include "avx512.hpp"
#include "memory.hpp"
#include "tiles.hpp"

namespace weightpath {
namespace {

constexpr int64_t DEPTH = 64, TILE = 16;           // columns of a product; rows and outputs
constexpr int64_t CHUNK = 2 * TILE * DEPTH;        // bytes of two B tiles
constexpr int64_t SLICE_CHUNKS = 12;
constexpr int64_t RESIDENT_BYTES = 1280 << 10;      // activations that stay in the L2 cache
constexpr int64_t MOST_TILES = 4;                  // packed tiles that share a slice of them

thread_local Scratch scratch;

struct Unpacked {
  int8_t* codes;   // [groups of the slice, chunks, 2, 16, 64]
  float* scales;   // [groups of the slice, 32]
};

// Two lines' worth of one step, signed, to their B tiles.
template <int BITS>
void unpack_group(const uint8_t* from, const uint8_t* next, const Shape& shape,
                  const __m512i (&zero)[2], int8_t* to) {
  constexpr int64_t STEPS = BITS == 4 ? 8 : 16, ROWS = TILE / STEPS;
  const __m512i nibble = _mm512_set1_epi8(15);
  const int64_t steps = shape.steps(), all = (steps + STEPS - 1) / STEPS * STEPS;
  for (int64_t step = 0; step < all; ++step) {
    int8_t* const at = to + step / STEPS * CHUNK + step % STEPS * ROWS * LINE;
    for (int h = 0; h < 2; ++h) {
      int8_t* const half = at + h * TILE * DEPTH;
      if (step >= steps) {
        for (int row = 0; row < ROWS; ++row) {
          _mm512_store_si512(half + row * LINE, _mm512_setzero_si512());
        }
        continue;
      }
      const __m512i line = _mm512_loadu_si512(from + (2 * step + h) * LINE);
      _mm_prefetch(reinterpret_cast<const char*>(next + (2 * step + h) * LINE), _MM_HINT_T1);
      if constexpr (BITS == 4) {
        const __m512i low = _mm512_and_si512(line, nibble);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(line, 4), nibble);
        _mm512_store_si512(half, _mm512_sub_epi8(low, zero[h]));
        _mm512_store_si512(half + LINE, _mm512_sub_epi8(high, zero[h]));
      } else {
        _mm512_store_si512(half, _mm512_sub_epi8(line, zero[h]));
      }
    }
  }
}

int64_t group_offset(const Shape& shape, int64_t g) {
  return g * shape.group_bytes() + (shape.zeros ? (g / 4 + 1) * LINE : 0);
}

// Groups [g0, g1) of a packed tile; meanwhile the bytes `ahead` of them are fetched.
void unpack(const uint8_t* tile, int64_t ahead, const Shape& shape, int64_t g0, int64_t g1,
            const Unpacked& to) {
  const int64_t chunks = (shape.padded_group() + DEPTH - 1) / DEPTH;
  const __m512i middle = _mm512_set1_epi8(shape.bits == 8 ? static_cast<char>(128) : 8);
  for (int64_t g = g0; g < g1; ++g) {
    const uint8_t* group = tile + group_offset(shape, g);
    __m512i zero[2] = {middle, middle};
    if (shape.zeros) {
      const uint8_t* line = tile + group_offset(shape, g / 4 * 4) - LINE;
      const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(line + g % 4 * 16));
      const __m128i low = _mm_set1_epi8(15);
      const __m512i four = _mm512_set1_epi32(0x01010101);
      zero[0] = _mm512_mullo_epi32(_mm512_cvtepu8_epi32(_mm_and_si128(pairs, low)), four);
      zero[1] = _mm512_mullo_epi32(
          _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(pairs, 4), low)), four);
    }
    const auto one = shape.bits == 4 ? unpack_group<4> : unpack_group<8>;
    one(group, group + ahead, shape, zero, to.codes + (g - g0) * chunks * CHUNK);
    const uint8_t* scales = group + shape.steps() * 2 * LINE;
    for (int64_t h = 0; h < 2; ++h) {
      _mm512_store_ps(to.scales + (g - g0) * TILE_ROWS + h * TILE,
                      load16(scales, shape.scales, h * TILE, 0xFFFF));
    }
  }
}

// C tiles that were stored and wait to be scaled.
struct Stored {
  const int32_t* sums;    // [2 * 16, 32]; in two planes the low one's begin at row 16
  const float* scales;    // [32]
  const float* x_scales;  // of the first row and this group; the next row's are nG further
  float* y;               // [rows, 32]
  int64_t rows, done;     // rows that are scaled already
};

// The next `count` rows of it, or what is left.
template <int P, bool PER_GROUP>
inline void scale_sums(Stored& c, int64_t groups, int64_t count) {
  const int64_t stop = c.done + count < c.rows ? c.done + count : c.rows;
  if (c.done >= stop) return;
  const __m512 scale[2] = {_mm512_load_ps(c.scales), _mm512_load_ps(c.scales + TILE)};
  for (int64_t r = c.done; r < stop; ++r) {
#pragma GCC unroll 2
    for (int64_t h = 0; h < 2; ++h) {
      const int64_t at = r * TILE_ROWS + h * TILE;
      __m512 exact = _mm512_cvtepi32_ps(_mm512_load_si512(c.sums + at));
      if constexpr (P == 2) {
        const __m512i low = _mm512_load_si512(c.sums + TILE * TILE_ROWS + at);
        exact = _mm512_fmadd_ps(exact, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
      }
      if constexpr (PER_GROUP) {
        exact = _mm512_mul_ps(exact, _mm512_set1_ps(c.x_scales[r * groups]));
      }
      _mm512_store_ps(c.y + at, _mm512_fmadd_ps(exact, scale[h], _mm512_load_ps(c.y + at)));
    }
  }
  c.done = stop;
}

// Tiles 0..3 are C (outputs 0..15 and 16..31 of A's first tile, then of its second), 4 and 5 are A,
// 6 and 7 are B.
TileConfig config_of(int64_t first_rows, int64_t second_rows) {
  TileConfig config{};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) {
    const bool second = i == 2 || i == 3 || i == 5;
    config.row_bytes[i] = DEPTH;
    config.rows[i] = static_cast<uint8_t>(i >= 6 ? TILE : second ? second_rows : first_rows);
  }
  return config;
}

// 16 rows of x, 64 columns, into the L1 cache (a hint: past the last row it is without effect).
inline void fetch_rows(const int8_t* x, int64_t stride) {
#pragma GCC unroll 16
  for (int64_t row = 0; row < TILE; ++row) {
    _mm_prefetch(reinterpret_cast<const char*>(x + row * stride), _MM_HINT_T0);
  }
}

// Rows [m0, m1) of x times an unpacked slice, added to y [m1 - m0, 32]. `configured` is the number
// of rows in a block that the tiles are set up for. Where the slice is whole, y is room for two
// blocks, and done(block's y, m, its end) is called as each is there.
template <int P, bool PER_GROUP, typename F>
void slice_products(const Unpacked& b, const Shape& shape, const Activations& a, int64_t g0,
                    int64_t g1, int64_t m0, int64_t m1, bool whole, float* y, int32_t* sums,
                    int64_t& configured, F&& done) {
  constexpr int64_t BLOCK = P == 2 ? TILE : 2 * TILE;
  const int64_t groups = shape.groups(), padded = shape.padded_group();
  const int64_t chunks = (padded + DEPTH - 1) / DEPTH, stride = shape.row_stride();
  Stored stored{};
  float *block_y = y, *last_y = y;
  for (int64_t m = m0; m < m1; m += BLOCK) {
    const int64_t rows = m1 - m < BLOCK ? m1 - m : BLOCK;
    last_y = block_y;
    block_y = whole ? y + (m - m0) / BLOCK % 2 * BLOCK * TILE_ROWS : y + (m - m0) * TILE_ROWS;
    if (whole) std::memset(block_y, 0, static_cast<size_t>(rows * TILE_ROWS * 4));
    const int64_t upper = rows < TILE ? rows : TILE;
    const int64_t lower = P == 2 ? upper : rows - upper;
    if (rows != configured) {
      configure_tiles(config_of(upper, lower ? lower : upper));
      configured = rows;
    }
    // Rows of the last group scaled after each of the products of this one.
    const int64_t some = (BLOCK + 4 * chunks - 1) / (4 * chunks);
    for (int64_t g = g0; g < g1; ++g) {
      const int64_t at = m * stride + g * padded;
      const int8_t* x0 = a.plane[0] + at;
      const int8_t* x1 = P == 2 ? a.plane[1] + at : x0 + TILE * stride;
      const int8_t* codes = b.codes + (g - g0) * chunks * CHUNK;
      TILE_ZERO(0);
      TILE_ZERO(1);
      if (lower) {
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (int64_t chunk = 0; chunk < chunks; ++chunk, codes += CHUNK) {
          fetch_rows(x0 + (chunk + 1) * DEPTH, stride);
          fetch_rows(x1 + (chunk + 1) * DEPTH, stride);
          TILE_LOAD(6, codes, LINE);
          TILE_LOAD(4, x0 + chunk * DEPTH, stride);
          TILE_PRODUCTS(0, 4, 6);
          scale_sums<P, PER_GROUP>(stored, groups, some);
          TILE_LOAD(5, x1 + chunk * DEPTH, stride);
          TILE_PRODUCTS(2, 5, 6);
          scale_sums<P, PER_GROUP>(stored, groups, some);
          TILE_LOAD(7, codes + CHUNK / 2, LINE);
          TILE_PRODUCTS(1, 4, 7);
          scale_sums<P, PER_GROUP>(stored, groups, some);
          TILE_PRODUCTS(3, 5, 7);
          scale_sums<P, PER_GROUP>(stored, groups, some);
        }
      } else {
        for (int64_t chunk = 0; chunk < chunks; ++chunk, codes += CHUNK) {
          TILE_LOAD(6, codes, LINE);
          TILE_LOAD(4, x0 + chunk * DEPTH, stride);
          TILE_PRODUCTS(0, 4, 6);
          scale_sums<P, PER_GROUP>(stored, groups, some);
          TILE_LOAD(7, codes + CHUNK / 2, LINE);
          TILE_PRODUCTS(1, 4, 7);
          scale_sums<P, PER_GROUP>(stored, groups, some);
        }
      }
      scale_sums<P, PER_GROUP>(stored, groups, BLOCK);
      if (whole && g == g0 && m > m0) done(last_y, m - BLOCK, m);
      TILE_STORE(0, sums, 4 * TILE_ROWS);
      TILE_STORE(1, sums + TILE, 4 * TILE_ROWS);
      if (lower) {
        TILE_STORE(2, sums + TILE * TILE_ROWS, 4 * TILE_ROWS);
        TILE_STORE(3, sums + TILE * TILE_ROWS + TILE, 4 * TILE_ROWS);
      }
      stored = {sums, b.scales + (g - g0) * TILE_ROWS,
                PER_GROUP ? a.scales + m * groups + g : nullptr, block_y, rows, 0};
    }
  }
  scale_sums<P, PER_GROUP>(stored, groups, BLOCK);
  if (whole) done(block_y, m0 + (m1 - m0 - 1) / BLOCK * BLOCK, m1);
}

// Whole lines of y: both halves of a row at once.
void write(const float* y, const Shape& shape, const Activations& a, const Output& out,
           int64_t tile, int64_t m0, int64_t m1) {
  const int64_t n = tile * TILE_ROWS;
  const __mmask16 mask[2] = {first(shape.n - n),
                             shape.n - n > TILE ? first(shape.n - n - TILE) : __mmask16{0}};
  __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int64_t h = 0; h < 2 && out.bias; ++h) {
    bias[h] = load16(out.bias, out.bias_kind, n + h * TILE, mask[h]);
  }
  for (int64_t m = m0; m < m1; ++m) {
    const __m512 scale = _mm512_set1_ps(a.per_group ? 1.0f : a.scales[m]);
    for (int64_t h = 0; h < 2; ++h) {
      const __m512 sum = _mm512_load_ps(y + (m - m0) * TILE_ROWS + h * TILE);
      store16(out.y, out.kind, m * shape.n + n + h * TILE, mask[h],
              _mm512_fmadd_ps(sum, scale, bias[h]));
    }
  }
}

void quantize(const void* x, Kind kind, const Shape& shape, const Activations& a, int64_t m) {
  AVX512_VNNI.quantize(x, kind, shape, a, m);
}

void product(const uint8_t* tile, const Shape& shape, const Activations& a, const Output& out,
             int64_t tile_index, int64_t m0, int64_t m1) {
  const int64_t groups = shape.groups(), rows = m1 - m0;
  const int64_t chunks = (shape.padded_group() + DEPTH - 1) / DEPTH;
  const int64_t most = chunks < SLICE_CHUNKS ? SLICE_CHUNKS / chunks : 1;
  const int64_t slices = (groups + most - 1) / most, slice = (groups + slices - 1) / slices;
  const bool whole = slices == 1;
  const int64_t code_bytes = slice * chunks * CHUNK, scale_bytes = slice * TILE_ROWS * 4;
  const int64_t sum_bytes = 2 * TILE * TILE_ROWS * 4;
  const int64_t y_bytes = (whole ? 2 * 2 * TILE : rows) * TILE_ROWS * 4;
  char* memory = scratch.at_least(code_bytes + scale_bytes + sum_bytes + y_bytes);
  if (!memory) {  // the same results, without memory of their own
    AVX512_VNNI.product(tile, shape, a, out, tile_index, m0, m1);
    return;
  }
  const Unpacked b{reinterpret_cast<int8_t*>(memory),
                   reinterpret_cast<float*>(memory + code_bytes)};
  int32_t* sums = reinterpret_cast<int32_t*>(memory + code_bytes + scale_bytes);
  float* y = reinterpret_cast<float*>(memory + code_bytes + scale_bytes + sum_bytes);
  const auto done = [&](const float* block, int64_t start, int64_t stop) {
    write(block, shape, a, out, tile_index, start, stop);
  };
  using Done = decltype((done));
  const auto multiply =
      a.planes == 1
          ? a.per_group ? slice_products<1, true, Done> : slice_products<1, false, Done>
          : a.per_group ? slice_products<2, true, Done> : slice_products<2, false, Done>;
  if (!whole) std::memset(y, 0, static_cast<size_t>(y_bytes));
  int64_t configured = 0;
  for (int64_t g0 = 0; g0 < groups; g0 += slice) {
    const int64_t g1 = g0 + slice < groups ? g0 + slice : groups;
    unpack(tile, slice * shape.group_bytes(), shape, g0, g1, b);
    finish_stores();
    multiply(b, shape, a, g0, g1, m0, m1, whole, y, sums, configured, done);
  }
  release_tiles();
  if (!whole) write(y, shape, a, out, tile_index, m0, m1);
}

// Two A tiles by two B tiles, as in slice_products.
int64_t burn(int64_t rounds) {
  alignas(LINE) static const int8_t ones[TILE * DEPTH] = {1};
  configure_tiles(config_of(TILE, TILE));
  TILE_LOAD(4, ones, LINE);
  TILE_LOAD(5, ones, LINE);
  TILE_LOAD(6, ones, LINE);
  TILE_LOAD(7, ones, LINE);
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t round = 0; round < rounds; ++round) {
    TILE_PRODUCTS(0, 4, 6);
    TILE_PRODUCTS(2, 5, 6);
    TILE_PRODUCTS(1, 4, 7);
    TILE_PRODUCTS(3, 5, 7);
  }
  release_tiles();
  return rounds * 4 * TILE * TILE * DEPTH;
}

uint64_t read(const uint8_t* from, int64_t lines) { return AVX512_VNNI.read(from, lines); }

// Rows from which these tiles are faster than avx512-vnni. Measured on 16 threads of a Xeon with
// AMX, three shapes, g64 and g128, VNNI's time over AMX's, lowest and highest of the six medians:
// W4A8 at M = 4 0.78 to 1.12, 8 1.12 to 1.87, 12 1.40 to 2.10, 16 1.93 to 2.36; W4A16 at M = 4 0.61
// to 1.06, 8 1.13 to 2.35, 16 2.19 to 2.50 (benchmarks/cpu_amx.py; docs/experiments.md).
constexpr int64_t FEWEST_ROWS = 8;

}  // namespace

const InstructionSet AMX_INT8 = {"amx-int8", quantize, product, burn, read,
                                 {1280 << 10, {2 * TILE, TILE}, 256, 16}, FEWEST_ROWS};

}  // namespace weightpath
