// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/cuda_step.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "kernels/step/gpu/cuda_shadow.h"
#include "kernels/step/gpu/frame/cuda_parts.h"
#include "kernels/step/gpu/frame/cuda_selector.h"

namespace kvstrata {

CudaStep::CudaStep(std::vector<StepMember> members, CudaWorkspace* workspace, cuda::Stream stream,
                   Exit exit)
    : CudaFrame(std::move(members), workspace, stream), exit_(exit) {
  parts_ = CutParts(*this, ws_);
  decodes_ = kvstrata::Decodes(parts_);
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

// What Begin does on the stream.
Status CudaStep::Prepare() {
  KVS_RETURN_IF_ERROR(memory().slots().Open());
  Status status = Stage();
  if (status.ok()) status = ws_.index_.Summarize(this);
  for (const auto& enqueue : once_indexed_) {
    if (status.ok()) status = enqueue();
  }
  once_indexed_.clear();
  // Ops read what Begin made ahead of the kernels before them (launch.cuh): no op may start while a
  // kernel of Begin's runs.
  if (status.ok() && launched_) status = memory().Separate(stream_);
  if (status.ok()) status = memory().slots().Close(stream_);
  if (!status.ok()) (void)ops_.synchronize(stream_);  // a part of it may be under way
  return status;
}

// Lengths of this step, and what follows from them.
Status CudaStep::Stage() {
  for (const auto& selector : ws_.selectors_) {
    if (selector != nullptr) KVS_RETURN_IF_ERROR(selector->Stage(this));
  }
  for (const auto& codec : ws_.codecs_) {
    if (codec != nullptr) KVS_RETURN_IF_ERROR(codec->Stage(this));
  }
  KVS_RETURN_IF_ERROR(ws_.index_.Stage(this));
  KVS_RETURN_IF_ERROR(ws_.host_pages_.Stage(this));
  int32_t* const starts = memory().StagedStarts();
  int32_t* const visible = memory().StagedVisible();
  starts[members()] = tokens_;
  const int32_t page = geometry().page_tokens;
  for (int i = 0; i < members(); ++i) {
    const StepMember& m = members_[i];
    const int32_t tokens = m.view.tokens + m.new_tokens;
    memory().At(ws_.lengths_, i) = tokens;
    memory().At(ws_.words_, i) = m.not_finite_word;
    starts[i] = first_row_[i];
    for (int32_t t = 0; t < m.new_tokens; ++t) visible[first_row_[i] + t] = m.view.tokens + 1 + t;
    const std::span pages(m.view.pages, static_cast<size_t>((tokens + page - 1) / page));
    KVS_RETURN_IF_ERROR(memory().Write(&ws_.pages_, i, std::as_bytes(pages), stream_));
  }
  return memory().CopyColumns(tokens_, stream_);
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

Status CudaStep::End(cuda::Stream stream) {
  KVS_ASSIGN_OR_RETURN(const bool capturing, IsCapturing(stream));
  if (capturing) {
    return FailedPrecondition("CAPTURE_END",
                              "the stream is being captured; end the capture, launch its graph, "
                              "then end the step");
  }
  KVS_RETURN_IF_ERROR(AppendPending());
  const auto page_bytes = static_cast<uint64_t>(geometry().page_bytes());
  for (const auto& [from, to] : moved_pages_) {
    KVS_RETURN_IF_ERROR(
        Check(ops_.copy_async(to, from, page_bytes, stream), "copying a forked page"));
  }
  for (CudaShadow* const shadow : shadows_) {
    if (shadow != nullptr) shadow->CopyOut(stream);
  }
  KVS_RETURN_IF_ERROR(WriteExit(stream));
  ended_ = true;
  ws_.in_step_ = false;
  for (const StepMember& m : members_) {
    if (m.kept) m.state->Advance(m.new_tokens);
  }
  return OkStatus();
}

CudaGraphs::Captured* CudaStep::BatchUnderCapture() {
  const Result<bool> capturing = IsCapturing(stream_);
  if (!capturing.ok() || !capturing.value()) return nullptr;
  return &ws_.graphs_.CaptureOf(memory().generation(), parts_);
}

Status CudaStep::Replay() {
  const auto all = [](const std::vector<uint8_t>& layers) {
    return std::ranges::all_of(layers, [](uint8_t done) { return done != 0; });
  };
  for (const CudaGraphs::Captured& batch : ws_.graphs_.captured(memory().generation())) {
    if (!Serves(batch.parts, parts_) || !all(batch.appended) || !all(batch.attended)) continue;
    selected_layer_ = geometry().layers - 1;
    NoteCapturedShadows();
    for (const CudaPart& part : parts_) {
      if (!part.observes) continue;
      CudaObserver& observer = *part.selector->traits(part.plan).observer;
      for (int layer = part.plan.n_dense_layers; layer < geometry().layers; ++layer) {
        observer.NoteReplayed(*this, part, layer);
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
