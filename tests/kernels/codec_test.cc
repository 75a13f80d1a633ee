// SPDX-License-Identifier: Apache-2.0
// What holds for every Recompressor and for the extents that it writes (kernels/codec/codec.h).
#include <sys/mman.h>

#include <random>

#include "gmock/gmock.h"
#include "kernels/plans/mosaickv/packed_layout.h"
#include "tests/kernels/codec_fixture.h"
#include "tests/kernels/verify_extent.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSeed = 77;
constexpr int32_t kPrompt = 150;
using Runs = std::vector<Run>;

Geometry SmallGeometry(DType dtype = DType::kBF16) {
  return {.layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 64, .dtype = dtype};
}

// Several prompt segments, several closings by loss.
Plan SmallPackedPlan() {
  Plan plan = PackedPlan();
  plan.packed.segment = 64;
  plan.packed.buffer = 16;
  plan.packed.search = true;
  plan.packed.max_channel_loss = 0.45;
  plan.packed.close_loss = 20;
  return plan;
}

Plan SmallSpanPlan() {
  Plan plan = SpanPlan();
  plan.lowrank.alpha = 1.5;
  return plan;
}

Plan PlanOfCodec(const std::string& codec) {
  if (codec.ends_with("planes")) {
    Plan plan = PlanesPlan();
    if (codec == "lower_planes") plan.planes.lower = Tier::kHost;
    return plan;
  }
  return codec == "packed" ? SmallPackedPlan() : SmallSpanPlan();
}

// About exponential, as surprisal is.
std::vector<float> SomeSurprisal(int32_t n) {
  std::mt19937_64 random(kSeed);
  std::exponential_distribution<float> nats(1.0f);
  std::vector<float> surprisal(static_cast<size_t>(n));
  for (float& x : surprisal) x = nats(random);
  return surprisal;
}

class CodecTest : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {
 protected:
  std::string codec() const { return std::get<0>(GetParam()); }
  bool packed() const { return codec() == "packed"; }
  bool planes() const { return codec().ends_with("planes"); }

  std::unique_ptr<CodecSequence> Start(const Inputs& in) const {
    const Plan plan = PlanOfCodec(codec());
    const auto trained = std::make_shared<SpanParameters>(SomeParameters(in.g, plan));
    auto s = std::make_unique<CodecSequence>(plan, in.g, in, packed() ? nullptr : trained,
                                             std::get<1>(GetParam()));
    s->Report(SomeSurprisal(in.n));
    return s;
  }

  static void ExpectInvalid(const Status& status) {
    EXPECT_TRUE(status.ok() || status.reason() == "EXTENT_INVALID") << status.ToString();
  }

  // Reads whatever the extents say there is; whether they could be parsed.
  bool ReadAll(CodecSequence& s, const float* q) const {
    const Geometry& g = s.geometry();
    const auto parsed = CodecOf(PlanOfCodec(codec())).parse(s.View(), g);
    ExpectInvalid(parsed.status());
    if (!parsed.ok()) return false;
    const StoredRows& stored = **parsed;
    Selection coarse;
    coarse.Reset(stored.end(), 1);
    if (stored.has_means()) coarse.coarse = {{{0, {0, s.tokens()}}}};
    std::vector<float> scores(static_cast<size_t>(stored.end()));
    ScoreWorks works;
    for (int h = 0; h < g.query_heads; ++h) {
      ReadRouters(SpansOf(&stored), h);
      if (SpansOf(&stored) == nullptr && h % g.group() != 0) continue;  // the same rows again
      Attention a(g.head_dim);
      AttendStored(stored, g, s.backend(), q, 0, h, &a);
      AttendStored(stored, g, s.backend(), coarse, q, 0, h, &a);
      works.Clear();
      stored.AddScores({0, h / g.group(), {0, stored.end()}, q, 1, 1, scores.data(), 0}, &works);
      works.Score(s.backend(), InlineExecutor());
    }
    return true;
  }

  // What selectors of spans read beside; null: nothing.
  static void ReadRouters(const SpanStorage* spans, int query_head) {
    if (spans == nullptr || spans->parts().empty()) return;
    float sum = spans->Threshold(0, query_head);
    if (spans->trained()) {
      const float* w = spans->Router(0, query_head);
      for (int64_t i = 0; i < int64_t{spans->d_route()} * 64; ++i) sum += w[i];
      for (size_t p = 0; p < spans->parts().size(); ++p) {
        const float* norms = spans->InverseNorms(static_cast<int>(p), 0, query_head);
        for (int32_t i = 0; i < spans->parts()[p].span_count; ++i) sum += norms[i];
      }
    }
    volatile float sink = sum;
    (void)sink;
  }
};

