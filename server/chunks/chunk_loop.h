// SPDX-License-Identifier: Apache-2.0
// ChunkServer::Loop: the thread that serves the chunk socket. For chunk_server.cc alone.
//
// Thread-safety: what is public, from any thread; the rest is the loop's. It has the lock but while
// it sleeps, so that whoever looks at the room sees it between two iterations.
#ifndef KVSTRATA_SERVER_CHUNKS_CHUNK_LOOP_H_
#define KVSTRATA_SERVER_CHUNKS_CHUNK_LOOP_H_

#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "base/unique_fd.h"
#include "server/chunks/chunk_board.h"
#include "server/chunks/chunk_door.h"
#include "server/chunks/chunk_processes.h"
#include "server/chunks/chunk_server.h"
#include "server/chunks/chunk_workers.h"
#include "server/chunks/room/chunk_room.h"
#include "server/sockets/event_poll.h"
#include "server/telemetry/log.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {

class ChunkServer::Loop {
 public:
  Loop(const ChunkServerOptions& options, std::unique_ptr<UnixListener> listener);
  ~Loop() { Stop({}); }
  Status Start();
  void Stop(std::chrono::microseconds writes);
  ChunkNumbers Numbers() const { return board_.Get(); }
  // What `look` says of the room; it is given null when no engine has come yet.
  template <typename F>
  auto Look(const F& look) const KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    return look(room_.get());
  }

 private:
  struct Connection {
    std::unique_ptr<ChunkGuest> who;
    bool writable = false;  // it is watched for room
  };

  void Run();
  void RunIteration() KVS_EXCLUDES(mu_);
  void OnEvent(const epoll_event& event) KVS_REQUIRES(mu_);
  // Clients see that it ends.
  void OnStop() KVS_REQUIRES(mu_);
  int WaitMs() const;
  void OnSocket(uint64_t number, uint32_t events) KVS_REQUIRES(mu_);
  void OnPacket(Connection* c, size_t bytes) KVS_REQUIRES(mu_);
  void OnDead(uint32_t process) KVS_REQUIRES(mu_);
  // Who has said HELLO is welcome, or refused.
  void Receive(std::unique_ptr<ChunkGuest> guest) KVS_REQUIRES(mu_);
  Status Join(ChunkGuest* guest) KVS_REQUIRES(mu_);
  // A room of that user's, made if need be.
  Status TakeRoom(uint32_t user) KVS_REQUIRES(mu_);
  // What came of work, and what goes out; until nothing does.
  void Flush() KVS_REQUIRES(mu_);
  void Send(uint64_t connection, std::vector<std::byte> packet) KVS_REQUIRES(mu_);
  void End(uint64_t connection, std::string_view why) KVS_REQUIRES(mu_);

  const ChunkServerOptions options_;
  EventPoll events_;
  UniqueFd stop_event_;
  std::unique_ptr<ChunkDoor> door_;
  LogLimiter log_{10};
  ChunkBoard board_;
  Heartbeat beat_{"kvs-chunks"};
  std::unique_ptr<ChunkWorkers> workers_;

  ChunkCounters counters_;
  mutable Mutex mu_;
  std::unique_ptr<ChunkRoom> room_ KVS_GUARDED_BY(mu_);  // null: no engine has come yet
  uint64_t rooms_ = 0;
  std::map<uint64_t, Connection> connections_;
  ChunkProcesses processes_{&events_};
  std::array<std::byte, chunks::kMostChunkPacket + 1> packet_;
  std::atomic<std::chrono::steady_clock::time_point> write_until_;  // deadline of writes at the end
  bool ending_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CHUNKS_CHUNK_LOOP_H_
