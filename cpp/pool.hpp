// A persistent pool of threads that runs one job at a time over static, contiguous ranges.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace weightpath {

using Work = void (*)(void* context, int64_t start, int64_t stop);

// Cuts [0, items) into `threads` contiguous ranges, as even as they go, and runs each on its own
// thread, the caller among them; range i always goes to thread i, so memory first touched in one
// job is read by the same thread in the next. Returns when all are done.
//
// Called from two threads at once, or from inside a job, the second caller runs its ranges itself:
// nothing waits for anything that waits for it. After a fork the child starts threads of its own.
void run(int64_t items, int threads, void* context, Work work);

template <typename F>
void parallel(int64_t items, int threads, F&& body) {
  run(items, threads, &body, [](void* context, int64_t start, int64_t stop) {
    (*static_cast<std::remove_reference_t<F>*>(context))(start, stop);
  });
}

// Memory that a thread will read soon.
struct Ahead {
  const uint8_t *at = nullptr, *stop = nullptr;
};

// Returns once `counter` is no longer `old`: spins, fetching what is ahead into the L2 cache
// meanwhile, from so many microseconds on gives its CPU away now and then, and sleeps in the end.
void wait_while(const std::atomic<uint32_t>& counter, uint32_t old, int64_t yield_after,
                Ahead& ahead);

// Where the threads of a team meet. Each says so in a line of its own, so that no line goes round
// all of them; thread 0 reads those lines, does what comes between, and lets all go on.
struct Barrier {
  explicit Barrier(int threads) : arrived(static_cast<size_t>(threads)), count(threads) {}

  template <typename F>
  void meet(int index, Ahead ahead, F&& between) {
    const uint32_t seen = generation.load(std::memory_order_relaxed);
    if (index != 0) {  // an exchange: what is waited on is written before waiters are looked for
      std::atomic<uint32_t>& mine = arrived[static_cast<size_t>(index)].generation;
      mine.exchange(seen + 1, std::memory_order_acq_rel);
      mine.notify_one();
      wait_while(generation, seen, YIELD_AFTER, ahead);
      return;
    }
    for (int i = 1; i < count; ++i) {
      wait_while(arrived[static_cast<size_t>(i)].generation, seen, YIELD_AFTER, ahead);
    }
    between();
    generation.exchange(seen + 1, std::memory_order_acq_rel);
    if (count > 1) generation.notify_all();
  }

  // Microseconds. Threads of a team that share a CPU meet hundreds of times a step: what they spin
  // is lost to the one that they wait for.
  static constexpr int64_t YIELD_AFTER = 3;
  alignas(128) std::atomic<uint32_t> generation{0};
  struct alignas(128) Arrival {
    std::atomic<uint32_t> generation{0};
  };
  std::vector<Arrival> arrived;
  const int count;
};

// Calls body(index, barrier) on every thread of a team at once, the caller's index 0. The team is
// `threads` strong, or the caller alone where the pool is taken: barrier.count says which.
template <typename F>
void team(int threads, F&& body) {
  Barrier all(threads), one(1);
  parallel(threads, threads, [&](int64_t start, int64_t stop) {
    if (stop - start == threads) body(0, one);
    else body(static_cast<int>(start), all);
  });
}

// Whether workers are pinned to CPUs of the process's affinity mask, worker i to its (i + 1)-th.
// Takes effect for workers that start or start their next job after the call. Off at first:
// pinning loses on a machine that is shared.
void set_pinning(bool pinned);

// Threads alive in this process, the caller not counted.
int workers();

}  // namespace weightpath
