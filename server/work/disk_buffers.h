// Buffers of the daemon's own that the disk tier takes: each from a multiple of 4096 on.
// Thread-safety: any thread. Aborts without memory.
#ifndef KVSTRATA_SERVER_WORK_DISK_BUFFERS_H_
#define KVSTRATA_SERVER_WORK_DISK_BUFFERS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "server/store/prefix_key.h"
#include "server/tier/disk_tier.h"

namespace kvstrata {

inline constexpr uint64_t kDiskAlignment = 4096;  // what O_DIRECT and the tier want

uint64_t WholeBlocks(uint64_t bytes);
// REQUIRES: whole blocks.
std::shared_ptr<std::byte> AlignedMemory(uint64_t bytes);

// What the tier calls a key.
std::string DiskNameOf(const PageKey& key);

// What reads a value of these sizes into memory of its own.
DiskGet NewDiskGet(std::string key, std::span<const uint64_t> sizes);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WORK_DISK_BUFFERS_H_
