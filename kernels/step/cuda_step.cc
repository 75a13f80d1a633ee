#include "kernels/step/cuda_step.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

namespace kvstrata {
namespace {

constexpr uintptr_t kVector = 16;  // bytes that ops read at a time

bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kVector == 0; }

cuda::CandidateRule RuleOf(const Plan& plan) {
  return {plan.page, plan.n_sink, plan.n_recent, plan.budget / plan.page, plan.min_tokens};
}

float ScaleOf(const Geometry& g) { return 1.0f / std::sqrt(static_cast<float>(g.head_dim)); }

// Bytes from a unit's minimum to its maximum.
int64_t FieldStride(const IndexLayout& index) {
  return index.RowOffset(0, 0, 1, 0, 0) - index.RowOffset(0, 0, 0, 0, 0);
}

const std::byte* RowAt(const Rows& rows, int32_t row) {
  return rows.data + row * rows.token_stride;
}

}  // namespace

CudaStep::CudaStep(std::vector<StepMember> members, CudaWorkspace* workspace, cuda::Stream stream,
                   Exit exit)
    : StepBatch(std::move(members)),
      ws_(*workspace),
      ops_(workspace->ops_),
      stream_(stream),
      exit_(exit) {
  CutParts();
}

Result<std::unique_ptr<CudaStep>> CudaStep::Begin(std::vector<StepMember> members,
                                                  CudaWorkspace* workspace, cuda::Stream stream,
                                                  Exit exit) {
  for (const StepMember& m : members) {
    KVS_RETURN_IF_ERROR(CudaServes(m.state->plan(), m.state->geometry()));
  }
  if (workspace->in_step_) {
    return FailedPrecondition("WORKSPACE_BUSY",
                              "the last step of this workspace is open; end it, or use another");
  }
  std::unique_ptr<CudaStep> step(new CudaStep(std::move(members), workspace, stream, exit));
  KVS_CHECK(step->geometry() == workspace->geometry_);
  KVS_ASSIGN_OR_RETURN(const bool capturing, step->IsCapturing(stream));
  if (capturing) {
    return FailedPrecondition("CAPTURE_BEGIN",
                              "the stream is being captured; begin the step before its layers are "
                              "captured: its copies differ from step to step");
  }
  KVS_RETURN_IF_ERROR(workspace->Fit(step->Need()));
  KVS_RETURN_IF_ERROR(workspace->Follow(stream));
  KVS_RETURN_IF_ERROR(step->Stage());
  KVS_RETURN_IF_ERROR(step->Summarize());
  step->begun_ = workspace->in_step_ = true;
  return step;
}

// Members that follow each other and attend alike share launches.
void CudaStep::CutParts() {
  for (int i = 0; i < members(); ++i) {
    const SequenceState& state = *members_[i].state;
    Part part{i, 1, members_[i].new_tokens, false, {}};
    part.selects = state.prompt_tokens() >= 0 && state.plan().selector != SelectorKind::kFull;
    if (part.selects) part.plan = state.plan();
    Part* const last = parts_.empty() ? nullptr : &parts_.back();
    if (last != nullptr && part.new_tokens == 1 && last->new_tokens == 1 &&
        part.selects == last->selects && part.plan == last->plan) {
      ++last->count;
    } else {
      parts_.push_back(std::move(part));
    }
  }
}

CudaWorkspace::Capacity CudaStep::Need() const {
  CudaWorkspace::Capacity need;
  need.members = members();
  need.rows = tokens_;
  for (const StepMember& m : members_) {
    const IndexLayout& index = m.state->index();
    const int32_t tokens = std::max(m.view.tokens + m.new_tokens, ws_.reserve_tokens_);
    need.pages = std::max(need.pages, tokens / geometry().page_tokens + 1);
    if (index.kind == IndexLayout::Kind::kNone) continue;
    const cuda::CandidateRule rule = RuleOf(m.state->plan());
    need.blocks = std::max(need.blocks, index.BlocksFor(tokens));
    need.units = std::max(need.units, tokens / rule.unit_tokens + 1);
    need.list = std::max(need.list, rule.take);
  }
  return need;
}

