// A persistent pool of threads that runs one job at a time over static, contiguous ranges.
#pragma once

#include <cstdint>
#include <type_traits>

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

// Whether workers are pinned to CPUs of the process's affinity mask, worker i to its (i + 1)-th.
// Takes effect for workers that start or start their next job after the call. Off at first:
// pinning loses on a machine that is shared.
void set_pinning(bool pinned);

// Threads alive in this process, the caller not counted.
int workers();

}  // namespace weightpath
