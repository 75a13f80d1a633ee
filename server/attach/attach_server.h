// SPDX-License-Identifier: Apache-2.0
// AttachServer: PATH.attach. Admits clients, passes them their descriptors, serves their rings, and
// ends their sessions when they detach, hang up or die.
//
// One thread ("kvs-attach") serves them all: epoll over the listener, sockets, pidfds and
// doorbells; after activity it polls the rings for `poll` before it sleeps, so that a decode loop
// never pays a system call. Nobody is waited for: a client that is slow to say Hello, to read its
// packets or to take its replies delays itself only. Nothing that a client passes is closed here,
// nor the socket that may hold it (descriptor_closer.h).
//
// The life of a connection: accepted (credentials from the kernel, before a byte is read) -> Hello
// within `hello_timeout` -> Welcome, session open -> one of
//   detached   kDetach: sequences are closed before the reply; the session ends, and its memory is
//              free, when the client has closed its socket, `hello_timeout` later at the latest
//   hung up    EOF or a broken frame: sequences close, the client's own arenas stay fenced until
//   ... dead       ... the pidfd says that the process is gone
//
// A process without the library redeems a token (attach_tokens.h) instead of saying Hello: it gets
// the tables and the arenas of a session of gRPC's, and says nothing more (handshake.h). Its
// connection ends with the session, when a later one takes its place, or when it hangs up.
//
// Ownership: the server owns sockets and its mappings, not the store, which must outlive it.
// Thread-safety: Stop and counters from any thread. Errors of clients are theirs; Start fails with
// ATTACH_START (INTERNAL) when the kernel refuses epoll, timers or threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "base/status.h"
#include "server/attach/peers/attach_tokens.h"
#include "server/sockets/descriptor_closer.h"
#include "server/sockets/unix_listener.h"
#include "server/store/requests/import_sink.h"
#include "server/store/store.h"

namespace kvstrata {

struct AttachOptions {
  std::chrono::microseconds hello_timeout{2'000'000};
  std::chrono::microseconds poll{50};      // 0: sleep at once
  uint64_t reply_backlog_bytes = 1 << 20;  // bytes for one session, beyond its reply ring
  std::chrono::microseconds settle_timeout{60'000'000};  // then it is DEADLINE_EXCEEDED
  uint32_t threads = 3;                                  // for what takes longer than a quantum
  std::string backend = "simd";                          // named in Welcome
  ImportSink* imports = nullptr;   // outlives the server; null: engines lend no tensors
  AttachTokens* tokens = nullptr;  // outlives the server; null: none is known
};

// Since start. `reclaims` are passes of the housekeeping that called the store.
struct AttachCounters {
  uint64_t attached = 0, passed = 0, refused = 0, timed_out = 0;
  uint64_t detached = 0, hung_up = 0, died = 0, malformed = 0;
  uint64_t frames = 0;
  ClosingCounters closing;  // closing what clients passed
};

class AttachServer {
 public:
  static Result<std::unique_ptr<AttachServer>> Start(const AttachOptions& options,
                                                     std::unique_ptr<UnixListener> listener,
                                                     Store* store);
  ~AttachServer();  // Stop
  // Closes the listener and all connections; clients see EOF. Idempotent. Blocks for the thread.
  void Stop();

  AttachCounters counters() const;
  // For connections that come from now on.
  void SetHelloTimeout(std::chrono::microseconds timeout);

 private:
  class Loop;
  explicit AttachServer(std::unique_ptr<Loop> loop);
  std::unique_ptr<Loop> loop_;
};

}  // namespace kvstrata
