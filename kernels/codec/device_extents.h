// SPDX-License-Identifier: Apache-2.0
// What packers on a GPU share: memory for extents, and whether what is to be packed lies there.
// Private to codecs.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/sync.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

// The pages of a table that hold positions of `tokens`.
inline std::span<std::byte* const> PagesOf(std::byte* const* pages, int32_t page_tokens,
                                           Run tokens) {
  const int32_t first = tokens.begin / page_tokens;
  const int32_t end = (tokens.end + page_tokens - 1) / page_tokens;
  return {pages + first, static_cast<size_t>(end - first)};
}

// Whether all of them are there, in a GPU's memory.
bool LieOnDevice(const cuda::CudaOps& ops, std::span<std::byte* const> pages);

// Memory for extents that are soon copied away. What is released serves the next ones: allocating
// and freeing some each time are waits for a GPU that an engine's kernels keep busy. Shared by
// those who hold some.
// Threads: Take one call at a time, on the device that is current; any may let go of memory.
class DeviceExtents : public std::enable_shared_from_this<DeviceExtents> {
 public:
  // spare_bytes: of what is kept for the next ones, at most.
  DeviceExtents(const cuda::CudaOps& ops, uint64_t spare_bytes)
      : ops_(ops), spare_bytes_(spare_bytes) {}

  // All zero, in the stream's order. GPU_MEMORY, CUDA_ERROR.
  Result<std::shared_ptr<std::byte>> Take(uint64_t bytes, cuda::Stream stream);

 private:
  // The smallest that is large enough, or null.
  std::unique_ptr<DeviceBuffer> Spare(uint64_t bytes) KVS_EXCLUDES(mu_);
  void GiveBack(std::unique_ptr<DeviceBuffer> buffer) KVS_EXCLUDES(mu_);

  const cuda::CudaOps& ops_;
  const uint64_t spare_bytes_;
  Mutex mu_;
  std::vector<std::unique_ptr<DeviceBuffer>> spare_ KVS_GUARDED_BY(mu_);
  uint64_t bytes_ KVS_GUARDED_BY(mu_) = 0;
};

}  // namespace kvstrata
