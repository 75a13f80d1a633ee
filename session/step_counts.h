// SPDX-License-Identifier: Apache-2.0
// What a session's steps did, counted in its segment (proto/shm_layout.h, StepCounts), where the
// daemon reads it for telemetry, on either transport.
//
// Threads: any, at the same time. Cost: a relaxed addition or two.
#ifndef KVSTRATA_SESSION_STEP_COUNTS_H_
#define KVSTRATA_SESSION_STEP_COUNTS_H_

#include "kernels/step/step_batch.h"
#include "proto/shm_layout.h"

namespace kvstrata {

// The decode steps of a batch that ends: every member's, on a CPU and on a GPU.
void CountDecodes(const StepBatch& batch, shm::StepCounts* to);

// One layer's selection of a member that was just attended, on a CPU: a GPU decides by itself
// whether it keeps the last one, and nobody waits to hear of it.
void CountSelection(const StepMember& member, const Selection& selection, shm::StepCounts* to);

}  // namespace kvstrata

#endif  // KVSTRATA_SESSION_STEP_COUNTS_H_
