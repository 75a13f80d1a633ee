// SPDX-License-Identifier: Apache-2.0
// Op attend_spans on the GPU (contract: attend_spans.h).
//
// One kernel, as each of four would cost 3 us more, and warps that are short of one kind of work
// take another. Products in tensor cores: queries and B q as two bf16 numbers each, weights and
// p A rounded to bf16 (weights of rows in the model's dtype to that), sums in fp32. The same inputs
// on the same GPU give the same bits.
//
// Cost: reads each attended row or factor once, at any rank up to 32; beyond, B once for every 16
// tokens of its span.
#pragma once

#include "kernels/plans/sekv/ops/attend_spans/attend_spans.h"

namespace kvstrata::cuda {

int64_t AttendSpansWorkspaceBytes(const AttendSpansBatch& work);

// cudaErrorInvalidValue: a shape outside the ranges above. Calls that share counters or workspace
// must be ordered by a stream.
int AttendSpansCuda(const AttendSpansBatch& work, Stream stream);

}  // namespace kvstrata::cuda
