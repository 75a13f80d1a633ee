// SPDX-License-Identifier: Apache-2.0
// Refs of score_spans, expand_spans and attend_spans over one small part against what sekv says of
// them: every row written out, one softmax.
#include "kernels/plans/sekv/ops/attend_spans/attend_spans.h"
#include "kernels/plans/sekv/ops/attend_spans/expand_spans.h"
#include "kernels/plans/sekv/ops/attend_spans/score_spans.h"
#include "tests/kernels/ops_fixture.h"

namespace kvstrata::cuda {
namespace {

constexpr int kSpans = 4, kDim = 64, kGroup = 2, kStride = 32, kRaw = 3, kRoute = 5, kRank = 2;
constexpr int kLengths[kSpans] = {5, 1, 70, 9}, kLongest = 70;
constexpr int kPageTokens = 16, kWindow = 3, kTokens = 10;

// One layer, one KV head. Span 1 lies as raw rows, the others as factors.
class Spans {
 public:
  explicit Spans(Random& random) {
    int32_t at = 0;
    for (int s = 0; s < kSpans; ++s) {
      runs_.push_back(at);
      runs_.push_back(at += kLengths[s]);
    }
    const auto draw = [&](std::vector<BF16>* out, int count) {
      for (int i = 0; i < count; ++i) out->push_back(FromFloat<BF16>(random.Normal()));
    };
    draw(&k_mean_, kSpans * kDim);
    draw(&v_mean_, kSpans * kDim);
    draw(&raw_, 2 * kRaw * kDim);
    draw(&page_, 2 * kPageTokens * kDim);
    draw(&q_, kGroup * kDim);
    draw(&factors_, 2 * kSpans * kSideFloats);
    for (int s = 0; s < kSpans; ++s) {
      const auto side = static_cast<uint64_t>(s * 2 * kSideFloats * 2);
      const int32_t rank = s == 1 ? -1 : kRank;
      entries_.push_back({side, side + kSideFloats * 2, rank, rank, 0});
    }
    norms_ = NormalFloats(random, kGroup * kSpans);
    w_ = NormalFloats(random, kGroup * kRoute * kDim);
    const auto address = [](const auto& v) { return reinterpret_cast<uint64_t>(v.data()); };
    part_ = {address(runs_),
             address(k_mean_),
             address(v_mean_),
             address(norms_),
             address(entries_),
             address(factors_),
             address(raw_),
             kSpans,
             kRaw,
             0,
             0,
             0,
             0};
    part_.PutBehind(nullptr);
    router_ = {address(w_), address(tau_), kGroup, kRoute};
    pages_ = address(page_);
  }
  SpanLayer Layer() const {
    return {&part_, &one_, &router_, 1, kStride, 0, 1, kGroup, kDim, DType::kBF16};
  }
  SpanQueries Queries() const { return {q_.data(), kGroup * kDim * 2, 1, kScale}; }
  ExpandSpansBatch Expansion() {
    return {Layer(), 1, relevance.data(), coarse.data(), &room, list.data(), &listed};
  }
  AttendSpansBatch Attention() const {
    AttendSpansBatch w;
    w.layer = Layer();
    w.queries = Queries();
    w.coarse = coarse.data();
    w.list = list.data();
    w.counts = &listed;
    w.pages = {&pages_, 1,       kPageTokens, 1, kDim, DType::kBF16, 0, kPageTokens * kDim * 2,
               0,       kDim * 2};
    w.window_begin = &window_begin_;
    w.tokens = &tokens_;
    return w;
  }

