// SPDX-License-Identifier: Apache-2.0
// What op pick_bits takes is what TopKRef takes of the reference's votes, but for votes close to
// each other (Tolerance).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <future>
#include <iterator>
#include <span>
#include <string>
#include <vector>

#include "kernels/ops/pick/pick.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/seed.h"
#include "tests/cuda/vote_bits_case.h"

namespace kvstrata::cuda {
namespace {

class PickBitsCase {
 public:
  PickBitsCase(const VoteBitsShape& s, int32_t take, Rng& rng)
      : vote_(s, rng), lists_(static_cast<size_t>(s.batch * s.kv_heads)), tolerance_(Tolerance(s)) {
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
    scratch_ = DeviceArray<std::byte>(static_cast<size_t>(ops.pick_bits_scratch_bytes(work_)));
    work_.vote.scratch = scratch_.get();
  }

  PickBitsBatch& work() { return work_; }
  void SetTokens(const std::vector<int32_t>& tokens) {
    vote_.SetTokens(tokens);
    references_.clear();
    PoisonAll();
  }
  void PoisonAll() {
    scratch_.Poison();
    PoisonSelection();
  }
  void PoisonSelection() {
    for (DeviceArray<int32_t>* const ints : {&units_, &counts_, &sink_end_, &recent_begin_}) {
      ints->Poison();
    }
  }
  void Run() {
    ASSERT_EQ(kvs_cuda_ops()->pick_bits(work_, nullptr), 0);
    Check(cudaDeviceSynchronize(), "pick_bits");
  }
  // By list; computed once for the tokens that are set, each list by a thread.
  const std::vector<float>& Reference(size_t list) {
    if (references_.empty()) {
      std::vector<std::future<std::vector<float>>> lists;
      for (int i = 0; i < static_cast<int>(lists_); ++i) {
        lists.push_back(std::async(std::launch::async, [this, i] {
          const int heads = work_.vote.output_rows, b = i / heads;
          const Candidates c = CandidatesOf(work_.vote.rule, vote_.tokens(b));
          return c.full ? std::vector<float>() : vote_.Reference(b, i % heads, c);
        }));
      }
      for (auto& one : lists) references_.push_back(one.get());
    }
    return references_[list];
  }
  // How far apart votes may be that are chosen the other way: 1 %. In groups above 4 heads products
  // of query and step are fp16: a logit, which deviates by q_size, is off by 3e-4 of that (standard
  // deviation), and of thousands of tokens two are off by four times as much, one up and one down.
  static float Tolerance(const VoteBitsShape& s) {
    return std::max(1e-2f, s.group > 4 ? 2.5e-3f * s.q_size : 0.0f);
  }
  // exactly: ties alone, which are for the lower index. least: votes below it are all alike.
  void ExpectTheBest(bool exactly = false, float least = 0) {
    const std::vector<int32_t> units = units_.Read(), counts = counts_.Read();
    const std::vector<int32_t> sink_end = sink_end_.Read(), recent_begin = recent_begin_.Read();
    const auto stride = static_cast<size_t>(work_.pick.list_stride);
    const int32_t take = work_.vote.rule.take, heads = work_.vote.output_rows;
    for (size_t list = 0; list < lists_; ++list) {
      SCOPED_TRACE("list " + std::to_string(list));
      const int b = static_cast<int>(list) / heads;
      const auto sequence = static_cast<size_t>(b);
      const Candidates c = CandidatesOf(work_.vote.rule, vote_.tokens(b));
      ASSERT_EQ(counts[list], c.full ? 0 : take);
      ASSERT_EQ(sink_end[sequence], c.full ? 0 : c.first);
      ASSERT_EQ(recent_begin[sequence], c.full ? 0 : c.last);
      const auto own = std::span(units).subspan(list * stride, stride);
      const auto taken = c.full ? size_t{0} : static_cast<size_t>(take);
      ASSERT_TRUE(std::ranges::all_of(own.subspan(taken), [](int32_t u) { return u == -1; }));
      if (taken == 0) continue;
      const std::vector<int32_t> got(own.begin(), own.begin() + take);
      ASSERT_EQ(std::ranges::adjacent_find(got, std::greater_equal()), got.end());
      ASSERT_GE(got.front(), c.first);
      ASSERT_LT(got.back(), c.last);
      const std::vector<float>& votes = Reference(list);
      std::vector<int32_t> want(taken), missing, extra;
      TopKRef({votes.data(), c.count(), take, want.data()});
      for (int32_t& u : want) u += c.first;
      if (exactly) {
        ASSERT_EQ(got, want);
      }
      std::ranges::set_difference(want, got, std::back_inserter(missing));
      std::ranges::set_difference(got, want, std::back_inserter(extra));
      float most = 0, fewest = INFINITY;
      for (const int32_t u : missing)
        most = std::max(most, votes[static_cast<size_t>(u - c.first)]);
      for (const int32_t u : extra)
        fewest = std::min(fewest, votes[static_cast<size_t>(u - c.first)]);
      if (!missing.empty()) {
        ASSERT_LE(most - fewest, tolerance_ * most + least);
      }
      const auto counts_here = std::ranges::count_if(
          missing, [&](int32_t u) { return votes[static_cast<size_t>(u - c.first)] > least; });
      EXPECT_LE(static_cast<size_t>(counts_here), taken / 50 + 2);
    }
  }
  // Whether the second round was needed, by list: after a Run.
  std::vector<bool> NeededAgain() const {
    struct OneAim {  // kept_tokens.cuh
      float log_sum[8], cut, scale;
      int32_t wanted, unused;
    };
    const std::vector<std::byte> bytes = scratch_.Read();
    std::vector<bool> again;
    for (size_t list = 0; list < lists_; ++list) {
      OneAim aim;
      std::memcpy(&aim, &bytes[(lists_ + list) * sizeof(aim)], sizeof(aim));
      again.push_back(aim.wanted != 0);
    }
    return again;
  }

