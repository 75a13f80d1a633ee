// SPDX-License-Identifier: Apache-2.0
// CudaSpans: codec lowrank (plan sekv) on a GPU: spans are scored and chosen by the GPU, and
// attended with everything else in one kernel (ops/attend_spans). Where the arrays of a part of
// them lie comes from its extents' descriptions (SpanStorage); the room for expansions follows from
// counts, which the host has.
//
// Threads: as CudaCodec. Cost: 12 bytes a span, query head and sequence, and 16 a span, KV head and
// sequence.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cuda/device_buffer.h"
#include "kernels/plans/sekv/lowrank.h"
#include "kernels/plans/sekv/ops/span_cuda_ops.h"
#include "kernels/plans/sekv/zoom_budget.h"
#include "kernels/select/unit_scores.h"
#include "kernels/step/gpu/frame/cuda_codec.h"
#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector_rows.h"
#include "kernels/step/gpu/memory/step_memory.h"

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

std::vector<cuda::SpanPart> PartsOnDevice(const SpanStorage& spans) {
  std::vector<cuda::SpanPart> parts;
  for (int i = 0; i < static_cast<int>(spans.parts().size()); ++i) {
    cuda::SpanPart part = PartOnDevice(spans, i);
    part.PutBehind(i == 0 ? nullptr : &parts.back());
    parts.push_back(part);
  }
  return parts;
}

// Rows that a step of the member may expand.
int32_t ExpandRoom(const Plan& plan, const SpanStorage& spans, int32_t n) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (ZoomsInFull(plan, n)) return cuda::kExpandAll;
  return static_cast<int32_t>(std::min(ZoomRoom(plan, spans, n), kMost));
}

class CudaSpans final : public CudaCodec {
 public:
  explicit CudaSpans(StepMemory* memory);

  int32_t EndOf(const SequenceState& state) const override;
  Status Check(const CudaFrame& frame) const override;
  Status Fit(const CudaFrame& frame) override;
  Status Stage(CudaFrame* frame) override;
  // Later new tokens attend what was chosen for the first; their coarse rows are scored for each.
  Status Attend(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q,
                const MutableRows& out, float* lse) override;

  // Scores the spans by one new token of each member, row `row` on of q, and lists those to expand.
  // The relevance of the first token is what spans are chosen by.
  Status Choose(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q, int32_t row,
                bool first);
  // What a KV head of a member lists: a span, and the heads of its group that expand it.
  Result<std::vector<uint32_t>> ReadList(const CudaFrame& frame, int member, int head) const;

 private:
  struct Room {
    int32_t members = 0;
    int32_t parts = 0, spans = 0;  // a member has at most so many
    bool operator==(const Room&) const = default;
  };

  Status FitTo(const Room& room, const CudaFrame& frame);
  Status StageMember(CudaFrame* frame, int member);
  cuda::SpanLayer LayerOf(const CudaFrame& frame, const CudaPart& part, int layer) const;
  cuda::SpanQueries QueriesOf(const CudaFrame& frame, const CudaPart& part, const Rows& q,
                              int32_t row) const;
  float* CoarseOf(const CudaFrame& frame, const CudaPart& part) const;
  uint32_t* ListOf(const CudaFrame& frame, int member) const;

  // cuda::SpanParts, room for expansions, end of what spans cover; kExpandAll of every member.
  const StepMemory::Column counts_, expand_, end_, expand_all_;
  Room room_;
  WordTable parts_, routers_;  // cuda::SpanPart [members][parts], cuda::SpanRouter [members]
  std::vector<uint64_t> ids_;  // by member, whose the tables are: SpanStorage::id; 0: nobody's
  DeviceBuffer relevance_, later_relevance_, coarse_, chosen_;  // for all query heads
  DeviceBuffer list_, list_counts_;                             // for all KV heads
  DeviceBuffer workspace_;                                      // for op attend_spans
  int chosen_layer_ = -1;
  int64_t chosen_writes_ = 0;  // CudaFrame::writes then
};

CudaSpans::CudaSpans(StepMemory* memory)
    : CudaCodec(false),
      counts_(memory->AddColumn()),
      expand_(memory->AddColumn()),
      end_(memory->AddColumn()),
      expand_all_(memory->AddColumn()) {
  memory->Add(&parts_);
  memory->Add(&routers_);
}

int32_t CudaSpans::EndOf(const SequenceState& state) const {
  const SpanStorage* const spans = SpansOf(state.stored());
  return spans == nullptr ? 0 : spans->end();
}

