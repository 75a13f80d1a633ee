#include "kernels/step/cuda_step.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "kernels/step/cuda_shadow.h"

namespace kvstrata {

CudaStep::CudaStep(std::vector<StepMember> members, CudaWorkspace* workspace, cuda::Stream stream,
                   Exit exit)
    : CudaFrame(std::move(members), workspace, stream), exit_(exit) {
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
  KVS_RETURN_IF_ERROR(workspace->Fit(*step, step->parts_));
  KVS_RETURN_IF_ERROR(step->memory().Follow(stream));
  KVS_RETURN_IF_ERROR(step->Prepare());
  step->begun_ = workspace->in_step_ = true;
  return step;
}

void CudaStep::Shadow(int member, CudaShadow* shadow) {
  KVS_CHECK(Decodes(member));
  shadow->Restart(IsRawGone(members_[member]));
  shadows_.resize(static_cast<size_t>(members()));
  shadows_[static_cast<size_t>(member)] = shadow;
}

// What is captured, or replayed, is not measured.
void CudaStep::NoteCapturedShadows() {
  for (CudaShadow* const shadow : shadows_) {
    if (shadow != nullptr) shadow->NoteCaptured();
  }
}

void CudaStep::CutParts() {
  for (const auto& selector : ws_.selectors_) {
    if (selector != nullptr) selector->Open(*this);
  }
  for (int i = 0; i < members(); ++i) {
    const size_t before = parts_.size();
    CudaSelector* const selector = ws_.SelectorOf(plan(i));
    CudaCodec* const codec = ws_.CodecOf(plan(i));
    if (selector != nullptr) {
      selector->Cut(*this, i, &parts_);
    } else {
      CudaPart& part = parts_.emplace_back();
      part.first = i;
      part.new_tokens = member(i).new_tokens;
      part.selects = codec != nullptr && state(i).prompt_tokens() >= 0;
    }
    for (CudaPart& part : std::span(parts_).subspan(before)) {
      if (!part.selects && !part.observes) continue;
      part.plan = plan(i);
      part.selector = selector;
      part.codec = part.selects ? codec : nullptr;
      part.promotes = part.selects && !part.prompt && part.new_tokens == 1 &&
                      CudaFarPages::MayPromote(*this, i);
    }
    JoinLastPart();
  }
  decodes_ = std::ranges::all_of(parts_, [](const CudaPart& part) {
    return part.new_tokens == 1 && !part.prompt && !part.observes;
  });
  const bool idle = IsShort();
  for (CudaPart& part : parts_) {
    part.idle = idle && part.selects && !part.prompt && part.selector != nullptr &&
                part.selector->IdlesWhenShort();
  }
}

// Members that follow each other and attend alike share launches.
void CudaStep::JoinLastPart() {
  if (parts_.size() < 2) return;
  const CudaPart& part = parts_.back();
  CudaPart& last = parts_[parts_.size() - 2];
  const bool alike = part.new_tokens == 1 && last.new_tokens == 1 && !part.prompt && !last.prompt &&
                     part.selects == last.selects && part.observes == last.observes &&
                     part.plan == last.plan;
  if (!alike) return;
  ++last.count;
  last.promotes |= part.promotes;
  parts_.pop_back();
}

bool CudaStep::IsShort() const {
  return std::ranges::all_of(parts_, [this](const CudaPart& part) {
    if (!part.selects || part.prompt || part.selector == nullptr ||
        !part.selector->IdlesWhenShort()) {
      return true;
    }
    const auto members = std::span(members_).subspan(static_cast<size_t>(part.first),
                                                     static_cast<size_t>(part.count));
    return std::ranges::all_of(
        members, [&part](const StepMember& m) { return m.view.tokens + 1 < part.plan.min_tokens; });
  });
}

// What Begin does on the stream.
Status CudaStep::Prepare() {
  KVS_RETURN_IF_ERROR(memory().OpenSlot());
  Status status = Stage();
  if (status.ok()) status = Summarize();
  for (const auto& selector : ws_.selectors_) {
    if (status.ok() && selector != nullptr) status = selector->Begin(this);
  }
  // Ops read what Begin made ahead of the kernels before them (launch.cuh): no op may start while a
  // kernel of Begin's runs.
  if (status.ok() && launched_) status = memory().Separate(stream_);
  if (status.ok()) status = memory().CloseSlot(stream_);
  if (!status.ok()) (void)ops_.synchronize(stream_);  // a part of it may be under way
  return status;
}

// Lengths of this step, and what follows from them.
Status CudaStep::Stage() {
  for (const auto& selector : ws_.selectors_) {
    if (selector != nullptr) KVS_RETURN_IF_ERROR(selector->Stage(this));
  }
  KVS_RETURN_IF_ERROR(ws_.packed_.Stage(this));
  KVS_RETURN_IF_ERROR(ws_.spans_.Stage(this));
  KVS_RETURN_IF_ERROR(ws_.far_pages_.Stage(this));
  return StageRows();
}

Status CudaStep::StageRows() {
  int32_t* const starts = memory().StagedStarts();
  int32_t* const visible = memory().StagedVisible();
  starts[members()] = tokens_;
  const int32_t page = geometry().page_tokens;
  for (int i = 0; i < members(); ++i) {
    const StepMember& m = members_[i];
    const int32_t tokens = m.view.tokens + m.new_tokens;
    memory().At(ws_.lengths_, i) = tokens;
    memory().At(ws_.from_, i) = m.state->indexed_tokens_;
    memory().At(ws_.to_, i) = m.view.tokens;
    starts[i] = first_row_[i];
    for (int32_t t = 0; t < m.new_tokens; ++t) visible[first_row_[i] + t] = m.view.tokens + 1 + t;
    const std::span pages(m.view.pages, static_cast<size_t>((tokens + page - 1) / page));
    KVS_RETURN_IF_ERROR(memory().Write(&ws_.pages_, i, std::as_bytes(pages), stream_));
    const std::span blocks(m.view.index_blocks,
                           static_cast<size_t>(m.state->index().BlocksFor(m.view.tokens)));
    KVS_RETURN_IF_ERROR(memory().Write(&ws_.blocks_, i, std::as_bytes(blocks), stream_));
  }
  return memory().CopyColumns(tokens_, stream_);
}

// Rows of the units that were completed since the index was written last, in all layers. A coarser
// level's come from those of the level below, which are written before.
Status CudaStep::Summarize() {
  for (int first = 0, last; first < members(); first = last) {
    const IndexLayout& index = state(first).index();
    for (last = first + 1; last < members() && state(last).index() == index;) ++last;
    if (index.kind == IndexLayout::Kind::kNone) continue;
    for (int level = 0; level < index.level_count; ++level) {
      KVS_RETURN_IF_ERROR(SummarizeLevel(first, last - first, level));
    }
  }
  for (const StepMember& m : members_) m.state->indexed_tokens_ = m.state->tokens_;
  return OkStatus();
}

Status CudaStep::SummarizeLevel(int first, int count, int level) {
  const IndexLayout& index = state(first).index();
  int32_t units = 0;
  for (int i = first; i < first + count; ++i) {
    units = std::max(units, index.UnitsFor(level, state(i).tokens_) -
                                index.UnitsFor(level, state(i).indexed_tokens_));
  }
  const bool means = index.kind == IndexLayout::Kind::kMean;
  cuda::SummarizeBatch w;
  w.kind = means ? cuda::SummarizeBatch::Kind::kMean : cuda::SummarizeBatch::Kind::kMinMax;
  w.source = level == 0 ? cuda::KeyRows(PagesOf(first, 0)) : IndexRowsOf(first, level - 1, 0);
  w.summary = IndexRowsOf(first, level, 0);
  w.field_stride = means ? 0 : index.field_stride();
  w.row_tokens = level == 0 ? 1 : index.levels[level - 1].unit_tokens;
  w.unit_rows = index.levels[level].unit_tokens / w.row_tokens;
  w.from = memory().On(ws_.from_, first);
  w.to = memory().On(ws_.to_, first);
  w.batch = count;
  w.units_max = units;
  w.layers = geometry().layers;
  w.source_layer_stride =
      level == 0 ? PageLayout::Of(geometry()).layer_stride : index.layer_stride(level - 1);
  w.summary_layer_stride = index.layer_stride(level);
  launched_ |= units > 0;
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
  (void)AwaitBegin();
  if (exit_.address == nullptr) return;
  std::atomic_ref<uint64_t>(*exit_.address).store(exit_.value, std::memory_order_release);
}

Status CudaStep::WriteExit(cuda::Stream stream) {
  if (exit_.address != nullptr) {
    KVS_RETURN_IF_ERROR(
        Check(ops_.write_value(exit_.address, exit_.value, stream), "leaving the epoch"));
  }
  return memory().MarkEnd(stream);
}

Status CudaStep::CopyMovedPages(cuda::Stream stream) {
  const auto bytes = static_cast<uint64_t>(geometry().page_bytes());
  for (const MovedPage& page : moved_pages_) {
    KVS_RETURN_IF_ERROR(
        Check(ops_.copy_async(page.to, page.from, bytes, stream), "copying a forked page"));
  }
  return OkStatus();
}

Status CudaStep::End(cuda::Stream stream) {
  KVS_ASSIGN_OR_RETURN(const bool capturing, IsCapturing(stream));
  if (capturing) {
    return FailedPrecondition("CAPTURE_END",
                              "the stream is being captured; end the capture, launch its graph, "
                              "then end the step");
  }
  KVS_RETURN_IF_ERROR(AppendPending());
  KVS_RETURN_IF_ERROR(CopyMovedPages(stream));
  for (CudaShadow* const shadow : shadows_) {
    if (shadow != nullptr) shadow->CopyOut(stream);
  }
  KVS_RETURN_IF_ERROR(WriteExit(stream));
  ended_ = true;
  ws_.in_step_ = false;
  for (const StepMember& m : members_) {
    if (!m.kept) continue;
    m.state->selector_->Advance(m.new_tokens);
    m.state->tokens_ += m.new_tokens;
  }
  return OkStatus();
}

CudaGraphs::Captured* CudaStep::BatchUnderCapture() {
  const Result<bool> capturing = IsCapturing(stream_);
  if (!capturing.ok() || !capturing.value()) return nullptr;
  return &ws_.graphs_.CaptureOf(memory().generation(), parts_);
}

// One that promotes serves members without pages in the host's memory, too, and one that selects
// short members.
bool CudaStep::Serves(std::vector<CudaPart> captured) const {
  for (size_t i = 0; i < captured.size() && i < parts_.size(); ++i) {
    captured[i].promotes = captured[i].promotes && parts_[i].promotes;
    captured[i].idle = captured[i].idle || parts_[i].idle;
  }
  return captured == parts_;
}

Status CudaStep::Replay() {
  const auto all = [](const std::vector<uint8_t>& layers) {
    return std::ranges::all_of(layers, [](uint8_t done) { return done != 0; });
  };
  for (const CudaGraphs::Captured& batch : ws_.graphs_.captured(memory().generation())) {
    if (!Serves(batch.parts) || !all(batch.appended) || !all(batch.attended)) continue;
    selected_layer_ = geometry().layers - 1;
    NoteCapturedShadows();
    for (const CudaPart& part : parts_) {
      if (part.selector == nullptr) continue;
      for (int layer = part.plan.n_dense_layers; layer < geometry().layers; ++layer) {
        part.selector->NoteReplayed(*this, part, layer);
      }
    }
    return OkStatus();
  }
  return FailedPrecondition("GRAPH_STALE",
                            "no graph of all layers was captured of such a batch at generation " +
                                std::to_string(memory().generation()) +
                                " of its workspace; run the layers, or capture them anew");
}

}  // namespace kvstrata
