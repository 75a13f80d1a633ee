// SPDX-License-Identifier: Apache-2.0
// What holds for every codec's stored rows (kernels/rows/stored_rows.h), seen from steps and
// selectors: attention over what they hold is attention over the rows that were written, of what is
// selected and of nothing else; scores are the logits of that attention; costs count what was read;
// and a codec is its own file and a row of a table. Codecs: stored_codecs.cc.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>

#include "gmock/gmock.h"
#include "kernels/select/token_scores.h"
#include "tests/kernels/codec_fixture.h"
#include "tests/kernels/stored_codecs.h"

namespace kvstrata {
namespace {

using Tokens = Run;  // gtest's classes have a Run of their own
using Runs = std::vector<Run>;

constexpr uint64_t kSeed = 59;
constexpr int32_t kPrompt = 301, kMore = 80;

Geometry Shape() { return {.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64}; }

// A sequence whose prompt is complete and stored as far as its codec may; the rows of kMore tokens
// more are on its pages.
class Stored {
 public:
  Stored(const StoredCodec& codec, const Inputs& in, std::string_view backend,
         bool keep_pages = false)
      : backend_(**FindBackend(backend)),
        rows_(codec.plan, in.g, in, nullptr, backend, &codec.codec),
        state_(in.g, codec.plan, kPrompt, kPrompt, &codec.codec) {
    std::vector<float> nats;
    for (int t = 0; t < kPrompt; ++t) nats.push_back(t % 9 == 0 ? 9.0f : 0.1f);
    rows_.keep_pages = keep_pages;
    rows_.Report(nats);
    rows_.Commit(kPrompt);
    rows_.PrefillDone();
    rows_.Settle();
    view_ = rows_.View();
    EXPECT_TRUE(state_.Report(0, kPrompt, nats.data(), nullptr, nullptr).ok());
    EXPECT_TRUE(state_.PrefillDone(view_, backend_, InlineExecutor()).ok());
    const Status parsed = state_.Refresh(view_);
    EXPECT_TRUE(parsed.ok()) << parsed.ToString();
    rows_.Commit(kPrompt + kMore);
    view_ = rows_.View();
    view_.tokens = kPrompt;
  }

  SequenceState& state() { return state_; }
  CodecSequence& rows() { return rows_; }
  const Backend& backend() const { return backend_; }
  const SequenceView& view() const { return view_; }
  SelectContext Context() { return state_.Context(view_, &backend_, &InlineExecutor()); }
  StepMember Member(int32_t new_tokens) { return {&state_, view_, new_tokens}; }

 private:
  const Backend& backend_;
  CodecSequence rows_;
  SequenceState state_;
  SequenceView view_;
};

struct Outputs {
  std::vector<float> out, lse;
};

// Attends `tokens` new tokens of each member, as `in` has them.
Outputs Attend(Step& step, const Inputs& in, int layer, int32_t tokens) {
  const Geometry& g = in.g;
  const int64_t head = g.head_dim * int64_t{sizeof(float)};
  const auto all = [&](const std::vector<float>& rows, int32_t heads) {
    std::vector<float> packed;
    for (int m = 0; m < step.members(); ++m) {
      for (int32_t t = kPrompt; t < kPrompt + tokens; ++t) {
        const float* const row = in.Row(rows, heads, t, layer, 0);
        packed.insert(packed.end(), row, row + int64_t{heads} * g.head_dim);
      }
    }
    return packed;
  };
  const auto rows = [&](const std::vector<float>& packed, int32_t heads) {
    return Rows{reinterpret_cast<const std::byte*>(packed.data()), heads * head, head, DType::kF32};
  };
  const std::vector<float> k = all(in.keys, g.kv_heads), v = all(in.values, g.kv_heads);
  const std::vector<float> q = all(in.queries, g.query_heads);
  EXPECT_TRUE(step.Append(layer, rows(k, g.kv_heads), rows(v, g.kv_heads)).ok());
  Outputs outputs;
  outputs.out.assign(q.size(), -1);
  outputs.lse.assign(q.size() / static_cast<size_t>(g.head_dim), -1);
  step.Attend(
      layer, rows(q, g.query_heads),
      {reinterpret_cast<std::byte*>(outputs.out.data()), g.query_heads * head, head, DType::kF32},
      outputs.lse.data());
  return outputs;
}

class StoredRowsTest : public ::testing::TestWithParam<std::tuple<size_t, std::string>> {
 protected:
  const StoredCodec& codec() const { return StoredCodecs()[std::get<0>(GetParam())]; }
  const std::string& backend() const { return std::get<1>(GetParam()); }
  std::unique_ptr<Stored> Hold(bool keep_pages = false) {
    return std::make_unique<Stored>(codec(), in_, backend(), keep_pages);
  }
  double Tolerance() const { return codec().tolerance; }

