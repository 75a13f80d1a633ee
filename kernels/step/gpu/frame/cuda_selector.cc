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

}  // namespace kvstrata
