// SPDX-License-Identifier: Apache-2.0
// A layer of a CudaStep: append, select, attend.
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/step/gpu/cuda_shadow.h"
#include "kernels/step/gpu/cuda_step.h"
#include "kernels/step/gpu/frame/cuda_codec.h"
#include "kernels/step/gpu/frame/cuda_selector.h"

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
  KVS_ASSIGN_OR_RETURN(rows.k, ws_.tensors_.Keys(*this, k));
  KVS_ASSIGN_OR_RETURN(rows.v, ws_.tensors_.Values(*this, v));
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
    if (part.codec != nullptr && !part.codec->attends_new_rows()) return false;
    if (part.selector == nullptr || part.idle) return true;
    const CudaSelectorTraits traits = part.selector->traits(part.plan);
    return traits.attends_newest && traits.reads_ahead;
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
  w.not_finite = NotFiniteOf(0);
  w.ahead = true;
  w.next_reads_ahead =
      !Selects(parts_[0], layer) || parts_[0].selector->traits(parts_[0].plan).reads_ahead;
  ++writes_;
  return Check(ops_.append(w, stream_), "op append");
}

bool CudaStep::SelectsByQuery(const CudaPart& part, int layer) const {
  const bool asked = Selects(part, layer) || (part.observes && layer >= part.plan.n_dense_layers);
  return asked && part.selector->traits(part.plan).queries != CudaQueries::kNone;
}

Status CudaStep::Select(int layer, const Rows& q) {
  KVS_ASSIGN_OR_RETURN(const Rows queries, ws_.tensors_.Queries(*this, q));
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
    KVS_ASSIGN_OR_RETURN(Rows queries,
                         QueriesFor(part.selector->traits(part.plan).queries, q, &dense, &native));
    queries.data = RowAt(queries, FirstRow(part));
    KVS_RETURN_IF_ERROR(part.selector->Select(this, part, layer, queries));
  }
  return OkStatus();
}

Result<Rows> CudaStep::QueriesFor(CudaQueries wanted, const Rows& q, Rows* dense, Rows* native) {
  const bool wants_native = wanted == CudaQueries::kNative;
  Rows* const known = wants_native ? native : dense;
  if (known->data == nullptr) {
    KVS_ASSIGN_OR_RETURN(
        *known, wants_native ? ws_.tensors_.Native(*this, q) : ws_.tensors_.Dense(*this, q));
  }
  return *known;
}

Status CudaStep::Attend(int layer, const Rows& q, const MutableRows& out, float* lse) {
  if (pending_.layer != layer) KVS_RETURN_IF_ERROR(AppendPending());
  KVS_ASSIGN_OR_RETURN(const Rows given, ws_.tensors_.Queries(*this, q));
  if (selected_layer_ != layer) KVS_RETURN_IF_ERROR(SelectFrom(layer, given));
  KVS_ASSIGN_OR_RETURN(const Rows queries, ws_.tensors_.Native(*this, given));
  if (queries.data != given.data) ++writes_;
  KVS_ASSIGN_OR_RETURN(const CudaTensors::Output to, ws_.tensors_.OutputFor(*this, out, lse));
  const RepeatedCall::Tensors tensors{queries.data,
                                      to.rows.data,
                                      to.lse,
                                      {queries.token_stride, queries.head_stride},
                                      {to.rows.token_stride, to.rows.head_stride},
                                      queries.dtype,
                                      to.rows.dtype};
  KVS_RETURN_IF_ERROR(Repeat(&CudaGraphs::Called::attends, layer, tensors,
                             [&] { return AttendParts(layer, queries, to.rows, to.lse); }));
  pending_ = {};
  if (CudaGraphs::Captured* const batch = BatchUnderCapture(); batch != nullptr) {
    NoteCapturedShadows();
    batch->attended[layer] = 1;
  } else {
    for (size_t i = 0; i < shadows_.size(); ++i) {
      if (shadows_[i] != nullptr) shadows_[i]->Measure(this, static_cast<int>(i), layer, queries);
    }
  }
  return ws_.tensors_.Store(*this, to, out, lse);
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
    KVS_RETURN_IF_ERROR(ws_.host_pages_.Promote(*this, part, layer, &w.layer));
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
