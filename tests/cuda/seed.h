// SPDX-License-Identifier: Apache-2.0
// The seed of this run's random inputs; printed by main.cc.
#ifndef KVSTRATA_TESTS_CUDA_SEED_H_
#define KVSTRATA_TESTS_CUDA_SEED_H_

#include <cstdint>

namespace kvstrata::cuda {

uint64_t TestSeed();

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_TESTS_CUDA_SEED_H_
