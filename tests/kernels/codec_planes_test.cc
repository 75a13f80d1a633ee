// SPDX-License-Identifier: Apache-2.0
// Codec planes beyond what holds for every codec: which extents its groups lie in, and steps over
// groups and raw rows, held to ops that are called by hand.
#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/pack_planes/pack_planes.h"
#include "kernels/plans/strata/planes_recompressor.h"
#include "kernels/select/notice.h"
#include "tests/kernels/codec_fixture.h"

namespace kvstrata {
namespace {

constexpr uint64_t kSeed = 83;
constexpr int32_t kSealed = 640, kTokens = 2300, kNew = 80;  // raw rows are several slices

Geometry Shape() { return {.layers = 1, .query_heads = 4, .kv_heads = 2, .head_dim = 64}; }

using Tokens = Run;  // gtest's classes have a Run of their own

std::vector<Tokens> TokensOf(CodecSequence& s) {
  const SequenceView view = s.View();
  std::vector<Tokens> tokens;
  for (int32_t i = 0; i < view.extent_count; ++i) tokens.push_back(view.extents[i].tokens);
  return tokens;
}

TEST(PlanesExtents, FollowEachOtherLikeDigits) {
  const Inputs in(Shape(), 1210, kSeed);
  Plan plan = PlanesPlan();
  plan.planes.unit = 16;
  CodecSequence s(plan, in.g, in);
  s.Commit(in.n);
  s.PrefillDone();
  s.Settle();
  EXPECT_EQ(TokensOf(s), (std::vector<Tokens>{
                             {0, 1024}, {1024, 1152}, {1152, 1168}, {1168, 1184}, {1184, 1200}}));
}

// As large as an extent may be, and no larger.
TEST(PlanesExtents, WeighNoMoreThanTheyMay) {
  static const Codec limited = [] {
    Codec codec = CodecOf(PlanesPlan());
    codec.recompressor = [](const Plan& p, const Geometry& g, ParametersPtr) {
      const PlanesFormat f{g.head_dim, p.planes.unit, p.planes.keep};
      return NewPlanesRecompressor(p, g, 20 * g.kv_heads * (f.upper_bytes() + f.lower_bytes()));
    };
    return codec;
  }();
  const Inputs in(Shape(), 64 * 17, kSeed);
  CodecSequence s(PlanesPlan(), in.g, in, nullptr, "ref", &limited);
  s.Commit(in.n);
  s.PrefillDone();
  s.Settle();
  EXPECT_EQ(TokensOf(s), (std::vector<Tokens>{{0, 512}, {512, 1024}, {1024, 1088}}));
}

// A sequence of which kSealed tokens are packed, and the others are rows on its pages.
class PlanesStep : public ::testing::TestWithParam<std::string> {
 protected:
  explicit PlanesStep(const Plan& plan = PlanesPlan())
      : plan_(plan),
        backend_(**FindBackend(GetParam())),
        rows_(plan_, in_.g, in_, nullptr, GetParam()),
        state_(in_.g, plan_, kSealed, kSealed) {
    rows_.Commit(kSealed);
    rows_.PrefillDone();
    rows_.Settle();
    view_ = rows_.View();
    EXPECT_TRUE(state_.PrefillDone(view_, backend_, InlineExecutor()).ok());
    rows_.Commit(kTokens + kNew);
    view_ = rows_.View();
    view_.tokens = kTokens;
    state_.Advance(kTokens - kSealed);
    const Status parsed = state_.Refresh(view_);
    EXPECT_TRUE(parsed.ok()) << parsed.ToString();
  }

  // The outputs of `count` new tokens, [token][head][dim]. state: null: state_.
  std::vector<float> Attend(int32_t count, SequenceState* state = nullptr) {
    if (state == nullptr) state = &state_;
    Step step({{state, view_, count}}, backend_, InlineExecutor());
    const auto all = [&](const std::vector<float>& from, int32_t heads) {
      std::vector<float> packed;
      for (int32_t t = kTokens; t < kTokens + count; ++t) {
        const float* const row = in_.Row(from, heads, t, 0, 0);
        packed.insert(packed.end(), row, row + int64_t{heads} * in_.g.head_dim);
      }
      return packed;
    };
    const int64_t head = in_.g.head_dim * int64_t{sizeof(float)};
    const auto rows = [&](const std::vector<float>& x, int32_t heads) {
      return Rows{reinterpret_cast<const std::byte*>(x.data()), heads * head, head, DType::kF32};
    };
    const std::vector<float> k = all(in_.keys, in_.g.kv_heads), v = all(in_.values, in_.g.kv_heads);
    const std::vector<float> q = all(in_.queries, in_.g.query_heads);
    EXPECT_TRUE(step.Append(0, rows(k, in_.g.kv_heads), rows(v, in_.g.kv_heads)).ok());
    std::vector<float> out(q.size(), NAN);
    step.Attend(
        0, rows(q, in_.g.query_heads),
        {reinterpret_cast<std::byte*>(out.data()), in_.g.query_heads * head, head, DType::kF32},
        nullptr);
    cost_ = step.cost(0);
    return out;
  }

