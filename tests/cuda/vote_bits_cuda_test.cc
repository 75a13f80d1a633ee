// SPDX-License-Identifier: Apache-2.0
// Votes by quantised keys are those of ref within 5e-3: logits of op score_bits, then op vote.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/cuda/captured_graph.h"
#include "tests/cuda/seed.h"
#include "tests/cuda/vote_bits_case.h"

namespace kvstrata::cuda {
namespace {

// Groups of whole blocks of op vote, of half a block, and of one and a half.
TEST(VoteBitsCuda, IsTheReferenceForEveryShape) {
  Rng rng(TestSeed());
  const DType q_types[] = {DType::kBF16, DType::kF16, DType::kF32};
  double worst = 0;
  for (const int dim : {64, 128, 256}) {
    for (const int bits : {2, 3, 4}) {
      for (const int group : {1, 3, 4, 7, 8}) {
        VoteBitsShape s;
        s.group = group;
        s.format = {dim, bits, std::vector{32, 64, 96, 128, 224, 256}[Below(rng, 6)]};
        s.q_dtype = q_types[Below(rng, 3)];
        s.sinks = std::vector{0, 4, 37, 100, 250}[Below(rng, 5)];
        s.recent = s.format.tokens + Below(rng, 70);
        s.per_head = Below(rng, 4) > 0;
        s.tokens_max = 3000;
        SCOPED_TRACE("dim " + std::to_string(dim) + " bits " + std::to_string(bits) + " group " +
                     std::to_string(group) + " unit " + std::to_string(s.format.tokens) +
                     " sinks " + std::to_string(s.sinks));
        VoteBitsCase vote(s, rng);
        vote.work().ahead = Below(rng, 2) == 0;
        vote.SetTokens({Below(rng, 3000), 2990 + Below(rng, 11)});
        ASSERT_NO_FATAL_FAILURE(vote.Run());
        worst = std::max(worst, vote.ExpectReference());
      }
    }
  }
  std::printf("worst relative error %.2g\n", worst);
}

TEST(VoteBitsCuda, MakesSharesOfAllAttention) {
  Rng rng(TestSeed());
  for (const int group : {1, 4, 8}) {
    VoteBitsShape s;
    s.group = group;
    s.shares = true;
    VoteBitsCase vote(s, rng);
    vote.SetTokens({4999, 400 + Below(rng, 4000)});
    ASSERT_NO_FATAL_FAILURE(vote.Run());
    vote.ExpectReference();
  }
}

// A vote a run of tokens, also where the first or the last run of what competes begins inside a
// block.
TEST(VoteBitsCuda, SumsRuns) {
  Rng rng(TestSeed());
  for (const int run : {4, 8, 16}) {
    for (const int group : {1, 4, 8}) {
      VoteBitsShape s;
      s.group = group;
      s.run = run;
      s.sinks = Below(rng, 100);
      s.shares = Below(rng, 2) == 0;
      s.tokens_max = 3000;
      SCOPED_TRACE(std::to_string(run) + " sinks " + std::to_string(s.sinks));
      VoteBitsCase vote(s, rng);
      for (int i = 0; i < 4; ++i) {
        vote.SetTokens({Below(rng, 3000), 2950 + Below(rng, 51)});
        ASSERT_NO_FATAL_FAILURE(vote.Run());
        vote.ExpectReference();
      }
    }
  }
}

// Candidates that end at each place of a block, the last group sealed by the token before.
TEST(VoteBitsCuda, TakesEveryLength) {
  Rng rng(TestSeed());
  for (const int unit : {32, 64, 96, 128}) {
    VoteBitsShape s;
    s.format.tokens = unit;
    s.sinks = 4;
    s.recent = unit;
    s.tokens_max = 1024;
    VoteBitsCase vote(s, rng);
    for (int tokens = 700; tokens < 700 + 2 * unit; tokens += 5) {
      SCOPED_TRACE(std::to_string(unit) + ", " + std::to_string(tokens));
      vote.SetTokens({tokens, tokens + 3});
      ASSERT_NO_FATAL_FAILURE(vote.Run());
      vote.ExpectReference();
    }
  }
}

TEST(VoteBitsCuda, TakesRaggedBatchesAndManyHeads) {
  Rng rng(TestSeed());
  for (const int group : {4, 8}) {
    VoteBitsShape s;
    s.batch = 32;
    s.kv_heads = 8;
    s.group = group;
    s.format.dim = 64;
    s.tokens_max = 1200;
    VoteBitsCase vote(s, rng);
    std::vector<int32_t> tokens(32);
    for (int32_t& n : tokens) n = Below(rng, 1201);
    vote.SetTokens(tokens);
    ASSERT_NO_FATAL_FAILURE(vote.Run());
    vote.ExpectReference();
  }
}

// Many blocks a warp, and candidates that begin inside a block.
TEST(VoteBitsCuda, TakesLongSequences) {
  Rng rng(TestSeed());
  VoteBitsShape s;
  s.batch = 1;
  s.kv_heads = 1;
  s.tokens_max = 200000;
  VoteBitsCase vote(s, rng);
  vote.SetTokens({199999});
  ASSERT_NO_FATAL_FAILURE(vote.Run());
  vote.ExpectReference();
}

TEST(VoteBitsCuda, OneGraphServesGrowingSequencesAndRepeats) {
  Rng rng(TestSeed());
  VoteBitsCase vote({}, rng);
  const VoteBatch work = vote.work();
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->vote(work, stream); });
  for (const int32_t tokens : {1, 438, 439, 2000, 4999}) {
    SCOPED_TRACE(tokens);
    vote.SetTokens({tokens, 5000 - tokens});
    graph.Replay();
    vote.ExpectReference();
  }
  const std::vector<float> first = vote.Votes();
  graph.Replay();
  const std::vector<float> again = vote.Votes();
  EXPECT_EQ(std::memcmp(first.data(), again.data(), first.size() * sizeof(float)), 0);
}

TEST(VoteBitsCuda, RefusesWhatItDoesNotTake) {
  Rng rng(TestSeed());
  VoteBitsCase vote({}, rng);
  const VoteBatch valid = vote.work();
  VoteBatch work = valid;
  work.groups.format.tokens = 48;
  EXPECT_NE(kvs_cuda_ops()->vote(work, nullptr), 0);
  work = valid;
  work.rule.recent_tokens = 63;  // a candidate may be in the group that is not sealed
  EXPECT_NE(kvs_cuda_ops()->vote(work, nullptr), 0);
  work = valid;
  work.rule.unit_tokens = 12;
  EXPECT_NE(kvs_cuda_ops()->vote(work, nullptr), 0);
  work = valid;
  work.query_heads = 18;
  EXPECT_NE(kvs_cuda_ops()->vote(work, nullptr), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
