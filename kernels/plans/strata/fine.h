// SPDX-License-Identifier: Apache-2.0
// Selector `fine`, for CPU and GPU: everything is attended, and which rows of codec planes are read
// by all of their planes is op attend_planes' to find, by the rule that is made of a plan here.
//
// Pure; any thread.
#pragma once

#include <cstdint>

#include "kernels/plan/plan.h"
#include "kernels/rows/selection.h"

namespace kvstrata {

PlanesRule PlanesRuleOf(const Plan& plan);

// What a query attends whose own token is number n.
void SelectFine(const Plan& plan, int32_t n, Selection* out);

}  // namespace kvstrata
