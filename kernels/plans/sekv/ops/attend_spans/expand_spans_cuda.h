// SPDX-License-Identifier: Apache-2.0
// Op expand_spans on the GPU (contract: expand_spans.h).
//
// One kernel, a CTA a query head, in rounds: sums of rows over ranges of scores tell where the room
// ends, and the few spans of that range are ordered one by one; what lies before the first that
// does not fit is taken, and the next round is over those behind it that are no longer than the
// room that is left, which is less from round to round. The last CTA of a KV head joins the lists.
// The same input gives the same output. It is a chain of short passes that leaves SMs free: the
// kernel behind it may start there once all kernels before are complete. attend_spans reads raw
// rows then.
#pragma once

#include "kernels/plans/sekv/ops/attend_spans/expand_spans.h"

namespace kvstrata::cuda {

// cudaErrorInvalidValue: a shape that it does not take.
int ExpandSpansCuda(const ExpandSpansBatch& work, Stream stream);

}  // namespace kvstrata::cuda
