// SPDX-License-Identifier: Apache-2.0
// PageMemory: the memory behind the pools, one resource for each device and one for the host: what
// it is, copies between its pages, and whether a device is lost.
//
// Ownership: owns the resources, and nothing that they made. Thread-safety: copies and all
// questions, from any thread without the store's lock, while the pages in question are held
// (page_references.h); what makes, frees or counts arenas, under that lock. Units: bytes. Errors:
// those of MemoryResource. A DEVICE_FAILED is kept: that pool answers nothing but it from then on.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/sync.h"
#include "server/memory/memory_resource.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_options.h"

namespace kvstrata {

inline constexpr size_t kMaxPools = 1 + PoolId::kMaxDevices;

struct PageCopy {
  const Page* from = nullptr;
  const Page* to = nullptr;
  CopyShape shape;
};

class PageMemory {
 public:
  // `device_bytes` and `host_bytes`: capacities, of a device at most its own.
  PageMemory(std::vector<StoreDevice> devices, uint64_t device_bytes,
             std::unique_ptr<MemoryResource> host, uint64_t host_bytes);

  // The devices', in their order, then the host's.
  std::span<const PoolId> ids() const { return ids_; }
  size_t devices() const { return ids_.size() - 1; }
  // A device's name; "" for the host.
  const std::string& name(PoolId pool) const { return pools_[pool.index()].name; }
  // "device", with the device's name where there are several; "host".
  std::string NameOfPool(PoolId pool) const;
  // What the arenas of a tier are, on every device.
  HandleType handle_type(Tier tier) const {
    return pools_[(tier == Tier::kHost ? PoolId::Host() : PoolId::Device(0)).index()]
        .memory->handle_type();
  }
  // Whether the daemon may follow the tier's addresses.
  bool readable(Tier tier) const { return handle_type(tier) == HandleType::kMemfd; }
  uint64_t granularity(PoolId pool) const { return pools_[pool.index()].memory->granularity(); }

  // All are on their way at once.
  Status Copy(std::span<const PageCopy> copies) const;
  // All of a page's bytes to or from memory of the daemon that is in no pool.
  Status Read(const Page& from, std::byte* to) const;
  Status Write(const Page& to, const std::byte* from) const;
  // Some of its bytes, from `at` on.
  Status Write(const Page& to, uint64_t at, std::span<const std::byte> from) const;
  // The first bytes of a page, and zeros behind them. `front`: memory of the host that has the
  // first of them instead. `of`: whose memory copies them, the page's own pool or that of a device,
  // which reaches its own memory too. REQUIRES: less than one granule is left.
  Status Fill(const Page& to, std::span<const std::byte> front, std::span<const std::byte> bytes,
              PoolId of) const;
  // Lets kernels of a device follow addresses of an arena that has pages that are held.
  Status Reach(PoolId device, const std::byte* at) const;

  // Somebody found out that a pool's device is lost.
  void Lose(PoolId pool, const Status& why) const { (void)Noted(pool, why); }
  // Why a pool's device is lost, DEVICE_FAILED; OK while it is not.
  Status failure(PoolId pool) const KVS_EXCLUDES(failures_mu_);

  // --- under the store's lock ---
  Result<MappedMemory> Allocate(PoolId pool, uint64_t bytes);
  void Free(PoolId pool, MappedMemory memory);
  uint64_t capacity(PoolId pool) const { return pools_[pool.index()].capacity; }
  // Rounded down to whole granules; what is taken beyond it stays until it is dropped.
  void SetCapacity(PoolId pool, uint64_t bytes);

  // Called once for a pool whose device is lost, by whoever found it out: in any thread, with or
  // without the store's lock.
  std::function<void(PoolId, const Status&)> on_failure;

 private:
  struct Pool {
    std::string name;
    uint64_t capacity = 0;  // `memory` looks at it
    std::unique_ptr<MemoryResource> memory;
  };
  void AddPool(PoolId id, std::unique_ptr<MemoryResource> memory, uint64_t capacity);
  // The status, kept if it says that the pool's device is lost.
  Status Noted(PoolId pool, Status status) const KVS_EXCLUDES(failures_mu_);
  // Copies from one device to another.
  Status CopyAcross(PoolId from, PoolId to, std::span<const MemoryCopy> copies) const
      KVS_EXCLUDES(failures_mu_);

  std::vector<PoolId> ids_;
  std::vector<Pool> pools_;  // by PoolId::index; never resized
  mutable Mutex failures_mu_;
  mutable std::array<Status, kMaxPools> failures_ KVS_GUARDED_BY(failures_mu_);
};

}  // namespace kvstrata
