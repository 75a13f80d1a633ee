// SPDX-License-Identifier: Apache-2.0
// max_loss of codecs packed and lowrank: what loses more is stored in a milder form or not at all,
// flushes follow, and the status and the log say it.
#include "gmock/gmock.h"
#include "kernels/plans/mosaickv/packed_recompressor.h"
#include "kernels/plans/sekv/lowrank.h"
#include "tests/kernels/codec_fixture.h"

namespace kvstrata {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

using Ints = std::vector<int32_t>;

constexpr uint64_t kSeed = 97;

Geometry SmallGeometry() { return {.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64}; }

// Rows of random numbers lose the most that rows can. From `first` on all have `rank` directions.
Inputs SomeRows(int32_t n, int32_t rank = 64, int32_t first = 0) {
  Inputs in(SmallGeometry(), n, kSeed);
  std::mt19937_64 random(kSeed);
  std::normal_distribution<float> normal;
  std::vector<float> basis(static_cast<size_t>(rank) * 64);
  for (float& x : basis) x = normal(random);
  const auto replace = [&](std::vector<float>* rows) {
    for (size_t at = static_cast<size_t>(first) * 4 * 64; rank < 64 && at < rows->size();
         at += 64) {
      std::fill_n(rows->begin() + static_cast<int64_t>(at), 64, 0.0f);
      for (int32_t r = 0; r < rank; ++r) {
        const float weight = normal(random);
        for (size_t c = 0; c < 64; ++c) {
          (*rows)[at + c] += weight * basis[static_cast<size_t>(r) * 64 + c];
        }
      }
    }
  };
  replace(&in.keys);
  replace(&in.values);
  return in;
}

Plan LimitedPlan(double max_loss) {
  Plan plan = PackedPlan();
  plan.packed.truncate = false;
  plan.packed.buffer = 16;
  plan.packed.close_loss = 1e9;
  plan.stored.max_loss = max_loss;
  return plan;
}

std::unique_ptr<PackedStorage> Packed(CodecSequence& s) {
  Result<std::unique_ptr<PackedStorage>> parsed = PackedStorage::Parse(s.View(), s.geometry());
  EXPECT_TRUE(parsed.ok()) << parsed.status().ToString();
  return std::move(*parsed);
}

std::unique_ptr<CodecSequence> Settled(const Plan& plan, const Inputs& in, int32_t prompt,
                                       std::string_view backend = "ref") {
  auto s = std::make_unique<CodecSequence>(plan, in.g, in, nullptr, backend);
  s->Commit(prompt);
  s->PrefillDone();
  s->Settle();
  s->Commit(in.n);
  s->Settle();
  return s;
}

// Kept elements of every head, of each extent.
Ints KeptBy(const PackedStorage& storage) {
  Ints kept;
  for (size_t e = 0; e < storage.segments().size(); ++e) {
    kept.push_back(storage.head(static_cast<int>(e), 0, 0).keys.keep);
    for (int h = 0; h < 4; ++h) {
      EXPECT_EQ(storage.head(static_cast<int>(e), h / 2, h % 2).keys.keep, kept.back());
    }
  }
  return kept;
}

// What each extent loses at worst.
std::vector<double> LossesOf(const PackedStorage& storage) {
  std::vector<double> losses;
  for (const PackedStorage::Segment& s : storage.segments()) losses.push_back(s.worst_loss);
  return losses;
}

class MaxLoss : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(, MaxLoss, ::testing::ValuesIn(BackendNames()),
                         [](const auto& test) { return test.param; });

TEST_P(MaxLoss, AMilderStrategyIsTakenAndFlushesFollowIt) {
  const Inputs in = SomeRows(400);
  const Plan plan = LimitedPlan(0.3);
  const auto s = Settled(plan, in, 200, GetParam()),
             off = Settled(LimitedPlan(1), in, 200, GetParam());
  const auto storage = Packed(*s), nonsense = Packed(*off);
  EXPECT_THAT(KeptBy(*nonsense), Each(16));
  ASSERT_GT(storage->segments().size(), 1u);
  EXPECT_EQ(storage->end(), nonsense->end());
  EXPECT_GT(storage->keep_max(), 16);
  EXPECT_LT(storage->keep_max(), 64);
  EXPECT_THAT(LossesOf(*storage), Each(::testing::Le(0.3)));
  const std::string keep = "keep = " + std::to_string(KeptBy(*storage)[0]) + " is taken";
  EXPECT_THAT(PackedText(plan, storage->end(), storage.get()),
              AllOf(HasSubstr("tokens 0 to 200"), HasSubstr("keep = 0 (head_dim / 4)"),
                    HasSubstr("more than max_loss = 0.300"), HasSubstr(keep)));
  ASSERT_THAT(s->warnings(), SizeIs(1)) << "once a sequence";
  EXPECT_THAT(s->warnings()[0], HasSubstr(keep));
  EXPECT_THAT(PackedText(plan, storage->end() + 1, storage.get()),
              AllOf(HasSubstr(keep), HasSubstr("nothing is packed from token " +
                                               std::to_string(storage->end()) + " on")));
  EXPECT_THAT(off->warnings(), SizeIs(0));
  EXPECT_EQ(PackedText(LimitedPlan(1), nonsense->end(), nonsense.get()), "");
}

TEST_P(MaxLoss, WhatLosesLittleIsPackedAsAsked) {
  const Inputs in = SomeRows(300, 8);
  const auto s = Settled(LimitedPlan(0.3), in, 200, GetParam());
  const auto off = Settled(LimitedPlan(1), in, 200, GetParam());
  EXPECT_THAT(KeptBy(*Packed(*s)), Each(16));
  const auto packed = Packed(*s), as_asked = Packed(*off);
  const PackedHead &h = packed->head(0, 1, 1), &same = as_asked->head(0, 1, 1);
  ASSERT_EQ(h.keys.stride, same.keys.stride);
  EXPECT_EQ(std::memcmp(h.keys.data, same.keys.data, 200 * h.keys.stride), 0);
  EXPECT_EQ(std::memcmp(h.values.data, same.values.data, 200 * h.values.stride), 0);
  EXPECT_EQ(std::memcmp(h.blocks.data, same.blocks.data, 25 * h.blocks.stride), 0);
  EXPECT_THAT(s->warnings(), SizeIs(0));
  EXPECT_EQ(PackedText(LimitedPlan(0.3), Packed(*s)->end(), Packed(*s).get()), "");
}

// Some tokens unlike all others, in a prompt that loses next to nothing on average.
TEST_P(MaxLoss, TheWorstTokensCountNotTheMean) {
  Inputs in = SomeRows(640, 8);
  const Inputs other = SomeRows(640);
  const auto unlike = [&](std::vector<float>* rows, const std::vector<float>& from) {
    std::copy_n(from.begin() + 300 * 4 * 64, 48 * 4 * 64, rows->begin() + 300 * 4 * 64);
  };
  unlike(&in.keys, other.keys);
  unlike(&in.values, other.values);
  const Plan plan = LimitedPlan(0.3);
  const auto s = Settled(plan, in, 640, GetParam());
  const auto storage = Packed(*s);
  ASSERT_EQ(storage->segments().size(), 1u);
  EXPECT_GT(storage->keep_max(), 16);
  EXPECT_GT(storage->segments()[0].refused_loss, 0.3);
  EXPECT_LE(storage->segments()[0].worst_loss, 0.3);
}

// Extents of a long segment, each as much as it needs.
TEST_P(MaxLoss, ExtentsOfOneSegmentAreLimitedEachByItself) {
  Inputs in = SomeRows(640, 8);
  const Inputs other = SomeRows(640);
  std::copy(other.keys.begin() + 580 * 4 * 64, other.keys.end(), in.keys.begin() + 580 * 4 * 64);
  std::copy(other.values.begin() + 580 * 4 * 64, other.values.end(),
            in.values.begin() + 580 * 4 * 64);
  const Plan plan = LimitedPlan(0.3);
  CodecSequence s(plan, in.g, in, nullptr, GetParam());
  s.UseCloneOf(*NewPackedRecompressor(plan, in.g, 50000));
  s.Commit(640);
  s.PrefillDone();
  s.Settle();
  const auto storage = Packed(s);
  const Ints kept = KeptBy(*storage);
  ASSERT_GT(kept.size(), 2u);
  EXPECT_EQ(storage->end(), 640);
  EXPECT_EQ(kept.front(), 16);
  EXPECT_GT(kept.back(), 16);
  EXPECT_THAT(LossesOf(*storage), Each(::testing::Le(0.3)));
}

TEST_P(MaxLoss, RowsStayRawWhereNoStrategyKeepsIt) {
  const Inputs in = SomeRows(400);
  Plan plan = LimitedPlan(0.2);
  plan.packed.truncate = true;  // a quarter of what is as large in all directions
  const auto s = Settled(plan, in, 200, GetParam());
  EXPECT_THAT(s->extents(), SizeIs(0));
  EXPECT_THAT(s->released(), SizeIs(0));
  EXPECT_FALSE(s->recompressor().Due(s->Input()));
  ASSERT_THAT(s->warnings(), SizeIs(1));
  EXPECT_THAT(s->warnings()[0], AllOf(HasSubstr("stay raw"), HasSubstr("truncate = false")));
  EXPECT_THAT(PackedText(plan, 200, nullptr), HasSubstr("nothing is packed"));
}

// Generated text that lies elsewhere than the prompt, whose rotations its flushes have.
TEST_P(MaxLoss, AFlushTakesMoreThanItsSegmentWhereItMust) {
  Inputs in = SomeRows(520, 8);
  const Inputs other = SomeRows(520);
  std::copy(other.keys.begin() + 200 * 4 * 64, other.keys.end(), in.keys.begin() + 200 * 4 * 64);
  std::copy(other.values.begin() + 200 * 4 * 64, other.values.end(),
            in.values.begin() + 200 * 4 * 64);
  const Plan plan = LimitedPlan(0.3);
  const auto s = Settled(plan, in, 200, GetParam());
  const auto storage = Packed(*s);
  const Ints kept = KeptBy(*storage);
  ASSERT_GT(kept.size(), 2u);
  EXPECT_EQ(kept[0], 16) << "the prompt as asked";
  EXPECT_THAT(Ints(kept.begin() + 1, kept.end()), Each(::testing::Gt(16)));
  EXPECT_THAT(LossesOf(*storage), Each(::testing::Le(0.3)));
  EXPECT_EQ(storage->end(), 520) << "joined or not, nothing is left out";
  EXPECT_THAT(PackedText(plan, storage->end(), storage.get()), HasSubstr("tokens 200 to "));
  EXPECT_THAT(s->warnings(), SizeIs(1));
}

TEST_P(MaxLoss, OneTokenAtATimeGivesTheSameBytes) {
  const Inputs in = SomeRows(330);
  Plan plan = LimitedPlan(0.3);
  plan.packed.segment = 96;
  const auto fast = Settled(plan, in, 150, GetParam());
  CodecSequence slow(plan, in.g, in, nullptr, GetParam());
  for (int32_t t = 1; t <= in.n; ++t) {
    slow.Commit(t);
    if (t == 150) slow.PrefillDone();
    slow.Settle();
  }
  // Without the memory of who has warned.
  CodecSequence forgetful(plan, in.g, in, nullptr, GetParam());
  for (int32_t t = 30; t <= in.n; t += 30) {
    forgetful.Commit(t);
    if (t == 150) forgetful.PrefillDone();
    forgetful.UseCloneOf(*NewRecompressor(plan, in.g, nullptr));
    forgetful.Settle();
  }
  EXPECT_EQ(slow.extents(), fast->extents());
  EXPECT_EQ(forgetful.extents(), fast->extents());
}

TEST_P(MaxLoss, SpansKeepRowsWhereFactorsLoseTooMuch) {
  std::vector<float> surprisal(300, 0.1f);
  for (size_t t = 0; t < surprisal.size(); t += 40) surprisal[t] = 9;
  for (const int32_t rank : {2, 64}) {
    const Inputs in = SomeRows(300, rank);
    Plan plan = SpanPlan();
    plan.lowrank.r_max = 4;
    plan.stored.max_loss = 0.3;
    CodecSequence s(plan, in.g, in, nullptr, GetParam());
    s.Commit(300);
    s.PrefillDone();
    s.Report(surprisal);
    s.Settle();
    Result<std::unique_ptr<SpanStorage>> parsed = SpanStorage::Parse(s.View(), s.geometry());
    ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
    const SpanStorage& storage = **parsed;
    ASSERT_GT(storage.spans().size(), 3u);
    const bool lossy = rank == 64;
    for (int32_t u = 0; u < static_cast<int32_t>(storage.spans().size()); ++u) {
      EXPECT_EQ(storage.Factors(u, 1, 1).k.rank, lossy ? -1 : 4);
      EXPECT_EQ(storage.Factors(u, 1, 1).v.rank, lossy ? -1 : 4);
    }
    const auto all = 8 * static_cast<int64_t>(storage.spans().size());
    EXPECT_EQ(storage.refused(), lossy ? all : 0);
    const std::string text = MaxLossText(plan, in.g, &storage);
    if (!lossy) {
      EXPECT_EQ(text, "");
    } else {
      EXPECT_THAT(text, AllOf(HasSubstr(std::to_string(all)), HasSubstr("r_max = 4")));
    }
  }
}

}  // namespace
}  // namespace kvstrata