  // Outputs of the new tokens [first, first + count) for a KV head, [token][group][dim], whose fine
  // set is chosen by the first of them; adds what that reads.
  std::vector<double> Expected(int kv_head, int32_t first, int32_t count) {
    const auto storage = *PlanesStorage::Parse(view_, in_.g);
    std::vector<const std::byte*> upper, lower;
    for (const PlanesExtent& extent : storage->extents()) {
      for (int32_t g = 0; g < extent.groups; ++g) {
        upper.push_back(extent.Upper(kv_head, g));
        lower.push_back(extent.Lower(kv_head, g));
      }
    }
    const int32_t group = in_.g.group(), dim = in_.g.head_dim, rows = count * group;
    std::vector<Attention> raw;
    std::vector<float> q, raw_m, raw_l;
    for (int32_t i = 0; i < rows; ++i) {
      const int32_t t = kTokens + first + i / group;
      const float* const query = in_.Query(t, 0, kv_head * group + i % group);
      q.insert(q.end(), query, query + dim);
      AttendInputs(in_, query, 0, kv_head, {kSealed, t + 1}, &raw.emplace_back(dim));
      raw_m.push_back(static_cast<float>(raw.back().m));
      raw_l.push_back(static_cast<float>(raw.back().l));
    }
    std::vector<float> m(static_cast<size_t>(rows)), l(m.size()), o(m.size() * size_t(dim));
    std::vector<uint8_t> fine(kSealed), strips(kSealed / kStripTokens);
    AttendPlanesWork w;
    w.rows = {storage->extents().front().format, upper.data(), lower.data(),
              static_cast<int32_t>(upper.size())};
    w.rule = rule_;
    w.tokens = kTokens + 1;
    w.q = q.data(), w.q_token = int64_t{group} * dim;
    w.queries = count, w.group = group, w.scale = in_.g.logit_scale();
    w.raw_m = raw_m.data(), w.raw_l = raw_l.data();
    w.m = m.data(), w.l = l.data(), w.o = o.data();
    w.fine = fine.data(), w.strips = strips.data();
    AttendPlanesRef(&w, 1, InlineExecutor());
    fine_ += std::count(fine.begin(), fine.end(), 1);
    bytes_ += PlanesBytesRead(w.rows, fine.data(), strips.data());
    std::vector<double> out;
    for (int32_t i = 0; i < rows; ++i) {
      Attention& a = raw[static_cast<size_t>(i)];
      a.Merge(m[static_cast<size_t>(i)], l[static_cast<size_t>(i)], &o[size_t(i) * size_t(dim)]);
      const std::vector<double> row = a.Output();
      out.insert(out.end(), row.begin(), row.end());
    }
    return out;
  }

  void ExpectOutputs(const std::vector<float>& got, int32_t first, int32_t count) {
    // simd rounds queries and weights to 8 bits; outputs are means of rows that nearly cancel.
    const double tolerance = GetParam() == "ref" ? 1e-5 : 5e-2;
    const auto dim = in_.g.head_dim;
    for (int h = 0; h < in_.g.kv_heads; ++h) {
      const std::vector<double> want = Expected(h, first, count);
      for (int32_t i = 0; i < count * in_.g.group(); ++i) {
        const int32_t token = first + i / in_.g.group(),
                      head = h * in_.g.group() + i % in_.g.group();
        const float* const row = &got[size_t(token * in_.g.query_heads + head) * size_t(dim)];
        const std::vector<double> mine(row, row + dim);
        const std::vector<double> theirs(want.begin() + int64_t{i} * dim,
                                         want.begin() + int64_t{i + 1} * dim);
        ASSERT_LT(ErrorOf(mine, theirs), tolerance) << "token " << token << " head " << head;
      }
    }
  }

