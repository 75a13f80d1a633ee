// SPDX-License-Identifier: Apache-2.0
// Codec packed against docs/spec/mosaickv.md: segments, closings, strategies, values, bytes.
#include <cstdio>

#include "kernels/codec/head_loop.h"
#include "kernels/plans/mosaickv/packed_places.h"
#include "kernels/plans/mosaickv/packed_recompressor.h"
#include "kernels/plans/mosaickv/strategy.h"
#include "tests/kernels/codec_fixture.h"
#include "tests/kernels/verify_extent.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSeed = 78;
using Ints = std::vector<int32_t>;
using Tokens = Run;  // testing::Test has a Run of its own
using Runs = std::vector<Run>;

Geometry SmallGeometry(int32_t dim = 64) {
  return {.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = dim};
}

// Rows in a subspace of `rank` directions (others from `change` on), exact in fp32 only.
void MakeLowRank(Inputs* in, int32_t rank, int32_t change = 1 << 30) {
  std::mt19937_64 random(kSeed);
  std::normal_distribution<float> normal;
  const int32_t dim = in->g.head_dim;
  const auto basis = [&] {
    std::vector<float> b(static_cast<size_t>(rank * dim));
    for (float& x : b) x = normal(random);
    return b;
  };
  const std::vector<float> before = basis(), after = basis();
  const int64_t heads = int64_t{in->g.layers} * in->g.kv_heads;
  for (std::vector<float>* rows : {&in->keys, &in->values}) {
    for (int64_t row = 0; row < in->n * heads; ++row) {
      const std::vector<float>& b = row / heads < change ? before : after;
      float* x = rows->data() + row * dim;
      std::fill(x, x + dim, 0.0f);
      for (int32_t j = 0; j < rank; ++j) {
        const float weight = normal(random) * 0.3f;
        for (int32_t c = 0; c < dim; ++c) x[c] += weight * b[static_cast<size_t>(j * dim + c)];
      }
    }
  }
}

std::unique_ptr<PackedStorage> Parsed(CodecSequence& s) {
  auto storage = PackedStorage::Parse(s.View(), s.geometry());
  EXPECT_TRUE(storage.ok()) << storage.status().ToString();
  return storage.ok() ? std::move(*storage) : nullptr;
}

Ints InspectInts(CodecSequence& s, const std::string& name) {
  const auto storage = Parsed(s);
  const auto array = InspectPacked(s.Context(storage.get()), name);
  EXPECT_TRUE(array.ok()) << array.status().ToString();
  Ints values(array->bytes.size() / 4);
  std::memcpy(values.data(), array->bytes.data(), array->bytes.size());
  return values;
}

TEST(PackedCodec, AttentionEqualsRawWhereNothingIsLost) {
  for (const std::string& backend : BackendNames()) {
    Inputs in(SmallGeometry(), 500, kSeed);
    MakeLowRank(&in, 8);
    Plan plan = PackedPlan();
    plan.packed.segment = 128;
    plan.packed.keep = 48;
    Geometry g = in.g;
    g.dtype = DType::kF32;
    CodecSequence s(plan, g, in, nullptr, backend);
    s.Commit(300);
    s.PrefillDone();
    s.Commit(in.n);
    s.Settle();
    const auto storage = Parsed(s);
    ASSERT_EQ(storage->end(), 300 + 200 / 32 * 32);
    for (int layer = 0; layer < g.layers; ++layer) {
      for (int h = 0; h < g.query_heads; ++h) {
        const float* q = in.Query(7, layer, h);
        Attention got(g.head_dim), want(g.head_dim);
        AttendStored(*storage, g, s.backend(), q, layer, h, &got);
        AttendInputs(in, q, layer, h / 2, {storage->end(), in.n}, &got);
        AttendInputs(in, q, layer, h / 2, {0, in.n}, &want);
        EXPECT_LT(ErrorOf(got.Output(), want.Output()), 1e-2) << backend;
      }
    }
  }
}

TEST(PackedCodec, PromptIsCutIntoSegmentsAsTheyComplete) {
  const Inputs in(SmallGeometry(), 200, kSeed);
  Plan plan = PackedPlan();
  plan.packed.segment = 64;
  CodecSequence s(plan, in.g, in);
  s.Commit(63);
  EXPECT_FALSE(s.recompressor().Due(s.Input()));
  s.Commit(130);
  s.Settle();
  EXPECT_EQ(InspectInts(s, "segments"), (Ints{0, 64, 1, 64, 128, 1}));
  s.Commit(140);
  s.PrefillDone();
  s.Settle();
  EXPECT_EQ(InspectInts(s, "segments"), (Ints{0, 64, 1, 64, 128, 1, 128, 140, 1}));
  s.Commit(171);
  EXPECT_FALSE(s.recompressor().Due(s.Input())) << "31 of 32 tokens wait";
  s.Commit(172);
  s.Settle();
  EXPECT_EQ(InspectInts(s, "segments"), (Ints{0, 64, 1, 64, 128, 1, 128, 140, 1, 140, 172, 0}));
}

