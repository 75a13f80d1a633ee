// SPDX-License-Identifier: Apache-2.0
// ChunkWorkers: whoever does the room's work: the thread of sums, and the tiers below.
//
// Thread-safety: any thread. Nothing blocks but the end, which waits for the chunk that is being
// summed.
#ifndef KVSTRATA_SERVER_CHUNKS_CHUNK_WORKERS_H_
#define KVSTRATA_SERVER_CHUNKS_CHUNK_WORKERS_H_

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "server/chunks/chunk_sums.h"
#include "server/chunks/chunk_tiers.h"
#include "server/chunks/room/chunk_inbox.h"

namespace kvstrata {

class ChunkWorkers {
 public:
  // `wake`: called when something is done; for as long as a tier has a call of this.
  ChunkWorkers(const ChunkTiersOptions& tiers, std::function<void()> wake)
      : inbox_(std::make_shared<ChunkInbox>(std::move(wake))),
        tiers_(tiers, inbox_),
        sums_(inbox_) {}

  const ChunkTiers& tiers() const { return tiers_; }
  void Start(std::vector<ChunkWork> work) {
    std::vector<ChunkWork> below;
    for (ChunkWork& one : work) {
      const bool sum = one.kind == ChunkWork::Kind::kSum || one.kind == ChunkWork::Kind::kVerify;
      sum ? sums_.Add(std::move(one)) : below.push_back(std::move(one));
    }
    if (!below.empty()) tiers_.Start(std::move(below));
  }
  std::vector<ChunkDone> TakeDone() { return inbox_->TakeAll(); }

 private:
  const std::shared_ptr<ChunkInbox> inbox_;
  const ChunkTiers tiers_;
  ChunkSums sums_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CHUNKS_CHUNK_WORKERS_H_
