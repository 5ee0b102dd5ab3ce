// Which instruction set runs, and a sentence for each that does not.
#pragma once

#include <string>
#include <vector>

#include "tiles.hpp"

namespace weightpath {

struct Candidate {
  const char* name;
  const InstructionSet* use;  // null where it cannot run
  std::string refusal;        // empty where it can
};

// Fastest first; the scalar one is last and always runs.
const std::vector<Candidate>& candidates();

// The fastest that runs for this many rows of x, or the one of this name whatever the rows.
// std::invalid_argument with the sentence where it cannot be had.
const InstructionSet& choose(const std::string& name, int64_t rows);

}  // namespace weightpath
