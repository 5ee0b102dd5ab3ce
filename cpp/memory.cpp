#include "memory.hpp"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "pool.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace weightpath {
namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;
constexpr int64_t BLOCK = 64 << 10;
constexpr uint64_t FACTOR = 0x9e3779b97f4a7c15u;  // odd, so that multiplying loses nothing

// Sums of eight interleaved columns of 64-bit words, and sums of those sums: a word that changes
// changes its column's sum, two that change places its second sum.
uint64_t block_sum(const char* from, int64_t bytes) {
  uint64_t first[8] = {}, second[8] = {}, words[8];
  for (int64_t at = 0; at < bytes; at += LINE) {
    if (bytes - at < LINE) std::memset(words, 0, LINE);
    std::memcpy(words, from + at, static_cast<size_t>(bytes - at < LINE ? bytes - at : LINE));
    for (int i = 0; i < 8; ++i) {
      first[i] += words[i];
      second[i] += first[i];
    }
  }
  uint64_t sum = static_cast<uint64_t>(bytes);
  for (int i = 0; i < 8; ++i) sum = ((sum * FACTOR + first[i]) * FACTOR) + second[i];
  return sum;
}

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

uint64_t checksum(const void* address, int64_t bytes, int threads) {
  const char* from = static_cast<const char*>(address);
  std::vector<uint64_t> sums(static_cast<size_t>((bytes + BLOCK - 1) / BLOCK));
  parallel(static_cast<int64_t>(sums.size()), threads, [&](int64_t start, int64_t stop) {
    for (int64_t i = start; i < stop; ++i) {
      const int64_t left = bytes - i * BLOCK;
      sums[static_cast<size_t>(i)] = block_sum(from + i * BLOCK, left < BLOCK ? left : BLOCK);
    }
  });
  uint64_t total = static_cast<uint64_t>(bytes);
  for (const uint64_t sum : sums) total = (total ^ sum) * FACTOR + (total >> 29);
  return total;
}

}  // namespace weightpath
