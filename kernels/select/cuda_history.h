// SPDX-License-Identifier: Apache-2.0
// CudaHistory: what a selector's half on a GPU keeps of one sequence from step to step, as
// SelectorHistory does on a CPU. It goes with the sequence's state, whatever batch, workspace or
// stream that is in; the plan's folder declares it. Threads: as SequenceState.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/plan/plan.h"
#include "kernels/rows/select_context.h"

namespace kvstrata {

class CudaHistory {
 public:
  virtual ~CudaHistory() = default;

  // A fork's. Memory is shared: from then on nobody writes it, and who steps next takes a copy of
  // his own.
  virtual std::shared_ptr<CudaHistory> Fork() = 0;
  // Tokens from `tokens` on are taken back. False: nothing of it stays good.
  virtual bool Truncate(int32_t tokens) = 0;
  // As Selector's, behind the prompt.
  virtual std::string StatusText(const Plan& plan, const SelectContext& context) const = 0;
};

}  // namespace kvstrata
