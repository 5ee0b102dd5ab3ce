// A decoder-only transformer, one call a step: rows of tokens in, logits out.
//
//   h = table[token]
//   a layer:  h += o(attention(rotary(q, k), v)),   q, k, v of norm(h)
//             h += down(silu(gate) * up),           gate, up of norm(h)
//   logits = head(norm(h))
//
// Rows are any mix of sequences and positions: a piece of a prompt, one token, or one token each of
// many sequences. The whole step is one job of the pool: every thread walks the phases, and a
// barrier parts them. With one row each thread prepares a phase's activations for itself, which is
// cheaper than a barrier; with more, rows are shared out.
//
// Nothing here owns a weight. Memory for a step is taken when a decoder first runs, or runs on more
// threads than before.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "attention.hpp"
#include "memory.hpp"
#include "pool.hpp"
#include "products.hpp"

namespace weightpath {

struct DecoderShape {
  int64_t hidden, intermediate, vocabulary, most_rows;
  AttentionShape attention;
  const void* table;  // [vocabulary, hidden]
  Kind table_kind;
};

struct Layer {
  Group qkv, output, gate_up, down;
  const float *input_norm, *post_norm;
  AttentionLayer attention;
};

enum class Phase : int {
  embed, qkv, write, attention, output, gate_up, down, head, waiting, count
};
constexpr const char* PHASES[] = {"embed",  "qkv",     "write", "attention", "output",
                                  "gate_up", "down",   "head",  "waiting"};

class Decoder {
 public:
  // instruction_set: "" for the fastest; std::invalid_argument says why one cannot be had.
  Decoder(const DecoderShape& shape, const std::string& instruction_set);

  void add_layer(Layer layer) { layers.push_back(std::move(layer)); }
  void set_head(const float* norm, Matrix head);
  void set_rope(const Rope& tables);

  // Runs rows (at most most_rows), and writes logits fp32 [wanted.size(), vocabulary] of the rows
  // numbered in `wanted`, ascending. Callers on several threads wait for one another. False where
  // memory ran out. std::invalid_argument where a row's token or position is out of range.
  bool step(const std::vector<Row>& rows, const std::vector<int64_t>& wanted, float* logits,
            int threads);

  // Nanoseconds of the calling thread by phase, since profiling was last switched.
  void profile(bool on);
  std::array<int64_t, static_cast<size_t>(Phase::count)> nanoseconds() const { return spent; }

 private:
  friend class Walk;
  bool make_room(int threads);

  struct Room {  // of one thread
    float *x, *gathered, *tiles[2];
    char* activations;
    AttentionRoom attention;
  };

  DecoderShape shape;
  std::string wanted_set;
  const StepKernels* kernels;
  std::vector<Layer> layers;
  const float* final_norm = nullptr;
  Group head;
  Rope rope;
  Attention attention;
  Scratch memory;
  int room_threads = 0;
  std::vector<Room> rooms;
  float *h, *normed, *q, *k, *v, *mixed, *gate;  // [most_rows, ...]
  char* activations;
  std::mutex busy;
  bool profiling = false;
  std::array<int64_t, static_cast<size_t>(Phase::count)> spent{};
};

}  // namespace weightpath
