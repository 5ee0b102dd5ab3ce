// The surface of weightpath._cpu.Decoder. Tensors arrive as addresses; what they mean, and that
// they live as long as the decoder does, is seen to in src/weightpath/engine/decode.py.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "bind_decoder.hpp"
#include "decoder.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace weightpath;

namespace {

template <typename T>
const T* at(uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

Matrix packed_matrix(int bits, int64_t n, int64_t k, int64_t group, bool zeros, int scales,
                     uintptr_t packed, int64_t stride, uintptr_t bias, int planes, bool per_group,
                     uintptr_t order, uintptr_t column_scales) {
  Matrix one;
  one.shape = {bits, n, k, group, zeros, static_cast<Kind>(scales)};
  one.packed = at<uint8_t>(packed);
  one.stride = stride;
  one.bias = at<float>(bias);
  one.planes = planes;
  one.per_group = per_group;
  one.order = at<int64_t>(order);
  one.column_scales = at<float>(column_scales);
  return one;
}

Matrix float_matrix(int64_t n, int64_t k, uintptr_t floats, int kind, uintptr_t bias) {
  Matrix one;
  one.shape = {8, n, k, k, false, Kind::fp32};
  one.floats = at<void>(floats);
  one.kind = static_cast<Kind>(kind);
  one.bias = at<float>(bias);
  return one;
}

}  // namespace

void bind_decoder(nb::module_& module) {
  nb::class_<Matrix>(module, "Matrix");
  module.def("packed_matrix", &packed_matrix, "bits"_a, "n"_a, "k"_a, "group"_a, "zeros"_a,
             "scales"_a, "packed"_a, "stride"_a, "bias"_a, "planes"_a, "per_group"_a, "order"_a,
             "column_scales"_a);
  module.def("float_matrix", &float_matrix, "n"_a, "k"_a, "floats"_a, "kind"_a, "bias"_a);
  module.attr("CACHE_BLOCK") = BLOCK;

  nb::class_<Decoder>(module, "Decoder")
      .def("__init__", [](Decoder* self, int64_t hidden, int64_t intermediate,
                          int64_t vocabulary, int64_t most_rows, int64_t layers, int64_t heads,
                          int64_t kv_heads, int64_t head_dim, float scaling, float epsilon,
                          int cache_kind, uintptr_t table, int table_kind,
                          const std::string& instruction_set) {
        const CacheShape cache{static_cast<CacheKind>(cache_kind), layers, kv_heads, head_dim};
        const AttentionShape attention{heads, kv_heads, head_dim, scaling, epsilon, cache};
        new (self) Decoder({hidden, intermediate, vocabulary, most_rows, attention,
                            at<void>(table), static_cast<Kind>(table_kind)},
                           instruction_set);
      }, "hidden"_a, "intermediate"_a, "vocabulary"_a, "most_rows"_a, "layers"_a, "heads"_a,
         "kv_heads"_a, "head_dim"_a, "scaling"_a, "epsilon"_a, "cache_kind"_a, "table"_a,
         "table_kind"_a, "instruction_set"_a)
      .def("add_layer", [](Decoder& self, int64_t index, const std::vector<Matrix>& matrices,
                           uintptr_t input_norm, uintptr_t post_norm, uintptr_t q_norm,
                           uintptr_t k_norm, int64_t window) {
        const auto& m = matrices;  // q, k, v, o, gate, up, down
        if (m.size() != 7) throw nb::value_error("a layer has 7 matrices");
        self.add_layer({Group({m[0], m[1], m[2]}, false), Group({m[3]}, false),
                        Group({m[4], m[5]}, true), Group({m[6]}, false), at<float>(input_norm),
                        at<float>(post_norm),
                        {index, window, at<float>(q_norm), at<float>(k_norm)}});
      }, "index"_a, "matrices"_a, "input_norm"_a, "post_norm"_a, "q_norm"_a, "k_norm"_a,
         "window"_a)
      .def("set_head", [](Decoder& self, uintptr_t norm, const Matrix& head) {
        self.set_head(at<float>(norm), head);
      }, "norm"_a, "head"_a)
      .def("set_rope", [](Decoder& self, uintptr_t cosines, uintptr_t sines, int64_t positions,
                          int64_t half) {
        self.set_rope({at<float>(cosines), at<float>(sines), positions, half});
      }, "cosines"_a, "sines"_a, "positions"_a, "half"_a)
      .def("step", [](Decoder& self, const std::vector<int64_t>& tokens,
                      const std::vector<uintptr_t>& caches, const std::vector<int64_t>& positions,
                      const std::vector<int64_t>& wanted, uintptr_t logits, int threads) {
        if (caches.size() != tokens.size() || positions.size() != tokens.size()) {
          throw nb::value_error("tokens, caches and positions differ in number");
        }
        std::vector<Row> rows;
        rows.reserve(tokens.size());
        for (size_t i = 0; i < tokens.size(); ++i) {
          rows.push_back({tokens[i], reinterpret_cast<uint8_t*>(caches[i]), positions[i]});
        }
        bool done;
        {
          const nb::gil_scoped_release released;
          done = self.step(rows, wanted, reinterpret_cast<float*>(logits), threads);
        }
        if (!done) throw std::bad_alloc();
      }, "tokens"_a, "caches"_a, "positions"_a, "wanted"_a, "logits"_a, "threads"_a)
      .def("profile", &Decoder::profile, "on"_a)
      .def("nanoseconds", [](const Decoder& self) {
        std::vector<std::tuple<std::string, int64_t>> all;
        const auto spent = self.nanoseconds();
        for (size_t i = 0; i < spent.size(); ++i) all.emplace_back(PHASES[i], spent[i]);
        return all;
      });
  module.def("cache_block_bytes", [](int kind, int64_t layers, int64_t heads, int64_t head_dim) {
    return CacheShape{static_cast<CacheKind>(kind), layers, heads, head_dim}.block_bytes();
  }, "kind"_a, "layers"_a, "kv_heads"_a, "head_dim"_a);
}
