// SPDX-License-Identifier: Apache-2.0
// Sessions: how one begins and ends, and who else is passed its memory.
//
// Thread-safety: all methods, from any thread. Errors: SESSION_UNKNOWN and those that a method
// names.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "server/store/options/session_types.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"

namespace kvstrata {

class Sessions {
 public:
  Sessions(Books& books, const StoreOptions& options, Answers& answers, SessionCatalog& catalog,
           Models& models, PageReferences& references, Watermarks& watermarks,
           Sequences& sequences);

  // Its sequences get memory of `device` and of the host, and see no other device's: pages of a
  // prefix that lie on another one are copied when they open.
  Result<SessionSegments> OpenSession(const PeerIdentity& peer, Transport transport,
                                      std::string_view client_name, ArenaSink sink,
                                      uint32_t device = 0) KVS_EXCLUDES(store_lock);
  // Idempotent; kEof may be followed by kDied. kDetached and kDied unmap the segments and close
  // their descriptors: SessionSegments is void after them. kEof keeps them, because readers that
  // are inside a step still hold back memory. While the session has writers (PassArenas) all are
  // kEof.
  EndedSession EndSession(uint64_t session, SessionEnd how) KVS_EXCLUDES(store_lock);

  // For a process without the library: passes every arena that the session was granted to `sink`,
  // now, and every later one before a table names it, instead of to the sink of before. With
  // `writable` the session's own arenas come writable; the process counts as a writer then until
  // EndWriter, and nobody else gets those arenas while there is one. Else all come read-only.
  // RESOURCE_EXHAUSTED WRITER_LIMIT: kMaxWriters of the session live. Cost: a system call an arena.
  static constexpr uint32_t kMaxWriters = 8;
  Result<PassedTables> PassArenas(uint64_t session, bool writable, ArenaSink sink)
      KVS_EXCLUDES(store_lock);
  // FAILED_PRECONDITION NOT_WRITABLE: it has no writer.
  Status CheckWriter(uint64_t session) KVS_EXCLUDES(store_lock);
  // A writer's process has ended.
  void EndWriter(uint64_t session) KVS_EXCLUDES(store_lock);

  // Another number in each daemon; never 0.
  uint64_t daemon_epoch() const { return daemon_epoch_; }

 private:
  Status CheckRoomForSession(const Tenant& tenant) const KVS_REQUIRES(store_lock);
  void CloseAll(Session* session) KVS_REQUIRES(store_lock);
  void DropSession(Session* session) KVS_REQUIRES(store_lock);

  Books& books_;
  const StoreOptions& options_;
  Answers& answers_;
  SessionCatalog& catalog_;
  Models& models_;
  PageReferences& references_;
  Watermarks& watermarks_;
  Sequences& sequences_;
  const uint64_t daemon_epoch_;
};

}  // namespace kvstrata
