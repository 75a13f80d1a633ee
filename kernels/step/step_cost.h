// SPDX-License-Identifier: Apache-2.0
// What attending a layer reads, counted from its selections: a row that several query heads of a
// group, several new tokens or several chunks of a prompt attend is read for its KV head once.
//
// Pure; any thread. Cost: the selections' runs once a KV head; lists of query heads are merged.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/step/step_batch.h"

namespace kvstrata {

// stored_end: positions below it are read where the member's codec holds them, others on pages.
// REQUIRES: chunks of the member's, in order; its state is refreshed from its view.
StepCost CostOf(const StepMember& member, int layer, int32_t stored_end,
                std::span<const ReadChunk> chunks);

}  // namespace kvstrata
