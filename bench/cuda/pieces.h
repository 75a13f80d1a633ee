// SPDX-License-Identifier: Apache-2.0
// Pages and index blocks for benchmarks of steps, and what they check.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "base/status.h"
#include "kernels/pages/dtype.h"
#include "tests/cuda/device_array.h"

namespace kvstrata::cuda {

inline void CheckStep(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::abort();
}

// Whether every output is a number.
inline bool IsSound(const DeviceArray<BF16>& output) {
  const std::vector<BF16> out = output.Read();
  return std::ranges::all_of(out, [](BF16 x) { return std::isfinite(ToFloat(x)); });
}

// Memory of random bf16 in [-1, 1) cut into `count` pieces in random order.
class Pieces {
 public:
  Pieces(int64_t count, int64_t bytes, std::mt19937_64& rng)
      : memory_(static_cast<size_t>(count * bytes)) {
    std::vector<BF16> block(size_t{61} << 20 >> 1);
    for (BF16& x : block)
      x = FromFloat<BF16>(static_cast<float>(static_cast<int32_t>(rng())) * 0x1p-31f);
    for (size_t at = 0; at < memory_.size(); at += block.size() * 2) {
      Check(cudaMemcpy(memory_.get() + at, block.data(),
                       std::min(block.size() * 2, memory_.size() - at), cudaMemcpyHostToDevice),
            "fill");
    }
    for (int64_t i = 0; i < count; ++i) addresses_.push_back(memory_.get() + i * bytes);
    std::shuffle(addresses_.begin(), addresses_.end(), rng);
    std::vector<uint64_t> table;
    for (const std::byte* at : addresses_) table.push_back(reinterpret_cast<uint64_t>(at));
    table_ = DeviceArray<uint64_t>(table);
  }
  const uint64_t* table() const { return table_.get(); }
  const std::vector<std::byte*>& addresses() const { return addresses_; }

 private:
  DeviceArray<std::byte> memory_;
  std::vector<std::byte*> addresses_;
  DeviceArray<uint64_t> table_;
};

}  // namespace kvstrata::cuda
