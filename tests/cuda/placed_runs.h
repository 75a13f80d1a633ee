// SPDX-License-Identifier: Apache-2.0
// Upper or lower runs of groups (planes_inputs.h) where op attend_planes finds them: on the GPU, or
// in page-locked memory of the host.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/ops/pack_planes/device_planes_cuda.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/page_locked_bytes.h"
#include "tests/cuda/planes_inputs.h"

namespace kvstrata::cuda {

class PlacedRuns {
 public:
  // In blocks [kv_heads][block_groups] of one array, at the places of a block in it. Where s is 1
  // or 2 runs begin and repeat 2 or 4 times as far away. record: bytes behind a head's runs, 0.
  PlacedRuns(const PlanesInputs& in, const std::vector<int>& places, bool lower, bool on_host,
             int64_t record = 0) {
    const PlanesShape& s = in.shape();
    const auto blocks = static_cast<int>(places.size()) / s.batch;
    const int64_t run = lower ? in.format().lower_bytes() : in.format().upper_bytes();
    const int64_t offset = lower ? 32 : 64;
    const int64_t head = s.block_groups * run, block = 4 * (offset + s.kv_heads * (head + record));
    const std::vector<std::byte>& from = lower ? in.lower() : in.upper();
    std::vector<std::byte> bytes(places.size() * block, std::byte{0xFF});
    const uint64_t base = Allocate(bytes.size(), on_host);
    std::vector<uint64_t> addresses(places.size());
    for (int b = 0; b < s.batch; ++b) {
      for (int g = 0; g < blocks * s.block_groups; ++g) {
        const size_t entry = static_cast<size_t>(b) * blocks + g / s.block_groups;
        const int64_t at = places[entry] * block;
        const int shift = places[entry] % 3;
        addresses[entry] = base + at + shift;
        for (int h = 0; h < s.kv_heads; ++h) {
          const int64_t behind = offset + s.kv_heads * head + h * record;
          std::fill_n(&bytes[at + (behind << shift)], record, std::byte{0});
        }
        for (int h = 0; g < s.groups_max && h < s.kv_heads; ++h) {
          const size_t item = static_cast<size_t>(b) * s.kv_heads + h;
          std::copy_n(&from[(item * s.groups_max + g) * run], run,
                      &bytes[at + ((offset + h * head) << shift) + g % s.block_groups * run]);
        }
      }
    }
    Write(bytes);
    table_ = DeviceArray<uint64_t>(addresses);
    runs_ = {table_.get(), offset, head};
  }

  const DeviceRuns& runs() const { return runs_; }
  // Another sequence has the first one's blocks.
  void Share(int blocks) {
    std::vector<uint64_t> addresses = table_.Read();
    std::copy_n(addresses.begin(), blocks, addresses.begin() + blocks);
    table_.Write(addresses);
  }
  void Poison() { Write(std::vector<std::byte>(size_, std::byte{0xFF})); }

 private:
  uint64_t Allocate(size_t size, bool on_host) {
    size_ = size;
    if (!on_host) {
      memory_ = DeviceArray<std::byte>(size);
      return memory_.address();
    }
    on_host_ = NewPageLocked(size);
    return reinterpret_cast<uint64_t>(on_host_.get());
  }
  void Write(const std::vector<std::byte>& bytes) {
    if (on_host_ == nullptr) return memory_.Write(bytes);
    std::ranges::copy(bytes, on_host_.get());
  }

  size_t size_ = 0;
  DeviceArray<std::byte> memory_;
  std::shared_ptr<std::byte[]> on_host_;
  DeviceArray<uint64_t> table_;
  DeviceRuns runs_;
};

}  // namespace kvstrata::cuda
