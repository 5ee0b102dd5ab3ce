#include "memory.hpp"

#include <atomic>
#include <cstdlib>

#include "pool.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace weightpath {
namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;

}  // namespace

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

Scratch::~Scratch() { std::free(memory); }

char* Scratch::at_least(int64_t wanted) {
  if (wanted > bytes) {
    std::free(memory);
    const int64_t unit = wanted < HUGE_PAGE ? 4096 : HUGE_PAGE;
    bytes = (wanted + unit - 1) / unit * unit;
    memory = std::aligned_alloc(static_cast<size_t>(unit), static_cast<size_t>(bytes));
    if (!memory) bytes = 0;
    else if (unit == HUGE_PAGE) advise_huge_pages(memory, bytes);
  }
  return static_cast<char*>(memory);
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
