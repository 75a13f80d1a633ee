// SPDX-License-Identifier: Apache-2.0
// StepTensors: the tensors that an engine has for a step, on the GPU, with random elements.
// SentenceEnds: which tokens of a text end sentences.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "bench/cuda/linked_plans.h"
#include "client/include/kvstrata/kvstrata.h"
#include "kernels/pages/dtype.h"
#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {

class StepTensors {
 public:
  StepTensors(const Plan& plan, int batch)
      : batch_(batch),
        rows_(Random(int64_t{2} * kChunk * kKvHeads * kDim)),
        q_(plan.spans ? SpanQueries(plan.agreed) : Random(int64_t{batch} * kHeads * kDim)),
        queries_(Random(int64_t{2} * batch * kHeads * kDim)),
        observed_(Random(int64_t{kObserved} * kHeads * kDim)),
        out_(static_cast<size_t>(std::max(batch, kObserved)) * kHeads * kDim) {}

  size_t bytes() const {
    return (rows_.size() + q_.size() + queries_.size() + observed_.size() + out_.size()) *
           sizeof(BF16);
  }
  // Keys of `tokens` rows, and their values. A decode step's are always the same.
  kvs_tensor StepRows(int32_t tokens) const { return Tensor(rows_.get(), kKvHeads, tokens); }
  // A prompt's chunks begin anywhere in them: were they all the same, units that are selected would
  // lie as regularly, at addresses that share channels of the memory.
  kvs_tensor PromptRows(int32_t tokens) {
    const auto first = static_cast<int64_t>(rng_() % kChunk);
    return Tensor(rows_.get() + first * kKvHeads * kDim, kKvHeads, tokens);
  }
  kvs_tensor Queries(int32_t tokens) const {
    return Tensor(tokens == kObserved ? observed_.get() : q_.get(), kHeads, tokens);
  }
  kvs_tensor Output(int32_t tokens) const { return Tensor(out_.get(), kHeads, tokens); }

  // The queries of a decode step become others: there are two, which alternate.
  void MoveQuery(cudaStream_t stream) {
    moved_ = !moved_;
    const size_t n = q_.size();
    Check(cudaMemcpyAsync(q_.get(), queries_.get() + (moved_ ? n : 0), n * sizeof(BF16),
                          cudaMemcpyDeviceToDevice, stream),
          "another query");
  }
  // Whether the output of a decode step is finite.
  bool Sound() const {
    const std::vector<BF16> out = out_.Read();
    return std::all_of(out.begin(), out.begin() + int64_t{batch_} * kHeads * kDim,
                       [](BF16 x) { return std::isfinite(ToFloat(x)); });
  }

 private:
  static kvs_tensor Tensor(BF16* data, int heads, int32_t tokens) {
    return kvs_tensor{data, KVS_BF16, heads, kDim, tokens, 0, 0};
  }
  std::vector<BF16> Random(int64_t n) {
    std::normal_distribution<float> normal;
    std::vector<BF16> values(static_cast<size_t>(n));
    for (BF16& x : values) x = FromFloat<BF16>(normal(rng_));
    return values;
  }
  std::vector<BF16> SpanQueries(bool agreed) {
    std::vector<BF16> q = Random(int64_t{batch_} * kHeads * kDim);
    for (BF16& x : q) x = FromFloat<BF16>(kSpanQueryScale * ToFloat(x));
    constexpr size_t kGroup = kHeads / kKvHeads;
    for (size_t head = 0; agreed && head < q.size() / kDim; ++head) {
      std::copy_n(q.begin() + static_cast<int64_t>(head / kGroup * kGroup * kDim), kDim,
                  q.begin() + static_cast<int64_t>(head * kDim));
    }
    return q;
  }

  const int batch_;
  std::mt19937 rng_{std::random_device{}()};
  const DeviceArray<BF16> rows_, q_, queries_, observed_, out_;
  bool moved_ = false;
};

class SentenceEnds {
 public:
  // Among the next `count` tokens; lengths are lognormal, cut at the plan's 100.
  std::vector<uint8_t> Next(int32_t count) {
    std::lognormal_distribution<double> length(std::log(kSentence), 0.5);
    std::vector<uint8_t> ends(static_cast<size_t>(count));
    for (uint8_t& end : ends) {
      if (--left_ > 0) continue;
      end = 1;
      left_ = std::max(1, static_cast<int>(length(rng_)));
    }
    return ends;
  }

 private:
  std::mt19937 rng_{std::random_device{}()};
  int left_ = 1;  // tokens of the sentence
};

// Exponential: one in 20 is an anchor at alpha = 2, about as in prose.
inline std::vector<float> RandomSurprisal(int32_t tokens) {
  std::mt19937 rng{std::random_device{}()};
  std::exponential_distribution<float> surprisal;
  std::vector<float> nats(static_cast<size_t>(tokens));
  for (float& x : nats) x = surprisal(rng);
  return nats;
}

}  // namespace kvstrata::cuda
