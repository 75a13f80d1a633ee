// SPDX-License-Identifier: Apache-2.0
// ChunkServer::Loop: the thread that serves the chunk socket. For the files of ChunkServer alone:
//
//   chunk_server.cc   the loop and its events
//   chunk_hello.cc    how a connection begins: accepted, with its peer's credentials from the
//   kernel
//                     before a byte is read; Hello in time; Welcome with the region, or Refused
//
// Thread-safety: Stop and Numbers from any thread, the rest is the loop's.
#ifndef KVSTRATA_SERVER_CHUNKS_CHUNK_LOOP_H_
#define KVSTRATA_SERVER_CHUNKS_CHUNK_LOOP_H_

#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/sync.h"
#include "base/unique_fd.h"
#include "server/chunks/chunk_inbox.h"
#include "server/chunks/chunk_link.h"
#include "server/chunks/chunk_processes.h"
#include "server/chunks/chunk_room.h"
#include "server/chunks/chunk_server.h"
#include "server/chunks/chunk_sums.h"
#include "server/chunks/chunk_tiers.h"
#include "server/sockets/descriptor_closer.h"
#include "server/sockets/event_poll.h"
#include "server/sockets/peer_process.h"
#include "server/telemetry/heartbeat.h"
#include "server/telemetry/log.h"

namespace kvstrata {

class ChunkServer::Loop {
 public:
  Loop(const ChunkServerOptions& options, std::unique_ptr<UnixListener> listener);
  ~Loop() { Stop(); }
  Status Start();
  void Stop();
  ChunkNumbers Numbers() const KVS_EXCLUDES(mu_);

 private:
  using Clock = std::chrono::steady_clock;
  struct Connection {
    Connection(uint64_t n, ChunkLink with) : number(n), link(std::move(with)) {}
    uint64_t number;
    ChunkLink link;
    PeerCredentials peer;
    uint32_t process = 0;  // its number, or one of ours where our namespace has none for it
    UniqueFd pidfd;        // until it is welcome
    bool joined = false;
    bool writable = false;  // it is watched for room
    Clock::time_point deadline;
    std::string engine;
  };

  // -- chunk_server.cc
  void Run();
  void RunIteration();
  void OnEvent(const epoll_event& event);
  void OnSocket(Connection* c, uint32_t events);
  void OnPacket(Connection* c, size_t bytes);
  void OnDead(uint32_t process);
  // What came of work, and what goes out; until nothing does.
  void Flush();
  void Dispatch(std::vector<ChunkWork> work);
  void Send(uint64_t connection, std::vector<std::byte> packet);
  void End(uint64_t connection, std::string_view why);
  void Tick();
  void PutNumbers() KVS_EXCLUDES(mu_);
  bool MayLog(uint64_t* suppressed);

  // -- chunk_hello.cc
  void Listen(bool on);
  void Accept();
  void Admit(UniqueFd socket);
  void OnHello(Connection* c, size_t bytes);
  Status CheckHello(const chunks::Hello& hello, size_t bytes, ChunkPeer* peer) const;
  Status Welcome(Connection* c, const ChunkPeer& peer, std::string_view client);
  // A room of that user's, made if need be.
  Status TakeRoom(uint32_t user);
  void Refuse(Connection* c, const Status& why);

  const ChunkServerOptions options_;
  std::unique_ptr<UnixListener> listener_;
  bool listening_ = false;
  EventPoll events_;
  UniqueFd stop_event_;
  DescriptorCloser closer_;
  LogLimiter log_{10};
  Heartbeat beat_{"kvs-chunks"};
  std::shared_ptr<ChunkInbox> inbox_;
  std::unique_ptr<ChunkTiers> tiers_;
  std::unique_ptr<ChunkSums> sums_;

  ChunkCounters counters_;
  std::unique_ptr<ChunkRoom> room_;  // null: no engine has come yet
  uint64_t rooms_ = 0, connections_made_ = 0;
  uint32_t unnumbered_ = 0;  // processes, of other namespaces
  std::map<uint64_t, std::unique_ptr<Connection>> connections_;
  ChunkProcesses processes_{&events_};
  std::array<std::byte, chunks::kMostChunkPacket + 1> packet_;
  bool stopping_ = false;

  mutable Mutex mu_;
  ChunkNumbers numbers_ KVS_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CHUNKS_CHUNK_LOOP_H_