INSTANTIATE_TEST_SUITE_P(
    , CodecTest,
    ::testing::Combine(::testing::Values("packed", "lowrank", "planes", "lower_planes"),
                       ::testing::ValuesIn(BackendNames())),
    [](const auto& test) { return std::get<0>(test.param) + "_" + std::get<1>(test.param); });

TEST_P(CodecTest, OneTokenAtATimeOrAllAtOnceGivesTheSameBytes) {
  const Inputs in(SmallGeometry(), 720, kSeed);
  const auto slow = Start(in), fast = Start(in);
  for (int32_t t = 1; t <= in.n; ++t) {
    slow->Commit(t);
    if (t == kPrompt) slow->PrefillDone();
    slow->Settle();
  }
  fast->Commit(kPrompt);
  fast->PrefillDone();
  fast->Commit(400);
  ASSERT_TRUE(fast->recompressor().Due(fast->Input()));
  EXPECT_GT(fast->recompressor().ReleasableBytes(fast->Input()), 0);
  fast->Settle();
  fast->Commit(in.n);
  fast->Settle();
  // Segments go on with what is generated; spans are the prompt's.
  EXPECT_GE(slow->extents().size(), codec() == "packed" ? 6u : 3u);
  EXPECT_EQ(slow->extents(), fast->extents());
  EXPECT_EQ(slow->released(), fast->released());
  EXPECT_EQ(fast->recompressor().ReleasableBytes(fast->Input()), 0);
}

TEST_P(CodecTest, ThreadsGiveTheSameBytes) {
  const Inputs in(SmallGeometry(), 400, kSeed);
  const auto pool = NewThreadPool(4);
  const auto one = Start(in), many = Start(in);
  many->executor = pool.get();
  for (const auto& s : {one.get(), many.get()}) {
    s->Commit(kPrompt);
    s->PrefillDone();
    s->Commit(in.n);
    s->Settle();
  }
  EXPECT_EQ(one->extents(), many->extents());
}

// Cancels before the `limit`-th piece of work.
class CancellingExecutor final : public Executor {
 public:
  CancellingExecutor(int limit, std::atomic<bool>* flag) : left_(limit), flag_(flag) {}
  void ParallelFor(int64_t n, const std::function<void(int64_t)>& fn) override {
    for (int64_t i = 0; i < n; ++i) {
      if (left_-- == 0) flag_->store(true);
      fn(i);
    }
  }
  int concurrency() const override { return 1; }

 private:
  int left_;
  std::atomic<bool>* flag_;
};

TEST_P(CodecTest, WhatIsCancelledChangesNothing) {
  const Inputs in(SmallGeometry(), 400, kSeed);
  const auto whole = Start(in), broken = Start(in);
  for (const auto& s : {whole.get(), broken.get()}) {
    s->Commit(kPrompt);
    s->PrefillDone();
    s->Commit(in.n);
  }
  whole->Settle();
  for (int round = 0; broken->recompressor().Due(broken->Input()); ++round) {
    ASSERT_LT(round, 1000);
    for (int limit = 0; limit < 4; ++limit) {
      const std::vector<Bytes> before = broken->extents();
      CancellingExecutor executor(limit, &broken->cancelled);
      broken->executor = &executor;
      const Status status = broken->RunOnce();
      broken->executor = nullptr;
      broken->cancelled = false;
      if (status.ok()) break;  // fewer pieces of work than that
      EXPECT_EQ(status.code(), Code::kAborted);
      EXPECT_EQ(broken->extents(), before);
    }
    if (broken->recompressor().Due(broken->Input())) {
      ASSERT_TRUE(broken->RunOnce().ok());
    }
  }
  EXPECT_EQ(broken->extents(), whole->extents());
}

TEST_P(CodecTest, CloneGoesOnLikeItsOriginal) {
  const Inputs in(SmallGeometry(), 720, kSeed);
  const auto a = Start(in), b = Start(in);
  for (const auto& s : {a.get(), b.get()}) {
    s->Commit(kPrompt);
    s->PrefillDone();
    s->Commit(300);
    s->Settle();
  }
  b->UseCloneOf(a->recompressor());
  for (const auto& s : {a.get(), b.get()}) {
    s->Commit(in.n);
    s->Settle();
  }
  EXPECT_EQ(a->extents(), b->extents());
}

