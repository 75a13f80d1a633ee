// SPDX-License-Identifier: Apache-2.0
// main of every GPU test: without a GPU it says so and exits with 77, which ctest shows as skipped.
// The seed of all random inputs is new at every run and printed; KVS_TEST_SEED sets it.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {

uint64_t TestSeed() {
  static const uint64_t seed = [] {
    const char* set = std::getenv("KVS_TEST_SEED");
    return set != nullptr ? std::strtoull(set, nullptr, 10) : std::random_device()();
  }();
  return seed;
}

}  // namespace kvstrata::cuda

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (kvs_cuda_ops()->device_count() == 0) {
    std::fprintf(stderr, "SKIPPED: no GPU is visible; every test of this program was left out\n");
    return 77;
  }
  std::printf("KVS_TEST_SEED=%llu\n", static_cast<unsigned long long>(kvstrata::cuda::TestSeed()));
  return RUN_ALL_TESTS();
}
