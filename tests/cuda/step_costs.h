// SPDX-License-Identifier: Apache-2.0
// What a CudaStep says of what a layer read, held to what a Step says.
#pragma once

#include <gtest/gtest.h>

#include "kernels/select/selection_rule.h"
#include "tests/cuda/step_batch_fixture.h"

namespace kvstrata::cuda {

// Whether op attend_planes decides what of a sequence its next token reads: nobody reads that back.
inline bool OpDecides(const TwinSequence& s) {
  return s.plan.codec == CodecKind::kPlanes && s.on_host->prompt_tokens() >= 0 &&
         !AttendsInFull(s.plan, s.on_host->tokens() + 1);
}

inline void ExpectCost(const TwinSequence& s, const StepCost& got, const StepCost& want) {
  // Means of buckets are fp32 on a CPU and bf16 here.
  const uint64_t means = s.plan.selector == SelectorKind::kBucket ? 2 : 1;
  EXPECT_EQ(got.select_bytes * means, want.select_bytes);
  if (!OpDecides(s)) {
    // Without lower runs what is packed counts as coarse.
    EXPECT_EQ(got.rows + (s.extents->arriving() ? got.coarse_rows : 0), want.rows);
    EXPECT_EQ(got.attend_bytes, want.attend_bytes);
    return;
  }
  // The sample is read twice, what is always fine by octets, and what is left out is counted;
  // near-ties may be decided otherwise.
  EXPECT_GE(got.rows + got.coarse_rows, want.rows + want.coarse_rows);
  EXPECT_GE(got.attend_bytes * 100, want.attend_bytes * 95);
  EXPECT_LE(got.attend_bytes, want.attend_bytes * 4);
}

}  // namespace kvstrata::cuda
