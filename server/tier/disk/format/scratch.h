// SPDX-License-Identifier: Apache-2.0
// Scratch: equal pieces of block-aligned memory for headers, small values and the ends of buffers.
// A piece goes back when its last owner lets go, which for an abandoned request may be never.
// Thread-safety: one thread at a time.
#ifndef KVSTRATA_SERVER_TIER_DISK_FORMAT_SCRATCH_H_
#define KVSTRATA_SERVER_TIER_DISK_FORMAT_SCRATCH_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "base/check.h"
#include "server/tier/disk/format/format.h"

namespace kvstrata::disk {

class Scratch {
 public:
  // A header, and a block for the end of each buffer or all of a small value.
  static constexpr uint64_t kPieceBytes = uint64_t{1 + kMaxBuffers} * kBlockBytes;

  explicit Scratch(uint32_t pieces) : pool_(std::make_shared<Pool>(pieces)) {}

  // Null: all are in use.
  std::shared_ptr<std::byte> Take() {
    if (pool_->free.empty()) return nullptr;
    std::byte* piece = pool_->free.back();
    pool_->free.pop_back();
    return {piece, [pool = pool_](std::byte* p) { pool->free.push_back(p); }};
  }

  std::byte* base() const { return pool_->base; }
  uint64_t bytes() const { return pool_->bytes; }

 private:
  struct Pool {
    explicit Pool(uint32_t pieces)
        : bytes(pieces * kPieceBytes),
          base(static_cast<std::byte*>(std::aligned_alloc(kBlockBytes, bytes))) {
      KVS_CHECK(base != nullptr);
      for (uint32_t i = pieces; i-- > 0;) free.push_back(base + i * kPieceBytes);
    }
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    ~Pool() { std::free(base); }

    const uint64_t bytes;
    std::byte* const base;
    std::vector<std::byte*> free;
  };
  std::shared_ptr<Pool> pool_;
};

}  // namespace kvstrata::disk

#endif  // KVSTRATA_SERVER_TIER_DISK_FORMAT_SCRATCH_H_