Status CudaSpans::Check(const CudaFrame& frame) const {
  for (int i = 0; i < frame.members(); ++i) {
    const SpanStorage* const spans = SpansOf(frame.state(i).stored());
    if (spans == nullptr || spans->parts().size() <= cuda::kSpanPartsMax) continue;
    return Unimplemented("CUDA_PLAN", "a sequence of more than " +
                                          std::to_string(cuda::kSpanPartsMax) +
                                          " parts with spans is not served on a GPU; use backend "
                                          "simd");
  }
  return OkStatus();
}

Status CudaSpans::Fit(const CudaFrame& frame) {
  constexpr int32_t kMultiple = 32;  // spans, in growing
  Room room = room_;
  for (int i = 0; i < frame.members(); ++i) {
    if (!Has(frame, i)) continue;
    const SpanStorage* const storage = SpansOf(frame.state(i).stored());
    const int32_t parts = storage == nullptr ? 1 : static_cast<int32_t>(storage->parts().size());
    const int32_t spans = storage == nullptr ? 1 : static_cast<int32_t>(storage->spans().size());
    Raise(&room.parts, std::max(parts, 1), std::min(PowerOfTwo(parts), cuda::kSpanPartsMax));
    Raise(&room.spans, std::max(spans, 1), Generous(std::max(spans, 1), kMultiple));
    room.members = std::max(room.members, frame.memory().members());
  }
  if (room == room_) return OkStatus();
  room_ = {};  // until all of it is there
  ids_.clear();
  KVS_RETURN_IF_ERROR(FitTo(room, frame));
  room_ = room;
  ids_.assign(static_cast<size_t>(room.members), 0);
  return OkStatus();
}

Status CudaSpans::FitTo(const Room& room, const CudaFrame& frame) {
  const Geometry& g = frame.geometry();
  StepMemory& memory = frame.memory();
  memory.NoteGrowth();
  KVS_RETURN_IF_ERROR(memory.Fit(&parts_, room.members, room.parts * kPartWords));
  KVS_RETURN_IF_ERROR(memory.Fit(&routers_, room.members, kRouterWords));
  const int64_t rows = int64_t{room.members} * g.query_heads;
  const int64_t lists = int64_t{room.members} * g.kv_heads;
  constexpr int64_t kFloat = sizeof(float), kInt = sizeof(int32_t);
  for (DeviceBuffer* const scores : {&relevance_, &later_relevance_, &coarse_}) {
    KVS_RETURN_IF_ERROR(memory.Fit(scores, rows * room.spans * kFloat));
  }
  KVS_RETURN_IF_ERROR(memory.Fit(&chosen_, rows * room.spans / 32 * kInt));
  KVS_RETURN_IF_ERROR(memory.Fit(&list_, lists * room.spans * cuda::kSpanPieces * kInt));
  KVS_RETURN_IF_ERROR(memory.Fit(&list_counts_, lists * kInt));
  cuda::AttendSpansBatch w;
  w.layer.kv_heads = g.kv_heads;
  w.layer.group = g.group();
  w.layer.head_dim = g.head_dim;
  int64_t bytes = 0;  // small batches have more CTAs an item
  for (w.queries.batch = 1; w.queries.batch <= room.members; ++w.queries.batch) {
    bytes =
        std::max(bytes, OpsOf<cuda::SpanOps>(frame.ops().lowrank).attend_spans_workspace_bytes(w));
  }
  return memory.Fit(&workspace_, bytes);
}

Status CudaSpans::Stage(CudaFrame* frame) {
  chosen_layer_ = -1;
  for (int i = 0; i < frame->members(); ++i) {
    if (!Has(*frame, i)) continue;
    const SpanStorage* const spans = SpansOf(frame->state(i).stored());
    const int32_t n = frame->member(i).view.tokens + 1;
    StepMemory& memory = frame->memory();
    memory.At(counts_, i) = spans == nullptr ? 0 : static_cast<int32_t>(spans->parts().size());
    memory.At(expand_, i) = spans == nullptr ? 0 : ExpandRoom(frame->plan(i), *spans, n);
    memory.At(end_, i) = EndOf(frame->state(i));
    memory.At(expand_all_, i) = cuda::kExpandAll;
    // Most steps find them there.
    if (spans != nullptr && ids_[static_cast<size_t>(i)] != spans->id()) {
      KVS_RETURN_IF_ERROR(StageMember(frame, i));
    }
  }
  return OkStatus();
}

