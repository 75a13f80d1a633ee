// SPDX-License-Identifier: Apache-2.0
// Random quantised keys and queries for ops over them, and what op vote must make of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/vote/vote.h"
#include "tests/cuda/quantised_blocks.h"
#include "tests/cuda/relative_error.h"

namespace kvstrata::cuda {

// A call of op vote over quantised keys.
struct VoteBitsShape {
  int batch = 2, kv_heads = 2, group = 4;
  QuantisedGroup format{128, 2, 64};
  DType q_dtype = DType::kBF16;
  int sinks = 37, recent = 301, run = 1;
  bool per_head = true;
  bool shares = false;  // with `always`
  int tokens_max = 5000;
  float q_size = 2.0f;  // logits of a few units, as real heads have
  bool alike = false;   // all keys are the same
  // The first query of each group finds this many nats more in the first group of tokens.
  float peak = 0;
};

class VoteBitsCase {
 public:
  VoteBitsCase(const VoteBitsShape& s, Rng& rng)
      : shape_(s),
        data_(Geometry{2, s.kv_heads * s.group, s.kv_heads, s.format.dim, 16, DType::kBF16},
              s.format, s.batch, s.tokens_max, rng),
        tokens_(static_cast<size_t>(s.batch)) {
    q_.resize(static_cast<size_t>(s.batch * s.kv_heads * s.group * s.format.dim));
    for (float& x : q_) x = RoundedTo(s.q_dtype, s.q_size * Normal(rng));
    if (s.alike) MakeAlike();
    if (s.peak > 0) MakePeak();
    for (int b = 0; b < s.batch; ++b) data_.Quantise(b, {0, s.tokens_max / s.format.tokens});
    data_.blocks().Upload();
    device_q_ = DeviceArray<std::byte>(Encoded(q_, s.q_dtype));
    work_.groups = data_.Groups();
    work_.scale = 1.0f / std::sqrt(static_cast<float>(s.format.dim));
    work_.rule = {s.run, s.sinks, s.recent, 100 / s.run, 0};
    work_.tokens = tokens_.get();
    work_.q = device_q_.get();
    work_.q_dtype = s.q_dtype;
    work_.batch = s.batch;
    work_.query_heads = s.kv_heads * s.group;
    work_.output_rows = s.per_head ? s.kv_heads : 1;
    work_.candidate_stride = (s.tokens_max + 15) / 16 * 16;
    votes_ = DeviceArray<float>(static_cast<size_t>(s.batch * work_.output_rows) *
                                static_cast<size_t>(work_.candidate_stride));
    work_.votes = votes_.get();
    scratch_ =
        DeviceArray<std::byte>(static_cast<size_t>(kvs_cuda_ops()->vote_scratch_bytes(work_)));
    work_.scratch = scratch_.get();
    if (s.shares) DrawAlways(rng);
  }

  VoteBatch& work() { return work_; }
  int32_t tokens(int sequence) const { return tokens_now_[static_cast<size_t>(sequence)]; }
  std::vector<float> Votes() const { return votes_.Read(); }
  void SetTokens(const std::vector<int32_t>& tokens) {
    tokens_now_ = tokens;
    tokens_.Write(tokens);
    votes_.Poison();
    scratch_.Poison();
  }
  void Run() {
    ASSERT_EQ(kvs_cuda_ops()->vote(work_, nullptr), 0);
    Check(cudaDeviceSynchronize(), "vote");
  }

  // The worst relative error of a row; beyond the candidates nothing is written.
  double ExpectReference() const {
    const std::vector<float> got = votes_.Read();
    double worst = 0;
    for (int b = 0; b < shape_.batch; ++b) {
      Candidates c = CandidateTokensOf(work_.rule, tokens_now_[static_cast<size_t>(b)]);
      if (c.full) c.last = c.first;
      const auto n = static_cast<size_t>(c.count() / shape_.run);
      const auto stride = static_cast<size_t>(work_.candidate_stride / shape_.run);
      for (int row = 0; row < work_.output_rows; ++row) {
        const float* own = &got[static_cast<size_t>(b * work_.output_rows + row) * stride];
        std::vector<float> want(n);
        const std::vector<float> votes = Reference(b, row, c);
        for (size_t i = 0; i < votes.size(); ++i)
          want[i / static_cast<size_t>(shape_.run)] += votes[i];
        worst = std::max(worst, RelativeError({own, n}, want));
        for (auto i = n; i < stride; ++i) {
          EXPECT_TRUE(std::isnan(own[i])) << i;
        }
      }
    }
    EXPECT_LE(worst, 5e-3);
    return worst;
  }