TEST_P(CodecTest, OwnExtentsParseAndVerify) {
  const Inputs in(SmallGeometry(), 400, kSeed);
  const auto s = Start(in);
  s->Commit(kPrompt);
  s->PrefillDone();
  s->Commit(in.n);
  s->Settle();
  EXPECT_TRUE(ReadAll(*s, in.Query(0, 0, 0)));
  for (Bytes& bytes : s->mutable_extents()) {
    EXPECT_TRUE(VerifyExtent(bytes).ok());
    EXPECT_EQ(bytes.size() % kExtentAlign, 0u);
    Bytes copied;
    const auto copy = [&](std::span<const std::byte> piece) {
      copied.insert(copied.end(), piece.begin(), piece.end());
      return OkStatus();
    };
    EXPECT_TRUE(CopyVerified(bytes, copy).ok());
    EXPECT_EQ(copied, bytes);
    const Status no = Internal("NO_ROOM", "the copy fails");
    EXPECT_EQ(CopyVerified(bytes, [&](std::span<const std::byte>) { return no; }).reason(),
              no.reason());
    bytes[bytes.size() / 2] ^= std::byte{1};
    EXPECT_EQ(VerifyExtent(bytes).reason(), "EXTENT_CHECKSUM");
    EXPECT_EQ(CopyVerified(bytes, copy).reason(), "EXTENT_CHECKSUM");
    bytes[bytes.size() / 2] ^= std::byte{1};
  }
}

TEST_P(CodecTest, NothingHappensBeforeItMay) {
  const Inputs in(SmallGeometry(), 300, kSeed);
  Plan plan = PlanOfCodec(codec());
  plan.min_tokens = 201;
  CodecSequence s(plan, in.g, in);
  s.Report(SomeSurprisal(in.n));
  s.Commit(kPrompt);
  EXPECT_FALSE(s.recompressor().Due(s.Input()));
  s.PrefillDone();
  s.Commit(199);
  EXPECT_FALSE(s.recompressor().Due(s.Input()));
  s.Commit(200);  // the next step's N is min_tokens
  EXPECT_TRUE(s.recompressor().Due(s.Input()));
}

TEST_P(CodecTest, RowsAreReleasedOnlyWhenTheyMay) {
  const Inputs in(SmallGeometry(), 400, kSeed);
  const auto s = Start(in);
  s->Commit(kPrompt);
  s->Settle();
  EXPECT_TRUE(s->released().empty()) << "prefill attends to raw rows";
  s->PrefillDone();
  s->indexed = 70;
  s->Settle();
  EXPECT_EQ(s->released(), (Runs{{0, 70}}));
  s->indexed = -1;
  s->Commit(180);
  s->Settle();
  if (packed()) {
    // The open segment's raw rows stay until it closes.
    EXPECT_EQ(s->released(), (Runs{{0, kPrompt}}));
  }
}

TEST_P(CodecTest, EmptyAndTinySequences) {
  for (const int32_t prompt : {0, 1, 2, 31, 33}) {
    const Inputs in(SmallGeometry(), 120, kSeed);
    const auto s = Start(in);
    s->Commit(prompt);
    s->PrefillDone();
    s->Settle();
    EXPECT_TRUE(ReadAll(*s, in.Query(0, 0, 0))) << prompt;
    s->Commit(in.n);
    s->Settle();
    EXPECT_TRUE(ReadAll(*s, in.Query(0, 0, 0))) << prompt;
  }
}

TEST_P(CodecTest, EveryDtype) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Inputs in(SmallGeometry(dtype), 260, kSeed);
    const auto s = Start(in);
    s->Commit(kPrompt);
    s->PrefillDone();
    s->Commit(in.n);
    s->Settle();
    EXPECT_TRUE(ReadAll(*s, in.Query(0, 0, 0)));
  }
}

TEST_P(CodecTest, LossOfRawPagesIsAnError) {
  const Inputs in(SmallGeometry(), kPrompt, kSeed);
  const auto s = Start(in);
  s->Commit(kPrompt);
  s->PrefillDone();
  RecompressInput input = s->Input();
  std::vector<std::byte*> pages(input.view.pages, input.view.pages + 10);
  pages[2] = nullptr;
  input.view.pages = pages.data();
  EXPECT_EQ(s->recompressor().Run(input).status().reason(), "RAW_ROWS_GONE");
}

// The extents of a sequence where no byte can be read, as on a GPU, and descriptions of them.
class UnreadableExtents {
 public:
  explicit UnreadableExtents(const std::vector<Bytes>& extents) {
    for (const Bytes& e : extents) bytes_ += e.size();
    void* at = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    KVS_CHECK(at != MAP_FAILED);
    data_ = static_cast<std::byte*>(at);
    const std::byte* place = data_;
    for (const Bytes& e : extents) {
      const auto size = static_cast<int64_t>(e.size());
      const std::span front(e.data(), static_cast<size_t>(std::min(size, kExtentFrontBytes)));
      const int64_t described = DescriptionBytes(front, size);
      descriptions_.emplace_back(e.begin(), e.begin() + described);
      views_.push_back({place, size, {}, descriptions_.back().data(), described});
      place += size;
    }
  }
  ~UnreadableExtents() { munmap(data_, bytes_); }
  UnreadableExtents(const UnreadableExtents&) = delete;

