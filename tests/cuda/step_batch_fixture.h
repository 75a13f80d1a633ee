// Sequences that a Step and a CudaStep run side by side: the same tokens on pages of the host and
// of the GPU, at the same places of two arenas, NaN wherever nothing was written.
#ifndef KVSTRATA_TESTS_CUDA_STEP_BATCH_FIXTURE_H_
#define KVSTRATA_TESTS_CUDA_STEP_BATCH_FIXTURE_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/step/cuda_step.h"
#include "kernels/step/step.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"

namespace kvstrata::cuda {

// Pieces of equal size, scattered over an arena of the host and one of the GPU.
class TwinPieces {
 public:
  TwinPieces(Rng& rng, int count, int64_t bytes)
      : host_(static_cast<size_t>(count * bytes), std::byte{0xFF}), device_(host_.size()) {
    std::vector<int64_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    for (const int64_t i : order) {
      host_pieces.push_back(host_.data() + i * bytes);
      device_pieces.push_back(device_.get() + i * bytes);
    }
  }

  std::vector<std::byte*> host_pieces, device_pieces;

 private:
  std::vector<std::byte> host_;
  DeviceArray<std::byte> device_;
};

struct TwinSequence {
  TwinSequence(Rng& rng, const Geometry& g, const std::string& plan_text, int32_t capacity)
      : plan(ParsePlan(plan_text).value()),
        on_host(std::make_unique<SequenceState>(g, plan, 0, 0)),
        on_device(std::make_unique<SequenceState>(g, plan, 0, 0)),
        pages(rng, capacity / g.page_tokens + 1, g.page_bytes()),
        blocks(rng, on_host->index().BlocksFor(capacity) + 1,
               std::max<int64_t>(on_host->index().block_bytes, 64)) {}

  SequenceView HostView() const {
    return {.pages = pages.host_pieces.data(),
            .index_blocks = blocks.host_pieces.data(),
            .tokens = on_host->tokens()};
  }
  SequenceView DeviceView() const {
    return {.pages = pages.device_pieces.data(),
            .index_blocks = blocks.device_pieces.data(),
            .tokens = on_device->tokens()};
  }
  // The prompt is complete.
  void ClosePrompt(const Backend& backend) {
    ASSERT_TRUE(on_host->PrefillDone(HostView(), backend, InlineExecutor()).ok());
    ASSERT_TRUE(on_device->ClosePrompt().ok());
  }
  // Both forget their index, as of a prefix that is held without one.
  void ForgetIndex(const Geometry& g) {
    on_host = std::make_unique<SequenceState>(g, plan, on_host->tokens(), 0);
    on_device = std::make_unique<SequenceState>(g, plan, on_device->tokens(), 0);
  }

  Plan plan;
  std::unique_ptr<SequenceState> on_host, on_device;
  TwinPieces pages, blocks;
};

// Whether two selections are the same but for units whose scores by `q` [query_heads][head_dim] are
// within 1 % of each other; *equal: they are the same.
class NearTies {
 public:
  NearTies(const TwinSequence& sequence, const Geometry& g, int layer, const float* q)
      : sequence_(sequence), g_(g), layer_(layer), q_(q) {}

  bool Agree(const Selection& want, const Selection& got, bool* equal) const {
    *equal = want.runs == got.runs && want.units == got.units && want.full == got.full;
    if (*equal) return true;
    if (want.full || got.full || want.units.size() != got.units.size()) return false;
    for (int head = 0; head < g_.kv_heads; ++head) {
      const std::vector<int32_t>& a = want.units[head];
      const std::vector<int32_t>& b = got.units[head];
      if (a.size() != b.size()) return false;
      std::vector<int32_t> missing, extra;
      std::ranges::set_difference(a, b, std::back_inserter(missing));
      std::ranges::set_difference(b, a, std::back_inserter(extra));
      const std::vector<double> scores = Scores(want, head);
      for (const int32_t m : missing) {
        for (const int32_t e : extra) {
          if (scores[m] - scores[e] > 1e-2 * std::abs(scores[m])) return false;
        }
      }
    }
    return true;
  }

 private:
  // Of the units that compete, by id.
  std::vector<double> Scores(const Selection& s, int head) const {
    const Plan& plan = sequence_.plan;
    const int32_t first = (plan.n_sink + plan.page - 1) / plan.page;
    const int32_t last = (s.tokens - plan.n_recent) / plan.page;
    std::vector<double> scores(static_cast<size_t>(last), 0);
    for (int i = 0; i < g_.group(); ++i) {
      const float* q = q_ + int64_t{head * g_.group() + i} * g_.head_dim;
      std::vector<double> bounds;
      for (int32_t u = first; u < last; ++u) bounds.push_back(Bound(head, u, q));
      const double top = *std::ranges::max_element(bounds);
      double sum = 0;
      for (double& x : bounds) {
        if (plan.group_softmax) sum += x = std::exp((x - top) / std::sqrt(g_.head_dim));
      }
      for (int32_t u = first; u < last; ++u) {
        const double x = bounds[static_cast<size_t>(u - first)];
        double& score = scores[static_cast<size_t>(u)];
        score = plan.group_softmax ? score + x / sum : i == 0 ? x : std::max(score, x);
      }
    }
    return scores;
  }
  double Bound(int head, int32_t unit, const float* q) const {
    const IndexLayout& index = sequence_.on_host->index();
    const auto* blocks = sequence_.blocks.host_pieces.data();
    const std::byte* low = index.Row(blocks, 0, layer_, 0, head, unit);
    const std::byte* high = index.Row(blocks, 0, layer_, 1, head, unit);
    const int64_t size = SizeOf(index.dtype);
    double sum = 0;
    for (int c = 0; c < g_.head_dim; ++c) {
      const double x = q[c];
      sum += std::max(x * LoadFloat(low + c * size, index.dtype),
                      x * LoadFloat(high + c * size, index.dtype));
    }
    return sum;
  }

  const TwinSequence& sequence_;
  const Geometry& g_;
  const int layer_;
  const float* q_;
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_TESTS_CUDA_STEP_BATCH_FIXTURE_H_
