// SPDX-License-Identifier: Apache-2.0
// What is said of a step's new rows that are not finite: op append says whether there are any, this
// finds where. Rows that somebody else wrote to their pages are looked at here.
//
// Threads: as the step's. Cost: reads the rows.
#pragma once

#include "base/status.h"
#include "kernels/step/step_batch.h"

namespace kvstrata {

// INVALID_ARGUMENT TENSOR_NOT_FINITE names the first element of k and v that no page holds as a
// finite number: [token][head][channel]. k, v: of host memory, of all new tokens of the batch.
Status CheckFinite(const StepBatch& batch, const Rows& k, const Rows& v);

// The same of the members' new rows of `layer` where they lie on the members' pages.
Status CheckWritten(const StepBatch& batch, int layer);

}  // namespace kvstrata
