// Sampling: repetition penalty, temperature, top-k, top-p, min-p, in transformers' order, then one
// draw. Tokens of equal logits stand or fall together at each limit.
//
//   w[i] = exp((s[i] - max s) / T),  s the penalised logits
//   top-k: s[i] >= the k-th largest;  top-p: the weight of all strictly larger < p * sum w;
//   min-p: w[i] >= min_p;  drawn: the first i, ids ascending, whose running sum exceeds u * sum w
//
// What looks at the whole vocabulary is in sample_passes.hpp, by blocks of 128. Block maxima bound
// what has to be looked at again: the k-th largest of them is no more than the k-th largest logit,
// and tokens under (1 - p) / vocabulary together weigh less than 1 - p. exp is 2^n times a
// polynomial of degree 7 (relative error 2e-7); sums are in double.
//
// top-p over a broad distribution neither gathers nor sorts what it keeps: where the limit lies is
// guessed from a sixteenth of the blocks, and one pass sums what is above the guess and takes out
// what is near it. A guess that proves wrong costs the way that gathers all.

#include "sample.hpp"

#include <algorithm>
#include <cmath>
#include <functional>

#include "cpuid.hpp"
#include "sample_passes.hpp"

namespace weightpath {
namespace {

constexpr int64_t BLOCK = SAMPLE_BLOCK;
constexpr int64_t FEW = 100;         // tokens that are tried for a nucleus first
constexpr double ROUNDING = 1e-6;    // of a sum of weights
constexpr double SLACK = 1e-3;       // of an exponent
constexpr int STEPS = 2048;          // in which weights are summed for a nucleus, so many
constexpr int A_UNIT = 16;           // to a unit of the exponent
constexpr int64_t BROAD = 64;        // blocks from which a nucleus is guessed at
constexpr int64_t STRIDE = 16;       // of the blocks that a guess looks at
constexpr int ASIDE = 2;             // steps that a guess may be off at first
constexpr int FINE = 16;             // parts of a step, where what is near the limit is in order

const SamplePasses& passes() {
  static constexpr SamplePasses PLAIN{block_maxima, weigh, pick, split, kept};
#ifdef WEIGHTPATH_AVX2
  static const bool avx2 = features().avx2;
  if (avx2) return SAMPLE_AVX2;
#endif
  return PLAIN;
}

// Buffers of a thread, kept from token to token.
struct Scratch {
  std::vector<float> penalised, maxima, raw_maxima, order, all_weights;
  std::vector<double> sums;
  std::vector<int64_t> ids;            // of what is gathered,
  std::vector<float> values, weights;  // and what is; room for the vocabulary, `count` are there
  size_t count = 0;
};

size_t blocks_of(int64_t n) { return static_cast<size_t>((n + BLOCK - 1) / BLOCK); }

bool maxima_of(const float* x, int64_t n, std::vector<float>& maxima) {
  maxima.resize(blocks_of(n));
  return passes().block_maxima(x, n, maxima.data());
}

double sums_of(const float* x, int64_t n, float largest, float inverse, std::vector<double>& sums) {
  sums.resize(blocks_of(n));
  return passes().weigh(x, n, largest, inverse, sums.data(), nullptr);
}

float largest_of(const std::vector<float>& values) {
  return *std::max_element(values.begin(), values.end());
}

// Lowest id of the largest value.
int64_t position_of_largest(const float* x, int64_t n, const std::vector<float>& maxima) {
  const auto block = std::max_element(maxima.begin(), maxima.end());
  const int64_t start = (block - maxima.begin()) * BLOCK;
  return std::find(x + start, x + std::min(n, start + BLOCK), *block) - x;
}

// Ids of all values >= bound, ascending, and the values.
void gather(const float* x, int64_t n, const std::vector<float>& maxima, float bound,
            Scratch& room) {
  const size_t most = (maxima.size() + 1) * BLOCK;
  if (room.ids.size() < most) {
    room.ids.resize(most);
    room.values.resize(most);
    room.weights.resize(most);
  }
  room.count = 0;
  for (size_t block = 0; block < maxima.size(); ++block) {
    if (maxima[block] < bound) continue;
    const int64_t start = static_cast<int64_t>(block) * BLOCK;
    room.count += static_cast<size_t>(
        passes().pick(x + start, std::min(BLOCK, n - start), bound, start,
                      room.ids.data() + room.count, room.values.data() + room.count));
  }
}

// A bound that at least k values reach.
float bound_of_top(const std::vector<float>& maxima, int64_t k, std::vector<float>& order) {
  if (k > static_cast<int64_t>(maxima.size())) return LOWEST;
  order = maxima;
  const auto nth = order.begin() + (k - 1);
  std::nth_element(order.begin(), nth, order.end(), std::greater<>());
  return *nth;
}

// The k-th largest of the gathered values, k <= their number.
float kth_largest(Scratch& room, int64_t k) {
  room.order.assign(room.values.data(), room.values.data() + room.count);
  const auto nth = room.order.begin() + (k - 1);
  std::nth_element(room.order.begin(), nth, room.order.end(), std::greater<>());
  return *nth;
}

// w of every gathered value, and their sum, taken in order.
double gathered_weights(Scratch& room, float largest, float inverse) {
  const int64_t count = static_cast<int64_t>(room.count);
  room.sums.resize(blocks_of(count));
  passes().weigh(room.values.data(), count, largest, inverse, room.sums.data(),
                 room.weights.data());
  double total = 0.0;
  for (size_t i = 0; i < room.count; ++i) total += static_cast<double>(room.weights[i]);
  return total;
}

// Steps of 1 / scale below `largest`, counted from `first`; what is beyond is in the last.
int step_of(float value, float largest, float scale, float first = 0.0f) {
  const float distance = (largest - value) * scale - first;
  return distance < STEPS - 1 ? static_cast<int>(distance) : STEPS - 1;
}

// The smallest of the gathered values that is kept where those strictly above it must weigh less
// than `target`; what is not gathered and above them weighs `above`. w = exp((x - largest) *
// inverse). Weights are summed by steps (`scale`, from `first` on, see step_of); then the values of
// the step in which the target is reached are put in order.
float nucleus_bound(Scratch& room, float largest, float inverse, float scale, float first,
                    double target, double above) {
  double steps[STEPS] = {};
  int last = 0;
  for (size_t i = 0; i < room.count; ++i) {
    const int step = step_of(room.values[i], largest, scale, first);
    steps[step] += static_cast<double>(room.weights[i]);
    last = std::max(last, step);
  }
  int step = 0;
  while (step < last && above + steps[step] < target) above += steps[step++];
  room.order.clear();
  for (size_t i = 0; i < room.count; ++i) {
    if (step_of(room.values[i], largest, scale, first) == step) {
      room.order.push_back(room.values[i]);
    }
  }
  std::sort(room.order.begin(), room.order.end(), std::greater<>());
  float kept = room.order.empty() ? largest : room.order.front();
  for (const float value : room.order) {
    if (value != kept && above >= target) break;
    kept = value;
    above += std::exp(static_cast<double>(kept - largest) * inverse);
  }
  return kept;
}

// The step in which a nucleus ends, by every STRIDE-th block: `gathered` is the weight of values
// >= `bound`, all of them in the nucleus; among the others the sampled blocks stand for all.
int guessed_step(const SampleRequest& ask, const float* scores, float largest, float inverse,
                 float bound, double gathered, double total, double target, const Scratch& room) {
  double steps[STEPS] = {}, seen = 0.0;
  const int64_t blocks = static_cast<int64_t>(room.maxima.size());
  for (int64_t block = 0; block < blocks; block += STRIDE) {
    const int64_t stop = std::min(ask.vocabulary, (block + 1) * BLOCK);
    for (int64_t i = block * BLOCK; i < stop; ++i) {
      if (scores[i] >= bound) continue;
      const double weight = static_cast<double>(room.all_weights[static_cast<size_t>(i)]);
      steps[step_of(scores[i], largest, inverse * A_UNIT)] += weight;
      seen += weight;
    }
  }
  const double wanted = (target - gathered) / (total - gathered) * seen;
  double above = 0.0;
  int step = 0;
  while (step < STEPS - 1 && above + steps[step] < wanted) above += steps[step++];
  return step;
}

// A token of a nucleus that is broad. room.all_weights: of all; gathered are the values >= `few`,
// together `weight`. -1 where the limit was not found near the guess.
int64_t draw_from_many(const SampleRequest& ask, const float* scores, float largest, float inverse,
                       float least, float few, double weight_of_few, double total, Scratch& room) {
  const double target = ask.top_p * total;
  const int64_t n = ask.vocabulary;
  const float* weights = room.all_weights.data();
  const float scale = inverse * (A_UNIT * FINE);  // from here on in parts of a step
  int low = guessed_step(ask, scores, largest, inverse, few, weight_of_few, total, target, room);
  low = std::max(0, low - ASIDE) * FINE;
  double sums[2];
  for (int width = (2 * ASIDE + 1) * FINE;; width *= 2) {
    if (low + width >= STEPS * FINE) return -1;
    room.count = static_cast<size_t>(
        passes().split(scores, weights, n, largest, scale, static_cast<float>(low),
                       static_cast<float>(low + width), sums, room.values.data(),
                       room.weights.data()));
    if (sums[0] >= target) {  // not in these steps: look in those beside them, twice as many
      low = std::max(0, low - 2 * width);
    } else if (sums[0] + sums[1] < target) {
      low += width;
    } else {
      break;
    }
  }
  const double above = sums[0];
  const float limit =
      nucleus_bound(room, largest, inverse, scale, static_cast<float>(low), target, above);
  const float bound = std::max(least, limit);
  const auto weight_of = [&](int64_t start) {
    return passes().kept(scores + start, weights + start, std::min(BLOCK, n - start), bound);
  };
  double kept = above;
  for (size_t i = 0; i < room.count; ++i) {
    if (room.values[i] >= bound) kept += static_cast<double>(room.weights[i]);
  }
  if (least > limit) {  // min-p is the stricter, and may leave out some of what is above
    kept = 0.0;
    for (int64_t start = 0; start < n; start += BLOCK) kept += weight_of(start);
  }
  double left = ask.uniform * kept;
  int64_t last = 0;
  for (int64_t start = 0; start < n; start += BLOCK) {
    const int64_t stop = std::min(n, start + BLOCK);
    const double sum = weight_of(start);
    if (left >= sum && stop < n) {
      left -= sum;
      continue;
    }
    for (int64_t i = start; i < stop; ++i) {
      if (scores[i] < bound) continue;
      last = i;
      const double weight = static_cast<double>(weights[i]);
      if (left < weight) return i;
      left -= weight;
    }
  }
  return last;  // rounding left less than nothing of the sum
}

int64_t draw_from_all(const SampleRequest& ask, const float* scores, float largest, float inverse,
                      Scratch& room) {
  const double total = sums_of(scores, ask.vocabulary, largest, inverse, room.sums);
  double left = ask.uniform * total;
  const size_t blocks = room.sums.size();
  size_t block = 0;
  while (block + 1 < blocks && left >= room.sums[block]) left -= room.sums[block++];
  const int64_t start = static_cast<int64_t>(block) * BLOCK;
  const int64_t count = std::min(BLOCK, ask.vocabulary - start);
  float weights[BLOCK];
  double sum;
  passes().weigh(scores + start, count, largest, inverse, &sum, weights);
  int64_t i = 0;
  while (i + 1 < count && left >= static_cast<double>(weights[i])) {
    left -= static_cast<double>(weights[i++]);
  }
  return start + i;
}

int64_t draw(const SampleRequest& ask, const float* scores, Scratch& room) {
  const float largest = largest_of(room.maxima);
  const double temperature = ask.temperature;
  const float inverse = static_cast<float>(1.0 / temperature);
  const bool some = ask.top_k > 0 && ask.top_k < ask.vocabulary, nucleus = ask.top_p < 1.0;
  const float least = ask.min_p > 0.0
      ? static_cast<float>(largest + temperature * std::log(ask.min_p))
      : LOWEST;
  if (!some && !nucleus && ask.min_p == 0.0) {
    return draw_from_all(ask, scores, largest, inverse, room);
  }
  float bound = least;
  if (some) {
    gather(scores, ask.vocabulary, room.maxima, bound_of_top(room.maxima, ask.top_k, room.order),
           room);
    bound = std::max(bound, kth_largest(room, ask.top_k));
    if (nucleus) {  // over the top k alone, ties with the last included
      const float kth = room.order[static_cast<size_t>(ask.top_k - 1)];
      gather(scores, ask.vocabulary, room.maxima, kth, room);
      const double share = ask.top_p * gathered_weights(room, largest, inverse);
      bound = std::max(bound, nucleus_bound(room, largest, inverse, inverse * A_UNIT, 0.0f,
                                              share, 0.0));
    }
  } else if (nucleus) {
    room.all_weights.resize(blocks_of(ask.vocabulary) * BLOCK);
    room.sums.resize(blocks_of(ask.vocabulary));
    const double total = passes().weigh(scores, ask.vocabulary, largest, inverse, room.sums.data(),
                                        room.all_weights.data());
    // The nucleus of a usual distribution is among its most likely tokens; else look wider.
    const int64_t few = std::min<int64_t>(FEW, static_cast<int64_t>(room.maxima.size()));
    const float likely = bound_of_top(room.maxima, few, room.order);
    gather(scores, ask.vocabulary, room.maxima, likely, room);
    const double gathered = gathered_weights(room, largest, inverse);
    if (gathered < (ask.top_p + ROUNDING) * total) {
      if (static_cast<int64_t>(room.maxima.size()) >= BROAD) {
        const int64_t token = draw_from_many(ask, scores, largest, inverse, least, likely, gathered,
                                             total, room);
        if (token >= 0) return token;
      }
      const double share = (1.0 - ask.top_p) * total / static_cast<double>(ask.vocabulary);
      const double low = largest + temperature * (std::min(0.0, std::log(share)) - SLACK);
      gather(scores, ask.vocabulary, room.maxima, static_cast<float>(low), room);
      gathered_weights(room, largest, inverse);
    }
    bound = std::max(bound, nucleus_bound(room, largest, inverse, inverse * A_UNIT, 0.0f,
                                            ask.top_p * total, 0.0));
  }
  gather(scores, ask.vocabulary, room.maxima, bound, room);
  double left = ask.uniform * gathered_weights(room, largest, inverse);
  size_t i = 0;
  while (i + 1 < room.count && left >= static_cast<double>(room.weights[i])) {
    left -= static_cast<double>(room.weights[i++]);
  }
  return room.ids[i];
}

void best_of(const SampleRequest& ask, double log_sum, Scratch& room, Sampled& found) {
  const int64_t top = std::min(ask.top, ask.vocabulary);
  if (top <= 0) return;
  gather(ask.logits, ask.vocabulary, room.raw_maxima,
         bound_of_top(room.raw_maxima, top, room.order), room);
  for (size_t i = 0; i < room.count; ++i) {
    found.best.emplace_back(room.ids[i], static_cast<double>(room.values[i]) - log_sum);
  }
  const auto before = [](const auto& a, const auto& b) {
    return a.second > b.second || (a.second == b.second && a.first < b.first);
  };
  const auto middle = found.best.begin() + top;
  std::partial_sort(found.best.begin(), middle, found.best.end(), before);
  found.best.resize(static_cast<size_t>(top));
}

}  // namespace

Sampled sample(const SampleRequest& ask) {
  static thread_local Scratch room;
  Sampled found;
  if (!maxima_of(ask.logits, ask.vocabulary, room.raw_maxima)) return found;
  found.finite = true;
  const float* scores = ask.logits;
  room.maxima = room.raw_maxima;
  if (ask.repetition_penalty != 1.0 && ask.seen_count > 0) {
    room.penalised.assign(ask.logits, ask.logits + ask.vocabulary);
    const float penalty = static_cast<float>(ask.repetition_penalty);
    for (int64_t i = 0; i < ask.seen_count; ++i) {
      const int64_t id = ask.seen[i];
      if (id < 0 || id >= ask.vocabulary) continue;  // an embedding may have more rows than a head
      const float logit = ask.logits[id];
      room.penalised[static_cast<size_t>(id)] = logit < 0 ? logit * penalty : logit / penalty;
    }
    scores = room.penalised.data();
    maxima_of(scores, ask.vocabulary, room.maxima);
  }
  found.token = ask.temperature > 0.0 ? draw(ask, scores, room)
                                      : position_of_largest(scores, ask.vocabulary, room.maxima);
  if (ask.top < 0) return found;
  const float largest = largest_of(room.raw_maxima);
  const double log_sum = static_cast<double>(largest)
      + std::log(sums_of(ask.logits, ask.vocabulary, largest, 1.0f, room.sums));
  found.logprob = static_cast<double>(ask.logits[found.token]) - log_sum;
  best_of(ask, log_sum, room, found);
  return found;
}

}  // namespace weightpath
