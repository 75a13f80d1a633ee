// SPDX-License-Identifier: Apache-2.0
// What a CudaStep selected, read back for tools and tests.

#include "kernels/step/gpu/cuda_step.h"
#include "kernels/step/gpu/frame/cuda_codec.h"
#include "kernels/step/gpu/frame/cuda_selector.h"
#include "kernels/step/step_cost.h"

namespace kvstrata {
Result<Selection> CudaStep::ReadSelection(int member) const {
  if (selected_layer_ < 0) {
    return FailedPrecondition("SELECTION_NONE", "no layer of this step was selected; attend one");
  }
  return ReadPart(PartOf(member), member);
}

Result<Selection> CudaStep::ReadPart(const CudaPart& part, int member) const {
  const int32_t n = members_[member].view.tokens + part.begin + 1;
  if (!Selects(part, selected_layer_)) return Selection::Full(n);
  KVS_RETURN_IF_ERROR(CheckReadable());
  return part.selector->Read(*this, part, member, n);
}

Result<std::vector<int32_t>> CudaStep::ReadKept(int member, int head) const {
  KVS_RETURN_IF_ERROR(CheckReadable());
  CudaSelector* const selector = ws_.SelectorOf(plan(member));
  const CudaObserver* const observer =
      selector == nullptr ? nullptr : selector->traits(plan(member)).observer;
  if (observer != nullptr) return observer->ReadKept(*this, member, head);
  return FailedPrecondition("KEPT_NONE", "no prompt tokens are kept for this member");
}

Status CudaStep::CheckReadable() const {
  KVS_ASSIGN_OR_RETURN(const bool capturing, IsCapturing(stream_));
  if (!capturing) return OkStatus();
  return FailedPrecondition("CAPTURE_READ", "a selection cannot be read while a graph is captured");
}

Result<StepCost> CudaStep::ReadCost(int member) const {
  KVS_RETURN_IF_ERROR(ReadSelection(member).status());
  std::vector<Selection> selections;
  std::vector<ReadChunk> chunks;
  const int32_t committed = members_[member].view.tokens;
  for (const CudaPart& part : parts_) {
    if (member < part.first || member >= part.first + part.count) continue;
    KVS_ASSIGN_OR_RETURN(selections.emplace_back(), ReadPart(part, member));
    chunks.push_back({nullptr, committed + part.begin, part.new_tokens});
  }
  for (size_t i = 0; i < chunks.size(); ++i) chunks[i].selection = &selections[i];
  const CudaCodec* const codec = PartOf(member).codec;
  const int32_t stored_end = codec == nullptr ? 0 : codec->EndOf(state(member));
  StepCost cost = CostOf(members_[member], selected_layer_, stored_end, chunks);
  if (codec != nullptr) {
    KVS_RETURN_IF_ERROR(CheckReadable());
    KVS_RETURN_IF_ERROR(codec->AddReads(*this, PartOf(member), member, selected_layer_, &cost));
  }
  return cost;
}

}  // namespace kvstrata
