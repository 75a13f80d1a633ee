// SPDX-License-Identifier: Apache-2.0
// BlockMemory: a GPU's memory by a table of ops, for tests of attention over blocks. Calls wait
// until they are done; what fails is a test's failure. Freed at its end.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_ops.h"

namespace kvstrata {

class BlockMemory {
 public:
  explicit BlockMemory(const cuda::CudaOps& ops) : ops_(ops) {}
  ~BlockMemory() {
    EndStep();
    for (std::byte* memory : memories_) ops_.free_device(memory);
    for (std::byte* memory : host_memories_) ops_.free_page_locked(memory);
  }
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;

  std::byte* Allocate(size_t bytes) {
    memories_.push_back(New(bytes));
    return memories_.back();
  }
  // The host's, which the GPU has at the same address.
  std::byte* AllocateOnHost(size_t bytes) {
    void* at = nullptr;
    EXPECT_EQ(ops_.allocate_page_locked(bytes, &at), 0);
    host_memories_.push_back(static_cast<std::byte*>(at));
    return host_memories_.back();
  }
  // A copy that lives until EndStep.
  std::byte* Keep(const void* from, size_t bytes) {
    step_memories_.push_back(New(std::max<size_t>(bytes, 16)));
    Upload(step_memories_.back(), from, bytes);
    return step_memories_.back();
  }
  void EndStep() {
    for (std::byte* memory : std::exchange(step_memories_, {})) ops_.free_device(memory);
  }

  void Upload(std::byte* to, const void* from, size_t bytes) const {
    EXPECT_EQ(ops_.copy_async(to, from, bytes, nullptr) + ops_.synchronize(nullptr), 0);
  }
  void Download(void* to, const std::byte* from, size_t bytes) const {
    EXPECT_EQ(ops_.copy_async(to, from, bytes, nullptr) + ops_.synchronize(nullptr), 0);
  }
  void Zero(std::byte* at, size_t bytes) const {
    EXPECT_EQ(ops_.zero_async(at, bytes, nullptr) + ops_.synchronize(nullptr), 0);
  }

 private:
  std::byte* New(size_t bytes) const {
    void* at = nullptr;
    EXPECT_EQ(ops_.allocate_device(bytes, &at), 0);
    return static_cast<std::byte*>(at);
  }

  const cuda::CudaOps& ops_;
  std::vector<std::byte*> memories_, host_memories_, step_memories_;
};

}  // namespace kvstrata
