// SPDX-License-Identifier: Apache-2.0
// ChunkServer: PATH.chunks: the memory of engines' chunks (docs/chunks.md), for engines that keep
// scheduler, blocks and kernels to themselves.
//
// One thread ("kvs-chunks") serves all clients: epoll over the listener, sockets and pidfds. It
// waits for nobody: sums are made in another thread, tiers call back from theirs, a client that
// does not read is ended. There is one room at a time, with all of `bytes`: the first user's, until
// nobody of his is there any more and another user comes.
//
// Ownership: borrows the tiers, which outlive it. Thread-safety: Stop and what is const, from any
// thread. Errors of clients are theirs, told by a Refused: CHUNKS_OFF, CHUNKS_FULL, CHUNKS_MEMORY,
// CHUNK_ROW, VERSION_MISMATCH, HELLO_MALFORMED, HELLO_TIMEOUT, CONNECTIONS, PEER_UNKNOWN. Start
// fails with CHUNKS_START (INTERNAL) and THREADS.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/status.h"
#include "server/chunks/chunk_door.h"
#include "server/chunks/chunk_tiers.h"
#include "server/chunks/room/chunk.h"
#include "server/chunks/room/engine_recalls.h"
#include "server/sockets/unix_listener.h"

namespace kvstrata {

struct ChunkServerOptions {
  uint64_t bytes = 0;             // 0: there are no chunks
  uint32_t layout_percent = 100;  // part of them that rows of one size may have
  uint64_t daemon_epoch = 0;
  ChunkDoorOptions door;
  ChunkTiersOptions tiers;
  EngineRecalls* recalls = nullptr;  // what workers tell; outlives the server
};

class ChunkServer {
 public:
  static Result<std::unique_ptr<ChunkServer>> Start(const ChunkServerOptions& options,
                                                    std::unique_ptr<UnixListener> listener);
  ~ChunkServer();  // Stop
  // Closes the listener and, behind what they have sent, all connections: clients see EOF. Complete
  // chunks are written on to the tiers below. Idempotent.
  void EndServing();
  // EndServing, then ends the threads and waits for them: what is not written now never is.
  // Idempotent.
  void Stop();

  // As of the last time that something happened.
  ChunkNumbers Numbers() const;
  // Whether complete chunks wait for their sum or to be written below, or are being written.
  bool Saves() const;
  // Those. Holds the loop up for a look at each.
  ChunkAmount Unwritten() const;

  // What an operator sees of chunks that are shown. Each holds the loop up: List for `n` chunks,
  // the others for a look-up; Copy copies beside it.
  struct Listed {
    ChunkKey key{};
    uint64_t bytes = 0;
  };
  // Those among the next `n` chunks from byte `*at` of the region on; kNoMore: that was all.
  static constexpr uint64_t kNoMore = ~uint64_t{0};
  std::vector<Listed> List(uint64_t* at, size_t n) const;
  bool Has(const ChunkKey& key) const;
  // Nothing: it is not there, or was evicted meanwhile.
  std::optional<std::vector<std::byte>> Copy(const ChunkKey& key) const;

 private:
  class Loop;
  explicit ChunkServer(std::unique_ptr<Loop> loop);
  std::unique_ptr<Loop> loop_;
};

}  // namespace kvstrata