 private:
  VoteBitsCase vote_;
  const size_t lists_;
  const float tolerance_;
  std::vector<std::vector<float>> references_;
  PickBitsBatch work_;
  DeviceArray<int32_t> units_, counts_, sink_end_, recent_begin_;
  DeviceArray<std::byte> scratch_;
};

TEST(PickBitsCuda, TakesWhatVoteAndPickTakeOfEveryShape) {
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
        PickBitsCase c(s, take, rng);
        c.SetTokens({Below(rng, 6000), 5990 + Below(rng, 11)});
        ASSERT_NO_FATAL_FAILURE(c.Run());
        // A list this short gives a sample that can be off by any factor (pick_bits_cuda.h).
        const float alike =
            std::ldexp(static_cast<float>(group), -38) / static_cast<float>(std::max(take, 1));
        ASSERT_NO_FATAL_FAILURE(c.ExpectTheBest(false, alike));
      }
    }
  }
}

// What takes most of shared memory: rings and, of a sample, exponents.
TEST(PickBitsCuda, TakesTheLargestFormat) {
  Rng rng(TestSeed());
  for (const int bits : {3, 4}) {
    VoteBitsShape s;
    s.group = 8;
    s.format = {256, bits, 64};
    s.tokens_max = 20000;
    SCOPED_TRACE(bits);
    PickBitsCase c(s, 700, rng);
    c.SetTokens({19990, 9000});
    ASSERT_NO_FATAL_FAILURE(c.Run());
    ASSERT_NO_FATAL_FAILURE(c.ExpectTheBest());
  }
}

// Nearly all is taken; sequences in full among the others.
TEST(PickBitsCuda, TakesNearlyAllOfRaggedBatches) {
  Rng rng(TestSeed());
  VoteBitsShape s;
  s.batch = 24;
  s.kv_heads = 4;
  s.format.dim = 64;
  s.tokens_max = 1200;
  PickBitsCase c(s, 600, rng);
  std::vector<int32_t> tokens(24);
  for (int32_t& n : tokens) n = 900 + Below(rng, 301);
  tokens[3] = 938;  // 600 candidates
  tokens[4] = 939;
  c.SetTokens(tokens);
  ASSERT_NO_FATAL_FAILURE(c.Run());
  ASSERT_NO_FATAL_FAILURE(c.ExpectTheBest());
}

// Votes that are all alike: nothing is left out, and the first tokens are taken. More of them than
// the choice has room for in shared memory.
TEST(PickBitsCuda, TakesTheFirstOfEqualKeys) {
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
    PickBitsCase c(s, 2048, rng);
    c.SetTokens({tokens});
    ASSERT_NO_FATAL_FAILURE(c.Run());
    ASSERT_NO_FATAL_FAILURE(c.ExpectTheBest(true));
  }
}

TEST(PickBitsCuda, TakesFromLongSequences) {
  Rng rng(TestSeed());
  for (const float q_size : {0.3f, 2.0f}) {
    VoteBitsShape s;
    s.batch = 1;
    s.kv_heads = 1;
    s.tokens_max = 300000;
    s.q_size = q_size;
    PickBitsCase c(s, 2048, rng);
    c.SetTokens({299990});
    ASSERT_NO_FATAL_FAILURE(c.Run());
    ASSERT_NO_FATAL_FAILURE(c.ExpectTheBest());
  }
}

