// SPDX-License-Identifier: Apache-2.0
// What makes lists as long as max_missed asks: op always and op take are their references, op vote
// makes shares of them, and op pick takes what they say.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/ops/pick/pick.h"
#include "kernels/ops/take/take.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/quantised_blocks.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

constexpr int32_t kPoison = -1;

// Lists of votes on the device, and how many of each are to be taken.
class TakeCase {
 public:
  TakeCase(int batch, int groups, int stride, float spread, Rng& rng)
      : votes_(static_cast<size_t>(batch * groups * stride)),
        tokens_(static_cast<size_t>(batch)),
        takes_(static_cast<size_t>(batch * groups)) {
    for (float& x : votes_) x = std::exp(spread * Normal(rng) - 9);
    device_votes_ = DeviceArray<float>(votes_);
    work_.votes = device_votes_.get();
    work_.vote_stride = stride;
    work_.batch = batch;
    work_.groups = groups;
    work_.rule = {1, 4, 64, 0, 300};
    work_.tokens = tokens_.get();
    work_.most = stride;
    work_.takes = takes_.get();
  }

  TakeBatch& work() { return work_; }
  const float* votes() const { return device_votes_.get(); }
  const int32_t* tokens() const { return tokens_.get(); }
  const int32_t* takes() const { return takes_.get(); }
  const float* ListOf(int list) const {
    return &votes_[static_cast<size_t>(list) * static_cast<size_t>(work_.vote_stride)];
  }
  Candidates CandidatesOfSequence(int b) const {
    return CandidatesOf(work_.rule, tokens_now_[static_cast<size_t>(b)]);
  }

  void SetTokens(const std::vector<int32_t>& tokens) {
    tokens_now_ = tokens;
    tokens_.Write(tokens);
    takes_.Poison();
  }
  std::vector<int32_t> Wanted() const {
    std::vector<int32_t> wanted;
    for (int b = 0; b < work_.batch; ++b) {
      const Candidates c = CandidatesOfSequence(b);
      for (int g = 0; g < work_.groups; ++g) {
        const float* own = ListOf(b * work_.groups + g);
        wanted.push_back(c.full ? 0 : Take({own, c.count(), work_.most, work_.missed}));
      }
    }
    return wanted;
  }
  std::vector<int32_t> Takes() const { return takes_.Read(); }
  // units [lists][stride]: of a list the k largest, and nothing behind them.
  void ExpectList(int list, int32_t k, const std::vector<int32_t>& units) const {
    const Candidates c = CandidatesOfSequence(list / work_.groups);
    std::vector<int32_t> want(static_cast<size_t>(k));
    TopKRef({ListOf(list), c.count(), k, want.data()});
    const int32_t* got = &units[static_cast<size_t>(list) * static_cast<size_t>(work_.vote_stride)];
    for (int32_t i = 0; i < work_.vote_stride; ++i) {
      ASSERT_EQ(got[i], i < k ? want[static_cast<size_t>(i)] + c.first : kPoison)
          << "list " << list << " entry " << i << " of " << k;
    }
  }
  // One more or fewer, where a sum rounds across a whole number.
  void ExpectReference() const {
    const std::vector<int32_t> got = takes_.Read(), want = Wanted();
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1) << "list " << i;
  }

 private:
  std::vector<float> votes_;
  std::vector<int32_t> tokens_now_;
  DeviceArray<float> device_votes_;
  DeviceArray<int32_t> tokens_, takes_;
  TakeBatch work_;
};

TEST(TakeCuda, IsTheReferenceForEveryLengthAndShare) {
  Rng rng(TestSeed());
  for (const float spread : {0.1f, 2.0f, 5.0f}) {
    TakeCase take(4, 3, 70000, spread, rng);
    for (const double missed : {0.0, 1e-3, 0.05, 2.0, 1e9}) {
      for (const int32_t most : {0, 100, 70000}) {
        SCOPED_TRACE(std::to_string(spread) + ", " + std::to_string(missed));
        take.work().missed = missed;
        take.work().most = most;
        take.SetTokens({299, 300 + Below(rng, 5000), 70000, 68 + 1024 * (1 + Below(rng, 60))});
        ASSERT_EQ(kvs_cuda_ops()->take(take.work(), nullptr), 0);
        take.ExpectReference();
      }
    }
  }
}

