// SPDX-License-Identifier: Apache-2.0
// Inspect of a sequence whose steps run on a GPU: its reported series, index rows and what its
// extents' descriptions hold. What its selector computes there is not read back.
#pragma once

#include <string_view>

#include "kernels/codec/extent_descriptions.h"
#include "kernels/cpu/executor.h"
#include "kernels/step/sequence_state.h"

namespace kvstrata {

// As SequenceState::Inspect; the view has `blocks` index blocks, which are copied by `read`. Also
// UNIMPLEMENTED CUDA_PLAN, which names the arrays that there are. REQUIRES: refreshed from `view`.
Result<InspectArray> InspectFromGpu(const SequenceState& state, SequenceView view, size_t blocks,
                                    const DeviceRead& read, Executor& executor,
                                    std::string_view name);

}  // namespace kvstrata