// A cut that too few tokens reach, one that all reach, and an estimate that is too small by far.
TEST(PickBitsCuda, TakesTheSameInTheSecondRound) {
  Rng rng(TestSeed());
  for (const int group : {4, 8}) {
    VoteBitsShape s;
    s.batch = 3;
    s.group = group;
    s.tokens_max = 20000;
    PickBitsCase c(s, 1500, rng);
    c.SetTokens({19990, 15000, 1700});
    for (const float margin : {0.02f, 0.4f, 0.95f, 1e6f}) {
      SCOPED_TRACE("group " + std::to_string(group) + " margin " + std::to_string(margin));
      c.work().margin = margin;
      c.PoisonAll();
      ASSERT_NO_FATAL_FAILURE(c.Run());
      ASSERT_NO_FATAL_FAILURE(c.ExpectTheBest());
      const std::vector<bool> again = c.NeededAgain();
      for (size_t list = 0; list < 4; ++list) {
        EXPECT_EQ(again[list], margin < 0.9f || (margin < 1 && again[list])) << list;
      }
      EXPECT_FALSE(again[4] || again[5]);  // attended in full
    }
  }
}

TEST(PickBitsCuda, HoldsForHugeLogits) {
  Rng rng(TestSeed());
  for (const float q_size : {40.0f, 300.0f}) {
    VoteBitsShape s;
    s.tokens_max = 30000;
    s.q_size = q_size;
    PickBitsCase c(s, 2, rng);
    c.SetTokens({29990, 25555});
    ASSERT_NO_FATAL_FAILURE(c.Run());
    ASSERT_NO_FATAL_FAILURE(c.ExpectTheBest(false, 1e-11f));
  }
}

// What one head finds in the first group, which is in every sample, makes the estimate of its sum
// up to 16 times too large: some of the best tokens may not reach the cut. More than `take` do, so
// that only a proof that counts how far the estimate is off asks for the second round.
TEST(PickBitsCuda, NoticesAnEstimateThatIsTooLarge) {
  Rng rng(TestSeed());
  for (const float peak : {10.0f, 14.0f}) {
    VoteBitsShape s;
    s.batch = 1;
    s.sinks = 0;
    s.tokens_max = 120000;
    s.peak = peak;
    PickBitsCase c(s, 2048, rng);
    c.SetTokens({119990});
    ASSERT_NO_FATAL_FAILURE(c.Run());
    ASSERT_NO_FATAL_FAILURE(c.ExpectTheBest());
    const std::vector<bool> again = c.NeededAgain();
    EXPECT_TRUE(again[0] && again[1]);
  }
}

TEST(PickBitsCuda, SeldomNeedsTheSecondRound) {
  Rng rng(TestSeed());
  size_t again = 0, lists = 0;
  for (const float q_size : {1.0f, 2.0f, 3.5f}) {
    VoteBitsShape s;
    s.batch = 1;
    s.kv_heads = 8;
    s.tokens_max = 50000;
    s.q_size = q_size;
    PickBitsCase c(s, 1024, rng);
    c.SetTokens({49990});
    ASSERT_NO_FATAL_FAILURE(c.Run());
    ASSERT_NO_FATAL_FAILURE(c.ExpectTheBest());
    for (const bool one : c.NeededAgain()) again += one ? 1 : 0, ++lists;
  }
  std::printf("%zu of %zu lists needed it\n", again, lists);
  EXPECT_LE(again, 2u);
}

TEST(PickBitsCuda, OneGraphServesGrowingSequences) {
  Rng rng(TestSeed());
  VoteBitsShape s;
  s.tokens_max = 9000;
  PickBitsCase c(s, 100, rng);
  const PickBitsBatch work = c.work();
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->pick_bits(work, stream); });
  for (const int32_t tokens : {1, 438, 439, 2000, 8999}) {
    SCOPED_TRACE(tokens);
    c.SetTokens({tokens, 9000 - tokens});
    for (int i = 0; i < 3; ++i) {
      c.PoisonSelection();
      graph.Replay();
      ASSERT_NO_FATAL_FAILURE(c.ExpectTheBest());
    }
  }
}

TEST(PickBitsCuda, RefusesWhatItDoesNotTake) {
  Rng rng(TestSeed());
  PickBitsCase c({}, 100, rng);
  PickBitsBatch work = c.work();
  work.vote.output_rows = 1;
  EXPECT_NE(kvs_cuda_ops()->pick_bits(work, nullptr), 0);
  work = c.work();
  work.pick.list_stride = 99;
  EXPECT_NE(kvs_cuda_ops()->pick_bits(work, nullptr), 0);
  work = c.work();
  work.vote.groups.format.tokens = 48;
  EXPECT_NE(kvs_cuda_ops()->pick_bits(work, nullptr), 0);
  work = c.work();
  const DeviceArray<float> always(1);
  work.vote.always = always.get();
  EXPECT_NE(kvs_cuda_ops()->pick_bits(work, nullptr), 0);
  work = c.work();
  work.vote.groups = {};
  EXPECT_NE(kvs_cuda_ops()->pick_bits(work, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