// A prompt that ends where a segment does leaves nothing to pack: its raw rows go all the same.
TEST(PackedCodec, SegmentsPackedBeforeThePromptEndedAreReleasedAtItsEnd) {
  const Inputs in(SmallGeometry(), 200, kSeed);
  Plan plan = PackedPlan();
  plan.packed.segment = 64;
  CodecSequence s(plan, in.g, in);
  s.Commit(128);
  s.Settle();
  EXPECT_TRUE(s.released().empty()) << "the prompt still reads its raw rows";
  s.PrefillDone();
  EXPECT_TRUE(s.recompressor().Due(s.Input()));
  s.Settle();
  EXPECT_EQ(s.released(), (std::vector<kvstrata::Run>{{0, 128}}));
  EXPECT_FALSE(s.recompressor().Due(s.Input())) << "said once";
  EXPECT_EQ(InspectInts(s, "segments"), (Ints{0, 64, 1, 64, 128, 1}));
}

TEST(PackedCodec, PiecesJoinByEights) {
  const Inputs in(SmallGeometry(), 40 + 16 * 75, kSeed);
  Plan plan = PackedPlan();
  plan.packed.buffer = 16;
  plan.packed.close_loss = 1e9;
  CodecSequence s(plan, in.g, in);
  s.Commit(40);
  s.PrefillDone();
  s.Commit(in.n);
  s.Settle();
  Ints lengths;
  const auto storage = Parsed(s);
  for (const auto& segment : storage->segments()) {
    lengths.push_back(segment.tokens.end - segment.tokens.begin);
  }
  // 75 = 1 * 64 + 1 * 8 + 3.
  EXPECT_EQ(lengths, (Ints{40, 1024, 128, 16, 16, 16}));
  EXPECT_EQ(InspectInts(s, "segments"), (Ints{0, 40, 1, 40, in.n, 0}));
  EXPECT_EQ(storage->BlockCount(1, 1), 5 + 150);
}

TEST(PackedCodec, JoinedRowsAreThePiecesRows) {
  const Inputs in(SmallGeometry(), 40 + 16 * 9, kSeed);
  Plan plan = PackedPlan();
  plan.packed.buffer = 16;
  plan.packed.close_loss = 1e9;
  CodecSequence s(plan, in.g, in);
  s.Commit(40);
  s.PrefillDone();
  Bytes keys, blocks;
  for (int i = 1; i <= 7; ++i) {
    s.Commit(40 + 16 * i);
    s.Settle();
    const auto storage = Parsed(s);
    const PackedHead& h = storage->head(i, 1, 0);
    keys.insert(keys.end(), h.keys.data, h.keys.data + 16 * h.keys.stride);
    blocks.insert(blocks.end(), h.blocks.data, h.blocks.data + 2 * h.blocks.stride);
  }
  s.Commit(in.n);
  s.Settle();
  const auto storage = Parsed(s);
  const PackedHead& h = storage->head(1, 1, 0);
  ASSERT_EQ(storage->segments()[1].tokens, (Tokens{40, 40 + 128}));
  EXPECT_EQ(std::memcmp(h.keys.data, keys.data(), keys.size()), 0);
  EXPECT_EQ(std::memcmp(h.blocks.data, blocks.data(), blocks.size()), 0);
}

TEST(PackedCodec, ClosedSegmentGetsItsOwnPlans) {
  Inputs in(SmallGeometry(), 600, kSeed);
  MakeLowRank(&in, 8, 200);  // generated text lies elsewhere
  Plan plan = PackedPlan();
  plan.packed.close_loss = 60;
  CodecSequence s(plan, in.g, in);
  s.Commit(200);
  s.PrefillDone();
  s.Commit(in.n);
  s.Settle();
  const Ints segments = InspectInts(s, "segments");
  ASSERT_GE(segments.size(), 6u);
  EXPECT_EQ(segments[3], 200);
  EXPECT_EQ(segments[5], 1) << "closed";
  EXPECT_EQ(s.released().front().end, segments[segments.size() - 3])
      << "up to the open segment, which nothing closes any more";
  EXPECT_LE(segments.size(), 9u) << "with its own plans generated text loses nothing";
}

TEST(PackedCodec, LengthClosesToo) {
  const Inputs in(SmallGeometry(), 400, kSeed);
  Plan plan = PackedPlan();
  plan.packed.segment = 96;
  plan.packed.close_loss = 1e9;
  CodecSequence s(plan, in.g, in);
  s.Commit(50);
  s.PrefillDone();
  s.Commit(270);
  s.Settle();
  EXPECT_EQ(InspectInts(s, "segments"), (Ints{0, 50, 1, 50, 146, 1, 146, 242, 1}));
}

