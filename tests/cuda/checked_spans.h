// What the ops of plan sekv must give: scores and outputs of ref (attend_coarse, attend_lowrank and
// attend_raw, merged), the choice of selector zoom's rule.
#ifndef KVSTRATA_TESTS_CUDA_CHECKED_SPANS_H_
#define KVSTRATA_TESTS_CUDA_CHECKED_SPANS_H_

#include <gtest/gtest.h>

#include <numeric>

#include "kernels/ops/attend_coarse/attend_coarse.h"
#include "kernels/ops/attend_lowrank/attend_lowrank.h"
#include "kernels/ops/attend_raw/attend_raw.h"
#include "kernels/ops/merge/merge.h"
#include "kernels/select/ranking.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/span_problem.h"

namespace kvstrata::cuda {

class CheckedSpans : public SpanProblem {
 public:
  using SpanProblem::SpanProblem;

  // score_spans, and what expand_spans chooses by its scores.
  void ExpectScoresAndChoice() {
    SCOPED_TRACE(Describe(case_));
    Check(kvs_cuda_ops()->score_spans(Scores(), nullptr), "score_spans");
    ExpectRelevance();
    ExpectCoarse();
    Check(kvs_cuda_ops()->expand_spans(Expansion(), nullptr), "expand_spans");
    ExpectChoice();
  }
  // All three ops.
  void ExpectLikeRef() {
    ExpectScoresAndChoice();
    SCOPED_TRACE(Describe(case_));
    PoisonWhatIsCoarse();
    Check(kvs_cuda_ops()->attend_spans(Attention(), nullptr), "attend_spans");
    ExpectOutputs();
    ExpectCountersAreZero();
  }
  void ExpectReplayed(CapturedGraph& graph) {
    SCOPED_TRACE(Describe(case_));
    out_.Poison();
    graph.Replay();
    ExpectChoice();
    ExpectOutputs();
  }
  int64_t expanded() const {
    return std::accumulate(
        expanded_.begin(), expanded_.end(), int64_t{0},
        [](int64_t sum, const auto& list) { return sum + static_cast<int64_t>(list.size()); });
  }

