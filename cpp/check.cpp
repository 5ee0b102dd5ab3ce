// A program for sanitizers and other processors: random weights, activations and shapes through
// every instruction set that runs here, compared with the scalar one bit for bit; then several
// callers at once, and a fork. It says which sets run, and of the others why not. Built with
// -DWEIGHTPATH_CHECK=ON: `make sanitize` and `make arm`.
//
//   check [cases] [seed] [--no-fork]        exit code 0 where all agree
//
// Under the thread sanitizer set TSAN_OPTIONS=die_after_fork=0: the child starts threads. qemu-user
// cannot fork a program with threads: --no-fork there.

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
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

// Activations [m, k]: plain, tiny, subnormal, zeros, a row of zeros, with one outlier, or with one
// value that is infinite in fp16.
std::vector<uint8_t> activations(std::mt19937& draw, int64_t m, int64_t k, Kind kind) {
  enum { TINY = 1, SUBNORMAL, ZEROS, ZERO_ROW, OUTLIER, INFINITE, MOST = 12 };
  const unsigned what = draw() % MOST;
  const float subnormal = kind == Kind::fp16 ? 1e-6f : 1e-39f;
  std::vector<uint8_t> x =
      floats(draw, m * k, kind, what == TINY ? 1e-6f : what == SUBNORMAL ? subnormal : 1.0f);
  const int64_t row = draw() % m;
  if (what == ZEROS) std::memset(x.data(), 0, x.size());
  for (int64_t i = 0; what == ZERO_ROW && i < k; ++i) {
    store_float(x.data(), kind, row * k + i, 0.0f);
  }
  if (what == OUTLIER) store_float(x.data(), kind, row * k + draw() % k, -3e4f);
  if (what == INFINITE) store_float(x.data(), kind, row * k + draw() % k, 7e4f);
  return x;
}

Case random_case(std::mt19937& draw) {
  const auto below = [&](int64_t top) { return static_cast<int64_t>(draw() % top); };
  const int64_t sizes[] = {8, 32, 64, 128}, rows[] = {16, 31, 32, 33, 100};
  Case one;
  const int bits = below(4) ? 4 : 8;
  const bool per_channel = bits == 8 || below(4) == 0;
  const int64_t longest = below(4) ? 150 : 700;
  const int64_t group = per_channel ? 1 + below(longest) : sizes[below(4)];
  const int64_t groups = per_channel ? 1 : 1 + below(6);
  one.shape = {bits, 1 + below(100), group * groups, group, bits == 4 && below(2) == 1,
               static_cast<Kind>(below(3))};
  one.m = below(3) ? 1 + below(9) : rows[below(5)];
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
  one.x = activations(draw, one.m, shape.k, one.x_kind);
  if (below(2)) one.bias = floats(draw, shape.n, one.bias_kind, 1.0f);
  if (!one.bias.empty() && below(8) == 0) {  // a NaN that rounding would carry over into zero
    std::memset(one.bias.data(), 0xFF, static_cast<size_t>(bytes_of(one.bias_kind)));
  }
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

// Leaves other activations where linear() keeps them: what a set forgets to write must not be what
// the set before it wrote.
void forget(Case one) {
  std::mt19937 draw(1);
  one.shape.n = 1;
  one.x = floats(draw, one.m * one.shape.k, one.x_kind, 1.0f);
  one.bias.clear();
  product(one, SCALAR, 1);
}

// Equal bit for bit, or both not a number: which NaN an operation keeps is the processor's choice.
bool same(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, Kind kind) {
  if (a == b) return true;
  const int64_t each = bytes_of(kind), count = static_cast<int64_t>(a.size()) / each;
  for (int64_t i = 0; i < count; ++i) {
    const bool both = std::isnan(load_float(a.data(), kind, i)) &&
                      std::isnan(load_float(b.data(), kind, i));
    if (!both && std::memcmp(a.data() + i * each, b.data() + i * each, each) != 0) return false;
  }
  return true;
}

int disagreements(int cases, uint32_t seed) {
  std::mt19937 draw(seed);
  int wrong = 0;
  for (int i = 0; i < cases; ++i) {
    const Case one = random_case(draw);
    const std::vector<uint8_t> wanted = product(one, SCALAR, 1);
    for (const Candidate& candidate : candidates()) {
      if (!candidate.use) continue;
      forget(one);
      if (same(product(one, *candidate.use, 1 + i % 4), wanted, one.y_kind)) continue;
      std::printf("%s: case %d of seed %u, %d bits [%ld, %ld], M %ld\n", candidate.name, i, seed,
                  one.shape.bits, static_cast<long>(one.shape.n), static_cast<long>(one.shape.k),
                  static_cast<long>(one.m));
      ++wrong;
    }
  }
  return wrong;
}

// How many sets give the same products for a weight of which one code has changed.
int blind(uint32_t seed) {
  int sets = 0;
  for (const Candidate& candidate : candidates()) {
    std::mt19937 draw(seed);
    bool sees = !candidate.use;
    for (int i = 0; i < 20 && !sees; ++i) {
      Case one = random_case(draw);
      const std::vector<uint8_t> wanted = product(one, SCALAR, 1);
      one.packed[one.shape.zeros ? LINE : 0] ^= 4;
      sees = !same(product(one, *candidate.use, 1), wanted, one.y_kind);
    }
    if (sees) continue;
    std::printf("%s: a changed code is not seen\n", candidate.name);
    ++sets;
  }
  return sets;
}

// "runs: NAMES", then a line for each that does not; asked for by name, those must be refused.
int introduce() {
  int wrong = 0;
  std::string running, others;
  for (const Candidate& candidate : candidates()) {
    if (candidate.use) {
      running += std::string(" ") + candidate.name;
      continue;
    }
    try {
      choose(candidate.name, 1);
      ++wrong;
    } catch (const std::invalid_argument& refused) {
      others += std::string("refused: ") + refused.what() + "\n";
    }
  }
  std::printf("runs:%s\n%schosen: %s\n", running.c_str(), others.c_str(), choose("", 1).name);
  return wrong;
}

}  // namespace

int main(int count, char** arguments) {
  const int cases = count > 1 ? std::atoi(arguments[1]) : 200;
  const uint32_t seed = count > 2 ? static_cast<uint32_t>(std::atoi(arguments[2])) : 0;
  int wrong = introduce() + blind(seed);
  std::fflush(stdout);  // before a fork copies what is not written yet
  wrong += disagreements(cases, seed);
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
