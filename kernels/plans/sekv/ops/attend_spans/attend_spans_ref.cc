// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include "kernels/cpu/executor.h"
#include "kernels/cuda/batches/host_batch.h"
#include "kernels/ops/attend_raw/attend_raw.h"
#include "kernels/ops/elements.h"
#include "kernels/ops/merge/merge.h"
#include "kernels/plans/sekv/ops/attend_lowrank/attend_lowrank.h"
#include "kernels/plans/sekv/ops/attend_spans/attend_spans.h"
#include "kernels/plans/sekv/ops/attend_spans/host_spans.h"

namespace kvstrata::cuda {
namespace {

// Partials of one query head, in the order in which they are merged.
struct HeadPartials {
  // Room for one more; its o.
  float* Add(int dim) {
    m.push_back(-std::numeric_limits<float>::infinity());
    l.push_back(0);
    o.resize(o.size() + static_cast<size_t>(dim));
    return o.data() + o.size() - dim;
  }
  std::vector<float> m, l, o;
};

// One query head of one sequence.
class Head {
 public:
  Head(const AttendSpansBatch& w, int b, int h)
      : w_(w), b_(b), kv_head_(h / w.layer.group), dim_(w.layer.head_dim) {
    const SpanLayer& l = w.layer;
    row_ = int64_t{b} * l.kv_heads * l.group + h;
    const auto* const own = static_cast<const std::byte*>(w.queries.q) + b * w.queries.stride;
    for (int c = 0; c < dim_; ++c) q_.push_back(ElementAt(own, l.dtype, int64_t{h} * dim_ + c));
    const int64_t item = int64_t{b} * l.kv_heads + kv_head_;
    const uint32_t* const list = w.list + item * kSpanPieces * l.span_stride;
    for (int32_t i = 0; i < w.counts[item]; ++i) {
      if ((list[i] >> (h % l.group) & 1) != 0) expanded_.insert(static_cast<int32_t>(list[i] >> 8));
    }
  }

  HeadPartials Attend() {
    int32_t first = 0;
    for (int32_t i = 0; i < w_.layer.counts[b_]; ++i) {
      const HostSpanPart part(w_.layer, b_, i);
      AddRaw(part);
      AddCoarse(part, first);
      AddExpanded(part, first);
      first += part.count();
    }
    const HostPages pages(w_.pages, b_);
    AddRows(pages.Keys(kv_head_), pages.Values(kv_head_), {w_.window_begin[b_], w_.tokens[b_]});
    return std::move(partials_);
  }

 private:
  void AddRows(const PagedRows& k, const PagedRows& v, Run run) {
    AttendWork w;
    w.k = k;
    w.v = v;
    w.q = q_.data();
    w.position = run.end;
    w.runs = &run;
    w.run_count = run.begin < run.end ? 1 : 0;
    w.scale = w_.queries.scale;
    w.o = partials_.Add(dim_);
    w.m = &partials_.m.back();
    w.l = &partials_.l.back();
    AttendRawRef(&w, 1, InlineExecutor());
  }
  void AddRaw(const HostSpanPart& part) {
    std::byte* const k = part.Raw(false, kv_head_);
    std::byte* const v = part.Raw(true, kv_head_);
    const auto rows = [&](std::byte* const* page) {
      return PagedRows{
          page,          0, dim_ * SizeOf(w_.layer.dtype), std::max(part.raw_count(), 1), dim_,
          w_.layer.dtype};
    };
    AddRows(rows(&k), rows(&v), {0, part.raw_count()});
  }
  // One row for each span whose logit is not -inf. `first`: the part's first span.
  void AddCoarse(const HostSpanPart& part, int32_t first) {
    const float* const logits = w_.coarse + row_ * w_.layer.span_stride + first;
    const float top = part.count() == 0 ? -std::numeric_limits<float>::infinity()
                                        : *std::max_element(logits, logits + part.count());
    float* const o = partials_.Add(dim_);
    if (std::isinf(top) && top < 0) return;
    double sum = 0;
    std::vector<double> out(static_cast<size_t>(dim_));
    for (int32_t s = 0; s < part.count(); ++s) {
      const double weight = std::exp(double{logits[s]} - top);
      const BF16* const v = part.ValueMean(kv_head_, s);
      sum += weight;
      for (size_t c = 0; weight > 0 && c < out.size(); ++c) out[c] += weight * ToFloat(v[c]);
    }
    partials_.m.back() = top;
    partials_.l.back() = static_cast<float>(sum);
    std::ranges::copy(out, o);
  }
  void AddExpanded(const HostSpanPart& part, int32_t first) {
    std::vector<LowRankSpan> spans;
    for (auto s = expanded_.lower_bound(first); s != expanded_.end() && *s < first + part.count();
         ++s) {
      spans.push_back(part.Factors(kv_head_, *s - first));
    }
    AttendLowRankWork w;
    w.spans = spans.data();
    w.span_count = static_cast<int32_t>(spans.size());
    w.dim = dim_;
    w.q = q_.data();
    w.scale = w_.queries.scale;
    w.o = partials_.Add(dim_);
    w.m = &partials_.m.back();
    w.l = &partials_.l.back();
    AttendLowRankRef(&w, 1, InlineExecutor());
  }