  // Output and lse of token `t` and a query head against attention over `runs` of the inputs.
  void ExpectAttends(const Outputs& got, size_t row, int32_t t, int layer, int head,
                     const Runs& runs) const {
    Attention truth(in_.g.head_dim);
    for (const Tokens& run : runs) {
      AttendInputs(in_, in_.Query(t, layer, head), layer, head / in_.g.group(), run, &truth);
    }
    const auto dim = static_cast<size_t>(in_.g.head_dim);
    const std::vector<double> out(got.out.begin() + static_cast<ptrdiff_t>(row * dim),
                                  got.out.begin() + static_cast<ptrdiff_t>((row + 1) * dim));
    ASSERT_LT(ErrorOf(out, truth.Output()), Tolerance()) << "layer " << layer << " head " << head;
    ASSERT_NEAR(got.lse[row], truth.m + std::log(truth.l), Tolerance());
  }

  const Inputs in_{Shape(), kPrompt + kMore, kSeed};
};

INSTANTIATE_TEST_SUITE_P(, StoredRowsTest,
                         ::testing::Combine(::testing::Range<size_t>(0, StoredCodecs().size()),
                                            ::testing::ValuesIn(BackendNames())),
                         [](const auto& test) {
                           return std::string(StoredCodecs()[std::get<0>(test.param)].name) + "_" +
                                  std::get<1>(test.param);
                         });

TEST_P(StoredRowsTest, StoreWhatTheCodecMay) {
  const auto s = Hold();
  const StoredRows* const stored = s->state().stored();
  ASSERT_EQ(stored != nullptr, codec().codec.stores());
  EXPECT_EQ(stored != nullptr && stored->end() > kPrompt / 2, codec().codec.stores());
  EXPECT_EQ(!s->rows().released().empty(), codec().codec.stores());
}

TEST_P(StoredRowsTest, AllOfThemAreAttendedOnce) {
  const auto s = Hold();
  Step step({s->Member(1)}, s->backend(), InlineExecutor());
  for (int layer = 0; layer < in_.g.layers; ++layer) {
    step.Choose(layer, Selection::Full(kPrompt + 1));
    const Outputs got = Attend(step, in_, layer, 1);
    for (int h = 0; h < in_.g.query_heads; ++h) {
      ASSERT_NO_FATAL_FAILURE(
          ExpectAttends(got, static_cast<size_t>(h), kPrompt, layer, h, {{0, kPrompt + 1}}));
    }
    EXPECT_EQ(step.Positions(0, 0), (Runs{{0, kPrompt + 1}}));
    EXPECT_EQ(step.cost(0).rows, static_cast<uint64_t>(in_.g.kv_heads) * (kPrompt + 1));
    EXPECT_EQ(step.cost(0).coarse_rows, 0u);
    EXPECT_GT(step.cost(0).attend_bytes, 0u);
  }
}

TEST_P(StoredRowsTest, WhatIsSelectedIsAttendedAndNothingElse) {
  const auto s = Hold();
  Step step({s->Member(1)}, s->backend(), InlineExecutor());
  for (int layer = 0; layer < in_.g.layers; ++layer) {
    const Outputs got = Attend(step, in_, layer, 1);
    ASSERT_FALSE(step.selection(0).full);
    const auto groups = static_cast<size_t>(step.Groups(0));
    std::vector<Runs> of_kv_head(static_cast<size_t>(in_.g.kv_heads));
    for (int h = 0; h < in_.g.query_heads; ++h) {
      const auto group = static_cast<int>(ListOf(groups, h, in_.g.query_heads));
      const Runs runs = step.Positions(0, group);
      ASSERT_EQ(RowsIn(runs, {0, kPrompt + 1}) < uint64_t{kPrompt}, codec().leaves_out);
      ASSERT_NO_FATAL_FAILURE(ExpectAttends(got, static_cast<size_t>(h), kPrompt, layer, h, runs));
      auto& read = of_kv_head[static_cast<size_t>(h / in_.g.group())];
      read.insert(read.end(), runs.begin(), runs.end());
    }
    // A row that several query heads attend is read once.
    uint64_t rows = 0;
    for (auto& read : of_kv_head) rows += RowsIn(Normalize(read), {0, kPrompt + 1});
    EXPECT_EQ(step.cost(0).rows, rows);
  }
}

TEST_P(StoredRowsTest, SeveralTilesOfNewTokensSeeThem) {
  const auto s = Hold();
  Step step({s->Member(kMore)}, s->backend(), InlineExecutor());
  step.Choose(1, Selection::Full(kPrompt + 1));
  const Outputs got = Attend(step, in_, 1, kMore);
  ASSERT_GT(kMore, kAttendQueryTile);
  for (const int32_t i : {0, 1, kAttendQueryTile - 1, kAttendQueryTile, kMore - 1}) {
    for (int h = 0; h < in_.g.query_heads; ++h) {
      const auto row = static_cast<size_t>(i * in_.g.query_heads + h);
      ASSERT_NO_FATAL_FAILURE(ExpectAttends(got, row, kPrompt + i, 1, h, {{0, kPrompt + i + 1}}));
    }
  }
}

TEST_P(StoredRowsTest, ScoresAreTheLogitsOfAttention) {
  const auto s = Hold();
  Step step({s->Member(1)}, s->backend(), InlineExecutor());
  step.Choose(0, Selection::Full(kPrompt + 1));
  const Outputs got = Attend(step, in_, 0, 1);
  const float scale = in_.g.logit_scale();
  const std::vector<float> q(in_.Query(kPrompt, 0, 0),
                             in_.Query(kPrompt, 0, 0) + in_.g.query_heads * in_.g.head_dim);
  // In ranges that begin and end inside of what a codec keeps together.
  std::vector<std::vector<float>> scores(static_cast<size_t>(in_.g.query_heads));
  TokenScores reader;
  for (const Tokens range :
       {Tokens{0, 13}, Tokens{13, 100}, Tokens{100, 290}, Tokens{290, kPrompt + 1}}) {
    const int32_t n = range.end - range.begin;
    std::vector<float> out(static_cast<size_t>(in_.g.query_heads * n), NAN);
    reader.Score(s->Context(), 0, q.data(), {0, in_.g.kv_heads}, range, scale, out.data(), n);
    for (int h = 0; h < in_.g.query_heads; ++h) {
      auto& own = scores[static_cast<size_t>(h)];
      own.insert(own.end(), out.begin() + h * n, out.begin() + (h + 1) * n);
    }
  }
  for (int h = 0; h < in_.g.query_heads; ++h) {
    double sum = 0;
    for (const float x : scores[static_cast<size_t>(h)]) sum += std::exp(double{x});
    EXPECT_NEAR(std::log(sum), got.lse[static_cast<size_t>(h)], 1e-4) << "head " << h;
    for (int32_t t = 0; t <= kPrompt; ++t) {
      double dot = 0;
      for (int c = 0; c < in_.g.head_dim; ++c) {
        dot += double{in_.Query(kPrompt, 0, h)[c]} * in_.Key(t, 0, h / in_.g.group())[c];
      }
      ASSERT_NEAR(scores[static_cast<size_t>(h)][static_cast<size_t>(t)], dot * scale,
                  4 * Tolerance())
          << "token " << t;
    }
  }
}

TEST_P(StoredRowsTest, ScoringReadsKeysAlone) {
  const auto s = Hold();
  Step step({s->Member(1)}, s->backend(), InlineExecutor());
  step.Choose(1, Selection::Full(kPrompt + 1));
  (void)Attend(step, in_, 1, 1);
  const int64_t all = KeyBytes(s->Context(), 1, {0, kPrompt + 1});
  EXPECT_GT(all, 0);
  EXPECT_LT(static_cast<uint64_t>(all), step.cost(0).attend_bytes);
  EXPECT_GE(KeyBytes(s->Context(), 1, {0, 150}) + KeyBytes(s->Context(), 1, {150, kPrompt + 1}),
            all);
  EXPECT_EQ(KeyBytes(s->Context(), 1, {40, 40}), 0);
}

TEST_P(StoredRowsTest, BatchesAndThreadsDoNotChangeBits) {
  const auto alone = Hold(), first = Hold();
  Stored other(StoredCodecs()[0], in_, backend());
  const auto pool = NewThreadPool(3);
  Step one({alone->Member(1)}, alone->backend(), InlineExecutor());
  Step two({other.Member(1), first->Member(1)}, first->backend(), *pool);
  const Outputs a = Attend(one, in_, 1, 1), b = Attend(two, in_, 1, 1);
  EXPECT_EQ(a.out,
            std::vector<float>(b.out.end() - static_cast<ptrdiff_t>(a.out.size()), b.out.end()));
  EXPECT_EQ(a.lse,
            std::vector<float>(b.lse.end() - static_cast<ptrdiff_t>(a.lse.size()), b.lse.end()));
}

TEST_P(StoredRowsTest, DamageIsAnErrorOrHarmless) {
  const auto s = Hold();
  for (Bytes& extent : s->rows().mutable_extents()) {
    for (size_t at = 0; at < std::min<size_t>(extent.size(), 512); at += 3) {
      extent[at] ^= std::byte{0x55};
      SequenceState state(in_.g, codec().plan, kPrompt, kPrompt, &codec().codec);
      const Status parsed = state.Refresh(s->rows().View());
      EXPECT_TRUE(parsed.ok() || parsed.reason() == "EXTENT_INVALID") << parsed.ToString();
      EXPECT_TRUE(at >= sizeof(uint32_t) || !parsed.ok()) << "magic";
      extent[at] ^= std::byte{0x55};
    }
  }
}

TEST_P(StoredRowsTest, APromptIsComputedFromRawPagesWhileTheyAreThere) {
  const auto kept = Hold(true), gone = Hold();
  for (Stored* const s : {kept.get(), gone.get()}) {
    SequenceState open(in_.g, codec().plan, kPrompt, kPrompt, &codec().codec);
    ASSERT_TRUE(open.Refresh(s->view()).ok());
    EXPECT_EQ(open.stored() != nullptr, s == gone.get() && codec().codec.stores());
  }
}

TEST_P(StoredRowsTest, ItsArraysAreRead) {
  const auto s = Hold(true);
  const auto inspect = [&](std::string_view name) {
    return s->state().Inspect(s->view(), s->backend(), InlineExecutor(), name);
  };
  const Status unknown = inspect("nothing").status();
  EXPECT_EQ(unknown.reason(), "INSPECT_UNKNOWN");
  for (const std::string_view name : codec().codec.arrays) {
    const Result<InspectArray> array = inspect(name);
    EXPECT_TRUE(array.ok()) << array.status().ToString();
    EXPECT_THAT(unknown.message(), ::testing::HasSubstr(std::string(name)));
  }
  SequenceState empty(in_.g, codec().plan, kPrompt, kPrompt, &codec().codec);
  EXPECT_EQ(empty.stored(), nullptr);
}

// How often a source names the toy codec, comments apart.
int64_t Mentions(const std::filesystem::path& path) {
  int64_t mentions = 0;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    line.resize(std::min(line.size(), line.find("//")));
    for (const char* name : {"toy_codec", "kToyCodec", "ToyRows", "ToyRecompressor"}) {
      if (line.find(name) != std::string::npos) ++mentions;
    }
  }
  return mentions;
}

// No part of the product names it, and of the tests its own file and the table, with an include and
// a row.
TEST(ToyCodec, IsOneFileAndOneRow) {
  const std::filesystem::path root = KVS_SOURCE_DIR;
  std::map<std::string, int64_t> mentions;
  for (const char* folder : {"base", "kernels", "session", "client", "server", "tests/kernels"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root / folder)) {
      const std::string path = entry.path().lexically_relative(root).string();
      if (!entry.is_regular_file() || path == "tests/kernels/stored_rows_test.cc") continue;
      if (const int64_t n = Mentions(entry.path()); n > 0) mentions[path] = n;
    }
  }
  ASSERT_TRUE(mentions.contains("tests/kernels/toy_codec.h"));
  mentions.erase("tests/kernels/toy_codec.h");
  EXPECT_THAT(mentions,
              ::testing::ElementsAre(::testing::Pair("tests/kernels/stored_codecs.cc", 2)));
}

}  // namespace
}  // namespace kvstrata
