// SPDX-License-Identifier: Apache-2.0
// ChunkSums: the thread ("kvs-chunk-sums") that makes the sums of chunks: when they are complete,
// and again before they are written below.
//
// Ownership: what it works on keeps its memory. Thread-safety: all methods, from any thread; the
// destructor waits for the chunk that is being summed. Cost of a chunk: a read of its bytes.
#ifndef KVSTRATA_SERVER_CHUNKS_CHUNK_SUMS_H_
#define KVSTRATA_SERVER_CHUNKS_CHUNK_SUMS_H_

#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>

#include "base/sync.h"
#include "server/chunks/room/chunk_work.h"

namespace kvstrata {

class ChunkSums {
 public:
  // THREADS (RESOURCE_EXHAUSTED) as std::system_error.
  explicit ChunkSums(std::shared_ptr<ChunkInbox> inbox);
  ~ChunkSums();

  // REQUIRES: kSum or kVerify.
  void Add(ChunkWork work) KVS_EXCLUDES(mu_);

 private:
  void Run();
  // False: the end.
  bool Next(ChunkWork* work) KVS_EXCLUDES(mu_);

  const std::shared_ptr<ChunkInbox> inbox_;
  Mutex mu_;
  std::condition_variable wake_;
  std::deque<ChunkWork> waiting_ KVS_GUARDED_BY(mu_);
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CHUNKS_CHUNK_SUMS_H_
