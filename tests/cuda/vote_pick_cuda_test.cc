// What op vote_pick takes is bit for bit what TopKRef takes of op vote's votes.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops/pick/pick.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/seed.h"
#include "tests/cuda/vote_bits_case.h"

namespace kvstrata::cuda {
namespace {

class VotePickCase {
 public:
  VotePickCase(const VoteBitsShape& s, int32_t take, Rng& rng)
      : vote_(s, rng), lists_(static_cast<size_t>(s.batch * s.kv_heads)) {
    vote_.work().rule.take = take;
    work_.vote = vote_.work();
    work_.vote.votes = nullptr;
    work_.pick.list_stride = take + 3;
    units_ = DeviceArray<int32_t>(lists_ * static_cast<size_t>(work_.pick.list_stride));
    counts_ = DeviceArray<int32_t>(lists_);
    sink_end_ = DeviceArray<int32_t>(static_cast<size_t>(s.batch));
    recent_begin_ = DeviceArray<int32_t>(static_cast<size_t>(s.batch));
    work_.pick.units = units_.get();
    work_.pick.counts = counts_.get();
    work_.pick.sink_end = sink_end_.get();
    work_.pick.recent_begin = recent_begin_.get();
    const CudaOps& ops = *kvs_cuda_ops();
    scratch_ = DeviceArray<std::byte>(static_cast<size_t>(ops.vote_pick_scratch_bytes(work_)));
    exchange_ = DeviceArray<std::byte>(
        std::vector<std::byte>(static_cast<size_t>(ops.vote_pick_exchange_bytes(work_))));
    work_.vote.scratch = scratch_.get();
    work_.pick.scratch = exchange_.get();
  }

  const VotePickBatch& work() const { return work_; }
  void SetTokens(const std::vector<int32_t>& tokens) {
    vote_.SetTokens(tokens);
    scratch_.Poison();
    PoisonSelection();
  }
  void PoisonSelection() {
    for (DeviceArray<int32_t>* const ints : {&units_, &counts_, &sink_end_, &recent_begin_}) {
      ints->Poison();
    }
  }
  void Run() {
    ASSERT_EQ(kvs_cuda_ops()->vote_pick(work_, nullptr), 0);
    Check(cudaDeviceSynchronize(), "vote_pick");
  }
  // Runs op vote beside it.
  void ExpectTheSame() {
    ASSERT_NO_FATAL_FAILURE(vote_.Run());
    const std::vector<float> votes = vote_.Votes();
    const std::vector<int32_t> units = units_.Read(), counts = counts_.Read();
    const std::vector<int32_t> sink_end = sink_end_.Read(), recent_begin = recent_begin_.Read();
    const auto stride = static_cast<size_t>(work_.pick.list_stride);
    const auto votes_stride = static_cast<size_t>(work_.vote.candidate_stride);
    const int32_t take = work_.vote.rule.take;
    for (size_t list = 0; list < lists_; ++list) {
      SCOPED_TRACE("list " + std::to_string(list));
      const size_t b = list / static_cast<size_t>(work_.vote.output_rows);
      const Candidates c = CandidatesOf(work_.vote.rule, vote_.tokens(static_cast<int>(b)));
      ASSERT_EQ(counts[list], c.full ? 0 : take);
      ASSERT_EQ(sink_end[b], c.full ? 0 : c.first);
      ASSERT_EQ(recent_begin[b], c.full ? 0 : c.last);
      std::vector<int32_t> want(stride, -1);
      if (!c.full && take > 0) {
        TopKRef({&votes[list * votes_stride], c.count(), take, want.data()});
        for (int32_t i = 0; i < take; ++i) want[static_cast<size_t>(i)] += c.first;
      }
      const auto* own = &units[list * stride];
      ASSERT_EQ(std::vector<int32_t>(own, own + stride), want);
    }
  }

