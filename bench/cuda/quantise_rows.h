// SPDX-License-Identifier: Apache-2.0
// Inputs of the rows `quantise` of cuda_bench: keys of 64K tokens and 32 layers on pages, and the
// index blocks that the index of `bits` fills (two bits, groups of 64).
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {

class QuantiseRows {
 public:
  static constexpr int kTokens = 65536, kLayers = 32, kHeads = 8, kDim = 128;
  static constexpr QuantisedGroup kFormat{kDim, 2, 64};
  static constexpr int kGroups = kTokens / kFormat.tokens;

  // Pages are scattered over the 8 GiB from `arena` on.
  explicit QuantiseRows(uint64_t arena)
      : pages_(Scattered(arena, kTokens / kPageTokens, int64_t{kLayers} * kLayerBytes)),
        rows_(size_t{kGroups / kBlockGroups} * kBlockBytes),
        blocks_(Scattered(rows_.address(), kGroups / kBlockGroups, kBlockBytes)) {
    for (int group = 0; group <= kGroups; ++group) ends_.push_back(group * kFormat.tokens);
    device_ends_ = DeviceArray<int32_t>(ends_);
  }

  // The groups [first, last) of all layers, in one launch.
  int Quantise(int first, int last, cudaStream_t stream) const {
    QuantiseKeysBatch work;
    work.keys = {pages_.get(), kTokens / kPageTokens, kPageTokens, kHeads,
                 kDim,         DType::kBF16,          0,           kPageTokens * kRow,
                 kRow};
    work.groups = {blocks_.get(),
                   kGroups / kBlockGroups,
                   kBlockGroups,
                   kHeads,
                   kFormat,
                   0,
                   kBlockGroups * kFormat.bytes()};
    work.from = device_ends_.get() + first;
    work.to = device_ends_.get() + last;
    work.batch = 1;
    work.groups_max = last - first;
    work.layers = kLayers;
    work.key_layer_stride = kLayerBytes;
    work.group_layer_stride = kHeads * kBlockGroups * kFormat.bytes();
    return kvs_cuda_ops()->quantise_keys(work, stream);
  }
  // Read and written for so many groups.
  static constexpr int64_t Bytes(int groups) {
    return int64_t{groups} * kLayers * kHeads * (kFormat.tokens * kRow + kFormat.bytes());
  }

 private:
  static constexpr int kPageTokens = 16, kBlockGroups = 8;
  static constexpr int64_t kRow = kDim * 2;
  static constexpr int64_t kLayerBytes = 2 * kHeads * kPageTokens * kRow;  // keys and values
  static constexpr int64_t kBlockBytes = kLayers * kHeads * kBlockGroups * kFormat.bytes();

  static DeviceArray<uint64_t> Scattered(uint64_t base, int count, int64_t bytes) {
    std::vector<uint64_t> at;
    for (int i = 0; i < count; ++i) at.push_back(base + static_cast<uint64_t>(i * bytes));
    std::mt19937 rng(std::random_device{}());
    std::shuffle(at.begin(), at.end(), rng);
    return DeviceArray<uint64_t>(at);
  }

  DeviceArray<uint64_t> pages_;
  DeviceArray<std::byte> rows_;
  DeviceArray<uint64_t> blocks_;
  std::vector<int32_t> ends_;
  DeviceArray<int32_t> device_ends_;
};

}  // namespace kvstrata::cuda
