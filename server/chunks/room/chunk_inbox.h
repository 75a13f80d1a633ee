// SPDX-License-Identifier: Apache-2.0
// ChunkInbox: what came of the room's work, from the threads that did it to the room's own. It
// outlives the room for those that end later.
//
// Thread-safety: all methods, from any thread. Cost: a lock, and a wake-up.
#ifndef KVSTRATA_SERVER_CHUNKS_ROOM_CHUNK_INBOX_H_
#define KVSTRATA_SERVER_CHUNKS_ROOM_CHUNK_INBOX_H_

#include <functional>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "server/chunks/room/chunk_work.h"
#include "server/tier/checksum.h"

namespace kvstrata {

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

#endif  // KVSTRATA_SERVER_CHUNKS_ROOM_CHUNK_INBOX_H_
