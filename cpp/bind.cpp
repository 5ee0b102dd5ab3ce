// The surface of weightpath._cpu. Tensors arrive as addresses with shapes and kinds: what they
// mean, and that they are contiguous and large enough, is checked in src/weightpath/kernels/cpu.py.

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind_decoder.hpp"
#include "cpuid.hpp"
#include "dispatch.hpp"
#include "linear.hpp"
#include "memory.hpp"
#include "pack.hpp"
#include "pool.hpp"
#include "sample.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weightpath;

namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Rows of x for which the peak is asked: the set of the longest products.
constexpr int64_t MANY_ROWS = 1 << 20;

Shape shape_of(int bits, int64_t n, int64_t k, int64_t group, bool zeros, int scales) {
  return {bits, n, k, group, zeros, static_cast<Kind>(scales)};
}

}  // namespace

NB_MODULE(_cpu, module) {
  module.doc() = "Products of low-bit weights on the CPU; used through weightpath.kernels.cpu.";

  module.def("instruction_sets", [] {
    std::vector<std::tuple<std::string, std::string>> all;
    for (const Candidate& one : candidates()) all.emplace_back(one.name, one.refusal);
    return all;
  }, "(name, why it cannot run or '') of every instruction set, fastest first.");
  module.def("chosen", [](const std::string& wanted, int64_t rows) {
    return std::string(choose(wanted, rows).name);
  }, "wanted"_a, "rows"_a,
             "The name that runs: the fastest for so many rows, or `wanted`; ValueError says why.");
  module.def("amx_refusal", [] { return features().amx_refusal; });

  module.def("packed_bytes", [](int bits, int64_t n, int64_t k, int64_t group, bool zeros,
                                int scales) {
    const Shape shape = shape_of(bits, n, k, group, zeros, scales);
    return shape.tiles() * shape.tile_bytes();
  }, "bits"_a, "n"_a, "k"_a, "group"_a, "zeros"_a, "scales"_a);

  module.def("pack", [](int bits, int64_t n, int64_t k, int64_t group, bool has_zeros, int kind,
                        uintptr_t codes, int source, uintptr_t scales, uintptr_t zeros,
                        uintptr_t packed, int threads) {
    const Shape shape = shape_of(bits, n, k, group, has_zeros, kind);
    const nb::gil_scoped_release released;
    pack(shape, pointer<const void>(codes), static_cast<Codes>(source),
         pointer<const void>(scales), pointer<const uint8_t>(zeros), pointer<uint8_t>(packed),
         threads);
  });

  module.def("linear", [](const std::string& wanted, int bits, int64_t n, int64_t k, int64_t group,
                          bool zeros, int scales, uintptr_t packed, uintptr_t x, int x_kind,
                          int64_t m, int planes, bool per_group, uintptr_t y, int y_kind,
                          uintptr_t bias, int bias_kind, int threads) {
    const InstructionSet& set = choose(wanted, m);
    const Shape shape = shape_of(bits, n, k, group, zeros, scales);
    const Output out{pointer<void>(y), static_cast<Kind>(y_kind), pointer<const void>(bias),
                     static_cast<Kind>(bias_kind)};
    bool done;
    {
      const nb::gil_scoped_release released;
      done = linear(set, shape, pointer<const uint8_t>(packed), pointer<const void>(x),
                    static_cast<Kind>(x_kind), m, planes, per_group, out, threads);
    }
    if (!done) throw std::bad_alloc();
  });

  module.def("advise_huge_pages", [](uintptr_t address, int64_t bytes) {
    return advise_huge_pages(pointer<void>(address), bytes);
  }, "address"_a, "bytes"_a);
  module.def("read_all", [](uintptr_t address, int64_t bytes, int threads) {
    const InstructionSet& set = choose("", 1);
    const nb::gil_scoped_release released;
    return read_all(set, pointer<const void>(address), bytes, threads);
  }, "address"_a, "bytes"_a, "threads"_a);
  module.def("checksum", [](uintptr_t address, int64_t bytes, int threads) {
    const nb::gil_scoped_release released;
    return checksum(pointer<const void>(address), bytes, threads);
  }, "address"_a, "bytes"_a, "threads"_a);
  module.def("burn", [](const std::string& wanted, int64_t rounds, int threads) {
    const InstructionSet& set = choose(wanted, MANY_ROWS);
    if (!set.burn) return int64_t{0};
    const nb::gil_scoped_release released;
    std::atomic<int64_t> products{0};
    parallel(threads, threads, [&](int64_t start, int64_t stop) {
      for (int64_t i = start; i < stop; ++i) products += set.burn(rounds);
    });
    return products.load();
  }, "wanted"_a, "rounds"_a, "threads"_a, "int8 products done from registers; 0 if unwritten.");
  // Whether all logits are finite, the token, its log-probability, and (id, that) of the best.
  module.def("sample", [](uintptr_t logits, int64_t vocabulary, uintptr_t seen, int64_t seen_count,
                          double repetition_penalty, double temperature, int64_t top_k,
                          double top_p, double min_p, double uniform, int64_t top) {
    const SampleRequest request{pointer<const float>(logits), vocabulary,
                                pointer<const int32_t>(seen), seen_count, repetition_penalty,
                                temperature, top_k, top_p, min_p, uniform, top};
    Sampled found = sample(request);
    return std::make_tuple(found.finite, found.token, found.logprob, std::move(found.best));
  });
  module.def("set_pinning", &set_pinning, "pinned"_a);
  module.def("workers", &workers);
  bind_decoder(module);
}