TEST(PackedCodec, DriftClosesWhenTheTextChanges) {
  Inputs in(SmallGeometry(), 2600, kSeed);
  MakeLowRank(&in, 24, 1500);
  Plan plan = PackedPlan();
  plan.packed.drift = 1.5;
  plan.packed.min_segment = 256;
  plan.packed.close_loss = 1;
  CodecSequence s(plan, in.g, in, nullptr, Backends().front().name);
  s.Commit(400);
  s.PrefillDone();
  s.Commit(1500);
  s.Settle();
  EXPECT_EQ(InspectInts(s, "segments").size(), 6u) << "the same text does not close";
  s.Commit(in.n);
  s.Settle();
  const Ints segments = InspectInts(s, "segments");
  ASSERT_EQ(segments.size() % 3, 0u);
  ASSERT_GE(segments.size(), 9u);
  EXPECT_EQ(segments[5], 1);
  EXPECT_GT(segments[4], 1500);
  EXPECT_LT(segments[4], 1500 + 560);
}

TEST(PackedCodec, LongSegmentsAreSeveralExtents) {
  const Inputs in(SmallGeometry(), 700, kSeed);
  Plan plan = PackedPlan();
  plan.packed.segment = 300;
  plan.packed.buffer = 16;
  plan.packed.search = true;
  plan.packed.max_channel_loss = 0.3;
  const auto run = [&](int64_t bytes) {
    auto s = std::make_unique<CodecSequence>(plan, in.g, in);
    const auto recompressor = NewPackedRecompressor(plan, in.g, bytes);
    s->UseCloneOf(*recompressor);
    s->Commit(350);
    s->PrefillDone();
    s->Commit(in.n);
    s->Settle();
    return s;
  };
  const auto whole = run(int64_t{1} << 40), split = run(1);
  EXPECT_GT(split->extents().size(), whole->extents().size() + 4);
  EXPECT_EQ(InspectInts(*split, "segments"), InspectInts(*whole, "segments"));
  EXPECT_EQ(InspectInts(*split, "strategies"), InspectInts(*whole, "strategies"));
  EXPECT_EQ(split->released(), whole->released());
  Attention a(64), b(64);
  const auto x = Parsed(*whole), y = Parsed(*split);
  EXPECT_EQ(x->BlockCount(0, 0), y->BlockCount(0, 0));
  AttendStored(*x, in.g, whole->backend(), in.Query(3, 1, 0), 1, 0, &a);
  AttendStored(*y, in.g, split->backend(), in.Query(3, 1, 0), 1, 0, &b);
  EXPECT_LT(ErrorOf(a.Output(), b.Output()), 1e-6);
}

// --- strategies ---

double OracleBlockLoss(const std::vector<std::vector<double>>& x, int block) {
  const size_t n = x.size(), dim = x[0].size();
  double within = 0, total = 0;
  for (size_t c = 0; c < dim; ++c) {
    double mean = 0;
    for (const auto& row : x) mean += row[c] / static_cast<double>(n);
    for (const auto& row : x) total += (row[c] - mean) * (row[c] - mean);
    for (size_t b = 0; b < n; b += static_cast<size_t>(block)) {
      const size_t end = std::min(n, b + static_cast<size_t>(block));
      double sum = 0;
      for (size_t i = b; i < end; ++i) sum += x[i][c];
      for (size_t i = b; i < end; ++i) {
        const double d = x[i][c] - sum / static_cast<double>(end - b);
        within += d * d;
      }
    }
  }
  return total > 0 ? within / total : 0;
}

TEST(PackedStrategy, BlockLossIsVarianceWithinBlocks) {
  const Inputs in(SmallGeometry(), 60, kSeed);
  CodecSequence s(PackedPlan(), in.g, in);
  s.Commit(60);
  const PagedRows rows = KeysOf(s.View().pages, PageLayout::Of(in.g), 1, 1);
  for (const Tokens run :
       {Tokens{0, 60}, Tokens{3, 40}, Tokens{10, 11}, Tokens{5, 10}, Tokens{0, 48}}) {
    std::vector<std::vector<double>> x;
    for (int32_t t = run.begin; t < run.end; ++t) {
      const float* key = in.Key(t, 1, 1);
      x.emplace_back(key, key + 64);
    }
    const auto losses = BlockLosses(rows, run);
    for (size_t i = 0; i < losses.size(); ++i) {
      EXPECT_NEAR(losses[i], OracleBlockLoss(x, kSearchedBlocks[i]), 1e-9) << run.end;
    }
  }
}