  const Inputs in_{Shape(), kTokens + kNew, kSeed};
  const Plan plan_;
  PlanesRule rule_ = {0,
                      plan_.fine.fine_above,
                      plan_.fine.skip_below,
                      1,
                      plan_.fine.sample,
                      plan_.fine.sinks,
                      plan_.fine.recent};  // expected
  const Backend& backend_;
  CodecSequence rows_;
  SequenceState state_;
  SequenceView view_;
  StepCost cost_;
  int64_t fine_ = 0, bytes_ = 0;  // expected
};

INSTANTIATE_TEST_SUITE_P(, PlanesStep, ::testing::ValuesIn(BackendNames()),
                         [](const auto& backend) { return backend.param; });

TEST_P(PlanesStep, RawRowsOfSeveralSlicesAreOneNormaliser) {
  static_assert(kTokens - kSealed > kAttendSliceRows);
  ASSERT_NO_FATAL_FAILURE(ExpectOutputs(Attend(1), 0, 1));
  const int64_t raw = in_.g.kv_heads * (kTokens + 1 - kSealed);
  EXPECT_GT(fine_, in_.g.kv_heads * plan_.fine.sinks);
  EXPECT_LT(fine_, in_.g.kv_heads * kSealed / 2);
  if (GetParam() != "ref") return;  // simd may decide near-ties the other way
  EXPECT_EQ(static_cast<int64_t>(cost_.rows), raw + fine_);
  EXPECT_EQ(static_cast<int64_t>(cost_.attend_bytes), raw * 2 * in_.g.row_bytes() + bytes_);
}

TEST_P(PlanesStep, TheFirstOfEachTileOfNewTokensChooses) {
  const std::vector<float> got = Attend(kNew);
  ASSERT_NO_FATAL_FAILURE(ExpectOutputs(got, 0, kAttendQueryTile));
  ASSERT_NO_FATAL_FAILURE(ExpectOutputs(got, kAttendQueryTile, kNew - kAttendQueryTile));
}

TEST_P(PlanesStep, BelowMinTokensEverythingIsFine) {
  Plan plan = plan_;
  plan.min_tokens = kTokens + 2;
  SequenceState state(in_.g, plan, kTokens, kTokens);
  ASSERT_TRUE(state.PrefillDone(view_, backend_, InlineExecutor()).ok());
  ASSERT_TRUE(state.Refresh(view_).ok());
  Step step({{&state, view_, 1}}, backend_, InlineExecutor());
  const std::vector<float> q(in_.Query(kTokens, 0, 0),
                             in_.Query(kTokens, 0, 0) + in_.g.query_heads * in_.g.head_dim);
  const int64_t head = in_.g.head_dim * int64_t{sizeof(float)};
  step.Select(0, {reinterpret_cast<const std::byte*>(q.data()), in_.g.query_heads * head, head,
                  DType::kF32});
  EXPECT_TRUE(step.selection(0).full);
  EXPECT_FALSE(step.selection(0).fine.has_value());
}

Plan OpensOnUpper() {
  Plan plan = PlanesPlan();
  plan.stored.keep_raw = KeepRaw::kNo;
  plan.planes.open_on_upper = true;
  return plan;
}

class PlanesArrive : public PlanesStep {
 protected:
  PlanesArrive() : PlanesStep(OpensOnUpper()) {
    const std::span all(whole_.extents, static_cast<size_t>(whole_.extent_count));
    for (const ExtentView& extent : all) {
      if (KindOf(extent) == ExtentKind::kPlanes) upper_.push_back(extent);
    }
    EXPECT_EQ(2 * upper_.size(), all.size());
  }
  // As the table says while lower runs are on their way, or says nothing of it.
  Status SeeUpper(bool rest_due) {
    for (ExtentView& extent : upper_) extent.rest_due = rest_due;
    view_.extents = upper_.data();
    view_.extent_count = static_cast<int32_t>(upper_.size());
    ++view_.version;
    return state_.Refresh(view_);
  }

  const SequenceView whole_ = view_;
  std::vector<ExtentView> upper_;
};

INSTANTIATE_TEST_SUITE_P(, PlanesArrive, ::testing::ValuesIn(BackendNames()),
                         [](const auto& backend) { return backend.param; });

TEST_P(PlanesArrive, UntilLowerRunsAreHereNothingPackedIsFine) {
  const std::vector<float> whole = Attend(1);
  ASSERT_TRUE(SeeUpper(true).ok());
  EXPECT_EQ(state_.StatusText(view_), Say(Notice::kRestDue, {kSealed}));
  const std::vector<float> coarse = Attend(1);
  rule_.fine_above = 1e9, rule_.sinks = 0, rule_.recent = 1;
  const StepCost cost = cost_;
  view_ = whole_, view_.version += 2;
  ASSERT_TRUE(state_.Refresh(view_).ok());
  ASSERT_NO_FATAL_FAILURE(ExpectOutputs(coarse, 0, 1));
  EXPECT_EQ(fine_, 0);
  EXPECT_EQ(static_cast<int64_t>(cost.rows), in_.g.kv_heads * (kTokens + 1 - kSealed));
  EXPECT_NE(coarse, whole);
  EXPECT_EQ(Attend(1), whole);
  EXPECT_EQ(state_.StatusText(view_), "ok");
}

// Below min_tokens, in dense layers and in a prompt's later chunk: all of it is attended.
TEST_P(PlanesArrive, InFullNothingIsLeftOut) {
  Plan plan = plan_;
  plan.min_tokens = kTokens + 2;
  ASSERT_TRUE(SeeUpper(true).ok());
  SequenceState state(in_.g, plan, kTokens, kTokens);
  ASSERT_TRUE(state.Refresh(view_).ok());
  ASSERT_TRUE(state.PrefillDone(view_, backend_, InlineExecutor()).ok());
  const std::vector<float> coarse = Attend(1, &state);
  rule_.fine_above = 1e9, rule_.skip_below = 0, rule_.sinks = 0, rule_.recent = 1;
  view_ = whole_;
  ASSERT_NO_FATAL_FAILURE(ExpectOutputs(coarse, 0, 1));
}

TEST_P(PlanesArrive, UpperRunsAloneAreDamageUnlessTheTableSaysSo) {
  EXPECT_EQ(SeeUpper(false).reason(), "EXTENT_INVALID");
  EXPECT_EQ(state_.Refresh(view_).reason(), "EXTENT_INVALID") << "again, of the same table";
}

}  // namespace
}  // namespace kvstrata