  SequenceView Of(SequenceView view) {
    for (size_t i = 0; i < views_.size(); ++i) views_[i].tokens = view.extents[i].tokens;
    view.extents = views_.data();
    return view;
  }
  std::vector<ExtentView>& views() { return views_; }
  Bytes& description(size_t i) { return descriptions_[i]; }

 private:
  size_t bytes_ = 0;
  std::byte* data_ = nullptr;
  std::vector<Bytes> descriptions_;
  std::vector<ExtentView> views_;
};

void ExpectSamePlace(const void* readable, const ExtentView& there, const void* unreadable,
                     const ExtentView& here) {
  EXPECT_EQ(static_cast<const std::byte*>(readable) - there.data,
            static_cast<const std::byte*>(unreadable) - here.data);
}

TEST_P(CodecTest, DescriptionsAreEnoughToParse) {
  const Inputs in(SmallGeometry(), 720, kSeed);
  const auto s = Start(in);
  s->Commit(kPrompt);
  s->PrefillDone();
  s->Commit(in.n);
  s->Settle();
  UnreadableExtents unreadable(s->extents());
  const SequenceView readable_view = s->View(), unreadable_view = unreadable.Of(readable_view);
  const Geometry& g = s->geometry();
  EXPECT_EQ(KindOf(unreadable_view.extents[0]), KindOf(readable_view.extents[0]));
  if (packed()) {
    const auto a = *PackedStorage::Parse(readable_view, g),
               b = *PackedStorage::Parse(unreadable_view, g);
    ASSERT_EQ(a->segments().size(), b->segments().size());
    for (int i = 0; i < readable_view.extent_count; ++i) {
      const ExtentView &there = readable_view.extents[i], &here = unreadable_view.extents[i];
      for (int h = 0; h < g.kv_heads; ++h) {
        const PackedHead &x = a->head(i, 0, h), &y = b->head(i, 0, h);
        ExpectSamePlace(x.keys.data, there, y.keys.data, here);
        ExpectSamePlace(x.values.data, there, y.values.data, here);
        ExpectSamePlace(x.blocks.data, there, y.blocks.data, here);
        EXPECT_EQ(x.keys.keep, y.keys.keep);
        EXPECT_EQ(x.block, y.block);
      }
    }
    ExpectSamePlace(a->head(0, 0, 1).r_v, readable_view.extents[0], b->head(0, 0, 1).r_v,
                    unreadable_view.extents[0]);
    return;
  }
  if (planes()) {
    const auto a = *PlanesStorage::Parse(readable_view, g),
               b = *PlanesStorage::Parse(unreadable_view, g);
    const size_t parts = PlanesPartsOf(PlanOfCodec(codec())).size();
    ASSERT_EQ(a->extents().size() * parts, static_cast<size_t>(readable_view.extent_count));
    for (size_t i = 0; i < a->extents().size(); ++i) {
      const ExtentView* there = readable_view.extents + i * parts;
      const ExtentView* here = unreadable_view.extents + i * parts;
      ExpectSamePlace(a->extents()[i].upper, *there, b->extents()[i].upper, *here);
      there += parts - 1, here += parts - 1;
      ExpectSamePlace(a->extents()[i].lower, *there, b->extents()[i].lower, *here);
    }
    return;
  }
  const auto a = *SpanStorage::Parse(readable_view, g), b = *SpanStorage::Parse(unreadable_view, g);
  EXPECT_EQ(a->spans(), b->spans());
  EXPECT_EQ(a->anchors(), b->anchors());
  EXPECT_TRUE(std::equal(a->parts()[0].raw_positions,
                         a->parts()[0].raw_positions + a->parts()[0].raw_count,
                         b->parts()[0].raw_positions));
  ExpectSamePlace(a->parts()[0].raw_rows, readable_view.extents[2], b->parts()[0].raw_rows,
                  unreadable_view.extents[2]);
  const LowRankSpan x = a->Factors(0, 0, 1), y = b->Factors(0, 0, 1);
  ExpectSamePlace(x.v.left, readable_view.extents[1], y.v.left, unreadable_view.extents[1]);
}