Status CudaStep::Stage() {
  KVS_ASSIGN_OR_RETURN(const CudaWorkspace::StagingSlot* const slot, ws_.NextSlot());
  KVS_RETURN_IF_ERROR(StageInts(*slot));
  for (int i = 0; i < members(); ++i) {
    const SequenceView& view = members_[i].view;
    const int32_t tokens = view.tokens + members_[i].new_tokens;
    const int32_t page = geometry().page_tokens;
    KVS_RETURN_IF_ERROR(ws_.Upload(&ws_.pages_, ws_.capacity_.pages, i, view.pages,
                                   (tokens + page - 1) / page, *slot, stream_));
    KVS_RETURN_IF_ERROR(ws_.Upload(&ws_.blocks_, ws_.capacity_.blocks, i, view.index_blocks,
                                   members_[i].state->index().BlocksFor(view.tokens), *slot,
                                   stream_));
  }
  return Check(ops_.record_event(slot->copied, stream_), "marking the copies of a step");
}

// Lengths of this step, and what follows from them.
Status CudaStep::StageInts(const CudaWorkspace::StagingSlot& slot) {
  auto* const ints = reinterpret_cast<int32_t*>(slot.data);
  const int64_t room = ws_.capacity_.members;
  const auto at = [ints, room](PerMember array, int i) -> int32_t& {
    return ints[static_cast<int>(array) * room + i];
  };
  int32_t* const visible = ints + ws_.IntsBeforeRows();
  for (int i = 0; i < members(); ++i) {
    const StepMember& m = members_[i];
    const Plan& plan = m.state->plan();
    const int32_t n = m.view.tokens + 1;
    const bool in_full = AttendsInFull(n, plan.n_sink + plan.n_recent, 0, plan.min_tokens);
    at(PerMember::kLengths, i) = m.view.tokens + m.new_tokens;
    at(PerMember::kFrom, i) = m.state->indexed_tokens_;
    at(PerMember::kTo, i) = m.view.tokens;
    at(PerMember::kSinkEnd, i) = in_full ? 0 : plan.n_sink;  // of selector window
    at(PerMember::kRecentBegin, i) = in_full ? 0 : n - plan.n_recent;
    at(PerMember::kCount, i) = first_row_[i];
    for (int32_t t = 0; t < m.new_tokens; ++t) visible[first_row_[i] + t] = n + t;
  }
  at(PerMember::kCount, members()) = tokens_;
  const auto bytes = static_cast<uint64_t>(ws_.IntsBeforeRows() + tokens_) * sizeof(int32_t);
  return Check(ops_.copy_async(ws_.ints_.as<int32_t>(), ints, bytes, stream_),
               "copying the lengths of a step");
}

// Rows of the units that were completed since the index was written last, in all layers.
Status CudaStep::Summarize() {
  for (int first = 0, last; first < members(); first = last) {
    const IndexLayout& index = members_[first].state->index();
    for (last = first + 1; last < members() && members_[last].state->index() == index;) ++last;
    if (index.kind == IndexLayout::Kind::kNone) continue;
    KVS_RETURN_IF_ERROR(SummarizeMembers(first, last - first));
  }
  for (const StepMember& m : members_) m.state->indexed_tokens_ = m.state->tokens_;
  return OkStatus();
}

Status CudaStep::SummarizeMembers(int first, int count) {
  const IndexLayout& index = members_[first].state->index();
  int32_t units = 0;
  for (int i = first; i < first + count; ++i) {
    const SequenceState& state = *members_[i].state;
    units = std::max(units,
                     index.UnitsFor(0, state.tokens_) - index.UnitsFor(0, state.indexed_tokens_));
  }
  const Part part{first, count, 1, false, {}};
  cuda::SummarizeBatch w;
  w.kind = cuda::SummarizeBatch::Kind::kMinMax;
  w.source = cuda::KeyRows(PagesOf(part, 0));
  w.summary = BoundsOf(part, 0);
  w.field_stride = FieldStride(index);
  w.unit_rows = index.levels[0].unit_tokens;
  w.from = ws_.Ints(PerMember::kFrom) + first;
  w.to = ws_.Ints(PerMember::kTo) + first;
  w.batch = count;
  w.units_max = units;
  w.layers = geometry().layers;
  w.source_layer_stride = PageLayout::Of(geometry()).layer_stride;
  w.summary_layer_stride = index.RowOffset(0, 1, 0, 0, 0) - index.RowOffset(0, 0, 0, 0, 0);
  return Check(ops_.summarize(w, stream_), "op summarize");
}

CudaStep::~CudaStep() {
  if (!begun_) return;
  ws_.in_step_ = false;
  if (ended_) return;
  const Result<bool> capturing = IsCapturing(stream_);
  if (capturing.ok() && !capturing.value()) {
    (void)WriteExit(stream_);
    return;
  }
  // Nothing captured has run: only Begin's own work is to be waited for.
  const size_t slot = (ws_.next_slot_ + ws_.slots_.size() - 1) % ws_.slots_.size();
  (void)ws_.AwaitOnHost(ws_.slots_[slot].copied);
  if (exit_.address == nullptr) return;
  std::atomic_ref<uint64_t>(*exit_.address).store(exit_.value, std::memory_order_release);
}

