// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/sekv/lowrank_writer.h"

#include <cmath>

#include "kernels/codec/head_loop.h"
#include "kernels/plans/sekv/lowrank_layout.h"
#include "kernels/plans/sekv/span_factors.h"
#include "kernels/segment/span_rule.h"

namespace kvstrata {
namespace {

// What a query head's relevance of mean key k is multiplied with: 1 / |W k| of its W
// [d_route][head_dim], or what the parameters have in its place; 0 for 1 / 0.
float InverseNorm(const SpanParameters& parameters, int64_t head, const std::vector<BF16>& k) {
  if (!parameters.norm.empty()) {
    const float norm = parameters.norm[head];
    return norm > 0 ? 1 / norm : 0.0f;
  }
  const int32_t d_route = parameters.d_route;
  const float* w = parameters.w.data() + head * d_route * parameters.head_dim;
  double squares = 0;
  for (int32_t i = 0; i < d_route; ++i) {
    double dot = 0;
    for (const BF16 x : k) dot += double{*w++} * double{ToFloat(x)};
    squares += dot * dot;
  }
  return squares > 0 ? static_cast<float>(1 / std::sqrt(squares)) : 0.0f;
}

template <typename T>
void CopyAll(const std::vector<T>& from, T* to) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size() * sizeof(T));
}

// --- kSpanSummary ---

class SummaryWriter {
 public:
  SummaryWriter(const Geometry& geometry, const SpanRange& range, const SpanParameters* parameters)
      : g_(geometry), range_(range) {
    const auto spans = static_cast<int64_t>(range.spans.size());
    const auto anchors = static_cast<int64_t>(range.anchors.size());
    info_at_ = writer_.Reserve(sizeof(SpanInfo));
    info_.span_count = static_cast<int32_t>(spans);
    info_.anchor_count = static_cast<int32_t>(anchors);
    const bool trained = parameters != nullptr;
    info_.d_route = trained ? parameters->d_route : 0;
    info_.routers = trained && range.first ? g_.query_heads : 0;
    info_.spans = writer_.Reserve(spans * 8);
    info_.anchors = writer_.Reserve(anchors * 4);
    info_.k_mean = writer_.Reserve(HeadCount(g_) * spans * g_.head_dim * 2);
    info_.v_mean = writer_.Reserve(HeadCount(g_) * spans * g_.head_dim * 2);
    const int64_t router = int64_t{info_.d_route} * g_.head_dim * 4;
    info_.router = writer_.Reserve(int64_t{g_.layers} * info_.routers * router);
    info_.tau = writer_.Reserve(range.first ? int64_t{g_.layers} * g_.query_heads * 4 : 0);
    info_.inverse_norms =
        writer_.Reserve(trained ? int64_t{g_.layers} * g_.query_heads * spans * 4 : 0);
    writer_.Allocate();
    *writer_.At<SpanInfo>(info_at_) = info_;
    int32_t* out = writer_.At<int32_t>(info_.spans);
    for (const Run& s : range.spans) *out++ = s.begin, *out++ = s.end;
    CopyAll(range.anchors, writer_.At<int32_t>(info_.anchors));
    if (!trained || !range.first) return;  // tau stays 0
    CopyAll(parameters->w, writer_.At<float>(info_.router));
    CopyAll(parameters->tau, writer_.At<float>(info_.tau));
  }

  // Span `i` of the part.
  void SetMeans(const HeadIndex& h, size_t i, const SpanForm& form) {
    const size_t row = h.flat * range_.spans.size() + i;
    const auto dim = static_cast<size_t>(g_.head_dim);
    CopyAll(form.k_mean, writer_.At<BF16>(info_.k_mean) + row * dim);
    CopyAll(form.v_mean, writer_.At<BF16>(info_.v_mean) + row * dim);
  }
  void SetInverseNorm(int layer, int query_head, size_t i, float value) {
    const auto row = static_cast<size_t>(int64_t{layer} * g_.query_heads + query_head);
    writer_.At<float>(info_.inverse_norms)[row * range_.spans.size() + i] = value;
  }

  std::vector<std::byte> Finish(bool trained) {
    return writer_.Finish(ExtentKind::kSpanSummary, g_, range_.tokens, trained ? kSpansTrained : 0);
  }

 private:
  const Geometry& g_;
  const SpanRange& range_;
  SpanInfo info_ = {};
  ExtentWriter writer_;
  uint64_t info_at_ = 0;
};

// --- kRawRows ---

class RawRowsWriter {
 public:
  RawRowsWriter(const Geometry& geometry, const SpanRange& range)
      : g_(geometry), tokens_(range.tokens), positions_(PositionsBetween(tokens_, range.spans)) {
    const auto count = static_cast<int64_t>(positions_.size());
    const uint64_t info_at = writer_.Reserve(sizeof(RawRowsInfo));
    info_.raw_count = static_cast<int32_t>(count);
    info_.positions = writer_.Reserve(count * 4);
    info_.rows = writer_.Reserve(HeadCount(g_) * 2 * count * g_.row_bytes());
    writer_.Allocate();
    *writer_.At<RawRowsInfo>(info_at) = info_;
    CopyAll(positions_, writer_.At<int32_t>(info_.positions));
  }