TEST(TakeCuda, WhatIsNoNumberIsTaken) {
  DeviceArray<float> votes(std::vector<float>{NAN, 0.5f, 0.0f, INFINITY, 0.25f, 0, 0, 0});
  DeviceArray<int32_t> tokens(std::vector<int32_t>{9}), takes(1);
  TakeBatch w;
  w.votes = votes.get();
  w.vote_stride = 8;
  w.batch = 1;
  w.rule = {1, 0, 1, 0, 0};
  w.tokens = tokens.get();
  w.missed = 0.3;
  w.most = 8;
  w.takes = takes.get();
  ASSERT_EQ(kvs_cuda_ops()->take(w, nullptr), 0);
  EXPECT_EQ(takes.Read()[0], 3);
}

// As many of each list as op take said, all of them where that is all, none where it is none.
TEST(TakeCuda, PickTakesOfEachListWhatItSays) {
  Rng rng(TestSeed());
  TakeCase take(3, 2, 20000, 2.0f, rng);
  DeviceArray<int32_t> units(6 * 20000), counts(6), sink_end(3), recent_begin(3);
  PickBatch pick;
  pick.scores = take.votes();
  pick.score_stride = 20000;
  pick.batch = 3;
  pick.groups = 2;
  pick.rule = take.work().rule;
  pick.tokens = take.tokens();
  pick.takes = take.takes();
  pick.take_each = true;
  pick.units = units.get();
  pick.counts = counts.get();
  pick.sink_end = sink_end.get();
  pick.recent_begin = recent_begin.get();
  pick.list_stride = 20000;
  for (const PickExchange way : {PickExchange::kByShape, PickExchange::kGlobalMemory}) {
    pick.exchange = way;
    const auto bytes = static_cast<size_t>(kvs_cuda_ops()->pick_scratch_bytes(pick));
    DeviceArray<std::byte> scratch{std::vector<std::byte>(bytes)};
    pick.scratch = scratch.get();
    for (const double missed : {0.0, 0.01, 3.0, 1e9}) {
      TakeBatch work = take.work();
      work.missed = missed;
      CapturedGraph graph([&](Stream stream) {
        const int error = kvs_cuda_ops()->take(work, stream);
        return error != 0 ? error : kvs_cuda_ops()->pick(pick, stream);
      });
      take.SetTokens({200, 5000 + Below(rng, 9000), 20000});
      units.Poison(), counts.Poison();
      graph.Replay();
      const std::vector<int32_t> got = units.Read(), takes = take.Takes();
      EXPECT_EQ(counts.Read(), takes);
      for (int list = 0; list < 6; ++list) take.ExpectList(list, takes[list], got);
    }
  }
}

struct Shape {
  int group = 4;
  QuantisedGroup format{128, 2, 64};
  DType dtype = DType::kBF16, q_dtype = DType::kBF16;
  int sinks = 4, recent = 64, run = 1;
};

// Two sequences of two KV heads: what is always attended, and the noise of the rest.
class AlwaysCase {
 public:
  static constexpr int kBatch = 2, kHeads = 2, kTokens = 3000;

  AlwaysCase(const Shape& s, Rng& rng)
      : data_(Geometry{2, kHeads * s.group, kHeads, s.format.dim, 16, s.dtype}, s.format, kBatch,
              kTokens, rng),
        tokens_(kBatch),
        always_(static_cast<size_t>(kBatch * kHeads * s.group * kAlwaysFloats)) {
    for (int b = 0; b < kBatch; ++b) data_.Quantise(b, {0, kTokens / s.format.tokens});
    data_.blocks().Upload();
    std::vector<float> q(static_cast<size_t>(kBatch * kHeads * s.group * s.format.dim));
    for (float& x : q) x = RoundedTo(s.q_dtype, 2 * Normal(rng));
    q_ = Encoded(q, s.q_dtype);
    device_q_ = DeviceArray<std::byte>(q_);
    work_.keys = data_.Keys();
    work_.groups = data_.Groups();
    work_.scale = 1.0f / std::sqrt(static_cast<float>(s.format.dim));
    work_.rule = {s.run, s.sinks, s.recent, 0, 0};
    work_.tokens = tokens_.get();
    work_.q = device_q_.get();
    work_.q_dtype = s.q_dtype;
    work_.batch = kBatch;
    work_.query_heads = kHeads * s.group;
    work_.always = always_.get();
  }

