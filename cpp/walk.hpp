// One thread's walk through a step of the decoder: the phases, and what is shared out in each.
// Included by decoder.cpp alone.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

#include "decoder.hpp"
#include "dispatch.hpp"

namespace weightpath {

constexpr int64_t ROWS_TOGETHER = 4;  // rows prepared at once, where they are shared out

static int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// One thread's walk through a step.
class Walk {
 public:
  Walk(Decoder& decoder, const std::vector<Row>& rows, const std::vector<int64_t>& wanted,
       float* logits, std::atomic<int64_t>& next, int index, Barrier& barrier)
      : d(decoder), all(rows), picked(wanted), logits(logits), next(next), index(index),
        barrier(barrier), room(d.rooms[static_cast<size_t>(index)]), kernels(*d.kernels),
        count(static_cast<int64_t>(rows.size())), timed(d.profiling && index == 0),
        since(timed ? now() : 0) {}

  void run() {
    const DecoderShape& s = d.shape;
    choose_set(count);
    const int64_t row0 = count * index / barrier.count, row1 = count * (index + 1) / barrier.count;
    for (int64_t m = row0; m < row1; ++m) {
      kernels.widen(s.table, s.table_kind, all[m].token * s.hidden, s.hidden, d.h + m * s.hidden);
    }
    meet(Phase::embed, d.layers.empty() ? nullptr : &d.layers[0].qkv);
    const size_t layers = d.layers.size();
    for (size_t i = 0; i < layers; ++i) {
      const bool last = i + 1 == layers;
      run_layer(d.layers[i], last, last ? d.head : d.layers[i + 1].qkv);
    }
    if (picked.empty()) return;
    products(d.head, prepare(d.head, d.h, d.final_norm, count, Phase::head), count,
             [&](int, const Tile& t) { put(t, logits, s.vocabulary); });
    note(Phase::head);
  }

 private:
  // Of the last layer, what no wanted row depends on is left out: a prompt's other rows leave their
  // keys and values, no more.
  void run_layer(const Layer& layer, bool last, const Group& after) {
    const DecoderShape& s = d.shape;
    const auto to_residual = [&](int, const Tile& t) {
      kernels.add(d.h + t.m0 * s.hidden + t.n0, s.hidden, t.y, t.m1 - t.m0, t.n);
    };
    float* const qkv[] = {d.q, d.k, d.v};
    products(layer.qkv, prepare(layer.qkv, d.h, layer.input_norm, count, Phase::qkv), count,
             [&](int which, const Tile& t) {
               put(t, qkv[which], layer.qkv.matrices[static_cast<size_t>(which)].shape.n);
             });
    meet(Phase::qkv, &layer.output);

    if (d.attention.writes_first()) {
      share(d.attention.write_items(), [&](int64_t i) {
        d.attention.write(kernels, layer.attention, d.rope, d.k, d.v, i, room.attention);
      });
      meet(Phase::write);
      if (last && picked.empty()) return;
    }
    share(d.attention.items(), [&](int64_t i) {
      d.attention.work(kernels, layer.attention, d.rope, i, d.q, d.k, d.v, d.mixed,
                       room.attention);
    });
    meet(Phase::attention, nullptr, [&] {
      if (last) keep_wanted();
    });
    if (last) {
      count = static_cast<int64_t>(picked.size());
      if (count == 0) return;
      choose_set(count);
    }

    products(layer.output, prepare(layer.output, d.mixed, nullptr, count, Phase::output), count,
             to_residual);
    meet(Phase::output, &layer.gate_up);

    products(layer.gate_up, prepare(layer.gate_up, d.h, layer.post_norm, count, Phase::gate_up),
             count, [&](int which, const Tile& t) {
               if (which == 0) return;
               kernels.silu(room.tiles[0], t.y, (t.m1 - t.m0) * t.n);
               put({room.tiles[0], t.n0, t.n, t.m0, t.m1}, d.gate, s.intermediate);
             });
    meet(Phase::gate_up, &layer.down);

    products(layer.down, prepare(layer.down, d.gate, nullptr, count, Phase::down), count,
             to_residual);
    meet(Phase::down, &after);
  }

  // One tile's columns n0 .. n0 + n of rows [m0, m1): y [m1 - m0, n].
  struct Tile {
    const float* y;
    int64_t n0, n, m0, m1;
  };

  void put(const Tile& t, float* to, int64_t width) {
    float* y = to + t.m0 * width + t.n0;
    const float* x = t.y;
    if (t.n == TILE_ROWS) {  // a size that the compiler knows
      for (int64_t m = t.m0; m < t.m1; ++m, y += width, x += TILE_ROWS) {
        std::memcpy(y, x, 4 * TILE_ROWS);
      }
      return;
    }
    for (int64_t m = t.m0; m < t.m1; ++m, y += width, x += t.n) {
      std::memcpy(y, x, static_cast<size_t>(4 * t.n));
    }
  }