TEST(PackedStrategy, ThresholdsDecide) {
  const Inputs in(SmallGeometry(), 200, kSeed);
  const auto strategies = [&](double channel, double block) {
    Plan plan = PackedPlan();
    plan.packed.search = true;
    plan.packed.max_channel_loss = channel;
    plan.packed.max_block_loss = block;
    CodecSequence s(plan, in.g, in);
    s.Commit(200);
    s.PrefillDone();
    s.Settle();
    const Ints all = InspectInts(s, "strategies");
    return Ints(all.begin(), all.begin() + 3);
  };
  EXPECT_EQ(strategies(2, 2), (Ints{8, 4, 16}));
  EXPECT_EQ(strategies(0, 0), (Ints{24, 1, 4}));
  EXPECT_EQ(strategies(0, 2), (Ints{24, 1, 16}));
}

// --- size ---

// The front of an extent that is made elsewhere: a description that parsers read without a look at
// the rest, the losses of flushes included.
TEST(PackedCodec, FrontOfAnExtentOfTheDeviceIsItsDescription) {
  Geometry g;
  g.layers = 2;
  g.kv_heads = 3;
  g.query_heads = 6;
  g.head_dim = 64;
  PackedInfo info = {};
  info.plan_begin = 0;
  info.buffer = 16;
  info.loss = 2;
  const kvstrata::Run tokens = {128, 144};
  PackedPlaces places(g, tokens, false, true, info);
  for (int64_t h = 0; h < HeadCount(g); ++h) places.AddHead({16, 1, 8}, false);
  places.NoteLoss(3, std::vector<double>{5});
  const std::vector<std::byte> front = places.Front(77);
  EXPECT_EQ(static_cast<int64_t>(front.size()),
            DescriptionBytes(std::span(front).first(kExtentFrontBytes), places.bytes()));
  const auto* const nowhere = reinterpret_cast<const std::byte*>(uintptr_t{4096});
  const Result<PackedExtent> extent = ReadPackedExtent(
      {nowhere, places.bytes(), tokens, front.data(), static_cast<int64_t>(front.size())}, g);
  ASSERT_TRUE(extent.ok()) << extent.status().ToString();
  EXPECT_EQ(extent->info.loss, 5);
  EXPECT_EQ(extent->info.recent, (5 + 3) / (2 * 16.0));
  EXPECT_EQ(extent->flushes[0], 3);
  EXPECT_EQ(extent->heads.back().keys.data - nowhere,
            static_cast<std::ptrdiff_t>(places.entry(5).keys));
  // Nobody hashed it: another build has another number.
  std::vector<std::byte> whole(static_cast<size_t>(places.bytes()));
  std::ranges::copy(front, whole.begin());
  EXPECT_TRUE(VerifyExtent(whole).ok());
  ExtentHeader header;
  std::memcpy(&header, whole.data(), sizeof(header));
  EXPECT_EQ(header.checksum, 77u);
}

TEST(PackedCodec, ThreeTimesSmaller) {
  const Geometry g = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 128};
  const Inputs in(g, 8192, kSeed);
  CodecSequence s(PackedPlan(), g, in, nullptr, Backends().front().name);
  s.Commit(8192);
  s.PrefillDone();
  s.Settle();
  const auto storage = Parsed(s);
  ASSERT_EQ(storage->head(0, 0, 0).keys.stride, 80);
  const double raw = 8192.0 * 2 * 256, rotations = 2.0 * 128 * 128 * 4;
  const double at_8k = raw / static_cast<double>(storage->bytes());
  const double at_64k =
      8 * raw / (8 * (static_cast<double>(storage->bytes()) - rotations) + rotations);
  std::printf("packed: %.3f x smaller at 8K tokens, %.3f at 64K\n", at_8k, at_64k);
  EXPECT_GE(at_8k, 2.7);
  EXPECT_GE(at_64k, 2.9);
}

TEST(PackedCodec, InspectionNamesWhatItHas) {
  const Inputs in(SmallGeometry(), 100, kSeed);
  CodecSequence s(PackedPlan(), in.g, in);
  EXPECT_EQ(InspectPacked(s.Context(nullptr), "segments").status().reason(), "NOTHING_PACKED");
  s.keep_pages = true;
  s.Commit(100);
  s.PrefillDone();
  s.Settle();
  const auto storage = Parsed(s);
  for (const std::string name : {"eigenvalues", "rotated_rows", "packed_rows"}) {
    const auto array = InspectPacked(s.Context(storage.get()), name);
    ASSERT_TRUE(array.ok()) << array.status().ToString();
    EXPECT_EQ(array->shape[0], name == "eigenvalues" ? 64 : 48);
  }
}

}  // namespace
}  // namespace kvstrata
