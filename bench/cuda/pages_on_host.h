// SPDX-License-Identifier: Apache-2.0
// Pages in page-locked host memory, and a hot cache that op promote fills from them: two
// selections, alternating, each of which evicts all of the other, so that every promotion copies
// all that it selects. One layer of Llama-3.1-8B: a slice is 4 KiB of keys and 4 KiB of values at
// another place.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {

class PagesOnHost {
 public:
  static constexpr int32_t kPages = 8192, kPageTokens = 16, kKvHeads = 8, kDim = 128;
  static constexpr int64_t kPieceBytes = kPageTokens * kDim * 2;
  static constexpr int64_t kPageBytes = 2 * kKvHeads * kPieceBytes;

  // Each selection has `listed` pages of each KV head.
  explicit PagesOnHost(int32_t listed)
      : listed_(listed),
        slots_(static_cast<size_t>(listed * kPageBytes)),
        owners_(Zeros<int32_t>(kKvHeads * listed)),
        stamps_(Zeros<int32_t>(kKvHeads * listed)),
        entries_(Zeros<uint64_t>(kKvHeads * kPages)),
        pages_(Zeros<uint64_t>(kPages)),
        counts_(std::vector<int32_t>(kKvHeads, listed)),
        sink_end_(std::vector<int32_t>{0}),
        recent_begin_(std::vector<int32_t>{kTokens}),
        tokens_{DeviceArray<int32_t>(std::vector<int32_t>{kTokens}),
                DeviceArray<int32_t>(std::vector<int32_t>{kTokens + 1})},
        counters_(Zeros<uint32_t>(kKvHeads)) {
    void* memory = nullptr;
    Check(cudaMallocHost(&memory, kPages * kPageBytes), "cudaMallocHost");
    memory_.reset(static_cast<std::byte*>(memory));
    std::memset(memory_.get(), 0, kPages * kPageBytes);
    hot_ = DeviceArray<HotPages>(std::vector<HotPages>{Table()});
    Place();
    Select();
  }

  int64_t bytes() const { return listed_ * kPageBytes; }
  // Promotes selection 0 or 1; returns 0 or an error of CUDA.
  int Promote(int which, cudaStream_t stream) const {
    PromoteBatch w;
    w.layer.hot = hot_.get();
    w.layer.page_tokens = kPageTokens;
    w.layer.kv_heads = kKvHeads;
    w.layer.head_dim = kDim;
    w.layer.value_offset = kKvHeads * kPieceBytes;
    w.layer.head_stride = kPieceBytes;
    w.layer.slot_stride = kDim * 2;
    w.selection = {kPageTokens,     kKvHeads,           listed_, units_[which].get(), counts_.get(),
                   sink_end_.get(), recent_begin_.get()};
    w.batch = 1;
    w.layer_bytes = kPageBytes;
    w.tokens = tokens_[which].get();
    w.committed = recent_begin_.get();
    w.counters = counters_.get();
    return kvs_cuda_ops()->promote(w, stream);
  }

 private:
  static constexpr int32_t kTokens = kPages * kPageTokens;

  template <typename T>
  static std::vector<T> Zeros(int32_t n) {
    return std::vector<T>(static_cast<size_t>(n));
  }
  HotPages Table() const {
    return {entries_.get(), pages_.get(), slots_.address(), owners_.get(),
            stamps_.get(),  kPages,       listed_};
  }
  // Pages lie in random order.
  void Place() {
    std::vector<uint64_t> pages;
    for (int32_t i = 0; i < kPages; ++i) {
      pages.push_back(reinterpret_cast<uint64_t>(memory_.get() + i * kPageBytes) | kHostPage);
    }
    std::shuffle(pages.begin(), pages.end(), rng_);
    const DeviceArray<uint64_t> device(pages);
    Check(kvs_cuda_ops()->rebase({Table(), device.get(), 0, kPages, 1, kKvHeads, kPageBytes},
                                 nullptr),
          "rebase");
    Check(cudaDeviceSynchronize(), "rebase");
  }
  void Select() {
    std::vector<int32_t> all(kPages), units[2];
    std::iota(all.begin(), all.end(), 0);
    for (int head = 0; head < kKvHeads; ++head) {
      std::shuffle(all.begin(), all.end(), rng_);
      for (int which = 0; which < 2; ++which) {
        const auto first = all.begin() + which * listed_;
        std::sort(first, first + listed_);
        units[which].insert(units[which].end(), first, first + listed_);
      }
    }
    for (int which = 0; which < 2; ++which) units_[which] = DeviceArray<int32_t>(units[which]);
  }

  struct FreePageLocked {
    void operator()(std::byte* memory) const { cudaFreeHost(memory); }
  };
  const int32_t listed_;
  std::mt19937 rng_{std::random_device{}()};
  std::unique_ptr<std::byte, FreePageLocked> memory_;
  DeviceArray<std::byte> slots_;
  DeviceArray<int32_t> owners_, stamps_;
  DeviceArray<uint64_t> entries_, pages_;
  DeviceArray<int32_t> units_[2], counts_, sink_end_, recent_begin_, tokens_[2];
  DeviceArray<uint32_t> counters_;
  DeviceArray<HotPages> hot_;
};

}  // namespace kvstrata::cuda