  // The wanted rows of the residual stream and of attention move to the front; they ascend.
  void keep_wanted() {
    const int64_t width = d.shape.attention.heads * d.shape.attention.head_dim;
    for (size_t i = 0; i < picked.size(); ++i) {
      const int64_t to = static_cast<int64_t>(i), from = picked[i];
      if (from == to) continue;
      std::memcpy(d.h + to * d.shape.hidden, d.h + from * d.shape.hidden,
                  static_cast<size_t>(4 * d.shape.hidden));
      std::memcpy(d.mixed + to * width, d.mixed + from * width, static_cast<size_t>(4 * width));
    }
  }

  void choose_set(int64_t rows) { set = &choose(d.wanted_set, rows); }

  // Norms (where `norm` is given) and quantizes rows of x [rows, K].
  Prepared prepare(const Group& group, const float* x, const float* norm, int64_t rows,
                   Phase phase) {
    const int64_t k = group.k();
    const float epsilon = d.shape.attention.epsilon;
    Prepared made;
    if (rows == 1) {
      made.x = x;
      if (norm) {
        kernels.norm(made.x, norm, k, epsilon, room.x);
        made.x = room.x;
      }
      place_activations(group, 1, room.activations, made);
      quantize_row(*set, group, made, made.x, 0, room.gathered);
      return made;
    }
    made.x = norm ? d.normed : x;
    if (!norm && group.makers.empty()) return made;
    place_activations(group, rows, d.activations, made);
    share((rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER, [&](int64_t i) {
      for (int64_t m = i * ROWS_TOGETHER; m < std::min((i + 1) * ROWS_TOGETHER, rows); ++m) {
        if (norm) kernels.norm(x + m * k, norm, k, epsilon, d.normed + m * k);
        quantize_row(*set, group, made, made.x, m, room.gathered);
      }
    });
    meet(phase);
    return made;
  }

  // Every tile of a group's matrices by every panel of rows; after(which, tile) as each is there.
  // Of a pair the first tile stays in room.tiles[0] until the second is there too.
  template <typename F>
  void products(const Group& group, const Prepared& from, int64_t rows, F&& after) {
    const Panels panels = group.panels(*set, rows, barrier.count);
    const int64_t units = group.units();
    const int matrices = static_cast<int>(group.matrices.size());
    const auto one = [&](int which, int64_t tile, int64_t panel) {
      const int64_t m0 = panels.begin(panel), m1 = panels.end(panel);
      float* y = room.tiles[group.paired ? which : 0];
      multiply(*set, kernels, group, which, from, tile, m0, m1, y);
      const int64_t n = group.matrices[static_cast<size_t>(which)].shape.n, n0 = tile * TILE_ROWS;
      after(which, Tile{y, n0, std::min(TILE_ROWS, n - n0), m0, m1});
    };
    const auto unit_by_panel = [&](int64_t unit, int64_t panel) {
      if (group.paired) {
        for (int which = 0; which < matrices; ++which) one(which, unit, panel);
        return;
      }
      int which = 0;
      for (const Matrix& matrix : group.matrices) {
        if (unit < matrix.shape.tiles()) break;
        unit -= matrix.shape.tiles();
        ++which;
      }
      one(which, unit, panel);
    };
    if (rows < SHARED_ROWS) {
      const int64_t stop = group.cut(index + 1, barrier.count);
      for (int64_t unit = group.cut(index, barrier.count); unit < stop; ++unit) {
        for (int64_t panel = 0; panel < panels.count; ++panel) unit_by_panel(unit, panel);
      }
      return;
    }
    share(panels.count * units, [&](int64_t item) { unit_by_panel(item % units, item / units); });
  }

  // one(i) for i in [0, items), each on the thread that is free next. Once between two barriers.
  template <typename F>
  void share(int64_t items, F&& one) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) one(i);
  }

  // While it waits a thread fetches what it will read of `then`, where rows are few.
  template <typename F>
  void meet(Phase phase, const Group* then, F&& between) {
    note(phase);
    const Ahead ahead =
        then && count < SHARED_ROWS ? then->ahead(index, barrier.count) : Ahead{};
    barrier.meet(index, ahead, [&] {
      next.store(0, std::memory_order_relaxed);
      between();
    });
    note(Phase::waiting);
  }

  void meet(Phase phase, const Group* then = nullptr) {
    meet(phase, then, [] {});
  }

  void note(Phase phase) {
    if (!timed) return;
    const int64_t at = now();
    d.spent[static_cast<size_t>(phase)] += at - since;
    since = at;
  }

  Decoder& d;
  const std::vector<Row>& all;
  const std::vector<int64_t>& picked;
  float* logits;
  std::atomic<int64_t>& next;
  int index;
  Barrier& barrier;
  Decoder::Room& room;
  const StepKernels& kernels;
  const InstructionSet* set = nullptr;
  int64_t count;
  bool timed;
  int64_t since;
};

}  // namespace weightpath