Result<bool> CudaStep::IsCapturing(cuda::Stream stream) const {
  bool capturing = false;
  KVS_RETURN_IF_ERROR(Check(ops_.is_capturing(stream, &capturing), "asking for a capture"));
  return capturing;
}

Status CudaStep::WriteExit(cuda::Stream stream) {
  if (exit_.address != nullptr) {
    KVS_RETURN_IF_ERROR(
        Check(ops_.write_value(exit_.address, exit_.value, stream), "leaving the epoch"));
  }
  return Check(ops_.record_event(ws_.last_work_, stream), "marking the end of a step");
}

Status CudaStep::End(cuda::Stream stream) {
  KVS_ASSIGN_OR_RETURN(const bool capturing, IsCapturing(stream));
  if (capturing) {
    return FailedPrecondition("CAPTURE_END",
                              "the stream is being captured; end the capture, launch its graph, "
                              "then end the step");
  }
  KVS_RETURN_IF_ERROR(WriteExit(stream));
  ended_ = true;
  ws_.in_step_ = false;
  for (const StepMember& m : members_) {
    m.state->selector_->Advance(m.new_tokens);
    m.state->tokens_ += m.new_tokens;
  }
  return OkStatus();
}

// What the ops of this call are captured for; null: nothing is captured.
CudaWorkspace::CapturedShape* CudaStep::ShapeUnderCapture() {
  const Result<bool> capturing = IsCapturing(stream_);
  if (!capturing.ok() || !capturing.value()) return nullptr;
  for (CudaWorkspace::CapturedShape& shape : ws_.captured_) {
    if (shape.parts == parts_) return &shape;
  }
  const std::vector<uint8_t> none(geometry().layers);
  return &ws_.captured_.emplace_back(CudaWorkspace::CapturedShape{parts_, none, none});
}

Status CudaStep::Replay() {
  const auto all = [](const std::vector<uint8_t>& layers) {
    return std::ranges::all_of(layers, [](uint8_t done) { return done != 0; });
  };
  for (const CudaWorkspace::CapturedShape& shape : ws_.captured_) {
    if (shape.parts != parts_ || !all(shape.appended) || !all(shape.attended)) continue;
    selected_layer_ = geometry().layers - 1;
    return OkStatus();
  }
  return FailedPrecondition("GRAPH_STALE",
                            "no graph of all layers was captured of such a batch at generation " +
                                std::to_string(ws_.generation_) +
                                " of its workspace; run the layers, or capture them anew");
}

Result<Rows> CudaStep::OnDevice(const Rows& rows, int32_t heads, DeviceBuffer* copy) {
  bool device = false;
  KVS_RETURN_IF_ERROR(Check(ops_.is_device_memory(rows.data, &device), "asking for an address"));
  if (device) return rows;
  KVS_ASSIGN_OR_RETURN(const bool capturing, IsCapturing(stream_));
  if (capturing) {
    return FailedPrecondition("CAPTURE_HOST_TENSOR",
                              "a tensor of host memory cannot be captured; pass device memory");
  }
  const auto bytes =
      static_cast<uint64_t>((tokens_ - 1) * rows.token_stride + (heads - 1) * rows.head_stride +
                            geometry().head_dim * SizeOf(rows.dtype));
  KVS_RETURN_IF_ERROR(ws_.Reserve(copy, bytes, stream_));
  KVS_RETURN_IF_ERROR(
      Check(ops_.copy_async(copy->as<std::byte>(), rows.data, bytes, stream_), "copying a tensor"));
  // The caller may write to it when we return; of pinned memory the copy is still to come.
  KVS_RETURN_IF_ERROR(Check(ops_.synchronize(stream_), "copying a tensor"));
  return Rows{copy->as<std::byte>(), rows.token_stride, rows.head_stride, rows.dtype};
}

