// Huge pages, and the read bandwidth that products of few rows are measured against.
#pragma once

#include <cstdint>

#include "tiles.hpp"

namespace weightpath {

// Asks the system to back [address, address + bytes) by huge pages, before it is first touched.
// False where the system has no such request or declines.
bool advise_huge_pages(void* address, int64_t bytes);

// Memory that a thread keeps between calls: it grows, and what was in it is lost when it does.
struct Scratch {
  void* memory = nullptr;
  int64_t bytes = 0;
  ~Scratch();

  // At least so many bytes, at a multiple of 64; null where the system has none.
  char* at_least(int64_t wanted);
};

// Reads every whole line once, `threads` contiguous ranges at once. The result keeps the reads
// alive.
uint64_t read_all(const InstructionSet& set, const void* address, int64_t bytes, int threads);

// A checksum of the bytes in their order: the same on every machine of this byte order and with any
// number of threads. Against damage, not against anyone who means it. It runs at the speed of the
// memory, and leaves mapped pages in the page table.
uint64_t checksum(const void* address, int64_t bytes, int threads);

}  // namespace weightpath
