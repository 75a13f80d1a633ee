// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/frame/cuda_selector.h"

#include "kernels/step/gpu/frame/cuda_codec.h"
#include "kernels/step/gpu/frame/cuda_frame.h"

namespace kvstrata {

bool CudaSelector::Has(const CudaFrame& frame, int member) const {
  return frame.SelectorOf(member) == this;
}

bool CudaCodec::Has(const CudaFrame& frame, int member) const {
  return frame.CodecOf(member) == this;
}

void CudaSelector::Cut(const CudaFrame& frame, int member, std::vector<CudaPart>* parts) {
  CudaPart& part = parts->emplace_back();
  part.first = member;
  part.new_tokens = frame.member(member).new_tokens;
  part.selects = frame.state(member).prompt_tokens() >= 0;
}

Result<std::vector<int32_t>> CudaSelector::ReadKept(const CudaFrame&, int, int) const {
  return FailedPrecondition("KEPT_NONE", "no prompt tokens are kept for this member");
}

}  // namespace kvstrata
