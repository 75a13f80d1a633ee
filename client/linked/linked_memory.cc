// SPDX-License-Identifier: Apache-2.0
#include "client/linked/linked_memory.h"

#include "kernels/cuda/device_buffer.h"

namespace kvstrata::client {

Result<std::byte*> LinkedMemory::Resolve(const shm::PageEntry& entry, uint64_t bytes) {
  Result<std::byte*> at = arenas_.Resolve(entry, bytes);
  if (at.ok() || at.status().reason() != "ARENA_UNKNOWN") return at;
  // Its descriptor was sent before the table was published; a full socket may have delayed it.
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  while (!at.ok() && at.status().reason() == "ARENA_UNKNOWN") {
    if (!connection_.AwaitPacket(deadline)) return at;
    at = arenas_.Resolve(entry, bytes);
  }
  return at;
}

Status LinkedMemory::Grow(const TableClaim& claim) {
  const SequenceState& state = *claim.sequence->state;
  const shm::Grow grow{claim.sequence->id, static_cast<uint32_t>(claim.tokens_after),
                       static_cast<uint32_t>(state.tokens()),
                       static_cast<uint32_t>(state.indexed_tokens()), 0};
  return ring_.Call(shm::kGrow, {BytesOf(grow)}, nullptr);
}

Status LinkedMemory::Read(std::byte* to, const std::byte* from, uint64_t bytes) {
  return CudaStatus(*gpu_.ops, gpu_.ops->copy_2d(gpu_.device, to, from, {bytes, bytes, 1}),
                    "reading from the GPU");
}

}  // namespace kvstrata::client
