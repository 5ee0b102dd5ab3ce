// A program for sanitizers: random weights, activations and shapes through every instruction set
// that runs here, compared with the scalar one bit for bit; then several callers at once, and a
// fork. Built with -DWEIGHTPATH_CHECK=ON and -fsanitize=... in CMAKE_CXX_FLAGS: `make sanitize`.
//
//   check [cases] [seed] [--no-fork]        exit code 0 where all agree
//
// Under the thread sanitizer set TSAN_OPTIONS=die_after_fork=0: the child starts threads. qemu-user
// cannot fork a program with threads: --no-fork there.

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "dispatch.hpp"
#include "floats.hpp"
#include "linear.hpp"
#include "pack.hpp"
#include "pool.hpp"

using namespace weightpath;

namespace {

struct Case {
  Shape shape;
  std::vector<uint8_t> packed, x, bias;
  Kind x_kind, y_kind, bias_kind;
  int64_t m;
  int planes;
  bool per_group;
};

// Exactly as many bytes as are stated, so that a read past the end is one past an allocation.
std::vector<uint8_t> floats(std::mt19937& draw, int64_t count, Kind kind, float size) {
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<uint8_t> bytes(static_cast<size_t>(count * bytes_of(kind)));
  for (int64_t i = 0; i < count; ++i) store_float(bytes.data(), kind, i, normal(draw));
  return bytes;
}

Case random_case(std::mt19937& draw) {
  const auto below = [&](int64_t top) { return static_cast<int64_t>(draw() % top); };
  const int64_t sizes[] = {8, 32, 64, 128};
  Case one;
  const int bits = below(4) ? 4 : 8;
  const bool per_channel = bits == 8 || below(4) == 0;
  const int64_t group = per_channel ? 1 + below(150) : sizes[below(4)];
  const int64_t groups = per_channel ? 1 : 1 + below(6);
  one.shape = {bits, 1 + below(100), group * groups, group, bits == 4 && below(2) == 1,
               static_cast<Kind>(below(3))};
  one.m = 1 + below(20);
  one.planes = 1 + static_cast<int>(below(2));
  one.per_group = below(2);
  one.x_kind = static_cast<Kind>(below(3));
  one.y_kind = static_cast<Kind>(below(3));
  one.bias_kind = static_cast<Kind>(below(3));
  const Shape& shape = one.shape;
  std::vector<uint8_t> codes(static_cast<size_t>(shape.n * shape.k));
  for (uint8_t& code : codes) code = static_cast<uint8_t>(draw() & (bits == 4 ? 15 : 255));
  std::vector<uint8_t> zeros(static_cast<size_t>(shape.n * groups));
  for (uint8_t& zero : zeros) zero = draw() & 15;
  const std::vector<uint8_t> scales = floats(draw, shape.n * groups, shape.scales, 0.01f);
  one.packed.resize(static_cast<size_t>(shape.tiles() * shape.tile_bytes()));
  pack(shape, codes.data(), Codes::bytes, scales.data(), shape.zeros ? zeros.data() : nullptr,
       one.packed.data(), 1 + static_cast<int>(below(3)));
  one.x = floats(draw, one.m * shape.k, one.x_kind, below(8) ? 1.0f : 1e-6f);
  if (below(2)) one.bias = floats(draw, shape.n, one.bias_kind, 1.0f);
  return one;
}

std::vector<uint8_t> product(const Case& one, const InstructionSet& set, int threads) {
  std::vector<uint8_t> y(static_cast<size_t>(one.m * one.shape.n * bytes_of(one.y_kind)));
  const Output out{y.data(), one.y_kind, one.bias.empty() ? nullptr : one.bias.data(),
                   one.bias_kind};
  if (!linear(set, one.shape, one.packed.data(), one.x.data(), one.x_kind, one.m, one.planes,
              one.per_group, out, threads)) {
    std::abort();
  }
  return y;
}

int disagreements(int cases, uint32_t seed) {
  std::mt19937 draw(seed);
  int wrong = 0;
  for (int i = 0; i < cases; ++i) {
    const Case one = random_case(draw);
    const std::vector<uint8_t> wanted = product(one, SCALAR, 1);
    for (const Candidate& candidate : candidates()) {
      if (!candidate.use || product(one, *candidate.use, 1 + i % 4) == wanted) continue;
      std::printf("%s: case %d of seed %u, %d bits [%ld, %ld], M %ld\n", candidate.name, i, seed,
                  one.shape.bits, static_cast<long>(one.shape.n), static_cast<long>(one.shape.k),
                  static_cast<long>(one.m));
      ++wrong;
    }
  }
  return wrong;
}

}  // namespace

int main(int count, char** arguments) {
  const int cases = count > 1 ? std::atoi(arguments[1]) : 200;
  const uint32_t seed = count > 2 ? static_cast<uint32_t>(std::atoi(arguments[2])) : 0;
  for (const Candidate& candidate : candidates()) {
    std::printf("%s: %s\n", candidate.name,
                candidate.use ? "checked" : candidate.refusal.c_str());
  }
  std::fflush(stdout);  // before a fork copies what is not written yet
  int wrong = disagreements(cases, seed);
  int each[3] = {0, 0, 0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 3; ++t) {
    callers.emplace_back([&, t] { each[t] = disagreements(cases / 3, seed + 1 + t); });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int more : each) wrong += more;
  if (count < 4 || std::strcmp(arguments[3], "--no-fork") != 0) {
    const pid_t child = fork();
    if (child == 0) _exit(disagreements(cases / 10, seed + 9) == 0 && workers() > 0 ? 0 : 1);
    int status = 0;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) ++wrong;
  }
  std::printf("%d disagreements\n", wrong);
  return wrong ? 1 : 0;
}