  double Q(int head, int c) const { return At(q_, head * kDim + c); }
  double KeyMean(int s, int c) const { return At(k_mean_, s * kDim + c); }
  // W^T W q / sqrt(d') . k / |W k|, whose norm is a table's.
  double Relevance(int head, int s) const {
    double sum = 0;
    for (int r = 0; r < kRoute; ++r) {
      double wq = 0, wk = 0;
      for (int c = 0; c < kDim; ++c) {
        const double x = w_[static_cast<size_t>((head * kRoute + r) * kDim + c)];
        wq += x * Q(head, c);
        wk += x * KeyMean(s, c);
      }
      sum += wq * wk;
    }
    return sum / std::sqrt(double{kRoute}) * norms_[static_cast<size_t>(head * kSpans + s)] +
           std::log(double{1} * kLengths[s]);
  }
  double Coarse(int head, int s) const {
    double dot = 0;
    for (int c = 0; c < kDim; ++c) dot += Q(head, c) * KeyMean(s, c);
    return dot * kScale + std::log(double{1} * kLengths[s]);
  }
  // Every attended row of a head, keys and values written out; `expanded`: of its spans.
  std::vector<double> Attended(int head, const bool (&expanded)[kSpans], double* lse) const {
    std::vector<double> out(kDim);
    double sum = 0;
    const auto add = [&](double logit, const auto& value) {
      sum += std::exp(logit);
      for (int c = 0; c < kDim; ++c) out[static_cast<size_t>(c)] += std::exp(logit) * value(c);
    };
    const auto add_row = [&](const auto& key, const auto& value) {
      double dot = 0;
      for (int c = 0; c < kDim; ++c) dot += Q(head, c) * key(c);
      add(dot * kScale, value);
    };
    for (int s = 0; s < kSpans; ++s) {
      if (!expanded[s]) {
        add(Coarse(head, s), [&](int c) { return At(v_mean_, s * kDim + c); });
        continue;
      }
      for (int i = 0; i < kLengths[s]; ++i) {
        add_row([&](int c) { return Expanded(false, s, i, c); },
                [&](int c) { return Expanded(true, s, i, c); });
      }
    }
    for (int i = 0; i < kRaw; ++i) {
      add_row([&](int c) { return At(raw_, i * kDim + c); },
              [&](int c) { return At(raw_, (kRaw + i) * kDim + c); });
    }
    for (int t = kWindow; t < kTokens; ++t) {
      add_row([&](int c) { return At(page_, t * kDim + c); },
              [&](int c) { return At(page_, (kPageTokens + t) * kDim + c); });
    }
    for (double& x : out) x /= sum;
    *lse = std::log(sum);
    return out;
  }

  static constexpr float kScale = 0.125f;
  std::vector<float> relevance = std::vector<float>(kGroup * kStride, kNaN), coarse = relevance;
  std::vector<uint32_t> list = std::vector<uint32_t>(kSpanPieces * kStride);
  int32_t room = 0, listed = -1;

 private:
  // bf16 numbers of a side of a span: room for rows or factors, B at a multiple of 64 bytes.
  static constexpr int kSideFloats = (kLongest * kRank + 32) / 32 * 32 + 2 * kDim;

  static double At(const std::vector<BF16>& rows, int i) {
    return ToFloat(rows[static_cast<size_t>(i)]);
  }
  double Expanded(bool value, int s, int i, int c) const {
    const int side = (2 * s + (value ? 1 : 0)) * kSideFloats;
    if (s == 1) return At(factors_, side + i * kDim + c);
    const int right = side + (kLengths[s] * kRank + 31) / 32 * 32;
    double x = 0;
    for (int r = 0; r < kRank; ++r) {
      x += At(factors_, side + i * kRank + r) * At(factors_, right + r * kDim + c);
    }
    return x;
  }

