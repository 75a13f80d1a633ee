// SPDX-License-Identifier: Apache-2.0
// reuse on the GPU, as op vote begins with it, against ref, which follows it with caches on the
// host: whether a cached pick serves a query, where the list is, and what the caches hold. Queries
// are alike or not by far: none is near theta.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/paged_batch.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

constexpr int kBatch = 3, kLayers = 2, kLayer = 1, kKvHeads = 2, kGroup = 3;
constexpr int kHeads = kKvHeads * kGroup, kLongest = 2000, kTake = 50;

struct Case {
  int dim = 128;
  DType q_dtype = DType::kBF16;
  bool per_head = false, append_departed = false;
  double theta = 0.9;
};

class Problem {
 public:
  Problem(Rng& rng, const Case& c)
      : case_(c),
        layout_{int64_t{kHeads} * c.dim, kTake},
        rows_(rng, {kLayers, kHeads, kKvHeads, c.dim, 16, DType::kBF16},
              std::vector<int32_t>(kBatch, kLongest), kLongest),
        caches_(std::vector<std::byte>(kBatch * CacheBytes())),
        host_caches_(caches_.size()),
        q_(static_cast<size_t>(kBatch * kHeads * c.dim * SizeOf(c.q_dtype))),
        tokens_(kBatch),
        voting_(kBatch),
        counts_(kBatch),
        sink_end_(kBatch),
        recent_begin_(kBatch),
        lists_(kBatch) {
    rows_.Upload();
    // The last sequence is attended in full and has no cache.
    cache_addresses_ = DeviceArray<uint64_t>(Addresses(caches_.address()));
    VoteBatch w = Work();
    votes_ = DeviceArray<float>(static_cast<size_t>(kBatch * w.candidate_stride));
    scratch_ = DeviceArray<std::byte>(static_cast<size_t>(kvs_cuda_ops()->vote_scratch_bytes(w)));
  }

  VoteBatch Work() const {
    VoteBatch w;
    w.rows = KeyRows(rows_.DeviceLayer());
    w.rule = Rule();
    w.tokens = voting_.get();
    w.q = q_.get();
    w.q_dtype = case_.q_dtype;
    w.batch = kBatch;
    w.query_heads = kHeads;
    w.candidate_stride = kLongest / 8 * 8;
    w.votes = votes_.get();
    w.scratch = scratch_.get();
    w.reuse = Options();
    w.reuse.caches = cache_addresses_.get();
    w.reuse.tokens = tokens_.get();
    w.reuse.voting = voting_.get();
    w.reuse.lists = lists_.get();
    w.reuse.counts = counts_.get();
    w.reuse.sink_end = sink_end_.get();
    w.reuse.recent_begin = recent_begin_.get();
    return w;
  }
  // One step; how many sequences' picks served.
  int Step(CapturedGraph& graph, const std::vector<int32_t>& tokens,
           const std::vector<std::byte>& q) {
    q_.Write(q);
    tokens_.Write(tokens);
    for (auto* out : {&voting_, &counts_, &sink_end_, &recent_begin_}) out->Poison();
    lists_.Poison();
    graph.Replay();
    std::vector<int32_t> voting(kBatch, -1), counts(voting), sink_end(voting), recent(voting);
    std::vector<uint64_t> lists(kBatch, ~uint64_t{0});
    const auto base = reinterpret_cast<uint64_t>(host_caches_.data());
    const std::vector<uint64_t> caches = Addresses(base);
    Reuse reuse = Options();
    reuse.caches = caches.data();
    reuse.tokens = tokens.data();
    reuse.voting = voting.data();
    reuse.lists = lists.data();
    reuse.counts = counts.data();
    reuse.sink_end = sink_end.data();
    reuse.recent_begin = recent.data();
    ReuseRef(reuse, Rule(), {q.data(), case_.q_dtype, kBatch, kHeads, case_.dim});
    EXPECT_EQ(voting_.Read(), voting);
    EXPECT_EQ(counts_.Read(), counts);
    EXPECT_EQ(sink_end_.Read(), sink_end);
    EXPECT_EQ(recent_begin_.Read(), recent);
    std::vector<uint64_t> got = lists_.Read();
    for (uint64_t& list : got) {
      if (list != ~uint64_t{0}) list += base - caches_.address();
    }
    EXPECT_EQ(got, lists);
    EXPECT_TRUE(caches_.Read() == host_caches_);
    return static_cast<int>(std::ranges::count(voting, kNoQuery));
  }

 private:
  size_t CacheBytes() const { return static_cast<size_t>(kLayers * layout_.layer_bytes()); }
  std::vector<uint64_t> Addresses(uint64_t first) const { return {first, first + CacheBytes(), 0}; }
  CandidateRule Rule() const { return {1, 4, 60, kTake, 0}; }
  Reuse Options() const {
    Reuse reuse;
    reuse.layer = kLayer;
    reuse.theta = case_.theta;
    reuse.per_head = case_.per_head;
    reuse.append_departed = case_.append_departed;
    return reuse;
  }

  const Case case_;
  const PickCacheLayout layout_;
  PagedBatch rows_;
  DeviceArray<std::byte> caches_;
  std::vector<std::byte> host_caches_;
  DeviceArray<std::byte> q_;
  DeviceArray<int32_t> tokens_, voting_, counts_, sink_end_, recent_begin_;
  DeviceArray<uint64_t> lists_, cache_addresses_;
  DeviceArray<float> votes_;
  DeviceArray<std::byte> scratch_;
};

std::vector<float> Queries(Rng& rng, int dim) {
  std::vector<float> q(static_cast<size_t>(kBatch * kHeads * dim));
  for (float& x : q) x = Normal(rng);
  return q;
}

// 14 steps, some of which are given up: the next one has as many tokens. How many picks served.
int Decode(Rng& rng, const Case& c) {
  SCOPED_TRACE("d" + std::to_string(c.dim) + " " + std::string(NameOf(c.q_dtype)) +
               (c.per_head ? " per head" : "") + " seed " + std::to_string(TestSeed()));
  Problem problem(rng, c);
  const VoteBatch w = problem.Work();
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->vote(w, stream); });
  std::vector<float> q = Queries(rng, c.dim);
  std::vector<int32_t> tokens = {500, 1700, 90};
  int served = 0;
  for (int step = 0; step < 14; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    if (step % 5 == 4) q = Queries(rng, c.dim);
    for (float& x : q) x += 0.01f * Normal(rng);
    // One head alone is another one: all together are still alike.
    if (step == 7) std::ranges::for_each(q.begin(), q.begin() + c.dim, [](float& x) { x = -x; });
    served += problem.Step(graph, tokens, Encoded(q, c.q_dtype));
    if (step % 4 == 2) continue;
    for (int b = 0; b < 2; ++b) tokens[static_cast<size_t>(b)] += 1 + Below(rng, 3);
  }
  return served;
}

TEST(ReuseCuda, AsRefDecides) {
  Rng rng(TestSeed());
  for (const int dim : {64, 128, 256}) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (const bool per_head : {false, true}) {
        const int served = Decode(rng, {dim, dtype, per_head, Below(rng, 2) == 0, 0.5});
        EXPECT_GT(served, 10);
        EXPECT_LT(served, 26);
      }
    }
  }
  EXPECT_EQ(Decode(rng, {.theta = 1.0}), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
