// SPDX-License-Identifier: Apache-2.0
// The table can be loaded as daemon and client load it, and names its errors.
#include "kernels/cuda/cuda_library.h"

#include <gtest/gtest.h>

namespace kvstrata::cuda {
namespace {

TEST(CudaLibrary, LoadsBesideTheProgram) {
  const Result<const CudaOps*> ops = LoadCudaOps();
  ASSERT_TRUE(ops.ok()) << ops.status().ToString();
  EXPECT_EQ(ops.value()->version, kCudaOpsVersion);
  EXPECT_GE(ops.value()->device_count(), 1);
}

TEST(CudaLibrary, NamesErrors) { EXPECT_STREQ(kvs_cuda_ops()->error_text(0), "no error"); }

}  // namespace
}  // namespace kvstrata::cuda