 private:
  VoteBitsCase vote_;
  const size_t lists_;
  VotePickBatch work_;
  DeviceArray<int32_t> units_, counts_, sink_end_, recent_begin_;
  DeviceArray<std::byte> scratch_, exchange_;
};

TEST(VotePickCuda, TakesWhatVoteAndPickTake) {
  Rng rng(TestSeed());
  for (const int dim : {64, 128, 256}) {
    for (const int group : {1, 3, 4, 8}) {
      for (const float q_size : {0.2f, 2.0f, 12.0f}) {  // flat to peaked
        VoteBitsShape s;
        s.group = group;
        s.format = {dim, 2 + Below(rng, 3), 32 << Below(rng, 4)};
        s.sinks = std::vector{0, 4, 37, 100}[Below(rng, 4)];
        s.recent = s.format.tokens + Below(rng, 70);
        s.tokens_max = 6000;
        s.q_size = q_size;
        const int32_t take = std::vector{0, 1, 64, 700, 2048}[Below(rng, 5)];
        SCOPED_TRACE("dim " + std::to_string(dim) + " group " + std::to_string(group) + " size " +
                     std::to_string(q_size) + " take " + std::to_string(take));
        VotePickCase c(s, take, rng);
        c.SetTokens({Below(rng, 6000), 5990 + Below(rng, 11)});
        ASSERT_NO_FATAL_FAILURE(c.Run());
        ASSERT_NO_FATAL_FAILURE(c.ExpectTheSame());
      }
    }
  }
}

// Nearly all is taken; sequences in full among the others.
TEST(VotePickCuda, TakesNearlyAllOfRaggedBatches) {
  Rng rng(TestSeed());
  VoteBitsShape s;
  s.batch = 24;
  s.kv_heads = 4;
  s.format.dim = 64;
  s.tokens_max = 1200;
  VotePickCase c(s, 600, rng);
  std::vector<int32_t> tokens(24);
  for (int32_t& n : tokens) n = 900 + Below(rng, 301);
  tokens[3] = 938;  // 600 candidates
  tokens[4] = 939;
  c.SetTokens(tokens);
  ASSERT_NO_FATAL_FAILURE(c.Run());
  ASSERT_NO_FATAL_FAILURE(c.ExpectTheSame());
}

// Votes that are all alike: no bin leaves any out, and the first tokens are taken. More of them
// than a CTA keeps, of more blocks than it has a list of.
TEST(VotePickCuda, TakesTheFirstOfEqualKeys) {
  Rng rng(TestSeed());
  for (const int tokens : {5000, 400000, 1100000}) {
    VoteBitsShape s;
    s.batch = 1;
    s.kv_heads = 1;
    s.group = 2;
    s.format.dim = 64;
    s.tokens_max = tokens;
    s.alike = true;
    SCOPED_TRACE(tokens);
    VotePickCase c(s, 2048, rng);
    c.SetTokens({tokens});
    ASSERT_NO_FATAL_FAILURE(c.Run());
    ASSERT_NO_FATAL_FAILURE(c.ExpectTheSame());
  }
}

TEST(VotePickCuda, TakesFromLongSequences) {
  Rng rng(TestSeed());
  for (const float q_size : {0.3f, 1.0f, 3.0f}) {
    VoteBitsShape s;
    s.batch = 1;
    s.kv_heads = 2;
    s.tokens_max = 300000;
    s.q_size = q_size;
    VotePickCase c(s, 2048, rng);
    c.SetTokens({299990});
    ASSERT_NO_FATAL_FAILURE(c.Run());
    ASSERT_NO_FATAL_FAILURE(c.ExpectTheSame());
  }
}

TEST(VotePickCuda, OneGraphServesGrowingSequences) {
  Rng rng(TestSeed());
  VoteBitsShape s;
  s.tokens_max = 9000;
  VotePickCase c(s, 100, rng);
  const VotePickBatch work = c.work();
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->vote_pick(work, stream); });
  for (const int32_t tokens : {1, 438, 439, 2000, 8999}) {
    SCOPED_TRACE(tokens);
    c.SetTokens({tokens, 9000 - tokens});
    for (int i = 0; i < 3; ++i) {
      c.PoisonSelection();
      graph.Replay();
      ASSERT_NO_FATAL_FAILURE(c.ExpectTheSame());
    }
  }
}

TEST(VotePickCuda, RefusesWhatItDoesNotTake) {
  Rng rng(TestSeed());
  VotePickCase c({}, 100, rng);
  VotePickBatch work = c.work();
  work.vote.output_rows = 1;
  EXPECT_NE(kvs_cuda_ops()->vote_pick(work, nullptr), 0);
  work = c.work();
  work.pick.list_stride = 99;
  EXPECT_NE(kvs_cuda_ops()->vote_pick(work, nullptr), 0);
  work = c.work();
  work.vote.groups.format.tokens = 48;
  EXPECT_NE(kvs_cuda_ops()->vote_pick(work, nullptr), 0);
  work = c.work();
  work.vote.groups = {};
  EXPECT_NE(kvs_cuda_ops()->vote_pick(work, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
