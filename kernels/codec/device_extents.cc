// SPDX-License-Identifier: Apache-2.0
#include "kernels/codec/device_extents.h"

#include <algorithm>
#include <utility>

namespace kvstrata {

bool LieOnDevice(const cuda::CudaOps& ops, std::span<std::byte* const> pages) {
  return std::ranges::all_of(pages, [&ops](const std::byte* page) {
    bool device = false;
    return page != nullptr && ops.is_device_memory(page, &device) == 0 && device;
  });
}

Result<std::shared_ptr<std::byte>> DeviceExtents::Take(uint64_t bytes, cuda::Stream stream) {
  std::unique_ptr<DeviceBuffer> buffer = Spare(bytes);
  if (buffer != nullptr) {
    KVS_RETURN_IF_ERROR(
        CudaStatus(ops_, ops_.zero_async(buffer->as<void>(), bytes, stream), "zeroing an extent"));
  } else {
    buffer = std::make_unique<DeviceBuffer>();
    KVS_RETURN_IF_ERROR(buffer->Reserve(ops_, bytes));
  }
  auto* const data = buffer->as<std::byte>();
  return std::shared_ptr<std::byte>(
      data, [memory = shared_from_this(), held = std::move(buffer)](std::byte*) mutable {
        memory->GiveBack(std::move(held));
      });
}

std::unique_ptr<DeviceBuffer> DeviceExtents::Spare(uint64_t bytes) {
  MutexLock lock(mu_);
  auto best = spare_.end();
  for (auto s = spare_.begin(); s != spare_.end(); ++s) {
    if ((*s)->bytes() < bytes) continue;
    if (best == spare_.end() || (*s)->bytes() < (*best)->bytes()) best = s;
  }
  if (best == spare_.end()) return nullptr;
  std::unique_ptr<DeviceBuffer> found = std::move(*best);
  spare_.erase(best);
  bytes_ -= found->bytes();
  return found;
}

void DeviceExtents::GiveBack(std::unique_ptr<DeviceBuffer> buffer) {
  MutexLock lock(mu_);
  if (bytes_ + buffer->bytes() > spare_bytes_) return;
  bytes_ += buffer->bytes();
  spare_.push_back(std::move(buffer));
}

}  // namespace kvstrata
