// SPDX-License-Identifier: Apache-2.0
// What a process without CUDA is told. Loading happens once a process, so every case has its own.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "kernels/cuda/cuda_library.h"

namespace kvstrata::cuda {
namespace {

// Ends the process, having printed what loading `library` says.
[[noreturn]] void PrintLoading(const char* library) {
  setenv("KVSTRATA_CUDA_LIBRARY", library, 1);
  const Result<const CudaOps*> ops = LoadCudaOps();
  std::cerr << (ops.ok() ? "loaded" : ops.status().ToString());
  std::exit(0);
}

TEST(CudaLoading, NamesTheFileThatIsMissing) {
  EXPECT_EXIT(PrintLoading("/nonexistent/libkvstrata_cuda.so"), ::testing::ExitedWithCode(0),
              "CUDA_LIBRARY.*/nonexistent/libkvstrata_cuda.so.*KVSTRATA_CUDA_LIBRARY");
}

TEST(CudaLoading, RefusesALibraryWithoutTheTable) {
  EXPECT_EXIT(PrintLoading("libc.so.6"), ::testing::ExitedWithCode(0), "CUDA_LIBRARY.*version");
}

#ifdef KVS_CUDA_LIBRARY
TEST(CudaLoading, SaysThatThereIsNoDevice) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  EXPECT_EXIT(PrintLoading(KVS_CUDA_LIBRARY), ::testing::ExitedWithCode(0),
              "CUDA_NO_DEVICE.*nvidia-smi");
}
#endif

}  // namespace
}  // namespace kvstrata::cuda
