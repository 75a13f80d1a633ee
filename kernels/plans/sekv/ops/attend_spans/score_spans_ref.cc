// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <vector>

#include "kernels/ops/elements.h"
#include "kernels/plans/sekv/ops/attend_spans/host_spans.h"
#include "kernels/plans/sekv/ops/attend_spans/score_spans.h"

namespace kvstrata::cuda {
namespace {

using Vector = std::vector<double>;

Vector QueryOf(const SpanLayer& l, const SpanQueries& queries, int b, int h) {
  const auto* const own = static_cast<const std::byte*>(queries.q) + b * queries.stride;
  Vector q;
  for (int c = 0; c < l.head_dim; ++c) {
    q.push_back(ElementAt(own, l.dtype, int64_t{h} * l.head_dim + c));
  }
  return q;
}

// W^T W q / sqrt(d').
Vector Pulled(const SpanLayer& l, const SpanRouter& router, int h, const Vector& q) {
  const auto* w = reinterpret_cast<const float*>(router.w) +
                  (int64_t{l.layer} * router.routers + h) * router.d_route * l.head_dim;
  Vector pulled(q.size());
  for (int r = 0; r < router.d_route; ++r, w += l.head_dim) {
    double dot = 0;
    for (size_t c = 0; c < q.size(); ++c) dot += w[c] * q[c];
    for (size_t c = 0; c < q.size(); ++c) pulled[c] += dot * w[c];
  }
  for (double& x : pulled) x /= std::sqrt(double{1} * router.d_route);
  return pulled;
}

double Dot(const Vector& q, const BF16* k) {
  double dot = 0;
  for (size_t c = 0; c < q.size(); ++c) dot += q[c] * ToFloat(k[c]);
  return dot;
}

}  // namespace

void ScoreSpansRef(const ScoreSpansBatch& w) {
  const SpanLayer& l = w.layer;
  const int heads = l.kv_heads * l.group;
  for (int b = 0; b < w.queries.batch; ++b) {
    for (int h = 0; h < heads && l.counts[b] > 0; ++h) {
      const Vector q = QueryOf(l, w.queries, b, h);
      const SpanRouter& router = l.routers[b];
      const Vector pulled = router.routers > 0 ? Pulled(l, router, h, q) : Vector();
      int64_t at = (int64_t{b} * heads + h) * l.span_stride;
      for (int32_t i = 0; i < l.counts[b]; ++i) {
        const HostSpanPart part(l, b, i);
        for (int32_t s = 0; s < part.count(); ++s, ++at) {
          const BF16* const k = part.KeyMean(h / l.group, s);
          const double length = std::log(double{1} * part.Length(s));
          w.coarse[at] = static_cast<float>(w.queries.scale * Dot(q, k) + length);
          w.relevance[at] =
              pulled.empty() ? w.coarse[at]
                             : static_cast<float>(Dot(pulled, k) * part.InverseNorm(h, s) + length);
        }
      }
    }
  }
}

}  // namespace kvstrata::cuda
