#include "decoder.hpp"

#include <algorithm>
#include <stdexcept>

#include "dispatch.hpp"
#include "walk.hpp"

namespace weightpath {
namespace {

constexpr int MOST_TEAM = 256;

int64_t lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

}  // namespace

Decoder::Decoder(const DecoderShape& of, const std::string& instruction_set)
    : shape(of), wanted_set(instruction_set), kernels(&step_kernels(instruction_set)) {
  choose(wanted_set, 1);
}

void Decoder::set_head(const float* norm, Matrix matrix) {
  final_norm = norm;
  head = Group({std::move(matrix)}, false);
}

void Decoder::set_rope(const Rope& tables) {
  const std::lock_guard<std::mutex> lock(busy);
  rope = tables;
}

void Decoder::profile(bool on) {
  const std::lock_guard<std::mutex> lock(busy);
  profiling = on;
  spent = {};
}

bool Decoder::make_room(int threads) {
  if (threads <= room_threads) return true;
  const AttentionShape& a = shape.attention;
  const int64_t rows = shape.most_rows, mixed_width = a.heads * a.head_dim;
  const int64_t kv_width = a.kv_heads * a.head_dim;
  const int64_t widest = std::max({shape.hidden, shape.intermediate, mixed_width});
  int64_t shared_bytes = head.activation_bytes(rows), own_bytes = head.activation_bytes(1);
  for (const Layer& layer : layers) {
    for (const Group* group : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down}) {
      shared_bytes = std::max(shared_bytes, group->activation_bytes(rows));
      own_bytes = std::max(own_bytes, group->activation_bytes(1));
    }
  }
  char* base = nullptr;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) {
    char* here = base ? base + used : nullptr;
    used += lines(bytes);
    return here;
  };
  const auto floats = [&](int64_t width) {
    return reinterpret_cast<float*>(take(4 * rows * width));
  };
  std::vector<Room> made(static_cast<size_t>(threads));
  const auto lay_out = [&] {
    used = 0;
    h = floats(shape.hidden);
    normed = floats(shape.hidden);
    q = floats(mixed_width);
    k = floats(kv_width);
    v = floats(kv_width);
    mixed = floats(mixed_width);
    gate = floats(shape.intermediate);
    activations = take(shared_bytes);
    for (Room& room : made) {
      room.x = reinterpret_cast<float*>(take(4 * widest));
      room.gathered = reinterpret_cast<float*>(take(4 * widest));
      for (float*& tile : room.tiles) tile = floats(TILE_ROWS);
      room.activations = take(own_bytes);
      char* at = take(AttentionRoom::bytes(a));
      if (base) room.attention = AttentionRoom::in(at, a);
      take(2 * LINE);  // the next thread's room shares no line, nor the line fetched with it
    }
  };
  lay_out();
  base = memory.at_least(used);
  if (!base) {
    room_threads = 0;
    return false;
  }
  lay_out();
  rooms = std::move(made);
  room_threads = threads;
  return true;
}

bool Decoder::step(const std::vector<Row>& rows, const std::vector<int64_t>& wanted,
                   float* logits, int threads) {
  if (rows.empty()) return true;
  const std::lock_guard<std::mutex> lock(busy);
  if (static_cast<int64_t>(rows.size()) > shape.most_rows) {
    throw std::invalid_argument(std::to_string(rows.size()) + " rows in a step of at most " +
                                std::to_string(shape.most_rows));
  }
  for (const Row& row : rows) {
    if (row.token < 0 || row.token >= shape.vocabulary) {
      throw std::invalid_argument("token " + std::to_string(row.token) + " of a vocabulary of " +
                                  std::to_string(shape.vocabulary));
    }
    if (row.position < 0 || row.position >= rope.positions) {
      throw std::invalid_argument("position " + std::to_string(row.position) + " of " +
                                  std::to_string(rope.positions));
    }
  }
  int64_t before = -1;
  for (const int64_t row : wanted) {
    if (row <= before || row >= static_cast<int64_t>(rows.size())) {
      throw std::invalid_argument("logits of row " + std::to_string(row) + " after row " +
                                  std::to_string(before) + ", of " + std::to_string(rows.size()) +
                                  " rows; they ascend");
    }
    before = row;
  }
  threads = std::clamp(threads, 1, MOST_TEAM);
  if (!make_room(threads)) return false;
  attention.plan(shape.attention, rows, threads);
  std::atomic<int64_t> next{0};
  team(threads, [&](int index, Barrier& barrier) {
    Walk(*this, rows, wanted, logits, next, index, barrier).run();
  });
  return true;
}

}  // namespace weightpath