 private:
  // W^T W q / sqrt(d') as selector zoom has it; nothing where nothing is trained.
  std::vector<double> Pulled(const float* q, int h) const {
    if (!case_.trained) return {};
    const float* w = &w_[static_cast<size_t>((kLayer * routers_ + h) * d_route_ * case_.dim)];
    std::vector<double> pulled(static_cast<size_t>(case_.dim));
    for (int r = 0; r < d_route_; ++r, w += case_.dim) {
      double dot = 0;
      for (int c = 0; c < case_.dim; ++c) dot += double{w[c]} * q[c];
      for (int c = 0; c < case_.dim; ++c) pulled[static_cast<size_t>(c)] += dot * w[c];
    }
    for (double& x : pulled) x /= std::sqrt(double(d_route_));
    return pulled;
  }
  // Scores of spans are want(part, span, query head, query, pulled query) + ln n; NaN is what lies
  // behind the last span.
  template <typename Want>
  void ExpectOfSpans(const std::vector<float>& scores, Want want) const {
    std::vector<float> got, wanted;
    for (int b = 0; b < batch(); ++b) {
      for (int h = 0; h < query_heads(); ++h) {
        const std::vector<double> pulled = Pulled(Query(b, h), h);
        size_t at = static_cast<size_t>((b * query_heads() + h) * span_stride_);
        for (const HostSpans& part : parts_[static_cast<size_t>(b)]) {
          for (int32_t u = 0; u < part.spans(); ++u, ++at) {
            got.push_back(scores[at]);
            wanted.push_back(static_cast<float>(want(part, u, h, Query(b, h), pulled) +
                                                std::log(double(part.Length(u)))));
          }
        }
        for (int32_t u = Spans(b); u < span_stride_; ++u, ++at) {
          EXPECT_TRUE(std::isnan(scores[at])) << u;
        }
      }
    }
    EXPECT_LE(RelativeError(got, wanted), 1e-4);
  }
  template <typename Number>
  double Dot(const HostSpans& part, int32_t u, int h, const Number* q) const {
    double dot = 0;
    for (int c = 0; c < case_.dim; ++c) {
      dot +=
          double{q[c]} *
          LoadFloat(part.k_mean(h / case_.group) + (int64_t{u} * case_.dim + c) * 2, DType::kBF16);
    }
    return dot;
  }
  void ExpectRelevance() const {
    if (!case_.trained) {
      EXPECT_EQ(Defined(relevance_.Read()), Defined(coarse_.Read()));
      return;
    }
    ExpectOfSpans(relevance_.Read(), [this](const HostSpans& part, int32_t u, int h, const float*,
                                            const std::vector<double>& pulled) {
      return Dot(part, u, h, pulled.data()) * double{part.norms(h)[u]};
    });
  }
  // NaN, which lies behind the last span, is not equal to itself.
  static std::vector<float> Defined(std::vector<float> scores) {
    std::erase_if(scores, [](float x) { return std::isnan(x); });
    return scores;
  }
  void ExpectCoarse() const {
    ExpectOfSpans(coarse_.Read(), [this](const HostSpans& part, int32_t u, int h, const float* q,
                                         const std::vector<double>&) {
      return Dot(part, u, h, q) * double{Scale()};
    });
  }
  // Selector zoom's rule on the scores of the device, which leave no near-ties.
  std::vector<int32_t> Expanded(int b, const float* relevance) const {
    std::vector<int32_t> lengths, expanded;
    for (const HostSpans& part : parts_[static_cast<size_t>(b)]) {
      for (int32_t u = 0; u < part.spans(); ++u) lengths.push_back(part.Length(u));
    }
    int64_t room = case_.room[static_cast<size_t>(b)];
    if (room == kExpandAll) {
      expanded.resize(lengths.size());
      std::iota(expanded.begin(), expanded.end(), 0);
      return expanded;
    }
    const double tau = case_.tau;
    const double threshold = tau <= 0 ? -INFINITY : static_cast<float>(std::log(tau / (1 - tau)));
    VisitRanked(relevance, static_cast<int32_t>(lengths.size()), [&](int32_t span) {
      const int32_t more = lengths[static_cast<size_t>(span)] - 1;
      if (!(relevance[span] > threshold)) return false;
      if (more > room) return true;
      expanded.push_back(span);
      room -= more;
      return true;
    });
    std::ranges::sort(expanded);
    return expanded;
  }
  // Coarse logits of what a head has chosen are -inf; the list of a KV head has it.
  void ExpectChoice() {
    ExpectCountersAreZero();
    expanded_.clear();
    const std::vector<float> relevance = relevance_.Read(), coarse = coarse_.Read();
    for (int b = 0; b < batch(); ++b) {
      for (int h = 0; h < query_heads(); ++h) {
        const size_t row = static_cast<size_t>((b * query_heads() + h) * span_stride_);
        expanded_.push_back(Expanded(b, &relevance[row]));
        std::vector<int32_t> got;
        for (int32_t u = 0; u < Spans(b); ++u) {
          if (coarse[row + static_cast<size_t>(u)] == -INFINITY) got.push_back(u);
        }
        EXPECT_EQ(got, expanded_.back()) << b << " " << h;
      }
      for (int h = 0; h < case_.kv_heads; ++h) ExpectList(b, h);
    }
  }
  void ExpectList(int b, int h) const {
    std::vector<uint32_t> want;
    for (int32_t u = 0; u < Spans(b); ++u) {
      const uint32_t heads = HeadsOf(b, h, u);
      if (heads == 0) continue;
      const int32_t pieces = std::min((LengthOf(b, u) + 31) / 32, kSpanPieces);
      want.insert(want.end(), static_cast<size_t>(pieces), static_cast<uint32_t>(u) << 8 | heads);
    }
    const auto item = static_cast<size_t>(b * case_.kv_heads + h);
    const std::vector<uint32_t> lists = list_.Read();
    const auto* from = &lists[item * static_cast<size_t>(kSpanPieces * span_stride_)];
    ASSERT_EQ(list_counts_.Read()[item], static_cast<int32_t>(want.size()));
    EXPECT_EQ(std::vector<uint32_t>(from, from + want.size()), want);
  }
  int32_t LengthOf(int b, int32_t u) const {
    for (const HostSpans& part : parts_[static_cast<size_t>(b)]) {
      if (u < part.spans()) return part.Length(u);
      u -= part.spans();
    }
    return 0;
  }
  void ExpectCountersAreZero() const {
    for (uint32_t x : counters_.Read()) EXPECT_EQ(x, 0u);
  }
  // Heads of a group that read a span token by token.
  uint32_t HeadsOf(int b, int h, int32_t u) const {
    uint32_t heads = 0;
    for (int g = 0; g < case_.group; ++g) {
      const auto& list = expanded_[static_cast<size_t>(b * query_heads() + h * case_.group + g)];
      heads |= uint32_t{std::ranges::binary_search(list, u)} << g;
    }
    return heads;
  }
  void PoisonWhatIsCoarse() {
    for (int b = 0; b < batch(); ++b) {
      int32_t first = 0;
      for (HostSpans& part : parts_[static_cast<size_t>(b)]) {
        for (int h = 0; h < case_.kv_heads; ++h) {
          for (int32_t u = 0; u < part.spans(); ++u) {
            if (HeadsOf(b, h, first + u) == 0) part.Poison(h, u);
          }
        }
        first += part.spans();
        part.Upload();
      }
    }
  }