  // The votes of a row's heads for the candidates.
  std::vector<float> Reference(int b, int row, const Candidates& c) const {
    const int32_t n = c.count(), heads = work_.query_heads / work_.output_rows;
    const auto count = static_cast<size_t>(n);
    std::vector<float> logits(static_cast<size_t>(heads) * count), max(static_cast<size_t>(heads)),
        sum(max.size()), votes(count);
    for (int i = 0; i < heads; i += shape_.group) {
      const int first = row * heads + i;
      const ScoreBitsWork w{
          data_.HostRows(b, first / shape_.group),
          {c.first, c.last},
          &q_[static_cast<size_t>((b * work_.query_heads + first) * shape_.format.dim)],
          shape_.group,
          work_.scale,
          logits.data() + static_cast<size_t>(i) * count,
          n};
      ScoreBitsRef(&w, 1, InlineExecutor());
    }
    VoteWork w{logits.data(), n, heads, n, max.data(), sum.data(), votes.data()};
    const auto own = static_cast<size_t>(b * work_.query_heads + row * heads);
    if (shape_.shares) {
      w.always = &always_logits_[own];
      w.always_n = 1;
      w.noise = &noise_[own];
    }
    VoteRef(w, InlineExecutor());
    return votes;
  }

 private:
  // One row that is always attended, as far above the others as sinks are, and noise.
  void DrawAlways(Rng& rng) {
    std::vector<float> always;
    for (int i = 0; i < shape_.batch * work_.query_heads; ++i) {
      always_logits_.push_back(8 + 3 * Normal(rng));
      noise_.push_back(std::abs(Normal(rng)));
      const float log2 = always_logits_.back() * 1.4426950408889634f;
      always.insert(always.end(), {log2, 1.0f, std::exp(-noise_.back() / 2)});
    }
    device_always_ = DeviceArray<float>(always);
    work_.always = device_always_.get();
  }
  void MakePeak() {
    const Geometry& g = data_.geometry();
    const PageLayout layout = PageLayout::Of(g);
    for (int b = 0; b < shape_.batch; ++b) {
      for (int head = 0; head < g.kv_heads; ++head) {
        const float* q =
            &q_[static_cast<size_t>((b * g.query_heads + head * g.group()) * g.head_dim)];
        float square = 0;
        for (int c = 0; c < g.head_dim; ++c) square += q[c] * q[c];
        const float of_query = shape_.peak * std::sqrt(static_cast<float>(g.head_dim)) / square;
        for (int t = 0; t < shape_.format.tokens; ++t) {
          std::byte* const key = data_.pages().TableOf(b)[t / g.page_tokens] +
                                 layout.KeyOffset(QuantisedBlocks::kLayer, head, t % g.page_tokens);
          for (int c = 0; c < g.head_dim; ++c) {
            std::byte* const at = key + c * SizeOf(g.dtype);
            StoreFloat(at, g.dtype, LoadFloat(at, g.dtype) + of_query * q[c]);
          }
        }
      }
    }
    data_.pages().Upload();
  }
  void MakeAlike() {
    std::vector<std::byte>& bytes = data_.pages().host();
    for (size_t i = 0; i < bytes.size(); i += 2) {
      StoreFloat(&bytes[i], data_.geometry().dtype, 0.75f);
    }
    data_.pages().Upload();
  }
  VoteBitsShape shape_;
  QuantisedBlocks data_;
  std::vector<float> q_;
  std::vector<int32_t> tokens_now_;
  DeviceArray<std::byte> device_q_, scratch_;
  DeviceArray<int32_t> tokens_;
  DeviceArray<float> votes_, device_always_;
  std::vector<float> always_logits_, noise_;  // by query head
  VoteBatch work_;
};

}  // namespace kvstrata::cuda
