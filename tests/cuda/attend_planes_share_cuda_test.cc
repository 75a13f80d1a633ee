// SPDX-License-Identifier: Apache-2.0
// Op attend_planes on the GPU by a share of the tokens, against the rule in double precision
// (planes_case.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/cuda/captured_graph.h"
#include "tests/cuda/planes_case.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

PlanesShape ByShare(double share) {
  PlanesShape s;
  s.rule = {.share = share, .skip_below = 1, .sample = 1};
  return s;
}

void RunAndExpect(const PlanesShape& shape, const std::vector<int32_t>& tokens, Rng& rng,
                  int lag = 0, double tolerance = 5e-3, double margin = 0.02) {
  SCOPED_TRACE("dim " + std::to_string(shape.dim) + " group " + std::to_string(shape.group) +
               " keep " + std::to_string(shape.keep) + " share " +
               std::to_string(shape.rule.share) + " sinks " + std::to_string(shape.rule.sinks) +
               " recent " + std::to_string(shape.rule.recent));
  PlanesCase c(shape, rng);
  c.SetTokens(tokens, lag);
  ASSERT_EQ(c.Run(), 0);
  c.ExpectRule(tolerance, margin);
}

TEST(AttendPlanesShareCuda, IsTheRuleForEveryShape) {
  Rng rng(TestSeed());
  const DType q_types[] = {DType::kBF16, DType::kF16, DType::kF32};
  for (const int dim : {64, 128, 256}) {
    for (const int group : {1, 3, 4, 5, 8}) {
      PlanesShape s = ByShare(0.02 + 0.1 * Below(rng, 4));
      s.dim = dim;
      s.group = group;
      s.keep = Below(rng, 2) == 0 ? 4 : 8;
      s.q_dtype = q_types[Below(rng, 3)];
      s.raw_parts = 1 + Below(rng, 2);
      s.block_groups = 1 << Below(rng, 4);
      s.ahead = Below(rng, 2) == 0;
      s.merges = Below(rng, 3) > 0;
      s.sharpness = 0.5f + static_cast<float>(Below(rng, 5)) * 0.5f;
      s.rule.skip_below = Below(rng, 3);
      s.rule.sample = 1 << Below(rng, 5);
      RunAndExpect(s, {1 + Below(rng, 770), 600 + Below(rng, 170)}, rng);
    }
  }
}

// From one candidate to all of them, as lengths and what is always fine leave room.
TEST(AttendPlanesShareCuda, TakesAsManyAsTheLengthSays) {
  Rng rng(TestSeed());
  for (const auto& [sinks, recent] : {std::pair{0, 1}, {4, 64}, {70, 30}, {4, 100000}}) {
    for (const double share : {1e-9, 0.1, 0.5, 0.9999}) {
      PlanesShape s = ByShare(share);
      s.kv_heads = 1;
      s.group = 2;
      s.batch = 3;
      s.rule.sinks = sinks;
      s.rule.recent = recent;
      RunAndExpect(s, {70 + Below(rng, 700), 1 + Below(rng, 80), 768}, rng);
      RunAndExpect(s, {700, 760, 200}, rng, 3);  // workers lag
    }
  }
}

TEST(AttendPlanesShareCuda, AttendsInFullWhereNIsZero) {
  Rng rng(TestSeed());
  PlanesCase c(ByShare(0.1), rng);
  c.SetTokens({765, 600});
  c.AttendInFull(1);
  ASSERT_EQ(c.Run(), 0);
  c.ExpectRule();
  EXPECT_EQ(c.counts().candidates, 2 * (11 * 64 - 4 - 3)) << "the first sequence's";
  EXPECT_EQ(c.counts().fine, 2 * (77 - (765 - 697)));
}

// Tokens that outweigh all others and are not fine: their coarse weights are beyond fp16.
TEST(AttendPlanesShareCuda, TakesCoarseTokensOfAnyWeight) {
  Rng rng(TestSeed());
  for (const float spike : {8.0f, 30.0f, 120.0f}) {
    for (const int group : {4, 8}) {
      PlanesShape s = ByShare(1e-9);
      s.group = group;
      s.spike = spike;
      s.sharpness = 0.3f;
      s.rule.sample = 16;  // which sees few of them
      s.rule.recent = 1;
      RunAndExpect(s, {765, 768}, rng, 0, 2e-2, 0.3);  // logits are rounded as they are large
    }
  }
}

