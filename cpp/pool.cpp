// One generation counter starts a job; one padded counter a worker ends it. A waiting worker spins
// for SPIN_MICROSECONDS (a model's next linear comes sooner), giving its CPU away now and then, and
// then sleeps in the kernel (std::atomic::wait is a futex on Linux). The caller waits the same way.

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "pool.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weightpath {
namespace {

constexpr int64_t SPIN_MICROSECONDS = 60;
constexpr int PAUSES = 64;  // between looks at the clock
constexpr int64_t YIELD_AFTER = 15;  // microseconds
constexpr int MOST_THREADS = 1024;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

// Asks for the next two lines; false where none is left.
inline bool fetch(Ahead& ahead) {
  if (ahead.at >= ahead.stop) return false;
#if defined(__x86_64__)
  _mm_prefetch(reinterpret_cast<const char*>(ahead.at), _MM_HINT_T1);
  _mm_prefetch(reinterpret_cast<const char*>(ahead.at + 64), _MM_HINT_T1);
#else
  __builtin_prefetch(ahead.at, 0, 2);
  __builtin_prefetch(ahead.at + 64, 0, 2);
#endif
  ahead.at += 128;
  return true;
}

struct alignas(128) Worker {
  std::atomic<uint32_t> done{0};
  bool pinned = false;
};

std::atomic<bool> pinning{false};
thread_local bool inside = false;

struct Pool {
  std::mutex busy;
  alignas(128) std::atomic<uint32_t> generation{0};
  alignas(128) int64_t items = 0;
  int threads = 1;
  void* context = nullptr;
  Work work = nullptr;
  std::vector<std::unique_ptr<Worker>> workers;
};

std::atomic<Pool*> current{nullptr};

// The child of a fork has none of the threads: it takes a new pool, and leaves the old one be.
void forget() { current.store(new Pool, std::memory_order_release); }

Pool& pool() {
  static std::once_flag once;
  std::call_once(once, [] {
    current.store(new Pool, std::memory_order_release);
    pthread_atfork(nullptr, nullptr, forget);
  });
  return *current.load(std::memory_order_acquire);
}

void do_range(const Pool& from, int index) {
  const int64_t each = from.items / from.threads, more = from.items % from.threads;
  const int64_t start = index * each + (index < more ? index : more);
  const int64_t stop = start + each + (index < more ? 1 : 0);
  if (start < stop) from.work(from.context, start, stop);
}

void pin(Worker& worker, int index) {
#if defined(__linux__)
  const bool wanted = pinning.load(std::memory_order_relaxed);
  if (worker.pinned == wanted) return;
  cpu_set_t allowed;  // of the main thread, which is never pinned here
  if (sched_getaffinity(getpid(), sizeof allowed, &allowed) != 0) return;
  if (wanted) {
    int nth = (index) % CPU_COUNT(&allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed) || nth-- > 0) continue;
      CPU_ZERO(&allowed);
      CPU_SET(cpu, &allowed);
      break;
    }
  }
  pthread_setaffinity_np(pthread_self(), sizeof allowed, &allowed);
  worker.pinned = wanted;
#else
  (void)worker, (void)index;
#endif
}

void serve(Pool* from, Worker* me, int index, uint32_t seen) {
  inside = true;
  for (;;) {
    Ahead nothing;
    wait_while(from->generation, seen, YIELD_AFTER, nothing);
    seen = from->generation.load(std::memory_order_acquire);
    pin(*me, index);
    if (index < from->threads) do_range(*from, index);
    me->done.store(seen, std::memory_order_release);
    me->done.notify_one();
  }
}

// Starts what is missing; false where the system gives no more threads.
bool ensure_workers(Pool& from, int wanted) {
  while (static_cast<int>(from.workers.size()) < wanted) {
    auto worker = std::make_unique<Worker>();
    const uint32_t seen = from.generation.load(std::memory_order_relaxed);
    worker->done.store(seen, std::memory_order_relaxed);
    const int index = static_cast<int>(from.workers.size()) + 1;
    try {
      std::thread(serve, &from, worker.get(), index, seen).detach();
    } catch (const std::system_error&) {
      return false;
    }
    from.workers.push_back(std::move(worker));
  }
  return true;
}

}  // namespace

void wait_while(const std::atomic<uint32_t>& counter, uint32_t old, int64_t yield_after,
                Ahead& ahead) {
  if (counter.load(std::memory_order_acquire) != old) return;
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    for (int i = 0; i < PAUSES; ++i) {
      if (counter.load(std::memory_order_acquire) != old) return;
      if (!fetch(ahead)) pause();
    }
    const auto spent = std::chrono::steady_clock::now() - start;
    if (spent > std::chrono::microseconds(SPIN_MICROSECONDS)) break;
    if (spent > std::chrono::microseconds(yield_after)) sched_yield();
  }
  counter.wait(old, std::memory_order_acquire);
}

void run(int64_t items, int threads, void* context, Work work) {
  if (threads > items) threads = static_cast<int>(items);
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  if (items < 1) return;
  if (threads <= 1 || inside) {
    work(context, 0, items);
    return;
  }
  Pool& shared = pool();
  std::unique_lock<std::mutex> lock(shared.busy, std::try_to_lock);
  if (!lock.owns_lock() || !ensure_workers(shared, threads - 1)) {
    work(context, 0, items);
    return;
  }
  shared.items = items;
  shared.threads = threads;
  shared.context = context;
  shared.work = work;
  const uint32_t generation = shared.generation.load(std::memory_order_relaxed) + 1;
  shared.generation.store(generation, std::memory_order_release);
  shared.generation.notify_all();
  inside = true;
  do_range(shared, 0);
  inside = false;
  Ahead nothing;
  for (const auto& worker : shared.workers) {
    wait_while(worker->done, generation - 1, YIELD_AFTER, nothing);
  }
}

void set_pinning(bool pinned) { pinning.store(pinned, std::memory_order_relaxed); }

int workers() {
  Pool& shared = pool();
  const std::lock_guard<std::mutex> lock(shared.busy);
  return static_cast<int>(shared.workers.size());
}

}  // namespace weightpath