// A dense copy, as `dtype`.
Result<Rows> CudaStep::Copied(const Rows& rows, int32_t heads, DType dtype, DeviceBuffer* to) {
  cuda::CopyRowsBatch w;
  w.from = rows.data;
  w.from_row_stride = rows.token_stride;
  w.from_head_stride = rows.head_stride;
  w.from_dtype = rows.dtype;
  w.to_dtype = dtype;
  w.rows = tokens_;
  w.heads = heads;
  w.dim = geometry().head_dim;
  w.to_head_stride = w.dim * SizeOf(dtype);
  w.to_row_stride = heads * w.to_head_stride;
  KVS_RETURN_IF_ERROR(ws_.Reserve(to, static_cast<uint64_t>(tokens_ * w.to_row_stride), stream_));
  w.to = to->as<std::byte>();
  KVS_RETURN_IF_ERROR(Check(ops_.copy_rows(w, stream_), "op copy_rows"));
  return Rows{to->as<std::byte>(), w.to_row_stride, w.to_head_stride, dtype};
}

bool CudaStep::IsDense(const void* data, int64_t token_stride, int64_t head_stride, DType dtype,
                       int32_t heads) const {
  const int64_t row = geometry().head_dim * SizeOf(dtype);
  return IsAligned(data) && head_stride == row && (token_stride == heads * row || tokens_ == 1);
}

Result<cuda::DeviceSource> CudaStep::SourceOf(const Rows& rows, DeviceBuffer* copy,
                                              DeviceBuffer* dense) {
  const int32_t heads = geometry().kv_heads;
  KVS_ASSIGN_OR_RETURN(Rows from, OnDevice(rows, heads, copy));
  if (!IsAligned(from.data) || from.token_stride % kVector != 0 ||
      from.head_stride % kVector != 0) {
    KVS_ASSIGN_OR_RETURN(from, Copied(from, heads, from.dtype, dense));
  }
  return cuda::DeviceSource{from.data, from.token_stride, from.head_stride, from.dtype};
}

Status CudaStep::Append(int layer, const Rows& k, const Rows& v) {
  cuda::AppendBatch w;
  KVS_ASSIGN_OR_RETURN(w.k, SourceOf(k, &ws_.host_k_, &ws_.dense_k_));
  KVS_ASSIGN_OR_RETURN(w.v, SourceOf(v, &ws_.host_v_, &ws_.dense_v_));
  w.layer = PagesOf({0, members(), 1, false, {}}, layer);
  w.batch = members();
  w.tokens = ws_.Ints(PerMember::kLengths);
  w.starts = tokens_ == members() ? nullptr : ws_.starts();
  w.rows_max = tokens_;
  KVS_RETURN_IF_ERROR(Check(ops_.append(w, stream_), "op append"));
  if (auto* const shape = ShapeUnderCapture(); shape != nullptr) shape->appended[layer] = 1;
  return OkStatus();
}