// Masses of its KV head are NaN, so the first candidates are fine. Those of others are as ever.
TEST(AttendPlanesShareCuda, KeepsAQueryThatIsNotFiniteApart) {
  Rng rng(TestSeed());
  PlanesShape s = ByShare(0.2);
  s.batch = 1;
  PlanesCase c(s, rng);
  c.SetTokens({760});
  ASSERT_EQ(c.Run(), 0);
  c.Read();
  const std::vector<float> before = c.got().rows;
  std::vector<float> q = c.inputs().q();
  q[128 + 5] = std::numeric_limits<float>::quiet_NaN();
  c.SetQueries(q);
  ASSERT_EQ(c.Run(), 0);
  c.Read();
  const int taken = 152 - (760 - (11 * 64 - 8 - 4));
  for (int t = 0; t < 11 * 64; ++t) {
    EXPECT_EQ(c.got().fine[t], t < 4 + taken || t >= 696) << "token " << t;
  }
  for (int strip = 0; strip < 11 * 4; ++strip) EXPECT_EQ(c.got().strips[strip], 1) << strip;
  for (size_t i = 0; i < before.size(); ++i) {
    const size_t row = i / 128;
    ASSERT_EQ(std::isnan(c.got().rows[i]), row == 1) << "row " << row << ", channel " << i % 128;
    if (row < 4) continue;
    ASSERT_EQ(c.got().rows[i], before[i]) << "row " << row << " of another KV head";
  }
}

TEST(AttendPlanesShareCuda, OneGraphServesGrowingSequencesAndRepeats) {
  Rng rng(TestSeed());
  PlanesCase c(ByShare(0.15), rng);
  const AttendPlanesBatch work = c.work();
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->attend_planes(work, stream); });
  for (const int32_t tokens : {1, 65, 400, 769}) {
    SCOPED_TRACE(tokens);
    c.SetTokens({tokens, 770 - tokens});
    c.PoisonOutputs();
    graph.Replay();
    c.ExpectRule();
  }
  const std::vector<float> first = c.got().rows;
  c.PoisonOutputs();
  graph.Replay();
  c.Read();
  EXPECT_EQ(std::memcmp(first.data(), c.got().rows.data(), first.size() * sizeof(float)), 0);
}

// Room for lists of a CTA, of a cluster, and longer ones than a cluster takes.
TEST(AttendPlanesShareCuda, TakesSequencesOfAnyRoom) {
  Rng rng(TestSeed());
  PlanesShape s = ByShare(0.1);
  s.batch = 1;
  s.groups_max = 40;
  PlanesCase c(s, rng);
  c.SetTokens({2500});
  ASSERT_EQ(c.Run(), 0);
  c.ExpectRule();
  const std::vector<uint8_t> fine = c.got().fine;
  for (const int groups : {400, 2000, 4000}) {
    AttendPlanesBatch work = c.work();
    work.planes.block_stride = groups / s.block_groups;
    DeviceArray<std::byte> workspace(
        static_cast<size_t>(kvs_cuda_ops()->attend_planes_workspace_bytes(work)));
    workspace.Poison();
    work.workspace = workspace.get();
    c.PoisonOutputs();
    ASSERT_EQ(kvs_cuda_ops()->attend_planes(work, nullptr), 0);
    c.ExpectRule();
    EXPECT_EQ(c.got().fine, fine);
  }
}

TEST(AttendPlanesShareCuda, AsksForMemoryWhereAShareNeedsIt) {
  Rng rng(TestSeed());
  PlanesCase c(ByShare(0.5), rng);
  AttendPlanesBatch work = c.work();
  const auto bytes = [&](const PlanesRule& rule) {
    work.rule = rule;
    return kvs_cuda_ops()->attend_planes_workspace_bytes(work);
  };
  const int64_t least = bytes({.fine_above = 8});
  EXPECT_EQ(bytes(kAllFine), least);
  const int64_t rows = 2 * 2 * 4, tokens = 12 * 64;
  EXPECT_GT(bytes({.share = 0.5}), least + rows * tokens * 4);
  EXPECT_LT(bytes({.share = 0.5}), least + rows * tokens * 6);
}

TEST(AttendPlanesShareCuda, RefusesWhatItDoesNotTake) {
  Rng rng(TestSeed());
  PlanesCase c(ByShare(0.5), rng);
  c.SetTokens({300, 400});
  const auto refuses = [&](auto change) {
    AttendPlanesBatch work = c.work();
    change(work);
    return kvs_cuda_ops()->attend_planes(work, nullptr) != 0;
  };
  EXPECT_FALSE(refuses([](AttendPlanesBatch&) {}));
  EXPECT_TRUE(refuses([](AttendPlanesBatch& w) { w.rule.run = 8; }));
  EXPECT_TRUE(refuses([](AttendPlanesBatch& w) { w.rule.share = 0; }));
  const uint32_t launch = 1;
  EXPECT_TRUE(refuses([&](AttendPlanesBatch& w) {
    w.hot.launch = &launch;
    w.hot.rows = 8;
    w.planes.hot_offset = 32;
  }));
}

}  // namespace
}  // namespace kvstrata::cuda
