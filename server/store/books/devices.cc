// SPDX-License-Identifier: Apache-2.0
#include "server/store/books/devices.h"

#include <algorithm>

#include "server/store/books/sequence.h"

namespace kvstrata {

void Devices::LoseDevice(uint32_t device, const Status& why) {
  books_.memory.Lose(PoolId::Device(device), why);
}

Status Devices::CheckHeld(const Sequence& s) const {
  const PoolId device = PoolId::Device(catalog_.SessionOf(s.session)->device);
  const Status failure = books_.memory.failure(device);
  if (failure.ok()) return OkStatus();
  const auto lost = [device](const Page* page) {
    return page != nullptr && page->arena->pool == device;
  };
  const bool any =
      std::ranges::any_of(s.pages, lost) || std::ranges::any_of(s.index_blocks, lost) ||
      std::ranges::any_of(s.extents, [&lost](const Extent& e) { return lost(e.page); });
  if (!any) return OkStatus();
  return Unavailable("DEVICE_FAILED", "sequence " + std::to_string(s.id) +
                                          " has pages on a device that is lost (" +
                                          std::string(failure.message()) +
                                          "); close it and open it again: it is computed anew, in "
                                          "host memory");
}

Result<uint32_t> Devices::FindDevice(std::string_view name) const {
  if (name.empty()) return 0;
  std::string known;
  for (uint32_t device = 0; device < books_.memory.devices(); ++device) {
    if (DeviceName(device) == name) return device;
    known += (device == 0 ? "'" : ", '") + DeviceName(device) + "'";
  }
  return NotFound("DEVICE_UNKNOWN",
                  "no device of this daemon is '" + std::string(name) + "'; there are " + known);
}

std::byte* Devices::ArenaBase(uint32_t id) const {
  StoreLock lock(books_.mu);
  const Arena* arena = books_.pools.Find(id);
  return arena == nullptr ? nullptr : arena->memory.base;
}

Status Devices::ReachFromDevice(uint32_t id, uint32_t device) const {
  const std::byte* const base = ArenaBase(id);
  if (base == nullptr) {
    return Internal("TABLE_INVALID", "arena " + std::to_string(id) + " does not exist");
  }
  return books_.memory.Reach(PoolId::Device(device), base);
}

}  // namespace kvstrata