  void CopyHead(std::byte* const* pages, const HeadIndex& h) {
    const PageLayout layout = PageLayout::Of(g_);
    CopyRows(KeysOf(pages, layout, h.layer, h.kv_head), 2 * h.layer, h.kv_head);
    CopyRows(ValuesOf(pages, layout, h.layer, h.kv_head), 2 * h.layer + 1, h.kv_head);
  }

  std::vector<std::byte> Finish() { return writer_.Finish(ExtentKind::kRawRows, g_, tokens_, 0); }

 private:
  void CopyRows(const PagedRows& rows, int64_t side, int kv_head) {
    const auto row = static_cast<size_t>(g_.row_bytes());
    std::byte* out = writer_.At<std::byte>(info_.rows) +
                     (side * g_.kv_heads + kv_head) * info_.raw_count * g_.row_bytes();
    for (const int32_t t : positions_) {
      std::memcpy(out, rows.Row(t), row);
      out += row;
    }
  }

  const Geometry& g_;
  Run tokens_;
  std::vector<int32_t> positions_;
  RawRowsInfo info_ = {};
  ExtentWriter writer_;
};

// --- kSpanFactors ---

using HeadForms = std::vector<std::vector<SpanForm>>;  // [layers * kv_heads][spans]

uint64_t ReserveFactor(const FactorRows& rows, int32_t n, ExtentWriter* writer) {
  const uint64_t left = writer->Reserve(static_cast<int64_t>(rows.left.size()) * 2);
  if (rows.rank < 0) return left;
  const uint64_t right = writer->Reserve(static_cast<int64_t>(rows.right.size()) * 2);
  KVS_CHECK(right == RightFactorAt(left, n, rows.rank));
  return left;
}

void CopyFactor(const FactorRows& rows, uint64_t left, int32_t n, ExtentWriter* writer) {
  CopyAll(rows.left, writer->At<BF16>(left));
  if (rows.rank >= 0) CopyAll(rows.right, writer->At<BF16>(RightFactorAt(left, n, rows.rank)));
}

std::vector<std::byte> WriteFactors(const Geometry& g, const SpanRange& range,
                                    const HeadForms& forms) {
  ExtentWriter writer;
  FactorsInfo info = {};
  const uint64_t info_at = writer.Reserve(sizeof(FactorsInfo));
  const int64_t count = HeadCount(g) * static_cast<int64_t>(range.spans.size());
  info.span_count = static_cast<int32_t>(range.spans.size());
  info.entries = writer.Reserve(count * static_cast<int64_t>(sizeof(FactorEntry)));
  const auto length = [&](size_t i) { return range.spans[i].end - range.spans[i].begin; };
  std::vector<FactorEntry> entries;
  for (const std::vector<SpanForm>& head : forms) {
    for (size_t i = 0; i < head.size(); ++i) {
      const uint64_t k = ReserveFactor(head[i].keys, length(i), &writer);
      const uint64_t v = ReserveFactor(head[i].values, length(i), &writer);
      entries.push_back({k, v, head[i].keys.rank, head[i].values.rank, 0});
      info.refused += int{head[i].keys.refused} + int{head[i].values.refused};
    }
  }
  writer.Allocate();
  *writer.At<FactorsInfo>(info_at) = info;
  CopyAll(entries, writer.At<FactorEntry>(info.entries));
  auto entry = entries.begin();
  for (const std::vector<SpanForm>& head : forms) {
    for (size_t i = 0; i < head.size(); ++i, ++entry) {
      CopyFactor(head[i].keys, entry->k, length(i), &writer);
      CopyFactor(head[i].values, entry->v, length(i), &writer);
    }
  }
  return writer.Finish(ExtentKind::kSpanFactors, g, range.tokens, 0);
}

}  // namespace

Result<SpanExtents> WriteSpans(const RecompressInput& input, const Geometry& geometry,
                               const Plan& plan, const SpanParameters* parameters,
                               const SpanRange& range) {
  KVS_RETURN_IF_ERROR(CheckRawRows(input, geometry, range.tokens));
  SummaryWriter summary(geometry, range, parameters);
  RawRowsWriter raw(geometry, range);
  HeadForms forms(static_cast<size_t>(HeadCount(geometry)));
  const PageLayout layout = PageLayout::Of(geometry);
  KVS_RETURN_IF_ERROR(ForEachHead(input, geometry, [&](const HeadIndex& h) {
    raw.CopyHead(input.view.pages, h);
    SpanSource source = {KeysOf(input.view.pages, layout, h.layer, h.kv_head),
                         ValuesOf(input.view.pages, layout, h.layer, h.kv_head),
                         {},
                         input.surprisal};
    const int first = h.kv_head * geometry.group();
    for (size_t i = 0; i < range.spans.size(); ++i) {
      source.tokens = range.spans[i];
      SpanForm form = CompressSpan(source, plan, parameters, *input.backend);
      summary.SetMeans(h, i, form);
      for (int q = first; parameters != nullptr && q < first + geometry.group(); ++q) {
        const int64_t head = int64_t{h.layer} * geometry.query_heads + q;
        summary.SetInverseNorm(h.layer, q, i, InverseNorm(*parameters, head, form.k_mean));
      }
      forms[h.flat].push_back(std::move(form));
    }
  }));
  return SpanExtents{summary.Finish(parameters != nullptr), WriteFactors(geometry, range, forms),
                     raw.Finish()};
}

}  // namespace kvstrata