TEST_P(CodecTest, DamagedDescriptionsAreRefused) {
  const Inputs in(SmallGeometry(), 400, kSeed);
  const auto s = Start(in);
  s->Commit(kPrompt);
  s->PrefillDone();
  s->Commit(in.n);
  s->Settle();
  UnreadableExtents unreadable(s->extents());
  const SequenceView view = unreadable.Of(s->View());
  const auto parse = [&] {
    return CodecOf(PlanOfCodec(codec())).parse(view, s->geometry()).status();
  };
  ASSERT_TRUE(parse().ok()) << parse().ToString();
  for (size_t i = 0; i < unreadable.views().size(); ++i) {
    unreadable.description(i)[0] ^= std::byte{1};
    EXPECT_EQ(parse().reason(), "EXTENT_INVALID");
    unreadable.description(i)[0] ^= std::byte{1};
    // Up to 256 bytes a description may be longer than what is read of it.
    int64_t& described = unreadable.views()[i].description_bytes;
    const int64_t whole = described;
    for (described = 0; described < whole; described += 1 + described / 3) {
      const Status status = parse();
      EXPECT_TRUE(status.reason() == "EXTENT_INVALID" || (status.ok() && described >= 128))
          << described << " " << status.ToString();
    }
    described = whole;
  }
}

// Flipped bits: an error, or numbers nobody asked for; never an access beyond the extent. Proven
// under -fsanitize=address.
class DamagedExtents : public CodecTest {
 protected:
  void SetUp() override {
    in_ = std::make_unique<Inputs>(SmallGeometry(), 230, kSeed);
    s_ = Start(*in_);
    s_->Commit(kPrompt);
    s_->PrefillDone();
    s_->Commit(in_->n);
    s_->Settle();
  }
  // Bytes that hold header and descriptors, and of the factors' many entries the first few.
  size_t DescriptorBytes(size_t extent) const {
    const size_t bytes = packed() ? 128 + 2 * sizeof(PackedEntry) : planes() ? 128 : 512;
    return std::min(s_->extents()[extent].size(), bytes);
  }
  void Flip(size_t extent, size_t bit) {
    s_->mutable_extents()[extent][bit / 8] ^= std::byte(1u << (bit % 8));
  }

  std::unique_ptr<Inputs> in_;
  std::unique_ptr<CodecSequence> s_;
};

INSTANTIATE_TEST_SUITE_P(
    , DamagedExtents,
    ::testing::Combine(::testing::Values("packed", "lowrank", "planes", "lower_planes"),
                       ::testing::ValuesIn(BackendNames())),
    [](const auto& test) { return std::get<0>(test.param) + "_" + std::get<1>(test.param); });

TEST_P(DamagedExtents, EveryBitOfHeaderAndDescriptors) {
  int refused = 0;
  for (size_t e = 0; e < s_->extents().size(); ++e) {
    for (size_t bit = 0; bit < DescriptorBytes(e) * 8; ++bit) {
      Flip(e, bit);
      refused += ReadAll(*s_, in_->Query(0, 0, 0)) ? 0 : 1;
      (void)s_->recompressor().Due(s_->Input());
      Flip(e, bit);
    }
  }
  EXPECT_GT(refused, 500);
}

TEST_P(DamagedExtents, RandomBits) {
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 300; ++i) {
    const size_t e = random() % s_->extents().size();
    std::vector<size_t> bits(1 + random() % 8);
    for (size_t& bit : bits) bit = random() % (s_->extents()[e].size() * 8);
    for (const size_t bit : bits) Flip(e, bit);
    (void)ReadAll(*s_, in_->Query(0, 0, 0));
    for (const size_t bit : bits) Flip(e, bit);
  }
}

TEST_P(DamagedExtents, ShortenedAndMissing) {
  std::vector<Bytes>& extents = s_->mutable_extents();
  for (size_t e = 0; e < extents.size(); ++e) {
    const Bytes whole = extents[e];
    for (size_t size = 0; size < whole.size(); size += 1 + size / 3) {
      extents[e] = Bytes(whole.begin(), whole.begin() + static_cast<int64_t>(size));
      EXPECT_FALSE(ReadAll(*s_, in_->Query(0, 0, 0)));
    }
    extents[e] = whole;
  }
}

TEST_P(DamagedExtents, RunAnswersInsteadOfGuessing) {
  Bytes& last = s_->mutable_extents().back();
  s_->Commit(in_->n);
  last[0] ^= std::byte{1};
  const Result<RecompressOutput> output = s_->recompressor().Run(s_->Input());
  ExpectInvalid(output.status());
  EXPECT_TRUE(!packed() || !output.ok());
}

}  // namespace
}  // namespace kvstrata
