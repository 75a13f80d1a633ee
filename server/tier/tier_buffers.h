// SPDX-License-Identifier: Apache-2.0
// Buffers of the daemon's own that a tier moves without a copy: each from a multiple of 4096 on,
// the first behind as many bytes for a header.
//
// Values go through them, not straight from and to the pools' arenas: docs/design.md, "On disk".
// Thread-safety: any thread. Aborts without memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "server/tier/value_tier.h"

namespace kvstrata {

uint64_t WholeBlocks(uint64_t bytes);

// `bytes`, whole blocks, behind a block that is the tier's (`header_room`).
std::shared_ptr<std::byte> HeapBuffers(uint64_t bytes);

// Memory for buffers of values. Io_uring may register it as a whole, which spares the kernel a look
// at each of its pages for each request, and us faults of fresh memory.
class TierBuffers {
 public:
  // REQUIRES: whole blocks.
  explicit TierBuffers(uint64_t bytes);

  // As HeapBuffers, but of this memory while it has room. Outlives this object.
  std::shared_ptr<std::byte> Take(uint64_t bytes);

  std::shared_ptr<std::byte> memory() const;
  uint64_t bytes() const;
  // Buffers that were taken and not given back, of the heap too.
  size_t in_use() const;

 private:
  struct Memory;
  const std::shared_ptr<Memory> memory_;
};

// What reads a value of these sizes into `buffers`; null: into memory of its own.
TierGet NewTierGet(std::string key, std::span<const uint64_t> sizes, TierBuffers* buffers);

}  // namespace kvstrata
