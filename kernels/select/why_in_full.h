// SPDX-License-Identifier: Apache-2.0
// Why decode steps of a sequence attend everything, as far as its plan and lengths say: for the
// process that runs its steps, whose status begins with it (kernels/step/status_text.cc), and for
// the daemon, which knows no more of most sequences.
//
// Pure; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/plan/plan.h"

namespace kvstrata {

// The plan is not at work yet: the sequence of `tokens` is short, or its prompt is open. "": it is.
std::string WhyNotAtWork(const Plan& plan, int32_t tokens, bool prompt_complete);

// That, or a budget that holds all, or a plan that reads all. "": steps choose, as far as that
// says.
std::string WhyInFull(const Plan& plan, int32_t tokens, bool prompt_complete);

}  // namespace kvstrata
