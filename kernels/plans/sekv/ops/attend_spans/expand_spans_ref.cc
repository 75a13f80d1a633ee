// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/ops/pick/pick.h"
#include "kernels/plans/sekv/ops/attend_spans/expand_spans.h"
#include "kernels/plans/sekv/ops/attend_spans/host_spans.h"

namespace kvstrata::cuda {
namespace {

std::vector<int32_t> LengthsOf(const SpanLayer& l, int b) {
  std::vector<int32_t> lengths;
  for (int32_t i = 0; i < l.counts[b]; ++i) {
    const HostSpanPart part(l, b, i);
    for (int32_t s = 0; s < part.count(); ++s) lengths.push_back(part.Length(s));
  }
  return lengths;
}

// ln(tau / (1 - tau)) of a query head; below everything where tau is not above 0.
double ThresholdOf(const SpanLayer& l, const SpanRouter& router, int h) {
  const double tau =
      reinterpret_cast<const float*>(router.tau)[int64_t{l.layer} * l.kv_heads * l.group + h];
  return tau <= 0 ? -std::numeric_limits<double>::infinity()
                  : static_cast<float>(std::log(tau / (1 - tau)));
}

// Whether a query head expands each span.
std::vector<bool> Chosen(const ExpandSpansBatch& w, const std::vector<int32_t>& lengths, int b,
                         int h) {
  const SpanLayer& l = w.layer;
  std::vector<bool> chosen(lengths.size(), w.room[b] == kExpandAll);
  if (w.room[b] == kExpandAll || lengths.empty()) return chosen;
  const float* const relevance =
      w.relevance + (int64_t{b} * l.kv_heads * l.group + h) * l.span_stride;
  const double threshold = ThresholdOf(l, l.routers[b], h);
  int64_t room = w.room[b];
  for (const int32_t s : RankedRef(relevance, static_cast<int32_t>(lengths.size()))) {
    if (!(relevance[s] > threshold)) break;
    const int32_t rows = lengths[static_cast<size_t>(s)] - 1;
    if (rows > room) continue;
    chosen[static_cast<size_t>(s)] = true;
    room -= rows;
  }
  return chosen;
}

}  // namespace

void ExpandSpansRef(const ExpandSpansBatch& w) {
  const SpanLayer& l = w.layer;
  for (int b = 0; b < w.batch; ++b) {
    const std::vector<int32_t> lengths = LengthsOf(l, b);
    for (int kv_head = 0; kv_head < l.kv_heads; ++kv_head) {
      std::vector<uint32_t> heads(lengths.size());  // the group's that read a span, a bit each
      for (int g = 0; g < l.group; ++g) {
        const int h = kv_head * l.group + g;
        const std::vector<bool> chosen = Chosen(w, lengths, b, h);
        float* const coarse = w.coarse + (int64_t{b} * l.kv_heads * l.group + h) * l.span_stride;
        for (size_t s = 0; s < lengths.size(); ++s) {
          if (!chosen[s]) continue;
          coarse[s] = -std::numeric_limits<float>::infinity();
          heads[s] |= 1u << g;
        }
      }
      const int64_t item = int64_t{b} * l.kv_heads + kv_head;
      uint32_t* const list = w.list + item * kSpanPieces * l.span_stride;
      int32_t count = 0;
      for (size_t s = 0; s < lengths.size(); ++s) {
        const int32_t pieces = heads[s] == 0 ? 0 : std::min((lengths[s] + 31) / 32, kSpanPieces);
        for (int32_t i = 0; i < pieces; ++i)
          list[count++] = static_cast<uint32_t>(s) << 8 | heads[s];
      }
      w.counts[item] = count;
    }
  }
}

}  // namespace kvstrata::cuda
