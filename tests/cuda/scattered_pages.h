// SPDX-License-Identifier: Apache-2.0
// Pages of random rows for GPU tests and benchmarks: each page somewhere else in one arena, on the
// device and, for the reference, on the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/pages/dtype.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"

namespace kvstrata::cuda {

class ScatteredPages {
 public:
  // Normal values of `dtype` throughout.
  ScatteredPages(int batch, int pages, int64_t page_bytes, DType dtype, std::mt19937_64& rng)
      : pages_(pages), host_(page_bytes * (int64_t{batch} * pages + 3)) {
    // A prime number of them over and over: drawing each would take most of a test's time.
    std::vector<float> values(65521);
    for (float& x : values) x = Normal(rng);
    for (size_t i = 0; i * SizeOf(dtype) < host_.size(); ++i) {
      StoreFloat(&host_[i * SizeOf(dtype)], dtype, values[i % values.size()]);
    }
    std::vector<int64_t> slots(int64_t{batch} * pages + 3);
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), rng);
    device_ = DeviceArray<std::byte>(host_.size());
    std::vector<uint64_t> addresses;
    for (int64_t i = 0; i < int64_t{batch} * pages; ++i) {
      table_.push_back(host_.data() + slots[i] * page_bytes);
      addresses.push_back(device_.address() + slots[i] * page_bytes);
    }
    addresses_ = DeviceArray<uint64_t>(addresses);
    Upload();
  }

  std::vector<std::byte>& host() { return host_; }
  void Upload() { device_.Write(host_); }
  void Download() {
    const std::vector<std::byte> read = device_.Read();
    std::copy(read.begin(), read.end(), host_.begin());  // the table points into host_
  }

  // One sequence's table, for the reference.
  std::byte* const* TableOf(int sequence) const { return &table_[int64_t{sequence} * pages_]; }
  const uint64_t* addresses() const { return addresses_.get(); }
  int32_t stride() const { return pages_; }

 private:
  int32_t pages_;
  std::vector<std::byte> host_;
  std::vector<std::byte*> table_;
  DeviceArray<std::byte> device_;
  DeviceArray<uint64_t> addresses_;
};

}  // namespace kvstrata::cuda
