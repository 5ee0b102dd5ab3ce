#include "attention.hpp"

#include <algorithm>
#include <cstring>

namespace weightpath {
namespace {

constexpr float LOG2E = 1.44269504088896341f;
constexpr int64_t PIECES_A_THREAD = 4;  // of one row's cache, over all heads

int64_t lines(int64_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

}  // namespace

int64_t AttentionRoom::bytes(const AttentionShape& shape) {
  const int64_t rows = shape.queries() * shape.share();
  return 2 * lines(4 * rows * shape.head_dim) + lines(4 * shape.head_dim) + 4 * lines(4 * rows);
}

AttentionRoom AttentionRoom::in(char* memory, const AttentionShape& shape) {
  const int64_t rows = shape.queries() * shape.share();
  const auto take = [&](int64_t count) {
    char* here = memory;
    memory += lines(4 * count);
    return here;
  };
  AttentionRoom room;
  room.q = reinterpret_cast<float*>(take(rows * shape.head_dim));
  room.acc = reinterpret_cast<float*>(take(rows * shape.head_dim));
  room.key = reinterpret_cast<float*>(take(shape.head_dim));
  room.maxima = reinterpret_cast<float*>(take(rows));
  room.sums = reinterpret_cast<float*>(take(rows));
  room.first = reinterpret_cast<int32_t*>(take(rows));
  room.last = reinterpret_cast<int32_t*>(take(rows));
  return room;
}

void Attention::plan(const AttentionShape& of, const std::vector<Row>& all, int threads) {
  shape = of;
  rows = &all;
  spans.clear();
  pieces.clear();
  shared.clear();
  prompt = false;
  int64_t floats = 0;
  const int64_t count = static_cast<int64_t>(all.size());
  for (int64_t begin = 0, end; begin < count; begin = end) {
    end = begin + 1;
    while (end < count && all[end].cache == all[begin].cache &&
           all[end].position == all[end - 1].position + 1) {
      ++end;
    }
    if (end - begin > 1) prompt = true;
    for (int64_t start = begin, stop; start < end; start = stop) {
      stop = std::min(end, start + LANES - all[start].position % LANES);
      spans.push_back({start, stop});
    }
    if (end - begin > 1 || count >= 2 * threads) {
      // Whole blocks of queries; the last ones see most, and are begun first.
      const int64_t each = std::min(
          shape.queries(), std::max<int64_t>(1, (end - begin) * shape.kv_heads / (4 * threads)));
      for (int64_t stop = end; stop > begin; stop -= std::min(each, stop - begin)) {
        const int64_t start = std::max(begin, stop - each);
        pieces.push_back({start, stop, 0, all[stop - 1].position / BLOCK + 1, true, -1});
      }
      continue;
    }
    const int64_t blocks = all[begin].position / BLOCK + 1;
    const int64_t span =
        std::max<int64_t>(1, blocks * shape.kv_heads / (PIECES_A_THREAD * threads));
    const int64_t parts = (blocks + span - 1) / span;
    for (int64_t b = blocks; b > 0; b -= std::min(span, b)) {  // the last one writes the key
      pieces.push_back({begin, end, std::max<int64_t>(0, b - span), b, parts == 1,
                        parts == 1 ? -1 : static_cast<int64_t>(shared.size())});
    }
    if (parts > 1) {
      shared.push_back({blocks, parts, floats});
      floats += shape.heads * blocks * (shape.head_dim + 2);
    }
  }
  if (static_cast<int64_t>(partial.size()) < floats) partial.resize(static_cast<size_t>(floats));
  const int64_t wanted = static_cast<int64_t>(shared.size()) * shape.kv_heads;
  if (counters < wanted) {
    done = std::make_unique<std::atomic<int32_t>[]>(static_cast<size_t>(wanted));
    counters = wanted;
  }
  for (int64_t i = 0; i < wanted; ++i) done[i].store(0, std::memory_order_relaxed);
}

void Attention::write_head(const StepKernels& kernels, const AttentionLayer& layer,
                           const Rope& rope, const float* k, const float* v, int64_t m,
                           int64_t head, const AttentionRoom& room) {
  const Row& row = (*rows)[m];
  const bool newest = m + 1 == static_cast<int64_t>(rows->size()) ||
                      (*rows)[m + 1].cache != row.cache ||
                      (*rows)[m + 1].position != row.position + 1;
  const int64_t size = shape.head_dim, at = (m * shape.kv_heads + head) * size;
  std::memcpy(room.key, k + at, 4 * size);
  if (layer.k_norm) kernels.norm(room.key, layer.k_norm, size, shape.epsilon, room.key);
  kernels.rotate(room.key, rope.cosines + row.position * rope.half,
                 rope.sines + row.position * rope.half, rope.half, size, 1.0f);
  kernels.keep(room.key, v + at, shape.cache,
               cache_head(shape.cache, row.cache, row.position / BLOCK, layer.index, head),
               row.position, newest);
}

void Attention::write(const StepKernels& kernels, const AttentionLayer& layer, const Rope& rope,
                      const float* k, const float* v, int64_t item,
                      const AttentionRoom& room) {
  const Span& span = spans[static_cast<size_t>(item / shape.kv_heads)];
  for (int64_t m = span.row0; m < span.row1; ++m) {
    write_head(kernels, layer, rope, k, v, m, item % shape.kv_heads, room);
  }
}

void Attention::work(const StepKernels& kernels, const AttentionLayer& layer, const Rope& rope,
                     int64_t item, const float* q, const float* k, const float* v, float* y,
                     const AttentionRoom& room) {
  const Piece& piece = pieces[static_cast<size_t>(item / shape.kv_heads)];
  const int64_t head = item % shape.kv_heads, share = shape.share(), size = shape.head_dim;
  const int64_t count = (piece.row1 - piece.row0) * share;
  const auto place = [&](int64_t i) {  // of query i, in q and y
    return ((piece.row0 + i / share) * shape.heads + head * share + i % share) * size;
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = (*rows)[piece.row0 + i / share].position;
    float* to = room.q + i * size;
    std::memcpy(to, q + place(i), 4 * size);
    if (layer.q_norm) kernels.norm(to, layer.q_norm, size, shape.epsilon, to);
    kernels.rotate(to, rope.cosines + position * rope.half, rope.sines + position * rope.half,
                   rope.half, size, shape.scaling * LOG2E);
  }
  const Row& last_row = (*rows)[piece.row1 - 1];
  if (!prompt && piece.block1 * BLOCK > last_row.position) {
    write_head(kernels, layer, rope, k, v, piece.row0, head, room);
  }
  const Shared* waits = piece.whole ? nullptr : &shared[static_cast<size_t>(piece.shared)];
  float* const parts =
      waits ? partial.data() + waits->at + head * waits->blocks * share * (size + 2) : nullptr;
  for (int64_t block = piece.block0; block < piece.block1; ++block) {
    Attend a{room.q, count, size, room.first, room.last,
             cache_head(shape.cache, last_row.cache, block, layer.index, head), shape.cache.kind,
             room.maxima, room.sums, room.acc};
    if (waits) {  // a state of its own: [share] maxima, [share] sums, [share, head_dim]
      a.maxima = parts + block * share * (size + 2);
      a.sums = a.maxima + share;
      a.acc = a.sums + share;
    }
    if (waits || block == piece.block0) {
      std::fill(a.maxima, a.maxima + count, EMPTY);
      std::fill(a.sums, a.sums + count, 0.0f);
      std::fill(a.acc, a.acc + count * size, 0.0f);
    }
    bool any = false;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t end = (*rows)[piece.row0 + i / share].position + 1;
      const int64_t begin = layer.window ? std::max<int64_t>(0, end - layer.window) : 0;
      const int64_t first = std::max<int64_t>(0, begin - block * BLOCK);
      const int64_t last = std::min(BLOCK, end - block * BLOCK);
      room.first[i] = static_cast<int32_t>(std::min(first, BLOCK));
      room.last[i] = static_cast<int32_t>(std::max<int64_t>(0, last));
      any = any || first < last;
    }
    if (any) kernels.attend(a);
  }
  if (!waits) {
    for (int64_t i = 0; i < count; ++i) {
      kernels.finish(room.acc + i * size, room.sums[i], size, y + place(i));
    }
    return;
  }
  std::atomic<int32_t>& counter = done[piece.shared * shape.kv_heads + head];
  if (counter.fetch_add(1, std::memory_order_acq_rel) + 1 < waits->pieces) return;
  counter.store(0, std::memory_order_relaxed);
  for (int64_t g = 0; g < share; ++g) {
    for (int64_t block = 0; block < waits->blocks; ++block) {
      float* m = parts + block * share * (size + 2);
      float *l = m + share, *acc = l + share + g * size;
      if (block) kernels.merge(parts + g, parts + share + g, parts + 2 * share + g * size, m[g],
                               l[g], acc, size);
    }
    kernels.finish(parts + 2 * share + g * size, parts[share + g], size, y + place(g));
  }
}

}  // namespace weightpath
