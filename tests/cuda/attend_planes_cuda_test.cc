// SPDX-License-Identifier: Apache-2.0
// Op attend_planes on the GPU against the rule in double precision (planes_case.h). Groups are
// sealed by `ref`.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/cuda/captured_graph.h"
#include "tests/cuda/planes_case.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {
namespace {

std::string TextOf(const PlanesShape& s) {
  return "dim " + std::to_string(s.dim) + " keep " + std::to_string(s.keep) + " group " +
         std::to_string(s.group) + " heads " + std::to_string(s.kv_heads) + " fine_above " +
         std::to_string(s.rule.fine_above) + " skip_below " + std::to_string(s.rule.skip_below) +
         " sample " + std::to_string(s.rule.sample) + " sinks " + std::to_string(s.rule.sinks) +
         " recent " + std::to_string(s.rule.recent) + " sharpness " + std::to_string(s.sharpness);
}

// Runs once, and says what it was.
void RunAndExpect(const PlanesShape& shape, const std::vector<int32_t>& tokens, Rng& rng,
                  int lag = 0, double tolerance = 5e-3, double margin = 0.02) {
  SCOPED_TRACE(TextOf(shape));
  PlanesCase c(shape, rng);
  c.SetTokens(tokens, lag);
  ASSERT_EQ(c.Run(), 0);
  const double worst = c.ExpectRule(tolerance, margin);
  std::printf("%s: error %.2g, %d of %d candidates fine, %d near-ties\n", TextOf(shape).c_str(),
              worst, c.counts().fine, c.counts().candidates, c.counts().near_ties);
}

TEST(AttendPlanesCuda, IsTheRuleForEveryShape) {
  Rng rng(TestSeed());
  const DType q_types[] = {DType::kBF16, DType::kF16, DType::kF32};
  for (const int dim : {64, 128, 256}) {
    for (const int group : {1, 3, 4, 7, 8}) {
      PlanesShape s;
      s.dim = dim;
      s.group = group;
      s.keep = Below(rng, 3) == 0 ? 4 : 8;
      s.q_dtype = q_types[Below(rng, 3)];
      s.raw_parts = 1 + Below(rng, 2);
      s.block_groups = 1 << Below(rng, 4);
      s.ahead = Below(rng, 2) == 0;
      s.merges = Below(rng, 3) > 0;
      s.sharpness = 0.5f + static_cast<float>(Below(rng, 5)) * 0.5f;
      s.rule.sample = std::vector{1, 2, 4, 16}[Below(rng, 4)];
      RunAndExpect(s, {1 + Below(rng, 770), 700 + Below(rng, 70)}, rng);
    }
  }
}

// `share` 1: a kernel of its own.
TEST(AttendPlanesCuda, AttendsEverythingFinely) {
  Rng rng(TestSeed());
  for (const int dim : {64, 128, 256}) {
    for (const int group : {1, 4, 7}) {
      PlanesShape s;
      s.dim = dim;
      s.group = group;
      s.keep = Below(rng, 3) == 0 ? 4 : 8;
      s.ahead = Below(rng, 2) == 0;
      s.merges = Below(rng, 3) > 0;
      s.sharpness = 0.5f + static_cast<float>(Below(rng, 5)) * 0.5f;
      s.rule.fine_above = 0;
      s.rule.share = 1;
      s.rule.recent = 100000;
      RunAndExpect(s, {1 + Below(rng, 770), 700 + Below(rng, 70)}, rng);
    }
  }
}

// Limits that choose next to nothing, next to everything, and fine tokens in strips that would be
// left out.
TEST(AttendPlanesCuda, IsTheRuleForEveryLimit) {
  Rng rng(TestSeed());
  for (const double fine_above : {0.05, 0.5, 2.0, 50.0}) {
    for (const double skip_below : {0.0, 0.3, 1.0, 8.0}) {
      PlanesShape s;
      s.kv_heads = 1;
      s.rule.fine_above = fine_above;
      s.rule.skip_below = skip_below;
      RunAndExpect(s, {760, 300 + Below(rng, 400)}, rng);
    }
  }
}

TEST(AttendPlanesCuda, KeepsSinksAndWindowFine) {
  Rng rng(TestSeed());
  for (const auto& [sinks, recent] :
       {std::pair{0, 1}, {4, 64}, {1, 200}, {64, 64}, {100, 30}, {70, 650}, {4, 100000}}) {
    PlanesShape s;
    s.kv_heads = 1;
    s.group = 2;
    s.rule.sinks = sinks;
    s.rule.recent = recent;
    RunAndExpect(s, {768, 65 + Below(rng, 700)}, rng);
    RunAndExpect(s, {700, 760}, rng, 3);  // workers lag
  }
}

TEST(AttendPlanesCuda, AttendsInFullWhereNIsZero) {
  Rng rng(TestSeed());
  PlanesCase c({}, rng);
  c.SetTokens({765, 600});
  c.AttendInFull(1);
  ASSERT_EQ(c.Run(), 0);
  c.ExpectRule();
  EXPECT_EQ(c.counts().candidates, 2 * (11 * 64 - 4 - 3)) << "the first sequence's";
  EXPECT_LT(c.counts().fine, c.counts().candidates);
}

TEST(AttendPlanesCuda, TakesEveryNumberOfGroups) {
  Rng rng(TestSeed());
  PlanesShape s;
  s.kv_heads = 1;
  s.batch = 1;
  s.groups_max = 40;
  PlanesCase c(s, rng);
  for (int groups = 0; groups <= 40; groups += groups < 6 ? 1 : 5) {
    SCOPED_TRACE(groups);
    c.SetTokens({64 * groups + 1 + Below(rng, 64)});
    ASSERT_EQ(c.Run(), 0);
    c.ExpectRule();
  }
}

// One token far above what the sample says: its weight is beyond what fp32 holds relative to it.
TEST(AttendPlanesCuda, TakesATokenThatOutweighsAllOthers) {
  Rng rng(TestSeed());
  for (const float spike : {30.0f, 120.0f, 400.0f}) {
    PlanesShape s;
    s.spike = spike;
    s.sharpness = 0.3f;
    RunAndExpect(s, {765, 768}, rng, 0, 4e-2, 0.3);  // logits are rounded as they are large
  }
}

TEST(AttendPlanesCuda, TakesLargeAndSmallValues) {
  Rng rng(TestSeed());
  for (const float size : {1e-3f, 12000.0f}) {
    PlanesShape s;
    s.value_size = size;
    RunAndExpect(s, {765, 500}, rng);
  }
}

// Its own outputs are NaN and none of its KV head's strips is left out; others are as ever.
TEST(AttendPlanesCuda, KeepsAQueryThatIsNotFiniteApart) {
  Rng rng(TestSeed());
  PlanesShape s;
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
  for (int strip = 0; strip < 11 * 4; ++strip) {
    EXPECT_EQ(c.got().strips[strip], 1) << "strip " << strip;
  }
  for (size_t i = 0; i < before.size(); ++i) {
    const size_t row = i / 128;
    ASSERT_EQ(std::isnan(c.got().rows[i]), row == 1) << "row " << row << ", channel " << i % 128;
    if (row < 4) continue;
    ASSERT_EQ(c.got().rows[i], before[i]) << "row " << row << " of another KV head";
  }
}

// Its choice is that of op `ref`, but for near-ties, and its output the same within 5e-3 where
// there are none.
TEST(AttendPlanesCuda, AgreesWithRef) {
  Rng rng(TestSeed());
  int compared = 0;
  for (int i = 0; i < 6; ++i) {
    PlanesShape s;
    s.groups_max = 20;
    if (i % 2 == 1) s.rule = {.share = 0.15, .skip_below = 1, .sample = 1};
    PlanesCase c(s, rng);
    c.SetTokens({1281, 1 + Below(rng, 1280)});
    ASSERT_EQ(c.Run(), 0);
    c.Read();
    const PlanesOracle oracle(c.inputs(), c.got());
    for (size_t item = 0; item < c.inputs().Items(); ++item) {
      std::vector<const std::byte*> upper, lower;
      AttendPlanesWork w = c.HostWork(item, &upper, &lower);
      std::vector<float> raw_m, raw_l(4, 1.0f), m(4), l(4), o(4 * 128);
      std::vector<uint8_t> fine(w.rows.tokens() + 1), strips(w.rows.strips() + 1);
      for (size_t g = 0; g < 4; ++g)
        raw_m.push_back(static_cast<float>(c.inputs().RawLogSum(4 * item + g)));
      w.raw_m = raw_m.data(), w.raw_l = raw_l.data();
      w.m = m.data(), w.l = l.data(), w.o = o.data();
      w.fine = fine.data(), w.strips = strips.data();
      AttendPlanesRef(&w, 1, InlineExecutor());
      int different = 0;
      for (int t = 0; t < w.rows.tokens(); ++t)
        different += fine[t] != c.got().fine[item * c.inputs().Stride() + t];
      for (int t = 0; t < w.rows.strips(); ++t)
        different += strips[t] != c.got().strips[item * c.inputs().Stride() / 16 + t];
      EXPECT_LE(different, 1 + w.rows.tokens() / 100) << "item " << item;
      if (different > 0 || w.rows.groups == 0) continue;
      ++compared;
      for (size_t g = 0; g < 4; ++g) {
        PlanesItemErrors e;
        oracle.CheckRow(4 * item + g, m[g], l[g], {o.begin() + g * 128, o.begin() + (g + 1) * 128},
                        e);
        EXPECT_LE(e.output, 5e-3) << "item " << item << " head " << g;
        EXPECT_LE(e.lse, 4e-3) << "item " << item << " head " << g;
      }
    }
  }
  EXPECT_GT(compared, 0);
}

TEST(AttendPlanesCuda, OneGraphServesGrowingSequencesAndRepeats) {
  Rng rng(TestSeed());
  PlanesCase c({}, rng);
  const AttendPlanesBatch work = c.work();
  CapturedGraph graph([&](Stream stream) { return kvs_cuda_ops()->attend_planes(work, stream); });
  for (const int32_t tokens : {1, 64, 65, 400, 769}) {
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

TEST(AttendPlanesCuda, OneWorkspaceServesBatchesOfSeveralSizes) {
  Rng rng(TestSeed());
  PlanesShape s;
  s.batch = 3;
  s.kv_heads = 1;
  s.groups_max = 40;  // for several CTAs an item, each of which leaves something
  s.rule.skip_below = 0;
  PlanesCase c(s, rng);
  c.SetTokens({2500, 2000, 2561});
  for (const int batch : {1, 2, 1, 3, 2, 3}) {
    AttendPlanesBatch work = c.work();
    work.batch = batch;
    c.PoisonOutputs();
    ASSERT_EQ(kvs_cuda_ops()->attend_planes(work, nullptr), 0);
    c.Read();
    const size_t written = c.got().rows.size() / 3 * static_cast<size_t>(batch);
    for (size_t i = 0; i < written; ++i) {
      ASSERT_FALSE(std::isnan(c.got().rows[i])) << "batch of " << batch << ", element " << i;
    }
  }
  c.ExpectRule();
}

// Long enough for many groups a warp and many CTAs an item.
TEST(AttendPlanesCuda, TakesLongSequencesAndFetchesLittleMore) {
  Rng rng(TestSeed());
  PlanesShape s;
  s.batch = 1;
  s.kv_heads = 1;
  s.groups_max = 512;
  s.sharpness = 1.5f;
  PlanesCase c(s, rng);
  c.SetTokens({32769});
  ASSERT_EQ(c.Run(), 0);
  c.ExpectRule();
  const double fetched = c.FetchedOverRule();
  std::printf("fetched over the rule's bytes: %.4f; %d of %d candidates fine\n", fetched,
              c.counts().fine, c.counts().candidates);
  EXPECT_LE(fetched, 1.05);
  EXPECT_GE(fetched, 1.0);
}

// Sequences of which one has nearly all the work, of more items than a warp has lanes: CTAs are
// shared out by it, and every item has at least one.
TEST(AttendPlanesCuda, TakesSequencesOfVeryDifferentLengths) {
  Rng rng(TestSeed());
  for (const int heads : {8, 1}) {
    PlanesShape s;
    s.batch = 6;
    s.kv_heads = heads;
    s.groups_max = 128;
    s.sharpness = 1.5f;
    RunAndExpect(s, {70, 8193, 1, 300, 64, 2000}, rng);
  }
}

TEST(AttendPlanesCuda, RefusesWhatItDoesNotTake) {
  Rng rng(TestSeed());
  PlanesCase c({}, rng);
  c.SetTokens({300, 400});
  const auto refuses = [&](auto change) {
    AttendPlanesBatch work = c.work();
    change(work);
    return kvs_cuda_ops()->attend_planes(work, nullptr) != 0;
  };
  EXPECT_FALSE(refuses([](AttendPlanesBatch&) {}));
  EXPECT_TRUE(refuses([](AttendPlanesBatch& w) { w.planes.format.tokens = 128; }));
  EXPECT_TRUE(refuses([](AttendPlanesBatch& w) { w.planes.block_groups = 3; }));
  EXPECT_TRUE(refuses([](AttendPlanesBatch& w) { w.rule.fine_above = w.rule.share = 0; }));
  EXPECT_TRUE(refuses([](AttendPlanesBatch& w) { w.rule.run = 8; }));
  EXPECT_TRUE(refuses([](AttendPlanesBatch& w) { w.group = 9; }));
  EXPECT_TRUE(refuses([](AttendPlanesBatch& w) { w.scale = 0; }));
  EXPECT_TRUE(refuses([](AttendPlanesBatch& w) { w.with.parts = 0; }));
}

}  // namespace
}  // namespace kvstrata::cuda