bool CudaStep::Selects(const Part& part, int layer) const {
  return part.selects && layer >= part.plan.n_dense_layers;
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

cuda::DeviceRows CudaStep::BoundsOf(const Part& part, int layer) const {
  const int32_t stride = ws_.capacity_.blocks;
  return cuda::IndexRows(ws_.blocks_.device.as<uint64_t>() + int64_t{part.first} * stride, stride,
                         members_[part.first].state->index(), 0, layer, 0);
}

cuda::DeviceSelection CudaStep::SelectionOf(const Part& part, int layer) const {
  if (!Selects(part, layer)) return {};
  cuda::DeviceSelection selection;
  if (part.plan.selector == SelectorKind::kWindow) {
    selection.sink_end = ws_.Ints(PerMember::kSinkEnd) + part.first;
    selection.recent_begin = ws_.Ints(PerMember::kRecentBegin) + part.first;
    return selection;
  }
  const int64_t list = int64_t{part.first} * geometry().kv_heads;
  selection.unit_tokens = part.plan.page;
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

Status CudaStep::SelectFrom(int layer, const Rows& q) {
  const int32_t heads = geometry().query_heads;
  Rows dense{};
  for (const Part& part : parts_) {
    if (!Selects(part, layer) || part.plan.selector == SelectorKind::kWindow) continue;
    if (dense.data == nullptr) {
      dense = q;
      if (!IsDense(q.data, q.token_stride, q.head_stride, q.dtype, heads)) {
        KVS_ASSIGN_OR_RETURN(dense, Copied(q, heads, q.dtype, &ws_.dense_q_));
      }
    }
    KVS_RETURN_IF_ERROR(SelectPart(part, layer, dense));
  }
  selected_layer_ = layer;
  return OkStatus();
}

// For the first new token of each member.
Status CudaStep::SelectPart(const Part& part, int layer, const Rows& q) {
  const std::byte* const queries = RowAt(q, first_row_[part.first]);
  KVS_RETURN_IF_ERROR(part.plan.group_softmax ? VoteBounds(part, layer, queries, q.dtype)
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
  return Check(ops_.score(w, stream_), "op score");
}

Status CudaStep::VoteBounds(const Part& part, int layer, const std::byte* q, DType dtype) {
  cuda::VoteBatch w;
  w.rows = BoundsOf(part, layer);
  w.fields = 2;
  w.field_stride = FieldStride(members_[part.first].state->index());
  w.scale = ScaleOf(geometry());
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
  KVS_ASSIGN_OR_RETURN(const Rows given, OnDevice(q, g.query_heads, &ws_.host_q_));
  if (selected_layer_ != layer) KVS_RETURN_IF_ERROR(SelectFrom(layer, given));
  Rows queries = given;
  const bool usable = given.dtype == g.dtype && IsAligned(given.data) &&
                      given.head_stride == g.row_bytes() && given.token_stride % kVector == 0;
  if (!usable) {
    KVS_ASSIGN_OR_RETURN(queries, Copied(given, g.query_heads, g.dtype, &ws_.native_q_));
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
  for (const Part& part : parts_) {
    KVS_RETURN_IF_ERROR(AttendPart(part, layer, queries, dense, sums));
  }
  if (!in_place) KVS_RETURN_IF_ERROR(StoreOutput(out, out_device));
  if (!lse_device) KVS_RETURN_IF_ERROR(CopyToHost(lse, sums, lse_bytes));
  if (shape != nullptr) shape->attended[layer] = 1;
  return OkStatus();
}

Status CudaStep::AttendPart(const Part& part, int layer, const Rows& q, const MutableRows& out,
                            float* lse) {
  const Geometry& g = geometry();
  cuda::AttendRawBatch w;
  w.layer = PagesOf(part, layer);
  w.selection = SelectionOf(part, layer);
  w.group = g.group();
  w.scale = ScaleOf(g);
  w.counters = ws_.attend_counters_.as<uint32_t>();
  w.workspace = ws_.attend_workspace_.as<float>();
  const int32_t first = first_row_[part.first];
  if (part.new_tokens == 1) return AttendItems(w, first, part.count, q, out, lse);
  // Every new token is an item with the same row of the page table. A selection has one list for
  // all of them, which the op cannot share between items.
  w.layer.page_stride = 0;
  const int32_t at_once = Selects(part, layer) ? 1 : CudaWorkspace::kItemsPerLaunch;
  for (int32_t t = 0; t < part.new_tokens; t += at_once) {
    const int32_t items = std::min(at_once, part.new_tokens - t);
    KVS_RETURN_IF_ERROR(AttendItems(w, first + t, items, q, out, lse));
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
  w.to.rows = out.data + row * out.token_stride;
  w.to.dtype = out.dtype;
  w.to.lse = lse == nullptr ? nullptr : lse + int64_t{row} * geometry().query_heads;
  return Check(ops_.attend_raw(w, stream_), "op attend_raw");
}

// From the dense outputs in out_ to where the caller wants them.
Status CudaStep::StoreOutput(const MutableRows& out, bool on_device) {
  const Geometry& g = geometry();
  const int64_t row = g.head_dim * SizeOf(out.dtype);
  if (on_device) {
    cuda::CopyRowsBatch w;
    w.from = ws_.out_.as<std::byte>();
    w.from_head_stride = row;
    w.from_row_stride = g.query_heads * row;
    w.from_dtype = w.to_dtype = out.dtype;
    w.to = out.data;
    w.to_row_stride = out.token_stride;
    w.to_head_stride = out.head_stride;
    w.rows = tokens_;
    w.heads = g.query_heads;
    w.dim = g.head_dim;
    return Check(ops_.copy_rows(w, stream_), "op copy_rows");
  }
  std::vector<std::byte> rows(static_cast<size_t>(tokens_ * g.query_heads * row));
  KVS_RETURN_IF_ERROR(CopyToHost(rows.data(), ws_.out_.as<std::byte>(), rows.size()));
  const std::byte* from = rows.data();
  for (int32_t t = 0; t < tokens_; ++t) {
    for (int32_t h = 0; h < g.query_heads; ++h, from += row) {
      std::memcpy(out.data + t * out.token_stride + h * out.head_stride, from,
                  static_cast<size_t>(row));
    }
  }
  return OkStatus();
}

Status CudaStep::CopyToHost(void* to, const void* from, uint64_t bytes) const {
  KVS_RETURN_IF_ERROR(Check(ops_.copy_async(to, from, bytes, stream_), "copying from the GPU"));
  return Check(ops_.synchronize(stream_), "copying from the GPU");
}

}  // namespace kvstrata