Status CudaSpans::StageMember(CudaFrame* frame, int member) {
  uint64_t& known = ids_[static_cast<size_t>(member)];
  const SpanStorage& spans = *SpansOf(frame->state(member).stored());
  known = 0;  // until all of it is on its way
  const std::vector<cuda::SpanPart> parts = PartsOnDevice(spans);
  StepMemory& memory = frame->memory();
  KVS_RETURN_IF_ERROR(
      memory.Write(&parts_, member, std::as_bytes(std::span(parts)), frame->stream()));
  const SpanStorage::Addresses first = spans.AddressesOf(0);
  const cuda::SpanRouter router{AddressOf(first.router), AddressOf(first.tau), first.routers,
                                spans.d_route()};
  KVS_RETURN_IF_ERROR(
      memory.Write(&routers_, member, std::as_bytes(std::span(&router, 1)), frame->stream()));
  known = spans.id();
  return OkStatus();
}

cuda::SpanLayer CudaSpans::LayerOf(const CudaFrame& frame, const CudaPart& part, int layer) const {
  const Geometry& g = frame.geometry();
  cuda::SpanLayer spans;
  spans.part_stride = parts_.stride() / kPartWords;
  spans.parts = parts_.Row<cuda::SpanPart>(part.first);
  spans.counts = frame.memory().On(counts_, part.first);
  spans.routers = routers_.Row<cuda::SpanRouter>(part.first);
  spans.span_stride = room_.spans;
  spans.layer = layer;
  spans.kv_heads = g.kv_heads;
  spans.group = g.group();
  spans.head_dim = g.head_dim;
  spans.dtype = g.dtype;
  return spans;
}

cuda::SpanQueries CudaSpans::QueriesOf(const CudaFrame& frame, const CudaPart& part, const Rows& q,
                                       int32_t row) const {
  return {q.data + row * q.token_stride, q.token_stride, part.count,
          frame.geometry().logit_scale()};
}

float* CudaSpans::CoarseOf(const CudaFrame& frame, const CudaPart& part) const {
  return coarse_.as<float>() + int64_t{part.first} * frame.geometry().query_heads * room_.spans;
}

uint32_t* CudaSpans::ListOf(const CudaFrame& frame, int member) const {
  const int64_t list = int64_t{member} * frame.geometry().kv_heads;
  return list_.as<uint32_t>() + list * cuda::kSpanPieces * room_.spans;
}

Status CudaSpans::Choose(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q,
                         int32_t row, bool first) {
  const Geometry& g = frame->geometry();
  const int64_t place = int64_t{part.first} * g.query_heads * room_.spans;
  cuda::ScoreSpansBatch w;
  w.layer = LayerOf(*frame, part, layer);
  w.queries = QueriesOf(*frame, part, q, row);
  w.relevance = (first ? relevance_ : later_relevance_).as<float>() + place;
  w.coarse = CoarseOf(*frame, part);
  w.ahead = true;
  KVS_RETURN_IF_ERROR(
      frame->Check(OpsOf<cuda::SpanOps>(frame->ops().lowrank).score_spans(w, frame->stream()),
                   "op score_spans"));

  cuda::ExpandSpansBatch e;
  e.layer = w.layer;
  e.batch = part.count;
  e.relevance = relevance_.as<float>() + place;
  e.coarse = w.coarse;
  const bool dense = layer < part.plan.n_dense_layers;
  e.room = frame->memory().On(dense ? expand_all_ : expand_, part.first);
  e.list = ListOf(*frame, part.first);
  e.counts = list_counts_.as<int32_t>() + int64_t{part.first} * g.kv_heads;
  e.chosen = chosen_.as<uint32_t>() + place / 32;
  e.counters = frame->counters();
  e.ahead = true;
  chosen_layer_ = layer;
  chosen_writes_ = frame->writes();
  return frame->Check(OpsOf<cuda::SpanOps>(frame->ops().lowrank).expand_spans(e, frame->stream()),
                      "op expand_spans");
}

