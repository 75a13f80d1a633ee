// SPDX-License-Identifier: Apache-2.0
// What the room has done by others: sums of chunks, and what tiers below know, read and write.
// Values; whoever does it tells the room what came of it (chunk_room.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "base/sync.h"
#include "server/chunks/room/chunk.h"

namespace kvstrata {

// A chunk, for whoever may come back when its region is gone.
struct ChunkRef {
  uint64_t room = 0;  // its serial number
  uint64_t row_bytes = 0;
  int32_t id = 0;
};

// Sets of tiers below.
enum BelowSet : uint8_t { kNowhere = 0, kDisk = 1, kRemote = 2 };

struct ChunkWork {
  enum class Kind : uint8_t {
    kSum,     // the sum of a complete chunk
    kVerify,  // its sum again, before it is written below
    kWrite,   // to `below`
    kProbe,   // whether `below` has it; no chunk yet
    kRead,    // from `below`
  };
  Kind kind = Kind::kSum;
  uint8_t below = kNowhere;
  ChunkRef chunk;
  ChunkKey key{};
  std::span<std::byte> bytes;
  std::shared_ptr<void> keep;  // owns them
};

// Where a key may be found below.
struct ChunkFind {
  ChunkKey key{};
  uint64_t row_bytes = 0;
  uint8_t there = kNowhere;  // what is known to have it
  uint8_t maybe = kNowhere;  // what must be asked
};

// ChunkInbox: what came of the room's work, from the threads that did it to the room's own. It
// outlives the room for those that end later.
//
// Thread-safety: all methods, from any thread. Cost: a lock, and a wake-up.
struct ChunkDone {
  ChunkWork::Kind kind = ChunkWork::Kind::kSum;
  ChunkRef chunk;
  ChunkKey key{};
  uint8_t below = kNowhere;  // where it is to be written; where it was found
  bool ok = true;            // read, or written
  bool let_go = false;       // behind a read that is not ok: the tier does not write there any more
  Checksum sum{};            // result of kSum and kVerify; of kRead, if another tier is to get it
};

class ChunkInbox {
 public:
  // `wake`: called behind each Put; from any thread, for as long as the inbox lives.
  explicit ChunkInbox(std::function<void()> wake) : wake_(std::move(wake)) {}

  void Put(const ChunkDone& done) KVS_EXCLUDES(mu_) {
    {
      MutexLock lock(mu_);
      done_.push_back(done);
    }
    wake_();
  }
  std::vector<ChunkDone> TakeAll() KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    return std::exchange(done_, {});
  }

 private:
  const std::function<void()> wake_;
  Mutex mu_;
  std::vector<ChunkDone> done_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata
