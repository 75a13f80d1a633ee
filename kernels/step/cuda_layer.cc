// A layer of a CudaStep: append, select, attend.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/step/cuda_step.h"

namespace kvstrata {
namespace {

// In every layer, here; the others before any layer.
bool SelectsByQuery(SelectorKind selector) {
  return selector == SelectorKind::kMinMax || selector == SelectorKind::kVote ||
         selector == SelectorKind::kBlock || selector == SelectorKind::kBucket;
}

// Whether a layer's first op behind its append reads ahead (launch.cuh): attend_raw, score, vote
// behind reuse, pick_buckets, score_packed and score_spans (ReadsSpans, in all layers) do; vote
// alone does not.
bool ReadsAhead(const Plan& plan) { return !plan.minmax.group_softmax; }

// Whether every selection of the plan has the newest token in it, and none is made of its key. What
// is not packed yet is always attended.
bool AlwaysAttendsNewest(const Plan& plan) {
  return plan.selector == SelectorKind::kVote     ? plan.vote.recent > 0
         : plan.selector == SelectorKind::kBucket ? plan.bucket.recent > 0
                                                  : true;
}

const std::byte* RowAt(const Rows& rows, int32_t row) {
  return rows.data + row * rows.token_stride;
}

}  // namespace

// Under capture every layer will be attended (Replay sees to it), so its new rows may be left to
// that: a kernel less in every step.
Status CudaStep::Append(int layer, const Rows& k, const Rows& v) {
  KVS_RETURN_IF_ERROR(AppendPending());
  NewRows rows{layer, {}, {}};
  KVS_ASSIGN_OR_RETURN(rows.k, SourceOf(k, &ws_.host_k_, &ws_.dense_k_));
  KVS_ASSIGN_OR_RETURN(rows.v, SourceOf(v, &ws_.host_v_, &ws_.dense_v_));
  auto* const shape = ShapeUnderCapture();
  if (shape == nullptr) return AppendRows(rows);
  shape->appended[layer] = 1;
  if (!AttendsNewRows()) return AppendRows(rows);
  pending_ = rows;
  return OkStatus();
}

// Whether the attention of every member takes a token's new rows from the caller's tensors.
bool CudaStep::AttendsNewRows() const {
  return std::ranges::all_of(parts_, [](const Part& part) {
    if (part.new_tokens > 1 || part.prompt || part.observes || ReadsSpans(part)) return false;
    return !part.selects || part.idle || (AlwaysAttendsNewest(part.plan) && ReadsAhead(part.plan));
  });
}

// New rows that no attention has taken.
Status CudaStep::AppendPending() {
  if (pending_.layer < 0) return OkStatus();
  return AppendRows(std::exchange(pending_, {}));
}

Status CudaStep::AppendRows(const NewRows& rows) {
  const int layer = rows.layer;
  cuda::AppendBatch w;
  w.k = rows.k;
  w.v = rows.v;
  w.layer = PagesOf({0, members(), 1, false, {}}, layer);
  w.batch = members();
  w.tokens = ws_.Ints(PerMember::kLengths);
  w.starts = tokens_ == members() ? nullptr : ws_.starts();
  w.rows_max = tokens_;
  w.ahead = true;
  w.next_reads_ahead =
      ReadsSpans(parts_[0]) || !Selects(parts_[0], layer) || ReadsAhead(parts_[0].plan);
  span_rows_layer_ = -1;
  return Check(ops_.append(w, stream_), "op append");
}

bool CudaStep::Selects(const Part& part, int layer) const {
  return part.selects && !part.idle && part.plan.selector != SelectorKind::kFull &&
         layer >= part.plan.n_dense_layers;
}

bool CudaStep::Observes(const Part& part, int layer) const {
  return part.observes && layer >= part.plan.n_dense_layers;
}

cuda::PagedLayer CudaStep::PagesOf(const Part& part, int layer) const {
  const PageLayout layout = PageLayout::Of(geometry());
  cuda::PagedLayer pages;
  pages.page_stride = ws_.capacity_.pages;
  pages.pages = ws_.pages_.device.as<uint64_t>() + int64_t{part.first} * pages.page_stride;
  pages.page_tokens = layout.page_tokens;
  pages.kv_heads = layout.kv_heads;
  pages.head_dim = layout.head_dim;
  pages.dtype = layout.dtype;
  pages.key_offset = layout.KeyOffset(layer, 0, 0);
  pages.value_offset = layout.ValueOffset(layer, 0, 0);
  pages.head_stride = layout.head_stride;
  pages.slot_stride = layout.slot_stride;
  return pages;
}

cuda::DeviceRows CudaStep::IndexRowsOf(const Part& part, int level, int layer) const {
  const int32_t stride = ws_.capacity_.blocks;
  return cuda::IndexRows(ws_.blocks_.device.as<uint64_t>() + int64_t{part.first} * stride, stride,
                         members_[part.first].state->index(), level, layer, 0);
}

cuda::DeviceSelection CudaStep::SelectionOf(const Part& part, int layer) const {
  if (!Selects(part, layer)) return {};
  if (part.plan.selector == SelectorKind::kVote) return VotedSelection(part);
  if (part.plan.selector == SelectorKind::kBucket) return BucketSelection(part);
  cuda::DeviceSelection selection;
  if (part.plan.selector == SelectorKind::kWindow) {
    selection.sink_end = ws_.Ints(PerMember::kSinkEnd) + part.first;
    selection.recent_begin = ws_.Ints(PerMember::kRecentBegin) + part.first;
    return selection;
  }
  if (part.plan.selector == SelectorKind::kCascade) return CascadeOf(part);
  const int64_t list = int64_t{part.first} * geometry().kv_heads;
  selection.unit_tokens = part.plan.index.unit;
  selection.groups = geometry().kv_heads;
  selection.list_stride = ws_.capacity_.list;
  selection.units = ws_.units_.as<int32_t>() + list * selection.list_stride;
  selection.counts = ws_.counts_.as<int32_t>() + list;
  selection.sink_end = ws_.sink_end_.as<int32_t>() + part.first;
  selection.recent_begin = ws_.recent_begin_.as<int32_t>() + part.first;
  return selection;
}

Status CudaStep::Select(int layer, const Rows& q) {
  KVS_ASSIGN_OR_RETURN(const Rows queries, OnDevice(q, geometry().query_heads, &ws_.host_q_));
  return SelectFrom(layer, queries);
}

template <typename Enqueue>
Status CudaStep::Repeat(std::vector<RepeatedCall> CudaWorkspace::CalledShape::*calls, int layer,
                        const RepeatedCall::Tensors& tensors, const Enqueue& enqueue) {
  if (!decodes_) return enqueue();
  KVS_ASSIGN_OR_RETURN(const bool capturing, IsCapturing(stream_));
  if (capturing) return enqueue();
  RepeatedCall& call = (ws_.CallsOf(parts_)->*calls)[static_cast<size_t>(layer)];
  return call.Run(ops_, tensors, &stream_, enqueue);
}

Status CudaStep::SelectFrom(int layer, const Rows& q) {
  const RepeatedCall::Tensors tensors{
      .q = q.data, .q_strides = {q.token_stride, q.head_stride}, .q_dtype = q.dtype};
  KVS_RETURN_IF_ERROR(Repeat(&CudaWorkspace::CalledShape::selects, layer, tensors,
                             [&] { return SelectParts(layer, q); }));
  selected_layer_ = layer;
  return OkStatus();
}

Status CudaStep::SelectParts(int layer, const Rows& q) {
  const int32_t heads = geometry().query_heads;
  Rows dense{};
  for (const Part& part : parts_) {
    if (ReadsSpans(part)) {
      Rows native = q;
      if (!IsAttendable(q)) {
        KVS_ASSIGN_OR_RETURN(native, Copied(q, heads, geometry().dtype, &ws_.native_q_));
      }
      KVS_RETURN_IF_ERROR(ScoreSpans(part, layer, native, 0));
      continue;
    }
    const bool selects = Selects(part, layer) && SelectsByQuery(part.plan.selector);
    if (!selects && !Observes(part, layer)) continue;
    if (dense.data == nullptr) {
      dense = q;
      if (!IsDense(q.data, q.token_stride, q.head_stride, q.dtype, heads)) {
        KVS_ASSIGN_OR_RETURN(dense, Copied(q, heads, q.dtype, &ws_.dense_q_));
      }
    }
    KVS_RETURN_IF_ERROR(SelectPart(part, layer, dense));
  }
  return OkStatus();
}

// For the first new token of each member, or for a chunk; of a prompt that is observed, its last
// tokens.
Status CudaStep::SelectPart(const Part& part, int layer, const Rows& q) {
  const std::byte* const queries = RowAt(q, first_row_[part.first] + part.begin);
  if (part.observes) return Observe(part, layer, queries, q.dtype);
  if (part.plan.selector == SelectorKind::kVote) return SelectVotes(part, layer, queries, q.dtype);
  if (part.plan.selector == SelectorKind::kBlock) {
    return SelectBlocks(part, layer, queries, q.dtype);
  }
  if (part.plan.selector == SelectorKind::kBucket) {
    return PickBuckets(part, layer, queries, q.dtype);
  }
  KVS_RETURN_IF_ERROR(part.plan.minmax.group_softmax ? VoteBounds(part, layer, queries, q.dtype)
                                                     : ScoreBounds(part, layer, queries, q.dtype));
  return Pick(part);
}

Status CudaStep::ScoreBounds(const Part& part, int layer, const std::byte* q, DType dtype) {
  cuda::ScoreBatch w;
  w.rows = BoundsOf(part, layer);
  w.fields = 2;
  w.field_stride = FieldStride(members_[part.first].state->index());
  w.rule = RuleOf(part.plan);
  w.tokens = ws_.visible() + first_row_[part.first];
  w.q = q;
  w.q_dtype = dtype;
  w.batch = part.count;
  w.query_heads = geometry().query_heads;
  w.unit_stride = ws_.capacity_.units;
  w.scores = ws_.scores_.as<float>() + int64_t{part.first} * geometry().kv_heads * w.unit_stride;
  w.ahead = true;
  return Check(ops_.score(w, stream_), "op score");
}

Status CudaStep::VoteBounds(const Part& part, int layer, const std::byte* q, DType dtype) {
  cuda::VoteBatch w;
  w.rows = BoundsOf(part, layer);
  w.fields = 2;
  w.field_stride = FieldStride(members_[part.first].state->index());
  w.scale = geometry().logit_scale();
  w.rule = RuleOf(part.plan);
  w.tokens = ws_.visible() + first_row_[part.first];
  w.q = q;
  w.q_dtype = dtype;
  w.batch = part.count;
  w.query_heads = geometry().query_heads;
  w.output_rows = geometry().kv_heads;
  w.candidate_stride = ws_.capacity_.units;
  w.votes =
      ws_.scores_.as<float>() + int64_t{part.first} * geometry().kv_heads * w.candidate_stride;
  w.scratch = ws_.vote_scratch_.as<std::byte>();
  return Check(ops_.vote(w, stream_), "op vote");
}

Status CudaStep::Pick(const Part& part) {
  const int64_t list = int64_t{part.first} * geometry().kv_heads;
  cuda::PickBatch w;
  w.score_stride = ws_.capacity_.units;
  w.scores = ws_.scores_.as<float>() + list * w.score_stride;
  w.batch = part.count;
  w.groups = geometry().kv_heads;
  w.rule = RuleOf(part.plan);
  w.tokens = ws_.visible() + first_row_[part.first];
  w.ahead = true;
  w.list_stride = ws_.capacity_.list;
  w.units = ws_.units_.as<int32_t>() + list * w.list_stride;
  w.counts = ws_.counts_.as<int32_t>() + list;
  w.sink_end = ws_.sink_end_.as<int32_t>() + part.first;
  w.recent_begin = ws_.recent_begin_.as<int32_t>() + part.first;
  w.scratch = ws_.pick_scratch_.as<std::byte>();
  w.scratch_lists = ws_.capacity_.members * geometry().kv_heads;
  return Check(ops_.pick(w, stream_), "op pick");
}

Status CudaStep::Attend(int layer, const Rows& q, const MutableRows& out, float* lse) {
  const Geometry& g = geometry();
  const int64_t row = int64_t{g.query_heads} * g.head_dim * SizeOf(out.dtype);
  if (pending_.layer != layer) KVS_RETURN_IF_ERROR(AppendPending());
  KVS_ASSIGN_OR_RETURN(const Rows given, OnDevice(q, g.query_heads, &ws_.host_q_));
  if (selected_layer_ != layer) KVS_RETURN_IF_ERROR(SelectFrom(layer, given));
  Rows queries = given;
  if (!IsAttendable(given)) {
    KVS_ASSIGN_OR_RETURN(queries, Copied(given, g.query_heads, g.dtype, &ws_.native_q_));
    span_rows_layer_ = -1;
  }

  bool out_device = false, lse_device = true;
  KVS_RETURN_IF_ERROR(Check(ops_.is_device_memory(out.data, &out_device), "asking for an address"));
  if (lse != nullptr) {
    KVS_RETURN_IF_ERROR(Check(ops_.is_device_memory(lse, &lse_device), "asking for an address"));
  }
  CudaWorkspace::CapturedShape* const shape = ShapeUnderCapture();
  if (shape != nullptr && !(out_device && lse_device)) {
    return FailedPrecondition("CAPTURE_HOST_TENSOR",
                              "a tensor of host memory cannot be captured; pass device memory");
  }
  const bool in_place =
      out_device && IsDense(out.data, out.token_stride, out.head_stride, out.dtype, g.query_heads);
  MutableRows dense{out.data, row, row / g.query_heads, out.dtype};
  if (!in_place) {
    KVS_RETURN_IF_ERROR(ws_.Reserve(&ws_.out_, static_cast<uint64_t>(tokens_ * row), stream_));
    dense.data = ws_.out_.as<std::byte>();
  }
  const auto lse_bytes = static_cast<uint64_t>(tokens_ * g.query_heads) * sizeof(float);
  float* sums = lse;
  if (!lse_device) {
    KVS_RETURN_IF_ERROR(ws_.Reserve(&ws_.lse_, lse_bytes, stream_));
    sums = ws_.lse_.as<float>();
  }
  const RepeatedCall::Tensors tensors{queries.data,
                                      dense.data,
                                      sums,
                                      {queries.token_stride, queries.head_stride},
                                      {dense.token_stride, dense.head_stride},
                                      queries.dtype,
                                      dense.dtype};
  KVS_RETURN_IF_ERROR(Repeat(&CudaWorkspace::CalledShape::attends, layer, tensors,
                             [&] { return AttendParts(layer, queries, dense, sums); }));
  pending_ = {};
  shape == nullptr ? MeasureShadows(layer, queries) : NoteCapturedShadows();
  if (!in_place) KVS_RETURN_IF_ERROR(StoreOutput(out, out_device));
  if (!lse_device) KVS_RETURN_IF_ERROR(CopyToHost(lse, sums, lse_bytes));
  if (shape != nullptr) shape->attended[layer] = 1;
  return OkStatus();
}

Status CudaStep::AttendParts(int layer, const Rows& q, const MutableRows& out, float* lse) {
  for (const Part& part : parts_) KVS_RETURN_IF_ERROR(AttendPart(part, layer, q, out, lse));
  return OkStatus();
}

Status CudaStep::AttendPart(const Part& part, int layer, const Rows& q, const MutableRows& out,
                            float* lse) {
  if (ReadsSpans(part)) return AttendSpans(part, layer, q, out, lse);
  if (part.selects && part.plan.codec == CodecKind::kPacked) {
    return AttendPacked(part, layer, q, out, lse);
  }
  const Geometry& g = geometry();
  cuda::AttendRawBatch w;
  w.layer = PagesOf(part, layer);
  w.selection = SelectionOf(part, layer);
  w.group = g.group();
  w.scale = g.logit_scale();
  w.workspace = ws_.attend_workspace_.as<std::byte>();
  const int32_t first = first_row_[part.first] + part.begin;
  // What the GPU selects in the layer itself is not there before.
  w.ahead = part.new_tokens == 1 && !(Selects(part, layer) && SelectsByQuery(part.plan.selector));
  if (part.promotes && Selects(part, layer)) {
    KVS_RETURN_IF_ERROR(Promote(part, layer, &w.layer));
    w.ahead = false;
  }
  if (part.new_tokens == 1) return AttendItems(w, first, part.count, q, out, lse);
  if (part.new_tokens > CudaWorkspace::kItemsOfMember) return AttendChunk(part, layer, q, out, lse);
  // Every new token is an item with the same row of the page table and the same selection.
  w.layer.page_stride = 0;
  w.selection.shared = true;
  return AttendItems(w, first, part.new_tokens, q, out, lse);
}

Status CudaStep::AttendChunk(const Part& part, int layer, const Rows& q, const MutableRows& out,
                             float* lse) {
  cuda::AttendChunkBatch w;
  w.layer = PagesOf(part, layer);
  w.selection = SelectionOf(part, layer);
  w.group = geometry().group();
  w.q_stride = q.token_stride;
  w.scale = geometry().logit_scale();
  w.counters = ws_.attend_counters_.as<uint32_t>();
  w.workspace = ws_.chunk_workspace_.as<float>();
  int32_t row = first_row_[part.first] + part.begin;
  for (int32_t left = part.new_tokens; left > 0; left -= w.rows, row += w.rows) {
    w.rows = std::min(left, cuda::kAttendChunkRows);
    w.tokens = ws_.visible() + row;
    w.q = RowAt(q, row);
    w.to = OutputFrom(row, out, lse);
    KVS_RETURN_IF_ERROR(Check(ops_.attend_chunk(w, stream_), "op attend_chunk"));
  }
  return OkStatus();
}

// Rows [row, row + items) of the batch.
Status CudaStep::AttendItems(cuda::AttendRawBatch w, int32_t row, int32_t items, const Rows& q,
                             const MutableRows& out, float* lse) {
  w.batch = items;
  w.tokens = ws_.visible() + row;
  w.q = RowAt(q, row);
  w.q_stride = q.token_stride;
  if (pending_.layer >= 0) {
    w.new_k = pending_.k.From(row);
    w.new_v = pending_.v.From(row);
  }
  w.to = OutputFrom(row, out, lse);
  return Check(ops_.attend_raw(w, stream_), "op attend_raw");
}

cuda::AttentionOutput CudaStep::OutputFrom(int32_t row, const MutableRows& out, float* lse) const {
  return {out.data + row * out.token_stride, out.dtype,
          lse == nullptr ? nullptr : lse + int64_t{row} * geometry().query_heads};
}

}  // namespace kvstrata