Status CudaSpans::Attend(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q,
                         const MutableRows& out, float* lse) {
  cuda::AttendSpansBatch w;
  w.layer = LayerOf(*frame, part, layer);
  w.coarse = CoarseOf(*frame, part);
  w.list = ListOf(*frame, part.first);
  w.counts = list_counts_.as<int32_t>() + int64_t{part.first} * frame->geometry().kv_heads;
  w.pages = frame->PagesOf(part.first, layer);
  w.window_begin = frame->memory().On(end_, part.first);
  w.counters = frame->counters();
  w.workspace = workspace_.as<float>();
  for (int32_t t = 0; t < part.new_tokens; ++t) {
    const int32_t row = frame->FirstRow(part) + t;
    if (t > 0) KVS_RETURN_IF_ERROR(Choose(frame, part, layer, q, row, false));
    w.queries = QueriesOf(*frame, part, q, row);
    w.tokens = frame->VisibleFrom(row);
    w.ahead = chosen_layer_ == layer && chosen_writes_ == frame->writes();
    w.to.rows = out.data + row * out.token_stride;
    w.to.dtype = out.dtype;
    w.to.lse = lse == nullptr ? nullptr : lse + int64_t{row} * frame->geometry().query_heads;
    KVS_RETURN_IF_ERROR(
        frame->Check(OpsOf<cuda::SpanOps>(frame->ops().lowrank).attend_spans(w, frame->stream()),
                     "op attend_spans"));
  }
  return OkStatus();
}

Result<std::vector<uint32_t>> CudaSpans::ReadList(const CudaFrame& frame, int member,
                                                  int head) const {
  const Geometry& g = frame.geometry();
  int32_t listed = 0;
  KVS_RETURN_IF_ERROR(frame.CopyToHost(
      &listed, list_counts_.as<int32_t>() + int64_t{member} * g.kv_heads + head, sizeof(listed)));
  std::vector<uint32_t> list(static_cast<size_t>(listed));
  KVS_RETURN_IF_ERROR(frame.CopyToHost(
      list.data(), ListOf(frame, member) + int64_t{head} * cuda::kSpanPieces * room_.spans,
      list.size() * sizeof(uint32_t)));
  return list;
}

// --- selector zoom -------------------------------------------------------------------------------

// As kernels/plans/sekv/zoom.cc does it on a CPU.
class CudaZoom final : public CudaSelector {
 public:
  explicit CudaZoom(CudaSpans* codec) : codec_(codec) {}

  CudaSelectorTraits traits(const Plan&) override {
    // In dense layers every span is expanded.
    return {.queries = CudaQueries::kNative, .in_dense_layers = true};
  }
  Status Select(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q) override {
    return codec_->Choose(frame, part, layer, q, 0, true);
  }

  // What it chose are spans, which the codec's attention has; of raw rows all are attended.
  cuda::DeviceSelection SelectionOf(const CudaFrame&, const CudaPart&) const override { return {}; }

  Result<Selection> Read(const CudaFrame& frame, const CudaPart& part, int member,
                         int32_t n) const override {
    const SpanStorage* const spans = SpansOf(frame.state(member).stored());
    if (spans == nullptr || ZoomsInFull(part.plan, n) ||
        frame.selected_layer() < part.plan.n_dense_layers) {
      return Selection::Full(n);
    }
    const Geometry& g = frame.geometry();
    const auto count = static_cast<int32_t>(spans->spans().size());
    Selection selection;
    selection.Reset(n, g.query_heads);
    selection.coarse.resize(static_cast<size_t>(g.query_heads));
    selection.scored_bytes = ZoomScoredBytes(*spans, g);
    for (int32_t head = 0; head < g.kv_heads; ++head) {
      KVS_ASSIGN_OR_RETURN(std::vector<uint32_t> list, codec_->ReadList(frame, member, head));
      list.erase(std::unique(list.begin(), list.end()), list.end());  // pieces of one span
      for (int32_t i = 0; i < g.group(); ++i) {
        const auto of = static_cast<size_t>(head * g.group() + i);
        for (const uint32_t entry : list) {
          if ((entry >> i & 1) != 0)
            selection.units[of].push_back(static_cast<int32_t>(entry >> 8));
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

 private:
  CudaSpans* const codec_;
};

}  // namespace

constinit const CudaSelectorRow kCudaZoom = {
    kOverLowRank, "", ServesAll,
    [](const CudaSelectorSource& from) -> std::unique_ptr<CudaSelector> {
      return std::make_unique<CudaZoom>(from.CodecOf<CudaSpans>(CodecKind::kLowRank));
    }};
constinit const CudaCodecRow kCudaLowRank = {
    ServesAll, [](const CudaCodecSource& from) -> std::unique_ptr<CudaCodec> {
      return std::make_unique<CudaSpans>(from.memory);
    }};

}  // namespace kvstrata
