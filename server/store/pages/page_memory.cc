// SPDX-License-Identifier: Apache-2.0
#include "server/store/pages/page_memory.h"

#include <algorithm>
#include <map>
#include <utility>

#include "base/check.h"
#include "server/store/pages/page.h"

namespace kvstrata {

PageMemory::PageMemory(std::vector<StoreDevice> devices, uint64_t device_bytes,
                       std::unique_ptr<MemoryResource> host, uint64_t host_bytes)
    : pools_(1 + devices.size()) {
  KVS_CHECK(!devices.empty() && pools_.size() <= kMaxPools);
  for (StoreDevice& device : devices) {
    const PoolId pool = PoolId::Device(static_cast<uint32_t>(ids_.size()));
    pools_[pool.index()].name = std::move(device.name);
    AddPool(pool, std::move(device.memory), std::min(device_bytes, device.bytes));
  }
  AddPool(PoolId::Host(), std::move(host), host_bytes);
}

void PageMemory::AddPool(PoolId id, std::unique_ptr<MemoryResource> memory, uint64_t capacity) {
  ids_.push_back(id);
  Pool& pool = pools_[id.index()];
  pool.memory = NewLimitedResource(std::move(memory), &pool.capacity);
  SetCapacity(id, capacity);
}

std::string PageMemory::NameOfPool(PoolId pool) const {
  const std::string tier(NameOf(pool.tier()));
  return pool.tier() == Tier::kHost || devices() == 1 ? tier : tier + " " + name(pool);
}

Result<MappedMemory> PageMemory::Allocate(PoolId pool, uint64_t bytes) {
  Result<MappedMemory> memory = pools_[pool.index()].memory->Allocate(bytes);
  (void)Noted(pool, memory.status());
  return memory;
}

void PageMemory::Free(PoolId pool, MappedMemory memory) {
  pools_[pool.index()].memory->Free(std::move(memory));
}

void PageMemory::SetCapacity(PoolId pool, uint64_t bytes) {
  pools_[pool.index()].capacity = bytes / granularity(pool) * granularity(pool);
}

Status PageMemory::failure(PoolId pool) const {
  MutexLock lock(failures_mu_);
  return failures_[pool.index()];
}

Status PageMemory::Noted(PoolId pool, Status status) const {
  if (status.reason() != "DEVICE_FAILED") return status;
  {
    MutexLock lock(failures_mu_);
    Status& failure = failures_[pool.index()];
    if (!failure.ok()) return status;
    failure = status;
  }
  if (on_failure) on_failure(pool, status);
  return status;
}

// A device knows how to reach the host, not the other way round.
Status PageMemory::Copy(std::span<const PageCopy> copies) const {
  std::map<std::pair<PoolId, PoolId>, std::vector<MemoryCopy>> by_pools;
  for (const auto& [from, to, shape] : copies) {
    by_pools[{from->arena->pool, to->arena->pool}].push_back({to->base(), from->base(), shape});
  }
  for (const auto& [pools, some] : by_pools) {
    const auto [from, to] = pools;
    const bool between_devices = from.tier() == Tier::kDevice && to.tier() == Tier::kDevice;
    if (between_devices && from != to) {
      KVS_RETURN_IF_ERROR(CopyAcross(from, to, some));
      continue;
    }
    const PoolId of = from.tier() == Tier::kDevice ? from : to;
    KVS_RETURN_IF_ERROR(Noted(of, pools_[of.index()].memory->Copy(some)));
  }
  return OkStatus();
}

Status PageMemory::CopyAcross(PoolId from, PoolId to, std::span<const MemoryCopy> copies) const {
  MemoryResource& source = *pools_[from.index()].memory;
  MemoryResource& destination = *pools_[to.index()].memory;
  const Status status = CopyBetween(source, destination, copies);
  if (status.reason() == "DEVICE_FAILED") {
    (void)Noted(from, source.Copy({}));  // whose is it?
    (void)Noted(to, destination.Copy({}));
  }
  return status;
}

Status PageMemory::Read(const Page& from, std::byte* to) const {
  const PoolId pool = from.arena->pool;
  const MemoryCopy copy{to, from.base(), {from.bytes, from.bytes, 1}};
  return Noted(pool, pools_[pool.index()].memory->Copy({&copy, 1}));
}

Status PageMemory::Write(const Page& to, const std::byte* from) const {
  return Write(to, 0, {from, to.bytes});
}

Status PageMemory::Write(const Page& to, uint64_t at, std::span<const std::byte> from) const {
  KVS_CHECK(at <= to.bytes && from.size() <= to.bytes - at);
  if (from.empty()) return OkStatus();
  const PoolId pool = to.arena->pool;
  const MemoryCopy copy{to.base() + at, from.data(), {from.size(), from.size(), 1}};
  return Noted(pool, pools_[pool.index()].memory->Copy({&copy, 1}));
}

Status PageMemory::Fill(const Page& to, std::span<const std::byte> front,
                        std::span<const std::byte> bytes, PoolId of) const {
  static constexpr std::array<std::byte, kMemoryGranularity> kZeros{};
  KVS_CHECK(front.size() <= bytes.size() && bytes.size() <= to.bytes);
  KVS_CHECK(to.bytes - bytes.size() < kZeros.size());
  std::vector<MemoryCopy> copies;
  const auto add = [&](uint64_t at, const std::byte* from, uint64_t n) {
    if (n > 0) copies.push_back({to.base() + at, from, {n, n, 1}});
  };
  add(0, front.data(), front.size());
  add(front.size(), bytes.data() + front.size(), bytes.size() - front.size());
  add(bytes.size(), kZeros.data(), to.bytes - bytes.size());
  return Noted(of, pools_[of.index()].memory->Copy(copies));
}

Status PageMemory::Reach(PoolId device, const std::byte* at) const {
  return Noted(device, pools_[device.index()].memory->Reach(at));
}

}  // namespace kvstrata
