// SPDX-License-Identifier: Apache-2.0
#include "kernels/plan/plan.h"

#include <limits>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvstrata {
namespace {

using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();

Plan MustParse(std::string_view text) {
  const Result<Plan> plan = ParsePlan(text);
  EXPECT_TRUE(plan.ok()) << text << ": " << plan.status().ToString();
  return plan.ok() ? *plan : Plan();
}

TEST(Plan, PresetsHaveTheDefaultsOfTheSpecification) {
  const Plan full = MustParse("full");
  EXPECT_EQ(full, Plan());
  const Plan window = MustParse("window");
  EXPECT_EQ(window.selector, SelectorKind::kWindow);
  EXPECT_EQ(window.segmenter(), SegmenterKind::kNone);
  EXPECT_EQ(window.window.sinks, 4);
  EXPECT_EQ(window.window.recent, 2044);
  EXPECT_EQ(window.min_tokens, 4096);
  const Plan quest = MustParse("quest");
  EXPECT_EQ(quest.selector, SelectorKind::kMinMax);
  EXPECT_EQ(quest.segmenter(), SegmenterKind::kPage);
  EXPECT_EQ(quest.index.unit, 16);
  EXPECT_EQ(quest.minmax.budget, 2048);
  EXPECT_EQ(quest.minmax.sinks, 0);
  EXPECT_EQ(quest.minmax.recent, 1);
  const Plan chess = MustParse("chess");
  EXPECT_EQ(chess.selector, SelectorKind::kCascade);
  EXPECT_EQ(chess.segmenter(), SegmenterKind::kHierarchy);
  EXPECT_EQ(chess.index.unit, 32);
  EXPECT_EQ(chess.index.pages_per_chunk, 8);
  EXPECT_EQ(chess.index.chunks_per_grid, 8);
  EXPECT_EQ(chess.cascade.recent, 16);
  EXPECT_EQ(chess.cascade.sinks, 1);
  EXPECT_EQ(chess.cascade.rho, (std::array<double, 3>{0.5, 0.2, 0.1}));
  EXPECT_EQ(chess.cascade.pruning, CascadeOptions::Pruning::kTop);
  EXPECT_EQ(chess.cascade.trigger, CascadeOptions::Trigger::kEntropy);
  EXPECT_FALSE(chess.cascade.trigger_or);
  EXPECT_EQ(chess.cascade.thresholds, (std::array<double, 2>{kInf, kInf}));
  EXPECT_EQ(chess.cascade.every, 10);
}

TEST(Plan, PresetsOfThePapersHaveTheirDefaults) {
  const Plan token = MustParse("tokenselect");
  EXPECT_EQ(token.selector, SelectorKind::kVote);
  EXPECT_EQ(token.segmenter(), SegmenterKind::kNone);
  EXPECT_EQ(token.codec, CodecKind::kRaw);
  EXPECT_EQ(token.vote.budget, 2048);
  EXPECT_EQ(token.vote.sinks, 128);
  EXPECT_EQ(token.vote.recent, 512);
  EXPECT_EQ(token.vote.theta, 0.9);
  EXPECT_EQ(token.vote.chunk, 512);
  EXPECT_EQ(token.vote.max_pool, 1);
  EXPECT_TRUE(token.vote.scale);
  EXPECT_FALSE(token.vote.append_departed || token.vote.cosine_per_head);
  const Plan sentence = MustParse("sentencekv");
  EXPECT_EQ(sentence.selector, SelectorKind::kBucket);
  EXPECT_EQ(sentence.segmenter(), SegmenterKind::kSentence);
  EXPECT_EQ(sentence.codec, CodecKind::kRaw);
  EXPECT_EQ(sentence.bucket.budget, 1024);
  EXPECT_EQ(sentence.bucket.r, 2);
  EXPECT_EQ(sentence.bucket.n_obs, 32);
  EXPECT_EQ(sentence.bucket.sinks, 32);
  EXPECT_EQ(sentence.bucket.recent, 32);
  EXPECT_EQ(sentence.bucket.pool, 7);
  EXPECT_EQ(sentence.bucket.max_length, 100);
  EXPECT_FALSE(sentence.bucket.keep_rest || sentence.bucket.per_query_head);
  const Plan sekv = MustParse("sekv");
  EXPECT_EQ(sekv.selector, SelectorKind::kZoom);
  EXPECT_EQ(sekv.segmenter(), SegmenterKind::kSpan);
  EXPECT_EQ(sekv.codec, CodecKind::kLowRank);
  EXPECT_EQ(sekv.lowrank.alpha, 2);
  EXPECT_EQ(sekv.lowrank.l_min, 4);
  EXPECT_EQ(sekv.lowrank.r_max, 32);
  EXPECT_EQ(sekv.lowrank.d_route, 0);
  EXPECT_EQ(sekv.lowrank.local, 512);
  EXPECT_EQ(sekv.zoom.rows, -1);
  EXPECT_EQ(sekv.zoom.rows_share, 0.25);
  EXPECT_EQ(sekv.lowrank.parameters, "");
  EXPECT_EQ(sekv.stored.max_loss, 0.3);
  const Plan mosaic = MustParse("mosaickv");
  EXPECT_EQ(mosaic.selector, SelectorKind::kBlock);
  EXPECT_EQ(mosaic.segmenter(), SegmenterKind::kLoss);
  EXPECT_EQ(mosaic.codec, CodecKind::kPacked);
  EXPECT_EQ(mosaic.block.share, 0.1);
  EXPECT_FALSE(mosaic.packed.search);
  EXPECT_EQ(mosaic.packed.keep, 0);
  EXPECT_EQ(mosaic.packed.neighbours, 1);
  EXPECT_EQ(mosaic.packed.block, 8);
  EXPECT_EQ(mosaic.packed.segment, 65536);
  EXPECT_EQ(mosaic.packed.buffer, 32);
  EXPECT_EQ(mosaic.packed.close_loss, 256);
  EXPECT_TRUE(mosaic.packed.truncate);
  EXPECT_EQ(mosaic.packed.drift, 0);
  EXPECT_EQ(mosaic.stored.keep_raw, KeepRaw::kAuto);
  const Plan raw = MustParse("{selector = \"block\", codec = \"raw\"}");
  EXPECT_EQ(raw.segmenter(), SegmenterKind::kPage);
  EXPECT_EQ(raw.index.unit, 16);
  EXPECT_EQ(raw.block.recent, 32);
}

TEST(Plan, OptionsOfThePapersAreSet) {
  const Plan token = MustParse(
      "tokenselect{k = 48, n_init = 8, n_local = 24, theta = 1, append_departed = true, "
      "max_pool = 5, scale = false, chunk = 48, cosine = \"head\"}");
  EXPECT_EQ(token.vote.budget, 48);
  EXPECT_EQ(token.vote.theta, 1.0);
  EXPECT_TRUE(token.vote.append_departed);
  EXPECT_EQ(token.vote.max_pool, 5);
  EXPECT_FALSE(token.vote.scale);
  EXPECT_EQ(token.vote.chunk, 48);
  EXPECT_TRUE(token.vote.cosine_per_head);
  const Plan sentence = MustParse(
      "sentencekv{tau = 48, r = 3, n_obs = 16, start = 8, recent = 9, pool = 1, max_length = 40, "
      "keep_rest = true, per_query_head = true}");
  EXPECT_EQ(sentence.bucket.budget, 48);
  EXPECT_EQ(sentence.bucket.r, 3.0);
  EXPECT_EQ(sentence.bucket.n_obs, 16);
  EXPECT_EQ(sentence.bucket.sinks, 8);
  EXPECT_EQ(sentence.bucket.recent, 9);
  EXPECT_EQ(sentence.bucket.pool, 1);
  EXPECT_EQ(sentence.bucket.max_length, 40);
  EXPECT_TRUE(sentence.bucket.keep_rest && sentence.bucket.per_query_head);
  const Plan sekv = MustParse(
      "sekv{alpha = 1.5, l_min = 6, r_max = 8, d_route = 16, local = 32, rows = 0, "
      "rows_share = 0.5, parameters = \"model-1.safetensors\", factors = \"device\", "
      "keep_raw = \"no\", max_loss = 0.125}");
  EXPECT_EQ(sekv.stored.max_loss, 0.125);
  EXPECT_EQ(sekv.lowrank.alpha, 1.5);
  EXPECT_EQ(sekv.lowrank.l_min, 6);
  EXPECT_EQ(sekv.lowrank.r_max, 8);
  EXPECT_EQ(sekv.lowrank.d_route, 16);
  EXPECT_EQ(sekv.lowrank.local, 32);
  EXPECT_EQ(sekv.zoom.rows, 0);
  EXPECT_EQ(sekv.zoom.rows_share, 0.5);
  EXPECT_EQ(sekv.lowrank.parameters, "model-1.safetensors");
  EXPECT_EQ(sekv.lowrank.factors, Tier::kDevice);
  EXPECT_EQ(sekv.stored.keep_raw, KeepRaw::kNo);
  const Plan fixed = MustParse(
      "mosaickv{share = 0.0625, strategy = \"fixed\", keep = 48, neighbours = 4, block = 16, "
      "segment = 128, buffer = 16, truncate = false, close_loss = 6, keep_raw = \"host\", "
      "group = \"softmax\"}");
  EXPECT_EQ(fixed.block.share, 0.0625);
  EXPECT_EQ(fixed.packed.keep, 48);
  EXPECT_EQ(fixed.packed.neighbours, 4);
  EXPECT_EQ(fixed.packed.block, 16);
  EXPECT_EQ(fixed.packed.segment, 128);
  EXPECT_EQ(fixed.packed.buffer, 16);
  EXPECT_FALSE(fixed.packed.truncate);
  EXPECT_EQ(fixed.packed.close_loss, 6);
  EXPECT_EQ(fixed.stored.keep_raw, KeepRaw::kHost);
  EXPECT_TRUE(fixed.block.group_softmax);
  const Plan search = MustParse(
      "mosaickv{strategy = \"search\", max_channel_loss = 0.35, max_block_loss = 0.6, "
      "drift = 2, min_segment = 512, closing = \"drift\"}");
  EXPECT_TRUE(search.packed.search);
  EXPECT_EQ(search.packed.max_channel_loss, 0.35);
  EXPECT_EQ(search.packed.max_block_loss, 0.6);
  EXPECT_EQ(search.packed.drift, 2);
  EXPECT_EQ(search.packed.min_segment, 512);
  EXPECT_GT(MustParse("mosaickv{closing = \"drift\"}").packed.drift, 0);
}

TEST(Plan, OptionsOfOurOwnAreSet) {
  const Plan quest = MustParse("quest{rest = \"mean\", group = \"softmax\"}");
  EXPECT_EQ(quest.index.rest, RestKind::kMean);
  EXPECT_TRUE(quest.minmax.group_softmax);
  EXPECT_FALSE(quest.minmax.deviation);
  EXPECT_TRUE(MustParse("quest{score = \"deviation\"}").minmax.deviation);
  EXPECT_EQ(MustParse("bits{run = 8}").bits.run, 8);
  const Plan chess = MustParse("chess{rest = \"mean\", tree = true, centred = true}");
  EXPECT_EQ(chess.index.rest, RestKind::kMean);
  EXPECT_TRUE(chess.cascade.tree && chess.cascade.centred);
  EXPECT_EQ(MustParse("{selector = \"block\", codec = \"raw\", rest = \"mean\"}").index.rest,
            RestKind::kMean);
}

struct Pair {
  const char* text;
  SegmenterKind segmenter;
  CodecKind codec;
};

// Without a segmenter a plan gets the right one; without a codec its preset's, or the one that
// the segmenter needs.
TEST(Plan, AxesThatAreLeftOutFollowFromTheOthers) {
  const Pair pairs[] = {
      {"{selector = 'full', codec = 'packed'}", SegmenterKind::kNone, CodecKind::kPacked},
      {"{selector = 'window', codec = 'packed'}", SegmenterKind::kNone, CodecKind::kPacked},
      {"quest{codec = 'packed'}", SegmenterKind::kPage, CodecKind::kPacked},
      {"chess{codec = 'packed'}", SegmenterKind::kHierarchy, CodecKind::kPacked},
      {"tokenselect{codec = 'packed'}", SegmenterKind::kNone, CodecKind::kPacked},
      {"{selector = 'block'}", SegmenterKind::kLoss, CodecKind::kPacked},
      {"{selector = 'block', segmenter = 'page'}", SegmenterKind::kPage, CodecKind::kRaw},
      {"mosaickv{codec = 'raw'}", SegmenterKind::kPage, CodecKind::kRaw},
      {"{selector = 'bucket'}", SegmenterKind::kSentence, CodecKind::kRaw},
      {"{selector = 'bucket', segmenter = 'span'}", SegmenterKind::kSpan, CodecKind::kLowRank},
      {"sentencekv{codec = 'lowrank', alpha = 1}", SegmenterKind::kSpan, CodecKind::kLowRank},
      {"{selector = 'zoom'}", SegmenterKind::kSpan, CodecKind::kLowRank}};
  for (const Pair& pair : pairs) {
    const Plan plan = MustParse(pair.text);
    EXPECT_EQ(plan.segmenter(), pair.segmenter) << pair.text;
    EXPECT_EQ(plan.codec, pair.codec) << pair.text;
    EXPECT_EQ(MustParse(FormatPlan(plan)), plan) << FormatPlan(plan);
  }
}

TEST(Plan, OptionsAreSet) {
  const Plan quest = MustParse(
      "  quest { budget = 1024, page=32,\tn_sink = 20, n_recent = 30, min_tokens = 0, "
      "n_dense_layers = 2, tier = \"host\", codec = 'raw' } ");
  EXPECT_EQ(quest.name, "quest");
  EXPECT_EQ(quest.minmax.budget, 1024);
  EXPECT_EQ(quest.index.unit, 32);
  EXPECT_EQ(quest.minmax.sinks, 20);
  EXPECT_EQ(quest.minmax.recent, 30);
  EXPECT_EQ(quest.min_tokens, 0);
  EXPECT_EQ(quest.n_dense_layers, 2);
  EXPECT_EQ(quest.tier, Tier::kHost);
  const Plan automatic = MustParse("quest{min_tokens = \"auto\", batch = 8}");
  EXPECT_EQ(automatic.min_tokens, kAutoTokens);
  EXPECT_EQ(automatic.batch, 8);
  const Plan chess = MustParse(
      "chess{page=8,pages_per_chunk=3,chunks_per_grid=4,sinks=2,window=5,rho=[1,0.6,5e-1],"
      "cascade=\"literal\",trigger=\"always\",combine=\"or\",thresholds=[0.9,inf],every=7}");
  EXPECT_EQ(chess.index.unit, 8);
  EXPECT_EQ(chess.index.pages_per_chunk, 3);
  EXPECT_EQ(chess.index.chunks_per_grid, 4);
  EXPECT_EQ(chess.cascade.sinks, 2);
  EXPECT_EQ(chess.cascade.recent, 5);
  EXPECT_EQ(chess.cascade.rho, (std::array<double, 3>{1, 0.6, 0.5}));
  EXPECT_EQ(chess.cascade.pruning, CascadeOptions::Pruning::kLiteral);
  EXPECT_EQ(chess.cascade.trigger, CascadeOptions::Trigger::kAlways);
  EXPECT_TRUE(chess.cascade.trigger_or);
  EXPECT_EQ(chess.cascade.thresholds, (std::array<double, 2>{0.9, kInf}));
  EXPECT_EQ(chess.cascade.every, 7);
  EXPECT_EQ(MustParse("chess{rho=\"moderate\"}").cascade.rho,
            (std::array<double, 3>{0.8, 0.7, 0.7}));
  EXPECT_EQ(MustParse("chess{rho=\"conservative\"}").cascade.rho,
            (std::array<double, 3>{0.9, 0.9, 0.9}));
  EXPECT_EQ(MustParse("quest{}"), MustParse("quest"));
}

TEST(Plan, OwnPlansNameTheirAxes) {
  Plan expected = MustParse("chess{rho = [0.3, 0.3, 0.3]}");
  expected.name = "custom";
  EXPECT_EQ(MustParse("{segmenter = \"hierarchy\", selector = \"cascade\", rho = [0.3, 0.3, 0.3]}"),
            expected);
  EXPECT_EQ(MustParse("{selector = \"cascade\", rho = [0.3, 0.3, 0.3]}"), expected);
  EXPECT_EQ(MustParse("quest{selector = \"minmax\", segmenter = \"page\"}"), MustParse("quest"));
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int32_t Int(int32_t low, int32_t high) {
    return std::uniform_int_distribution<int32_t>(low, high)(engine_);
  }
  double Share() { return 1 - std::uniform_real_distribution<double>(0, 1)(engine_); }  // (0, 1]
  bool Coin() { return Int(0, 1) == 1; }

 private:
  std::mt19937_64 engine_;
};

void RandomPapers(Random& r, Plan& p) {
  if (p.selector == SelectorKind::kVote) {
    p.vote.budget = r.Int(0, 1 << 29), p.vote.sinks = r.Int(0, 1 << 29),
    p.vote.recent = r.Int(1, 1 << 29);
    p.vote.theta = 2 * r.Share() - 1;
    p.vote.append_departed = r.Coin(), p.vote.scale = r.Coin(), p.vote.cosine_per_head = r.Coin();
    p.vote.max_pool = r.Int(1, 1024), p.vote.chunk = r.Int(1, 65536);
  }
  if (p.selector == SelectorKind::kBucket) {
    p.bucket.budget = r.Int(0, 1 << 19), p.bucket.max_length = r.Int(1, 65536),
    p.bucket.per_query_head = r.Coin();
  }
  if (p.segmenter() == SegmenterKind::kSentence) {
    p.bucket.r = 100 * r.Share(), p.bucket.n_obs = r.Int(1, 1024), p.bucket.pool = r.Int(1, 1024);
    p.bucket.sinks = r.Int(0, 1 << 29), p.bucket.recent = r.Int(1, 1 << 29),
    p.bucket.keep_rest = r.Coin();
  }
  if (p.selector == SelectorKind::kZoom) {
    p.zoom.rows = r.Int(-1, 1 << 29), p.zoom.rows_share = r.Share();
  }
  if (p.codec == CodecKind::kLowRank) {
    p.lowrank.alpha = 100 * r.Share(), p.lowrank.l_min = r.Int(1, 1 << 29),
    p.lowrank.r_max = r.Int(1, 256);
    p.lowrank.d_route = r.Int(0, 256), p.lowrank.local = r.Int(0, 1 << 29);
    p.lowrank.parameters = r.Coin() ? "" : "a-" + std::to_string(r.Int(0, 9)) + ".b_c";
    p.lowrank.factors = static_cast<Tier>(r.Int(0, 1));
  }
  if (p.codec != CodecKind::kRaw) {
    p.stored.keep_raw = static_cast<KeepRaw>(r.Int(0, 2));
    p.stored.max_loss = r.Share();
  }
  if (p.selector == SelectorKind::kBlock) p.block.share = r.Share();
}

void RandomPacked(Random& r, Plan& p) {
  p.packed.search = r.Coin();
  if (p.packed.search) {
    p.packed.max_channel_loss = r.Share(), p.packed.max_block_loss = r.Share();
  } else {
    p.packed.neighbours = 1 << r.Int(0, 2), p.packed.block = 4 << r.Int(0, 2);
    p.packed.keep = p.packed.neighbours * r.Int(0, 48);
  }
  p.packed.truncate = r.Coin();
  p.packed.buffer = 16 * r.Int(1, 256);
  p.packed.segment = r.Int(p.packed.buffer, 1 << 20);
  p.packed.drift = r.Coin() ? 0 : r.Share() * 10;
  if (p.packed.drift > 0) {
    p.packed.min_segment = r.Int(16, p.packed.segment);
  } else {
    p.packed.close_loss = r.Share() * 1e9;
  }
}

constexpr std::string_view kStarts[] = {"full",
                                        "window",
                                        "quest",
                                        "chess",
                                        "tokenselect",
                                        "sentencekv",
                                        "sekv",
                                        "mosaickv",
                                        "bits",
                                        "strata",
                                        "full{codec = 'packed'}",
                                        "window{codec = 'packed'}",
                                        "quest{codec = 'packed'}",
                                        "chess{codec = 'packed'}",
                                        "tokenselect{codec = 'packed'}",
                                        "bits{codec = 'packed'}",
                                        "sentencekv{codec = 'lowrank'}",
                                        "mosaickv{codec = 'raw'}"};

void RandomEnds(Random& r, Plan& p) {
  const bool units = p.segmenter() == SegmenterKind::kPage;
  if (units || p.segmenter() == SegmenterKind::kHierarchy) {
    p.index.rest = static_cast<RestKind>(r.Int(0, 1));
  }
  if (units) p.index.unit = r.Int(1, 1024);
  if (p.selector == SelectorKind::kWindow) {
    p.window = {r.Int(0, 1 << 29), r.Int(1, 1 << 29)};
  }
  if (p.selector == SelectorKind::kMinMax) {
    p.minmax = {r.Int(0, 1 << 29), r.Int(1, 1 << 29), r.Int(0, 1 << 29), r.Coin(), r.Coin()};
  }
  if (p.selector == SelectorKind::kBits) {
    p.bits = {r.Int(2, 4), r.Int(0, 1 << 29), r.Int(1, 1 << 29), r.Int(0, 1 << 29)};
    p.bits.run = r.Coin() ? 8 : 1;
    p.index.unit = 16 * r.Int(1, 16);
  }
  if (p.codec == CodecKind::kPlanes) {
    p.stored.max_loss = StoredOptions().max_loss;  // not of planes
    p.planes = {r.Coin() ? 8 : 4, 16 * r.Int(1, 16)};
    if (r.Coin()) {
      p.fine.fine_above = 100 * r.Share();
    } else {
      p.fine.share = r.Share();
      p.fine.run = r.Coin() ? 8 : 1;
    }
    p.fine.skip_below = r.Share();
    p.fine.sample = r.Int(1, 1024);
    p.fine.sinks = r.Int(0, 1 << 29);
    p.fine.recent = r.Int(1, 1 << 29);
    if (r.Coin()) p.planes.lower = Tier::kHost, p.planes.hot = r.Coin() ? 0 : 16;
  }
  if (p.selector == SelectorKind::kBlock) {
    p.block.group_softmax = r.Coin();
    if (units) p.block.recent = r.Int(1, 1 << 29);
  }
}

Plan RandomPlan(Random& r) {
  Plan p = MustParse(kStarts[r.Int(0, static_cast<int>(std::size(kStarts)) - 1)]);
  if (r.Coin()) p.name = "custom";
  p.tier = r.Coin() ? Tier::kHost : Tier::kDevice;
  p.min_tokens = r.Coin() ? kAutoTokens : r.Int(0, 1 << 29);
  if (p.min_tokens == kAutoTokens) p.batch = r.Int(1, 4096);
  p.n_dense_layers = r.Int(0, 512);
  RandomPapers(r, p);
  if (p.codec == CodecKind::kPacked) RandomPacked(r, p);
  RandomEnds(r, p);
  if (p.codec == CodecKind::kRaw && p.selector != SelectorKind::kFull &&
      p.selector != SelectorKind::kBits && p.index.rest == RestKind::kDrop) {
    p.compact = r.Coin();
  }
  if (p.selector != SelectorKind::kCascade) return p;
  p.index.unit = r.Int(1, 64);
  p.index.pages_per_chunk = r.Int(1, 32);
  p.index.chunks_per_grid = r.Int(1, 32);
  p.cascade.sinks = r.Int(0, 1 << 19);
  p.cascade.recent = r.Int(1, 1 << 19);
  p.cascade.rho = {r.Share(), r.Share(), r.Share()};
  p.cascade.pruning = r.Coin() ? CascadeOptions::Pruning::kLiteral : CascadeOptions::Pruning::kTop;
  p.cascade.trigger = static_cast<CascadeOptions::Trigger>(r.Int(0, 2));
  p.cascade.trigger_or = r.Coin();
  p.cascade.thresholds = {r.Coin() ? kInf : r.Share() * 1e-7, r.Coin() ? 0 : r.Share() * 1e20};
  p.cascade.every = r.Int(1, 1 << 19);
  p.cascade.centred = r.Coin();
  p.cascade.tree = p.index.rest != RestKind::kDrop && r.Coin();
  return p;
}

TEST(Plan, WhatFormatWritesParseReads) {
  constexpr uint64_t kSeed = 11;
  RecordProperty("seed", kSeed);
  Random random(kSeed);
  for (int i = 0; i < 2000; ++i) {
    const Plan plan = RandomPlan(random);
    const std::string text = FormatPlan(plan);
    const Result<Plan> again = ParsePlan(text);
    ASSERT_TRUE(again.ok()) << "seed " << kSeed << " plan " << i << ": " << text << ": "
                            << again.status().ToString();
    ASSERT_EQ(*again, plan) << "seed " << kSeed << " plan " << i << ": " << text;
    ASSERT_EQ(text.find('\n'), std::string::npos);
  }
}

TEST(Plan, FormatWritesEveryOption) {
  EXPECT_EQ(FormatPlan(MustParse("quest")),
            "quest{codec = \"raw\", tier = \"device\", min_tokens = 4096, n_dense_layers = 0, "
            "compact = false, n_sink = 0, n_recent = 1, page = 16, budget = 2048, group = \"max\", "
            "rest = \"drop\"}");
  EXPECT_THAT(FormatPlan(MustParse("chess")), HasSubstr("thresholds = [inf, inf]"));
  EXPECT_THAT(FormatPlan(MustParse("{selector = \"full\"}")),
              HasSubstr("{segmenter = \"none\", selector = \"full\", "));
  // What a switch leaves unread is not written.
  const std::string fixed = FormatPlan(MustParse("mosaickv"));
  EXPECT_THAT(fixed, HasSubstr("strategy = \"fixed\", keep = 0"));
  EXPECT_THAT(fixed, ::testing::Not(HasSubstr("max_channel_loss")));
  EXPECT_THAT(fixed, ::testing::Not(HasSubstr("drift =")));
}

TEST(Plan, EveryPresetIsDescribedAndParses) {
  EXPECT_THAT(PresetNames(),
              ::testing::ElementsAre("full", "window", "quest", "chess", "tokenselect",
                                     "sentencekv", "sekv", "mosaickv", "bits", "strata"));
  for (const std::string_view name : PresetNames()) {
    EXPECT_FALSE(DescribePreset(name).empty()) << name;
    EXPECT_EQ(MustParse(name).name, name);
  }
  EXPECT_TRUE(DescribePreset("nobody").empty());
}

TEST(Plan, SomeModelsAreTooSmallForAPlan) {
  Geometry g{.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
  const Plan packed = MustParse("mosaickv{keep = 64}");
  const Status status = CheckGeometry(packed, g);
  EXPECT_EQ(status.reason(), "PLAN_COMBINATION");
  EXPECT_THAT(status.message(), HasSubstr("48 channels of head_dim = 64"));
  EXPECT_FALSE(CheckGeometry(MustParse("sekv{d_route = 128}"), g).ok());
  g.head_dim = 128;
  EXPECT_TRUE(CheckGeometry(packed, g).ok());
  EXPECT_TRUE(CheckGeometry(MustParse("sekv{d_route = 128}"), g).ok());
  for (const std::string_view name : PresetNames()) {
    EXPECT_TRUE(CheckGeometry(MustParse(name), g).ok()) << name;
  }
}

TEST(Plan, KeysBeforeRotaryEmbeddingRuleOutWhatCannotRotateThem) {
  Geometry g{.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
  const Status stored_after = CheckGeometry(MustParse("window{compact = true}"), g);
  EXPECT_EQ(stored_after.reason(), "PLAN_COMBINATION");
  EXPECT_THAT(stored_after.message(), HasSubstr("keys_pre_rope = 1, or use compact = false"));
  g.rotary = {10000, 64};
  for (const char* plan : {"mosaickv", "sekv", "sentencekv{codec = 'lowrank'}",
                           "{selector = 'full', codec = 'packed'}"}) {
    const Status status = CheckGeometry(MustParse(plan), g);
    EXPECT_EQ(status.code(), Code::kUnimplemented) << plan;
    EXPECT_EQ(status.reason(), "PLAN_UNIMPLEMENTED") << plan;
    EXPECT_THAT(status.message(), HasSubstr("keys_pre_rope = 1")) << plan;
  }
  const Status bits = CheckGeometry(MustParse("bits"), g);
  EXPECT_EQ(bits.reason(), "PLAN_COMBINATION");
  EXPECT_THAT(bits.message(), HasSubstr("keys_pre_rope = 0"));
  EXPECT_THAT(bits.message(), HasSubstr("tokenselect"));
  const Status rest = CheckGeometry(MustParse("quest{rest = 'mean'}"), g);
  EXPECT_EQ(rest.reason(), "PLAN_COMBINATION");
  EXPECT_THAT(rest.message(), HasSubstr("rest = \"mean\""));
  for (const char* plan : {"full", "window{compact = true}", "quest{compact = true}", "chess",
                           "tokenselect{compact = true}", "sentencekv{compact = true}",
                           "{selector = 'block', codec = 'raw', compact = true}"}) {
    EXPECT_TRUE(CheckGeometry(MustParse(plan), g).ok()) << plan;
  }
}

TEST(Plan, IndexFollowsTheSegmenter) {
  const Geometry g{.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
  EXPECT_EQ(IndexOf(MustParse("full"), g).kind, IndexLayout::Kind::kNone);
  EXPECT_EQ(IndexOf(MustParse("window"), g).kind, IndexLayout::Kind::kNone);
  const IndexLayout quest = IndexOf(MustParse("quest{page = 8}"), g);
  EXPECT_EQ(quest.kind, IndexLayout::Kind::kMinMax);
  EXPECT_EQ(quest.levels[0].unit_tokens, 8);
  const IndexLayout deviation = IndexOf(MustParse("quest{page = 8, score = \"deviation\"}"), g);
  EXPECT_EQ(deviation.kind, IndexLayout::Kind::kDeviation);
  EXPECT_EQ(deviation.dtype, g.dtype);
  EXPECT_EQ(deviation.block_bytes, quest.block_bytes);
  const IndexLayout chess =
      IndexOf(MustParse("chess{page = 8, pages_per_chunk = 3, chunks_per_grid = 5}"), g);
  EXPECT_EQ(chess.kind, IndexLayout::Kind::kMean);
  ASSERT_EQ(chess.level_count, 3);
  EXPECT_EQ(chess.levels[0].unit_tokens, 8);
  EXPECT_EQ(chess.levels[1].unit_tokens, 24);
  EXPECT_EQ(chess.levels[2].unit_tokens, 120);
  EXPECT_EQ(chess.block_tokens % 120, 0);
  const IndexLayout block = IndexOf(MustParse("{selector = 'block', codec = 'raw', page = 8}"), g);
  EXPECT_EQ(block.kind, IndexLayout::Kind::kMean);
  EXPECT_EQ(block.levels[0].unit_tokens, 8);
  const IndexLayout bits = IndexOf(MustParse("bits{bits = 3, unit = 32}"), g);
  EXPECT_EQ(bits.kind, IndexLayout::Kind::kBits);
  EXPECT_EQ(bits.group(), (QuantisedGroup{64, 3, 32}));
  EXPECT_EQ(IndexShare(MustParse("bits")), 2.0 / 32 + 1.0 / 64);
  EXPECT_EQ(IndexShare(MustParse("quest")), 1.0 / 16);
  EXPECT_EQ(IndexShare(MustParse("tokenselect")), 0);
  for (const char* text : {"tokenselect", "sentencekv", "sekv", "mosaickv"}) {
    EXPECT_EQ(IndexOf(MustParse(text), g).kind, IndexLayout::Kind::kNone) << text;
  }
}

}  // namespace
}  // namespace kvstrata
