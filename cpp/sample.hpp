// The next token from logits: one pass over the vocabulary, then work on the few that are left.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace weightpath {

// What is asked of one choice. The settings mean what src/weightpath/engine/sampling.py says.
struct SampleRequest {
  const float* logits;  // [vocabulary]
  int64_t vocabulary;
  const int32_t* seen;  // ids that the repetition penalty takes, repeats allowed
  int64_t seen_count;
  double repetition_penalty;
  double temperature;  // 0 takes the most likely token
  int64_t top_k;       // 0: all
  double top_p, min_p;
  double uniform;  // in [0, 1): which of the tokens left is drawn
  int64_t top;     // log-probabilities wanted beside the chosen token's; -1: none at all
};

struct Sampled {
  bool finite = false;  // false: a logit is NaN or infinite, and nothing below means anything
  int64_t token = 0;
  double logprob = 0.0;                          // of `token`, over the logits as they came
  std::vector<std::pair<int64_t, double>> best;  // the `top` most likely: id, log-probability
};

Sampled sample(const SampleRequest& request);

// Values of a block: passes keep one maximum and one sum of each.
constexpr int64_t SAMPLE_BLOCK = 128;

// The passes over all logits, one table an instruction set (sample_passes.hpp says what each does).
struct SamplePasses {
  bool (*block_maxima)(const float* x, int64_t n, float* maxima);
  double (*weigh)(const float* x, int64_t n, float largest, float inverse, double* sums,
                  float* weights);
  int64_t (*pick)(const float* x, int64_t count, float bound, int64_t first, int64_t* ids,
                  float* values);
  int64_t (*split)(const float* x, const float* weights, int64_t n, float largest, float scale,
                   float low, float high, double* sums, float* values, float* theirs);
  double (*kept)(const float* x, const float* weights, int64_t count, float bound);
};

extern const SamplePasses SAMPLE_AVX2;  // where the compiler and the CPU have it

}  // namespace weightpath
