// SPDX-License-Identifier: Apache-2.0
// Words in which kernels note that rows of a sequence are not finite, in another order than that of
// the batch.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {

class NotedWords {
 public:
  explicit NotedWords(int batch) : batch_(batch) {
    void* at = nullptr;
    Check(kvs_cuda_ops()->allocate_page_locked((batch + 2) * sizeof(uint32_t), &at), "words");
    words_ = static_cast<uint32_t*>(at);
    Clear();
    std::vector<int32_t> of;
    for (int b = 0; b < batch; ++b) of.push_back(batch - b);
    of_ = DeviceArray<int32_t>(of);
  }
  NotedWords(const NotedWords&) = delete;
  ~NotedWords() { (void)kvs_cuda_ops()->free_page_locked(words_); }

  NotFiniteWords Asked() const { return {words_, of_.get()}; }
  void Clear() { std::fill_n(words_, batch_ + 2, 0u); }
  // By sequence. REQUIRES: kernels are done. The words beside are as they were.
  std::vector<bool> Noted() const {
    EXPECT_EQ(words_[0], 0u);
    EXPECT_EQ(words_[batch_ + 1], 0u);
    std::vector<bool> noted;
    for (int b = 0; b < batch_; ++b) noted.push_back(words_[batch_ - b] != 0);
    return noted;
  }

 private:
  const int batch_;
  uint32_t* words_ = nullptr;
  DeviceArray<int32_t> of_;
};

}  // namespace kvstrata::cuda
