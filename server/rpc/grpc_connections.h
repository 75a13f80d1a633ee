// GrpcConnections: what the daemon knows of the connections that it gave to gRPC. gRPC tells nobody
// when one of them ends, and on its own it waits for a peer that does not read or does not answer;
// so a copy of each descriptor stays here, in an epoll set that hears of the end, and shutdown(2)
// on the copies ends all of them at once.
//
// Who may connect is asked for each accepted connection (Admit), before gRPC sees it; who ended is
// told once for each that was added (Ended).
//
// Ownership: copies; gRPC owns its descriptors. A copy lives until its connection has ended both
// ways: gRPC shuts down what it closes, and a peer that is gone has hung up.
// Threads: one at a time; fd() may be polled meanwhile. Cost: one descriptor and 48 bytes of kernel
// memory or so a connection; Admit and Add are a few system calls.
#ifndef KVSTRATA_SERVER_RPC_GRPC_CONNECTIONS_H_
#define KVSTRATA_SERVER_RPC_GRPC_CONNECTIONS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>

#include "base/status.h"
#include "base/unique_fd.h"

namespace kvstrata {

class GrpcConnections {
 public:
  static constexpr size_t kMaxOfUser = 1024;

  // GRPC_START (INTERNAL): the kernel gives no epoll set. Called once, first.
  Status Open();
  // Readable while Collect has something to do.
  int fd() const { return ended_.get(); }

  // CONNECTIONS (RESOURCE_EXHAUSTED): the user has as many as one may have.
  Status Admit(uint32_t uid) const;
  // Keeps a copy of an admitted connection. DESCRIPTORS (RESOURCE_EXHAUSTED): there is none for it.
  Status Add(uint32_t uid, int socket);
  // Forgets connections that have ended.
  void Collect();
  // Ends all of them, for both sides, whatever was not sent yet. They are collected later.
  void CutAll();

  size_t OfUser(uint32_t uid) const;

 private:
  struct Connection {
    uint32_t uid;
    UniqueFd copy;
  };
  void Ended(int copy);

  UniqueFd ended_;
  std::unordered_map<int, Connection> connections_;  // by the copy
  std::map<uint32_t, size_t> of_user_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_GRPC_CONNECTIONS_H_
