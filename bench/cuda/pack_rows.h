// SPDX-License-Identifier: Apache-2.0
// Inputs of the rows `pack` and `flush` of cuda_bench: a prompt's raw rows of 32 layers on pages,
// and everything that its packed segment is made of. Keep 32 of 128, blocks of 8 (the preset).
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/plans/mosaickv/ops/attend_packed/attend_packed.h"
#include "kernels/plans/mosaickv/ops/packed_cuda_ops.h"
#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {

class PackRows {
 public:
  static constexpr int kTokens = 65536, kLayers = 32, kHeads = 8, kDim = 128;
  static constexpr int kItems = kLayers * 2 * kHeads;  // [layer][K|V][head]
  static constexpr int kFlushTokens = 32;
  // Layers of a graph of flushes: their rotations are six times what the L2 holds.
  static constexpr int kFlushes = 9 * kLayers;
  static constexpr int64_t kReadBytes = int64_t{kTokens} * kItems * kDim * 2;

  // Pages of 2 MiB are scattered over kReadBytes from `arena` on.
  explicit PackRows(uint64_t arena) {
    constexpr int64_t kPageBytes = int64_t{kPageTokens} * kItems * kDim * 2;
    std::vector<uint64_t> pages;
    for (int64_t i = 0; i < kTokens / kPageTokens; ++i) {
      pages.push_back(arena + static_cast<uint64_t>(i * kPageBytes));
    }
    std::mt19937 rng(std::random_device{}());
    std::shuffle(pages.begin(), pages.end(), rng);
    pages_ = DeviceArray<uint64_t>(pages);
    MakePack();
    MakeFlushes();
  }

  // For all layers.
  int Covariance(cudaStream_t stream) const { return Ops().covariance(sums_, stream); }
  int Eigen(cudaStream_t stream) const { return kvs_cuda_ops()->eigen(eigen_, stream); }
  int RotatePack(cudaStream_t stream) const { return Ops().rotate_pack(pack_, stream); }
  // For one layer; the n-th has rotations and rows of its own.
  int Flush(int n, cudaStream_t stream) const {
    RotatePackBatch work = pack_;
    work.items = flush_items_.get() + int64_t{n} * 2 * kHeads;
    work.count = 2 * kHeads;
    work.rows_max = kFlushTokens;
    return Ops().rotate_pack(work, stream);
  }
  // The flushes' rotations: those of the segment, which must have been made.
  void CopyRotations() {
    constexpr size_t kFloats = size_t{kItems} * kDim * kDim;
    for (size_t i = 0; i < kFlushes / kLayers; ++i) {
      Check(cudaMemcpy(flush_r_.get() + i * kFloats, r_.get(), kFloats * sizeof(float),
                       cudaMemcpyDeviceToDevice),
            "copying rotations");
    }
  }
  int64_t packed_bytes() const { return static_cast<int64_t>(packed_.size()); }

 private:
  static const PackedOps& Ops() { return OpsOf<PackedOps>(kvs_cuda_ops()->packed); }
  static constexpr int kPageTokens = 16, kKeep = 32, kBlock = 8;

  static HeadRows Rows(const uint64_t* pages, int item, int32_t begin, int32_t end) {
    return {reinterpret_cast<uint64_t>(pages), int64_t{item} * kPageTokens * kDim * 2, begin, end};
  }
  static bool IsKeys(int item) { return item / kHeads % 2 == 0; }

  void MakePack() {
    constexpr uint64_t kSquare = kDim * kDim;
    const auto stride = static_cast<uint64_t>(PackedFormat(kDim, kKeep, 1, true).stride);
    a_ = DeviceArray<double>(kItems * kSquare);
    r_ = DeviceArray<float>(kItems * kSquare);
    values_ = DeviceArray<float>(size_t{kItems} * kDim);
    losses_ = DeviceArray<PackLoss>(size_t{kItems} * (kTokens / kPackChunkRows));
    const uint64_t row_bytes = kTokens * stride, block_bytes = row_bytes / kBlock;
    packed_ = DeviceArray<std::byte>(kItems * row_bytes + kItems / 2 * block_bytes);
    std::vector<CovarianceItem> sums;
    std::vector<EigenItem> eigen;
    std::vector<RotatePackItem> pack;
    for (uint64_t i = 0; i < kItems; ++i) {
      const HeadRows rows = Rows(pages_.get(), static_cast<int>(i), 0, kTokens);
      const bool keys = IsKeys(static_cast<int>(i));
      const uint64_t a = a_.address() + i * kSquare * sizeof(double);
      const uint64_t r = r_.address() + i * kSquare * sizeof(float);
      sums.push_back({rows, a});
      eigen.push_back({a, values_.address() + i * kDim * sizeof(float), r});
      const uint64_t blocks = packed_.address() + kItems * row_bytes + KeysBefore(i) * block_bytes;
      pack.push_back({rows, r, packed_.address() + i * row_bytes, keys ? blocks : 0,
                      losses_.address() + i * (kTokens / kPackChunkRows) * sizeof(PackLoss), kKeep,
                      1, kBlock, 0});
    }
    sum_items_ = DeviceArray<CovarianceItem>(sums);
    eigen_items_ = DeviceArray<EigenItem>(eigen);
    pack_items_ = DeviceArray<RotatePackItem>(pack);
    counters_ = DeviceArray<uint32_t>(std::vector<uint32_t>(kItems, 0));
    const HeadRowShape shape = {kDim, kPageTokens, kDim * 2, DType::kBF16};
    sums_ = {shape, sum_items_.get(), kItems, kTokens, false, counters_.get(), nullptr};
    workspace_ =
        DeviceArray<float>(static_cast<size_t>(Ops().covariance_workspace_bytes(sums_)) / 4);
    sums_.workspace = workspace_.get();
    eigen_ = {kDim, eigen_items_.get(), kItems, nullptr};
    pack_ = {shape, pack_items_.get(), kItems, kTokens, true};
  }
  static uint64_t KeysBefore(uint64_t item) { return item / (2 * kHeads) * kHeads + item % kHeads; }

  // Packed rows of a flush go where the segment's were: what is timed does not read them.
  void MakeFlushes() {
    std::vector<RotatePackItem> all = pack_items_.Read(), items;
    flush_r_ = DeviceArray<float>(size_t{kFlushes} * 2 * kHeads * kDim * kDim);
    for (int n = 0; n < kFlushes; ++n) {
      for (int i = 0; i < 2 * kHeads; ++i) {
        RotatePackItem item = all[static_cast<size_t>(n % kLayers * 2 * kHeads + i)];
        const int32_t begin = n / kLayers * kFlushTokens;
        item.source.begin = begin;
        item.source.end = begin + kFlushTokens;
        item.r = flush_r_.address() +
                 static_cast<uint64_t>(n * 2 * kHeads + i) * kDim * kDim * sizeof(float);
        items.push_back(item);
      }
    }
    flush_items_ = DeviceArray<RotatePackItem>(items);
  }

  DeviceArray<uint64_t> pages_;
  DeviceArray<double> a_;
  DeviceArray<float> r_, values_, workspace_, flush_r_;
  DeviceArray<PackLoss> losses_;
  DeviceArray<std::byte> packed_;
  DeviceArray<CovarianceItem> sum_items_;
  DeviceArray<EigenItem> eigen_items_;
  DeviceArray<RotatePackItem> pack_items_, flush_items_;
  DeviceArray<uint32_t> counters_;
  CovarianceBatch sums_;
  EigenBatch eigen_;
  RotatePackBatch pack_;
};

}  // namespace kvstrata::cuda