  AlwaysBatch& work() { return work_; }
  void Run(const std::vector<int32_t>& tokens) {
    tokens_.Write(tokens);
    always_.Poison();
    ASSERT_EQ(kvs_cuda_ops()->always(work_, nullptr), 0);
    const std::vector<float> got = always_.Read(), want = Reference(tokens);
    for (size_t i = 0; i < want.size(); ++i) {
      if (std::isnan(want[i])) {
        EXPECT_TRUE(std::isnan(got[i])) << i;
      } else {
        EXPECT_NEAR(got[i], want[i], 1e-3 * std::max(1.0f, std::abs(want[i]))) << i;
      }
    }
  }

 private:
  std::vector<float> Reference(const std::vector<int32_t>& tokens) {
    std::vector<float> always(always_.size(), NAN);
    std::vector<uint64_t> pages, blocks;
    for (int b = 0; b < kBatch; ++b) {
      AddTable(data_.pages(), b, &pages);
      AddTable(data_.blocks(), b, &blocks);
    }
    AlwaysBatch w = work_;
    w.keys.pages = pages.data();
    w.groups.blocks = blocks.data();
    w.tokens = tokens.data();
    w.q = q_.data();
    w.always = always.data();
    AlwaysRef(w);
    return always;
  }
  static void AddTable(const ScatteredPages& pages, int b, std::vector<uint64_t>* table) {
    for (int32_t i = 0; i < pages.stride(); ++i) {
      table->push_back(reinterpret_cast<uint64_t>(pages.TableOf(b)[i]));
    }
  }

  QuantisedBlocks data_;
  std::vector<std::byte> q_;
  DeviceArray<std::byte> device_q_;
  DeviceArray<int32_t> tokens_;
  DeviceArray<float> always_;
  AlwaysBatch work_;
};

TEST(AlwaysCuda, IsTheReferenceForEveryShape) {
  Rng rng(TestSeed());
  for (const int dim : {64, 128, 256}) {
    for (const int group : {1, 3, 8}) {
      Shape s;
      s.group = group;
      s.format = {dim, 2 + Below(rng, 3), std::vector{32, 64, 96}[Below(rng, 3)]};
      s.dtype = Below(rng, 2) == 0 ? DType::kBF16 : DType::kF16;
      s.q_dtype = std::vector{DType::kBF16, DType::kF16, DType::kF32}[Below(rng, 3)];
      s.sinks = std::vector{0, 4, 90}[Below(rng, 3)];
      s.recent = 100 + Below(rng, 200);
      s.run = std::vector{1, 8, 16}[Below(rng, 3)];
      SCOPED_TRACE("dim " + std::to_string(dim) + " group " + std::to_string(group));
      AlwaysCase always(s, rng);
      // Attended in full; no group of eight; several.
      ASSERT_NO_FATAL_FAILURE(always.Run({50, 500}));
      ASSERT_NO_FATAL_FAILURE(always.Run({3000, 1000 + Below(rng, 2000)}));
    }
  }
}

TEST(AlwaysCuda, RefusesWhatItDoesNotTake) {
  Rng rng(TestSeed());
  AlwaysCase always({}, rng);
  AlwaysBatch work = always.work();
  work.query_heads = 18;
  EXPECT_NE(kvs_cuda_ops()->always(work, nullptr), 0);
  work = always.work();
  work.groups.format.dim = 64;
  EXPECT_NE(kvs_cuda_ops()->always(work, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
