#include "memory.hpp"

#include <atomic>

#include "pool.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace weightpath {

bool advise_huge_pages(void* address, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(address) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(address) + bytes) / page * page;
  if (begin >= end) return false;
  return madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE) == 0;
#else
  (void)address, (void)bytes;
  return false;
#endif
}

uint64_t read_all(const InstructionSet& set, const void* address, int64_t bytes, int threads) {
  const uint8_t* from = static_cast<const uint8_t*>(address);
  std::atomic<uint64_t> total{0};
  parallel(bytes / LINE, threads, [&](int64_t start, int64_t stop) {
    total += set.read(from + start * LINE, stop - start);
  });
  return total;
}

}  // namespace weightpath
