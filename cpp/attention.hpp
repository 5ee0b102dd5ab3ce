// Attention of a step, cut into work for a team of threads.
//
// Rows that follow one another in one sequence are a run. A run of several rows (a piece of a
// prompt) is cut into blocks of queries, each of which walks the cache's blocks in order and joins
// their partial softmaxes as it goes. A run of one row (decoding) has its cache blocks shared out
// too: partial results wait in memory, and whoever finishes the last of them joins all, in the same
// order. So both give the same bits.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "step_kernels.hpp"

namespace weightpath {

struct Row {
  int64_t token;
  uint8_t* cache;  // of its sequence
  int64_t position;
};

struct Rope {
  const float *cosines = nullptr, *sines = nullptr;  // [positions, half]
  int64_t positions = 0, half = 0;
};

// What attention needs of a layer.
struct AttentionLayer {
  int64_t index;
  int64_t window;                 // positions that a query sees, its own among them; 0 is all
  const float *q_norm, *k_norm;   // [head_dim] or null
};

struct AttentionShape {
  int64_t heads, kv_heads, head_dim;
  float scaling, epsilon;
  CacheShape cache;

  int64_t share() const { return heads / kv_heads; }  // query heads of a key-value head
  // Rows of queries that one piece of work takes.
  int64_t queries() const { return 96 / share() > 1 ? 96 / share() : 1; }
};

// One thread's room.
struct AttentionRoom {
  float *q, *acc, *maxima, *sums, *key;
  int32_t *first, *last;

  static int64_t bytes(const AttentionShape& shape);
  static AttentionRoom in(char* memory, const AttentionShape& shape);
};

class Attention {
 public:
  // Cuts a step's rows; `threads` will share the work. The same cut serves every layer.
  void plan(const AttentionShape& shape, const std::vector<Row>& rows, int threads);

  // Whether keys and values are to be written before any work is done, by `write`.
  bool writes_first() const { return prompt; }
  int64_t items() const { return static_cast<int64_t>(pieces.size()) * shape.kv_heads; }

  // Some rows' keys and values of one head, from k and v [M, kv_heads * head_dim]. Two items share
  // no line of the cache.
  int64_t write_items() const { return static_cast<int64_t>(spans.size()) * shape.kv_heads; }
  void write(const StepKernels&, const AttentionLayer&, const Rope&, const float* k, const float* v,
             int64_t item, const AttentionRoom&);
  // One item: y [M, heads * head_dim] from q of the same shape.
  void work(const StepKernels&, const AttentionLayer&, const Rope&, int64_t item, const float* q,
            const float* k, const float* v, float* y, const AttentionRoom&);

 private:
  struct Piece {
    int64_t row0, row1, block0, block1;  // rows of one run; blocks of the cache
    bool whole;      // all blocks that its rows see: nothing waits
    int64_t shared;  // else its row's place in `shared`
  };
  struct Span {
    int64_t row0, row1;  // of one run, within 16 positions
  };
  struct Shared {
    int64_t blocks, pieces, at;  // at: floats into `partial`
  };

  void write_head(const StepKernels&, const AttentionLayer&, const Rope&, const float* k,
                  const float* v, int64_t m, int64_t head, const AttentionRoom&);

  AttentionShape shape{};
  const std::vector<Row>* rows = nullptr;
  bool prompt = false;
  std::vector<Span> spans;
  std::vector<Piece> pieces;
  std::vector<Shared> shared;
  std::vector<float> partial;  // [kv_heads, blocks, share, head_dim + 2] of each shared row
  std::unique_ptr<std::atomic<int32_t>[]> done;
  int64_t counters = 0;
};

}  // namespace weightpath
