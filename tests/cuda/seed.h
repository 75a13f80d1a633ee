// SPDX-License-Identifier: Apache-2.0
// The seed of this run's random inputs; printed by main.cc.
#pragma once

#include <cstdint>

namespace kvstrata::cuda {

uint64_t TestSeed();

}  // namespace kvstrata::cuda
