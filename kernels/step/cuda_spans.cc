// Plan sekv in a CudaStep: spans are scored and chosen by the GPU, and attended with everything
// else in one kernel (ops/attend_spans). Where the arrays of a part lie comes from its extents'
// descriptions (SpanStorage); the room for expansions follows from counts, which the host has.
#include <algorithm>
#include <cstring>

#include "kernels/select/unit_scores.h"
#include "kernels/select/zoom_budget.h"
#include "kernels/step/cuda_step.h"

namespace kvstrata {
namespace {

constexpr int32_t kPartWords = sizeof(cuda::SpanPart) / sizeof(uint64_t);
constexpr int32_t kRouterWords = sizeof(cuda::SpanRouter) / sizeof(uint64_t);

uint64_t AddressOf(const void* at) { return reinterpret_cast<uint64_t>(at); }

cuda::SpanPart PartOnDevice(const SpanStorage& spans, int i) {
  const SpanStorage::Part& part = spans.parts()[static_cast<size_t>(i)];
  const SpanStorage::Addresses at = spans.AddressesOf(i);
  return {AddressOf(at.spans),
          AddressOf(spans.KeyMeans(i, 0, 0).Row(0)),
          AddressOf(spans.ValueMeans(i, 0, 0).Row(0)),
          AddressOf(spans.InverseNorms(i, 0, 0)),
          AddressOf(at.entries),
          AddressOf(at.factors),
          AddressOf(part.raw_rows),
          part.span_count,
          part.raw_count,
          0,
          0,
          0,
          0};
}

}  // namespace

bool CudaStep::ReadsSpans(const Part& part) {
  return part.selects && part.plan.codec == CodecKind::kLowRank;
}

void CudaStep::NeedOfSpans(CudaWorkspace::Capacity* need) const {
  for (const StepMember& m : members_) {
    if (m.state->plan().codec != CodecKind::kLowRank) continue;
    need->span_parts = std::max(need->span_parts, 1);
    if (m.state->spans() == nullptr) continue;
    const SpanStorage& spans = *m.state->spans();
    need->span_parts = std::max(need->span_parts, static_cast<int32_t>(spans.parts().size()));
    need->spans = std::max(need->spans, static_cast<int32_t>(spans.spans().size()));
  }
}

Status CudaStep::CheckSpans() const {
  if (ws_.capacity_.span_parts <= cuda::kSpanPartsMax) return OkStatus();
  return Unimplemented("CUDA_PLAN", "a sequence of more than " +
                                        std::to_string(cuda::kSpanPartsMax) +
                                        " parts with spans is not served on a GPU; use backend "
                                        "simd");
}

CudaStep::SpanCounts CudaStep::SpanCountsOf(const StepMember& m) {
  const SpanStorage* spans = m.state->spans();
  if (spans == nullptr) return {};
  const Plan& plan = m.state->plan();
  const int32_t n = m.view.tokens + 1;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const auto room = static_cast<int32_t>(std::min(ZoomRoom(plan, *spans, n), kMost));
  return {static_cast<int32_t>(spans->parts().size()),
          ZoomsInFull(plan, n) ? cuda::kExpandAll : room, spans->end()};
}

// Tables of the members' parts: most steps find them there.
Status CudaStep::StageSpans(const CudaWorkspace::StagingSlot& slot) {
  KVS_RETURN_IF_ERROR(CheckSpans());
  for (int i = 0; i < members(); ++i) {
    const SpanStorage* const spans = members_[i].state->spans();
    if (spans == nullptr) continue;
    uint64_t& known = ws_.span_ids_[static_cast<size_t>(i)];
    if (known == spans->id()) continue;
    known = 0;  // until all of it is on its way
    const auto upload = [&](CudaWorkspace::AddressTable* table, int32_t stride,
                            const std::vector<uint64_t>& words) {
      return ws_.Upload(table, stride, i, reinterpret_cast<const std::byte* const*>(words.data()),
                        static_cast<int32_t>(words.size()), slot, stream_);
    };
    const auto count = static_cast<int32_t>(spans->parts().size());
    std::vector<uint64_t> words(static_cast<size_t>(count * kPartWords));
    cuda::SpanPart before;
    for (int32_t p = 0; p < count; ++p) {
      cuda::SpanPart part = PartOnDevice(*spans, p);
      part.PutBehind(p == 0 ? nullptr : &before);
      std::memcpy(words.data() + p * kPartWords, &part, sizeof(part));
      before = part;
    }
    KVS_RETURN_IF_ERROR(upload(&ws_.span_parts_, ws_.capacity_.span_parts * kPartWords, words));
    const SpanStorage::Addresses first = spans->AddressesOf(0);
    const cuda::SpanRouter router{AddressOf(first.router), AddressOf(first.tau), first.routers,
                                  spans->d_route()};
    words.resize(kRouterWords);
    std::memcpy(words.data(), &router, sizeof(router));
    KVS_RETURN_IF_ERROR(upload(&ws_.span_routers_, kRouterWords, words));
    known = spans->id();
  }
  return OkStatus();
}

cuda::SpanLayer CudaStep::SpansOf(const Part& part, int layer) const {
  const Geometry& g = geometry();
  cuda::SpanLayer spans;
  spans.part_stride = ws_.capacity_.span_parts;
  spans.parts = reinterpret_cast<const cuda::SpanPart*>(ws_.span_parts_.device.as<uint64_t>()) +
                int64_t{part.first} * spans.part_stride;
  spans.counts = ws_.Ints(PerMember::kSpanParts) + part.first;
  spans.routers =
      reinterpret_cast<const cuda::SpanRouter*>(ws_.span_routers_.device.as<uint64_t>()) +
      part.first;
  spans.span_stride = ws_.capacity_.spans;
  spans.layer = layer;
  spans.kv_heads = g.kv_heads;
  spans.group = g.group();
  spans.head_dim = g.head_dim;
  spans.dtype = g.dtype;
  return spans;
}

cuda::SpanQueries CudaStep::SpanQueriesOf(const Part& part, const Rows& q, int32_t token) const {
  const int32_t row = first_row_[part.first] + token;
  return {q.data + row * q.token_stride, q.token_stride, part.count, geometry().logit_scale()};
}

// Scores of one new token of each member; the relevance of the first is what spans are chosen by.
Status CudaStep::ScoreSpans(const Part& part, int layer, const Rows& q, int32_t token) {
  const int64_t place = int64_t{part.first} * geometry().query_heads * ws_.capacity_.spans;
  cuda::ScoreSpansBatch w;
  w.layer = SpansOf(part, layer);
  w.queries = SpanQueriesOf(part, q, token);
  w.relevance = (token == 0 ? ws_.relevance_ : ws_.later_relevance_).as<float>() + place;
  w.coarse = ws_.coarse_.as<float>() + place;
  w.ahead = true;
  KVS_RETURN_IF_ERROR(Check(ops_.score_spans(w, stream_), "op score_spans"));

  cuda::ExpandSpansBatch e;
  e.layer = w.layer;
  e.batch = part.count;
  e.relevance = ws_.relevance_.as<float>() + place;
  e.coarse = w.coarse;
  const bool dense = layer < part.plan.n_dense_layers;
  e.room = ws_.Ints(dense ? PerMember::kAllRows : PerMember::kSpanRoom) + part.first;
  const int64_t list = int64_t{part.first} * geometry().kv_heads;
  e.list = ws_.span_list_.as<uint32_t>() + list * cuda::kSpanPieces * ws_.capacity_.spans;
  e.counts = ws_.span_counts_.as<int32_t>() + list;
  e.chosen = ws_.span_chosen_.as<uint32_t>() + place / 32;
  e.counters = ws_.attend_counters_.as<uint32_t>();
  e.ahead = true;
  span_rows_layer_ = layer;
  return Check(ops_.expand_spans(e, stream_), "op expand_spans");
}

// Later new tokens attend what was chosen for the first; their coarse rows are scored for each.
Status CudaStep::AttendSpans(const Part& part, int layer, const Rows& q, const MutableRows& out,
                             float* lse) {
  const int64_t list = int64_t{part.first} * geometry().kv_heads;
  cuda::AttendSpansBatch w;
  w.layer = SpansOf(part, layer);
  w.coarse =
      ws_.coarse_.as<float>() + int64_t{part.first} * geometry().query_heads * ws_.capacity_.spans;
  w.list = ws_.span_list_.as<uint32_t>() + list * cuda::kSpanPieces * ws_.capacity_.spans;
  w.counts = ws_.span_counts_.as<int32_t>() + list;
  w.pages = PagesOf(part, layer);
  w.window_begin = ws_.Ints(PerMember::kSpanEnd) + part.first;
  w.counters = ws_.attend_counters_.as<uint32_t>();
  w.workspace = ws_.span_workspace_.as<float>();
  for (int32_t t = 0; t < part.new_tokens; ++t) {
    if (t > 0) KVS_RETURN_IF_ERROR(ScoreSpans(part, layer, q, t));
    const int32_t row = first_row_[part.first] + t;
    w.queries = SpanQueriesOf(part, q, t);
    w.tokens = ws_.visible() + row;
    w.ahead = span_rows_layer_ == layer;
    w.to.rows = out.data + row * out.token_stride;
    w.to.dtype = out.dtype;
    w.to.lse = lse == nullptr ? nullptr : lse + int64_t{row} * geometry().query_heads;
    KVS_RETURN_IF_ERROR(Check(ops_.attend_spans(w, stream_), "op attend_spans"));
  }
  return OkStatus();
}

// As its selector makes it (kernels/select/zoom.cc).
Result<Selection> CudaStep::ReadSpans(const Part& part, int member, int32_t n) const {
  const StepMember& m = members_[member];
  const SpanStorage* const spans = m.state->spans();
  if (spans == nullptr || ZoomsInFull(m.state->plan(), n) ||
      selected_layer_ < part.plan.n_dense_layers) {
    return Selection::Full(n);
  }
  const Geometry& g = geometry();
  const auto count = static_cast<int32_t>(spans->spans().size());
  Selection selection;
  selection.Reset(n, g.query_heads);
  selection.coarse.resize(static_cast<size_t>(g.query_heads));
  selection.scored_bytes = ZoomScoredBytes(*spans, g);
  for (int32_t head = 0; head < g.kv_heads; ++head) {
    const int64_t item = int64_t{member} * g.kv_heads + head;
    int32_t listed = 0;
    KVS_RETURN_IF_ERROR(CopyToHost(&listed, ws_.span_counts_.as<int32_t>() + item, sizeof(listed)));
    std::vector<uint32_t> list(static_cast<size_t>(listed));
    KVS_RETURN_IF_ERROR(CopyToHost(
        list.data(), ws_.span_list_.as<uint32_t>() + item * cuda::kSpanPieces * ws_.capacity_.spans,
        list.size() * sizeof(uint32_t)));
    for (int32_t i = 0; i < g.group(); ++i) {
      const auto of = static_cast<size_t>(head * g.group() + i);
      list.erase(std::unique(list.begin(), list.end()), list.end());  // pieces of one span
      for (const uint32_t entry : list) {
        if ((entry >> i & 1) != 0) selection.units[of].push_back(static_cast<int32_t>(entry >> 8));
      }
      AppendRest({0, count}, selection.units[of], 0, &selection.coarse[of]);
    }
  }
  selection.runs.resize(1);  // raw rows are the same for all heads
  for (const SpanStorage::Part& range : spans->parts()) {
    for (int32_t i = 0; i < range.raw_count; ++i) {
      AppendRun({range.raw_positions[i], range.raw_positions[i] + 1}, &selection.runs[0]);
    }
  }
  AppendRun({spans->end(), n}, &selection.runs[0]);
  return selection;
}

}  // namespace kvstrata