  std::vector<int32_t> runs_;
  std::vector<BF16> k_mean_, v_mean_, raw_, page_, q_, factors_;
  std::vector<SpanFactors> entries_;
  std::vector<float> norms_, w_, tau_ = std::vector<float>(kGroup, 0);
  SpanPart part_;
  SpanRouter router_;
  uint64_t pages_ = 0;
  const int32_t one_ = 1, window_begin_ = kWindow, tokens_ = kTokens;
};

void Score(Spans& spans) {
  ScoreSpansRef({spans.Layer(), spans.Queries(), spans.relevance.data(), spans.coarse.data()});
}

TEST(ScoreSpansRef, OfMeansAndRouters) {
  Random random;
  SCOPED_TRACE(random.Trace());
  Spans spans(random);
  Score(spans);
  for (int h = 0; h < kGroup; ++h) {
    for (int s = 0; s < kSpans; ++s) {
      const auto at = static_cast<size_t>(h * kStride + s);
      EXPECT_NEAR(spans.relevance[at], spans.Relevance(h, s), 1e-3);
      EXPECT_NEAR(spans.coarse[at], spans.Coarse(h, s), 1e-5);
    }
    EXPECT_TRUE(std::isnan(spans.coarse[static_cast<size_t>(h * kStride + kSpans)]));
  }
}

TEST(ExpandSpansRef, UpToTheRoomByRelevance) {
  Random random;
  Spans spans(random);
  // Head 0: 2 does not fit, 3 and 1 do. Head 1: 3 alone fits (tau 0: all are relevant enough).
  spans.coarse.assign(spans.coarse.size(), 1);
  const float scores[2][kSpans] = {{1, 2, 9, 5}, {7, 0, kNaN, 8}};
  for (size_t h = 0; h < 2; ++h) std::copy_n(scores[h], kSpans, &spans.relevance[h * kStride]);
  spans.room = 8;
  ExpandSpansRef(spans.Expansion());
  EXPECT_EQ(spans.coarse[3], -kInf);
  EXPECT_EQ(spans.coarse[1], -kInf);
  EXPECT_EQ(spans.coarse[0], 1.0f);
  EXPECT_EQ(spans.coarse[2], 1.0f);
  EXPECT_EQ(spans.coarse[kStride + 3], -kInf);
  EXPECT_EQ(spans.coarse[kStride + 1], -kInf);  // takes no room
  ASSERT_EQ(spans.listed, 2);
  EXPECT_EQ(spans.list[0], 1u << 8 | 3u);
  EXPECT_EQ(spans.list[1], 3u << 8 | 3u);
  spans.room = kExpandAll;
  ExpandSpansRef(spans.Expansion());
  ASSERT_EQ(spans.listed, 6);  // three pieces of 70 tokens
  for (size_t i = 2; i < 5; ++i) EXPECT_EQ(spans.list[i], 2u << 8 | 3u);
}

TEST(AttendSpansRef, IsOneSoftmaxOverAllRows) {
  Random random;
  SCOPED_TRACE(random.Trace());
  Spans spans(random);
  Score(spans);
  // Head 0 reads spans 1 and 2 token by token, head 1 spans 0 and 1.
  const bool expanded[kGroup][kSpans] = {{false, true, true, false}, {true, true, false, false}};
  spans.list = {0u << 8 | 2u, 1u << 8 | 3u, 2u << 8 | 1u, 2u << 8 | 1u, 2u << 8 | 1u};
  spans.listed = 5;
  for (size_t h = 0; h < kGroup; ++h) {
    for (size_t s = 0; s < kSpans; ++s) {
      if (expanded[h][s]) spans.coarse[h * kStride + s] = -kInf;
    }
  }
  std::vector<float> out(kGroup * kDim), lse(kGroup), m(kGroup), l(kGroup), o(kGroup * kDim);
  AttendSpansBatch w = spans.Attention();
  w.partial = {m.data(), l.data(), o.data(), 1};
  AttendSpansRef(w);
  w.to = {out.data(), DType::kF32, lse.data()};
  AttendSpansRef(w);
  for (int h = 0; h < kGroup; ++h) {
    double want_lse = 0;
    const std::vector<double> want = spans.Attended(h, expanded[h], &want_lse);
    const auto head = static_cast<size_t>(h);
    EXPECT_NEAR(lse[head], want_lse, 1e-4);
    EXPECT_NEAR(m[head] + std::log(l[head]), want_lse, 1e-4);
    for (size_t c = 0; c < kDim; ++c) {
      EXPECT_NEAR(out[head * kDim + c], want[c], 1e-4);
      EXPECT_NEAR(o[head * kDim + c] / l[head], want[c], 1e-4);
    }
  }
  // Another op's partial: the output itself once more changes nothing but the lse.
  const std::vector<float> once = out;
  w.with = {m.data(), l.data(), o.data(), 1};
  AttendSpansRef(w);
  for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], once[i], 1e-4);
}

// The same part twice: what is attended has twice the weight, of each part its own spans.
TEST(AttendSpansRef, SpansAreNumberedThroughTheParts) {
  Random random;
  SCOPED_TRACE(random.Trace());
  Spans spans(random);
  Score(spans);
  spans.list = {2u << 8 | 3u, 6u << 8 | 3u};
  spans.listed = 1;
  for (size_t h = 0; h < kGroup; ++h) {
    spans.coarse[h * kStride + 2] = -kInf;
    std::copy_n(&spans.coarse[h * kStride], kSpans, &spans.coarse[h * kStride + kSpans]);
  }
  std::vector<float> once(kGroup * kDim), once_lse(kGroup), out(once), lse(once_lse);
  AttendSpansBatch w = spans.Attention();
  w.window_begin = w.tokens;  // no rows on pages
  w.to = {once.data(), DType::kF32, once_lse.data()};
  AttendSpansRef(w);
  SpanPart parts[2] = {w.layer.parts[0], w.layer.parts[0]};
  parts[1].PutBehind(&parts[0]);
  const int32_t two = 2;
  w.layer.parts = parts;
  w.layer.counts = &two;
  w.layer.part_stride = 2;
  w.counts = &two;
  w.to = {out.data(), DType::kF32, lse.data()};
  AttendSpansRef(w);
  for (size_t h = 0; h < kGroup; ++h) EXPECT_NEAR(lse[h], once_lse[h] + std::log(2.0), 1e-4);
  for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], once[i], 1e-4);
}

}  // namespace
}  // namespace kvstrata::cuda
