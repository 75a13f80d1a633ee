// A layer of a CudaStep: append, select, attend.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/step/cuda_codec.h"
#include "kernels/step/cuda_selector.h"
#include "kernels/step/cuda_step.h"

namespace kvstrata {
namespace {

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
  CudaGraphs::Captured* const batch = BatchUnderCapture();
  if (batch == nullptr) return AppendRows(rows);
  batch->appended[layer] = 1;
  if (!AttendsNewRows()) return AppendRows(rows);
  pending_ = rows;
  return OkStatus();
}

// Whether the attention of every member takes a token's new rows from the caller's tensors.
bool CudaStep::AttendsNewRows() const {
  return std::ranges::all_of(parts_, [](const CudaPart& part) {
    if (part.new_tokens > 1 || part.prompt || part.observes) return false;
    if (part.codec != nullptr && !part.codec->AttendsNewRows()) return false;
    if (part.selector == nullptr || part.idle) return true;
    return part.selector->AttendsNewest(part.plan) && part.selector->ReadsAhead(part.plan);
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
  w.layer = PagesOf(0, layer);
  w.batch = members();
  w.tokens = memory().On(ws_.lengths_, 0);
  w.starts = tokens_ == members() ? nullptr : memory().starts();
  w.rows_max = tokens_;
  w.ahead = true;
  w.next_reads_ahead = !Selects(parts_[0], layer) || parts_[0].selector->ReadsAhead(parts_[0].plan);
  ++writes_;
  return Check(ops_.append(w, stream_), "op append");
}

bool CudaStep::SelectsByQuery(const CudaPart& part, int layer) const {
  const bool asked = Selects(part, layer) || (part.observes && layer >= part.plan.n_dense_layers);
  return asked && part.selector->queries() != CudaQueries::kNone;
}

Status CudaStep::Select(int layer, const Rows& q) {
  KVS_ASSIGN_OR_RETURN(const Rows queries, OnDevice(q, geometry().query_heads, &ws_.host_q_));
  return SelectFrom(layer, queries);
}

template <typename Enqueue>
Status CudaStep::Repeat(std::vector<RepeatedCall> CudaGraphs::Called::*calls, int layer,
                        const RepeatedCall::Tensors& tensors, const Enqueue& enqueue) {
  if (!decodes_) return enqueue();
  KVS_ASSIGN_OR_RETURN(const bool capturing, IsCapturing(stream_));
  if (capturing) return enqueue();
  CudaGraphs::Called& batch = ws_.graphs_.CallsOf(memory().generation(), parts_);
  RepeatedCall& call = (batch.*calls)[static_cast<size_t>(layer)];
  return call.Run(ops_, tensors, &stream_, enqueue);
}

Status CudaStep::SelectFrom(int layer, const Rows& q) {
  const RepeatedCall::Tensors tensors{
      .q = q.data, .q_strides = {q.token_stride, q.head_stride}, .q_dtype = q.dtype};
  KVS_RETURN_IF_ERROR(
      Repeat(&CudaGraphs::Called::selects, layer, tensors, [&] { return SelectParts(layer, q); }));
  selected_layer_ = layer;
  return OkStatus();
}

Status CudaStep::SelectParts(int layer, const Rows& q) {
  Rows dense{}, native{};
  for (const CudaPart& part : parts_) {
    if (!SelectsByQuery(part, layer)) continue;
    KVS_ASSIGN_OR_RETURN(Rows queries, QueriesFor(*part.selector, q, &dense, &native));
    queries.data = RowAt(queries, FirstRow(part));
    KVS_RETURN_IF_ERROR(part.selector->Select(this, part, layer, queries));
  }
  return OkStatus();
}

Result<Rows> CudaStep::QueriesFor(const CudaSelector& selector, const Rows& q, Rows* dense,
                                  Rows* native) {
  const int32_t heads = geometry().query_heads;
  if (selector.queries() == CudaQueries::kNative) {
    if (native->data != nullptr) return *native;
    *native = q;
    if (IsAttendable(q)) return *native;
    KVS_ASSIGN_OR_RETURN(*native, Copied(q, heads, geometry().dtype, &ws_.native_q_));
    return *native;
  }
  if (dense->data != nullptr) return *dense;
  *dense = q;
  if (IsDense(q.data, q.token_stride, q.head_stride, q.dtype, heads)) return *dense;
  KVS_ASSIGN_OR_RETURN(*dense, Copied(q, heads, q.dtype, &ws_.dense_q_));
  return *dense;
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
    ++writes_;
  }

  bool out_device = false, lse_device = true;
  KVS_RETURN_IF_ERROR(Check(ops_.is_device_memory(out.data, &out_device), "asking for an address"));
  if (lse != nullptr) {
    KVS_RETURN_IF_ERROR(Check(ops_.is_device_memory(lse, &lse_device), "asking for an address"));
  }
  CudaGraphs::Captured* const batch = BatchUnderCapture();
  if (batch != nullptr && !(out_device && lse_device)) {
    return FailedPrecondition("CAPTURE_HOST_TENSOR",
                              "a tensor of host memory cannot be captured; pass device memory");
  }
  const bool in_place =
      out_device && IsDense(out.data, out.token_stride, out.head_stride, out.dtype, g.query_heads);
  MutableRows dense{out.data, row, row / g.query_heads, out.dtype};
  if (!in_place) {
    KVS_RETURN_IF_ERROR(memory().Reserve(&ws_.out_, static_cast<uint64_t>(tokens_ * row), stream_));
    dense.data = ws_.out_.as<std::byte>();
  }
  const auto lse_bytes = static_cast<uint64_t>(tokens_ * g.query_heads) * sizeof(float);
  float* sums = lse;
  if (!lse_device) {
    KVS_RETURN_IF_ERROR(memory().Reserve(&ws_.lse_, lse_bytes, stream_));
    sums = ws_.lse_.as<float>();
  }
  const RepeatedCall::Tensors tensors{queries.data,
                                      dense.data,
                                      sums,
                                      {queries.token_stride, queries.head_stride},
                                      {dense.token_stride, dense.head_stride},
                                      queries.dtype,
                                      dense.dtype};
  KVS_RETURN_IF_ERROR(Repeat(&CudaGraphs::Called::attends, layer, tensors,
                             [&] { return AttendParts(layer, queries, dense, sums); }));
  pending_ = {};
  batch == nullptr ? MeasureShadows(layer, queries) : NoteCapturedShadows();
  if (!in_place) KVS_RETURN_IF_ERROR(StoreOutput(out, out_device));
  if (!lse_device) KVS_RETURN_IF_ERROR(CopyToHost(lse, sums, lse_bytes));
  if (batch != nullptr) batch->attended[layer] = 1;
  return OkStatus();
}

Status CudaStep::AttendParts(int layer, const Rows& q, const MutableRows& out, float* lse) {
  for (const CudaPart& part : parts_) {
    KVS_RETURN_IF_ERROR(part.codec == nullptr ? AttendPart(part, layer, q, out, lse)
                                              : part.codec->Attend(this, part, layer, q, out, lse));
  }
  return OkStatus();
}

Status CudaStep::AttendPart(const CudaPart& part, int layer, const Rows& q, const MutableRows& out,
                            float* lse) {
  if (part.new_tokens > CudaWorkspace::kItemsOfMember) return AttendChunk(part, layer, q, out, lse);
  cuda::AttendRawBatch w = AttendRawOf(part, layer, FirstRow(part), q);
  w.selection = SelectionOf(part, layer);
  // What the GPU selects in the layer itself is not there before.
  w.ahead = part.new_tokens == 1 && !SelectsByQuery(part, layer);
  if (part.promotes && Selects(part, layer)) {
    KVS_RETURN_IF_ERROR(ws_.far_pages_.Promote(*this, part, layer, &w.layer));
    w.ahead = false;
  }
  w.batch = part.count;
  if (part.new_tokens > 1) {
    // Every new token is an item with the same row of the page table and the same selection.
    w.batch = part.new_tokens;
    w.layer.page_stride = 0;
    w.selection.shared = true;
  }
  w.to = OutputFrom(FirstRow(part), out, lse);
  return Check(ops_.attend_raw(w, stream_), "op attend_raw");
}

Status CudaStep::AttendChunk(const CudaPart& part, int layer, const Rows& q, const MutableRows& out,
                             float* lse) {
  cuda::AttendChunkBatch w;
  w.layer = PagesOf(part.first, layer);
  w.selection = SelectionOf(part, layer);
  w.group = geometry().group();
  w.q_stride = q.token_stride;
  w.scale = geometry().logit_scale();
  w.counters = counters();
  w.workspace = ws_.chunk_workspace_.as<float>();
  int32_t row = FirstRow(part);
  for (int32_t left = part.new_tokens; left > 0; left -= w.rows, row += w.rows) {
    w.rows = std::min(left, cuda::kAttendChunkRows);
    w.tokens = VisibleFrom(row);
    w.q = RowAt(q, row);
    w.to = OutputFrom(row, out, lse);
    KVS_RETURN_IF_ERROR(Check(ops_.attend_chunk(w, stream_), "op attend_chunk"));
  }
  return OkStatus();
}

}  // namespace kvstrata
