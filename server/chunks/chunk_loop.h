// SPDX-License-Identifier: Apache-2.0
// ChunkServer::Loop: the thread that serves the chunk socket. For chunk_server.cc alone.
//
// Thread-safety: Stop and Numbers from any thread, the rest is the loop's.
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

#include "base/unique_fd.h"
#include "server/chunks/chunk_board.h"
#include "server/chunks/chunk_door.h"
#include "server/chunks/chunk_processes.h"
#include "server/chunks/chunk_room.h"
#include "server/chunks/chunk_server.h"
#include "server/chunks/chunk_workers.h"
#include "server/sockets/event_poll.h"
#include "server/telemetry/heartbeat.h"
#include "server/telemetry/log.h"

namespace kvstrata {

class ChunkServer::Loop {
 public:
  Loop(const ChunkServerOptions& options, std::unique_ptr<UnixListener> listener);
  ~Loop() { Stop({}); }
  Status Start();
  void Stop(std::chrono::microseconds writes);
  ChunkNumbers Numbers() const { return board_.Get(); }

 private:
  struct Connection {
    std::unique_ptr<ChunkGuest> who;
    bool writable = false;  // it is watched for room
  };

  void Run();
  void RunIteration();
  void OnEvent(const epoll_event& event);
  // Clients see that it ends.
  void OnStop();
  int WaitMs() const;
  void OnSocket(uint64_t number, uint32_t events);
  void OnPacket(Connection* c, size_t bytes);
  void OnDead(uint32_t process);
  // Who has said HELLO is welcome, or refused.
  void Receive(std::unique_ptr<ChunkGuest> guest);
  Status Join(ChunkGuest* guest);
  // A room of that user's, made if need be.
  Status TakeRoom(uint32_t user);
  // What came of work, and what goes out; until nothing does.
  void Flush();
  void Send(uint64_t connection, std::vector<std::byte> packet);
  void End(uint64_t connection, std::string_view why);
  void PutNumbers();

  const ChunkServerOptions options_;
  EventPoll events_;
  UniqueFd stop_event_;
  std::unique_ptr<ChunkDoor> door_;
  LogLimiter log_{10};
  ChunkBoard board_;
  Heartbeat beat_{"kvs-chunks"};
  std::unique_ptr<ChunkWorkers> workers_;

  ChunkCounters counters_;
  std::unique_ptr<ChunkRoom> room_;  // null: no engine has come yet
  uint64_t rooms_ = 0;
  std::map<uint64_t, Connection> connections_;
  ChunkProcesses processes_{&events_};
  std::array<std::byte, chunks::kMostChunkPacket + 1> packet_;
  std::atomic<std::chrono::steady_clock::time_point> write_until_;  // of the end
  bool ending_ = false, stopping_ = false;
  std::thread thread_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CHUNKS_CHUNK_LOOP_H_