  struct Partial {
    float m = 0, l = 0;
    std::vector<float> o;
  };
  template <typename Work, typename Op>
  void Add(Work w, Op op, std::vector<Partial>* partials) const {
    Partial& p = partials->emplace_back();
    p.o.resize(static_cast<size_t>(case_.dim));
    w.m = &p.m;
    w.l = &p.l;
    w.o = p.o.data();
    op(&w, 1, InlineExecutor());
  }
  PagedRows OnePage(std::byte* const* page, int32_t count, DType dtype) const {
    return {page, 0, RowBytes(), std::max(count, 1), case_.dim, dtype};
  }
  AttendWork RawWork(PagedRows k, PagedRows v, const float* q, const kvstrata::Run& run) const {
    AttendWork w;
    w.k = k;
    w.v = v;
    w.q = q;
    w.position = run.end;
    w.runs = &run;
    w.run_count = run.begin < run.end ? 1 : 0;
    w.scale = Scale();
    return w;
  }
  void AddPart(const HostSpans& part, int h, const float* q, const std::vector<int32_t>& expanded,
               int32_t first, std::vector<Partial>* partials) const {
    const int kv_head = h / case_.group;
    std::byte* pages[] = {part.raw(0, kv_head), part.raw(1, kv_head), part.k_mean(kv_head),
                          part.v_mean(kv_head)};
    const kvstrata::Run raw{0, part.raw_count()};
    Add(RawWork(OnePage(&pages[0], part.raw_count(), case_.dtype),
                OnePage(&pages[1], part.raw_count(), case_.dtype), q, raw),
        AttendRawRef, partials);
    std::vector<kvstrata::Run> coarse;
    std::vector<LowRankSpan> spans;
    std::vector<float> rows;
    for (int32_t u = 0; u < part.spans(); ++u) {
      rows.push_back(std::log(static_cast<float>(part.Length(u))));
      if (std::ranges::binary_search(expanded, first + u)) {
        spans.push_back(part.Factors(kv_head, u));
      } else {
        coarse.push_back({u, u + 1});
      }
    }
    AttendCoarseWork means;
    means.k = OnePage(&pages[2], part.spans(), DType::kBF16);
    means.v = OnePage(&pages[3], part.spans(), DType::kBF16);
    means.q = q;
    means.runs = coarse.data();
    means.run_count = static_cast<int32_t>(coarse.size());
    means.log_count = rows.data();
    means.scale = Scale();
    Add(means, AttendCoarseRef, partials);
    AttendLowRankWork factors;
    factors.spans = spans.data();
    factors.span_count = static_cast<int32_t>(spans.size());
    factors.dim = case_.dim;
    factors.q = q;
    factors.scale = Scale();
    Add(factors, AttendLowRankRef, partials);
  }
  void Merge(const std::vector<Partial>& partials, float* out, float* lse) const {
    std::vector<float> m, l, o;
    for (const Partial& p : partials) {
      m.push_back(p.m);
      l.push_back(p.l);
      o.insert(o.end(), p.o.begin(), p.o.end());
    }
    const auto parts = static_cast<int32_t>(partials.size());
    const MergeWork merge{m.data(), l.data(), o.data(), parts, 1, 1, case_.dim, out, 0, lse, 0};
    MergeRef(&merge, 1, InlineExecutor());
  }

  void ExpectOutputs() const {
    const std::vector<float> out = Floats(case_.out_dtype, out_.Read()), lse = lse_.Read();
    std::vector<float> want(out.size()), want_lse(lse.size());
    for (int b = 0; b < batch(); ++b) {
      std::vector<std::byte*> pages;
      for (int32_t i = 0; i < page_stride_; ++i) pages.push_back(HostPage(b, i));
      for (int h = 0; h < query_heads(); ++h) {
        const size_t row = static_cast<size_t>(b * query_heads() + h);
        const float* q = Query(b, h);
        std::vector<Partial> partials;
        int32_t first = 0;
        for (const HostSpans& part : parts_[static_cast<size_t>(b)]) {
          AddPart(part, h, q, expanded_[row], first, &partials);
          first += part.spans();
        }
        const PagedRows k{pages.data(), h / case_.group * HeadBytes(), RowBytes(), kPage, case_.dim,
                          case_.dtype};
        PagedRows v = k;
        v.offset += HeadsBytes();
        const kvstrata::Run window{window_begin_[static_cast<size_t>(b)],
                                   tokens_[static_cast<size_t>(b)]};
        Add(RawWork(k, v, q, window), AttendRawRef, &partials);
        Merge(partials, &want[row * static_cast<size_t>(case_.dim)], &want_lse[row]);
      }
    }
    EXPECT_LE(RelativeError(out, want), 5e-3);
    EXPECT_LE(RelativeError(lse, want_lse), 1e-3);
  }

  std::vector<std::vector<int32_t>> expanded_;  // [batch][query_heads]
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_TESTS_CUDA_CHECKED_SPANS_H_
