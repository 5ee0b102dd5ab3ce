// Where keys and values lie in a sequence's cache, and their element kinds.
//
// The cache is blocks of 128 positions, one after another in one mapping that the system backs as
// it is touched. In a block, for every layer and every key-value head:
//
//   keys    [8, head_dim / 2, 16, 2]   positions 16 a + b, columns 2 c and 2 c + 1 at [a, c, b]
//   values  [64, head_dim, 2]          positions 2 a and 2 a + 1, column d at [a, d]
//   int8 only: key scales fp32 [128], value scales fp32 [128]
//
// So one load is 16 positions (keys) or 16 columns (values) twice over, and two bf16 values come
// apart by one shift and one mask. fp32 has the two of a pair in lines of their own: [.., 2, 16].
#pragma once

#include <cstdint>

namespace weightpath {

constexpr int64_t BLOCK = 128;  // positions of a block; also of one partial softmax
constexpr int64_t LANES = 16;
constexpr int64_t MOST_HEAD_DIM = 256;

enum class CacheKind : int { bf16 = 0, int8 = 1, fp32 = 2 };

struct CacheShape {
  CacheKind kind;
  int64_t layers, heads, head_dim;

  [[gnu::always_inline]] int64_t element() const {
    return kind == CacheKind::bf16 ? 2 : kind == CacheKind::int8 ? 1 : 4;
  }
  [[gnu::always_inline]] int64_t region() const { return BLOCK * head_dim * element(); }
  [[gnu::always_inline]] int64_t scale_bytes() const {
    return kind == CacheKind::int8 ? 4 * BLOCK : 0;
  }
  [[gnu::always_inline]] int64_t head_bytes() const { return 2 * (region() + scale_bytes()); }
  [[gnu::always_inline]] int64_t block_bytes() const { return layers * heads * head_bytes(); }
};

// One layer and head of one block.
struct CacheHead {
  uint8_t *keys, *values;
  float *key_scales, *value_scales;  // null unless int8
};

[[gnu::always_inline]] inline CacheHead cache_head(const CacheShape& shape, uint8_t* cache,
                                                    int64_t block, int64_t layer, int64_t head) {
  uint8_t* at = cache + block * shape.block_bytes() +
                (layer * shape.heads + head) * shape.head_bytes();
  CacheHead found{at, at + shape.region(), nullptr, nullptr};
  if (shape.kind == CacheKind::int8) {
    found.key_scales = reinterpret_cast<float*>(at + 2 * shape.region());
    found.value_scales = found.key_scales + BLOCK;
  }
  return found;
}

}  // namespace weightpath
