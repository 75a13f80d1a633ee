// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/chunk_sums.h"

#include <utility>

#include "server/telemetry/thread_top.h"
#include "server/tier/checksum.h"

namespace kvstrata {

ChunkSums::ChunkSums(std::shared_ptr<ChunkInbox> inbox)
    : inbox_(std::move(inbox)), thread_(StartThread("kvs-chunk-sums", [this] { Run(); })) {}

ChunkSums::~ChunkSums() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void ChunkSums::Add(ChunkWork work) {
  {
    MutexLock lock(mu_);
    waiting_.push_back(std::move(work));
  }
  wake_.notify_one();
}

bool ChunkSums::Next(ChunkWork* work) KVS_NO_THREAD_SAFETY_ANALYSIS {
  std::unique_lock<std::mutex> lock(mu_.native());
  while (!stopping_ && waiting_.empty()) wake_.wait(lock);
  if (stopping_) return false;
  *work = std::move(waiting_.front());
  waiting_.pop_front();
  return true;
}

void ChunkSums::Run() {
  ChunkWork work;
  while (Next(&work)) {
    Survive("kvs-chunk-sums", [&] {
      inbox_->Put(
          {work.kind, work.chunk, work.key, work.below, true, false, ChecksumOf(work.bytes)});
    });
    work.keep.reset();
  }
}

}  // namespace kvstrata