  const AttendSpansBatch& w_;
  const int b_, kv_head_, dim_;
  int64_t row_;
  std::vector<float> q_;
  std::set<int32_t> expanded_;  // spans that the head reads token by token
  HeadPartials partials_;
};

// One partial of all: what op merge would take in their stead.
void StorePartial(const HeadPartials& from, const Partials& to, int64_t row, int dim) {
  const float top = *std::ranges::max_element(from.m);
  double l = 0;
  std::vector<double> o(static_cast<size_t>(dim));
  for (size_t i = 0; i < from.m.size(); ++i) {
    const double weight = from.l[i] == 0 ? 0 : std::exp(double{from.m[i]} - top);
    l += weight * from.l[i];
    for (size_t c = 0; c < o.size(); ++c) o[c] += weight * from.o[i * o.size() + c];
  }
  to.m[row] = top;
  to.l[row] = static_cast<float>(l);
  std::ranges::copy(o, to.o + row * dim);
}

void StoreOutput(const AttendSpansBatch& w, HeadPartials from, int64_t row) {
  const int dim = w.layer.head_dim;
  const int64_t rows = int64_t{w.queries.batch} * w.layer.kv_heads * w.layer.group;
  for (int64_t i = 0; i < w.with.parts; ++i) {
    const int64_t at = i * rows + row;
    float* const o = from.Add(dim);
    from.m.back() = w.with.m[at];
    from.l.back() = w.with.l[at];
    std::copy_n(w.with.o + at * dim, dim, o);
  }
  std::vector<float> out(static_cast<size_t>(dim));
  float lse = 0;
  MergeWork merge;
  merge.m = from.m.data();
  merge.l = from.l.data();
  merge.o = from.o.data();
  merge.parts = static_cast<int32_t>(from.m.size());
  merge.rows = 1;
  merge.dim = dim;
  merge.out = out.data();
  merge.lse = &lse;
  MergeRef(&merge, 1, InlineExecutor());
  for (int c = 0; c < dim; ++c) {
    SetElement(w.to.rows, w.to.dtype, row * dim + c, out[static_cast<size_t>(c)]);
  }
  if (w.to.lse != nullptr) w.to.lse[row] = lse;
}

}  // namespace

void AttendSpansRef(const AttendSpansBatch& w) {
  const int heads = w.layer.kv_heads * w.layer.group;
  for (int b = 0; b < w.queries.batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      const int64_t row = int64_t{b} * heads + h;
      HeadPartials partials = Head(w, b, h).Attend();
      if (w.to.rows != nullptr) {
        StoreOutput(w, std::move(partials), row);
      } else {
        StorePartial(partials, w.partial, row, w.layer.head_dim);
      }
    }
  }
}

}  // namespace kvstrata::cuda
