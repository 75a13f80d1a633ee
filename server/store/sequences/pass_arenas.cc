// SPDX-License-Identifier: Apache-2.0
// Descriptors of a remote session's memory, for a process without the client library.
#include <fcntl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/references/tables.h"
#include "server/store/sequences/sessions.h"

namespace kvstrata {

Result<PassedTables> Sessions::PassArenas(uint64_t session_id, bool writable, ArenaSink sink) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Session * session, catalog_.FindSession(session_id));
  if (writable && session->writers == kMaxWriters) {
    return ResourceExhausted("WRITER_LIMIT",
                             std::to_string(kMaxWriters) + " processes have session " +
                                 std::to_string(session_id) +
                                 "'s arenas writable; end one, or ask for a token that reads");
  }
  PassedTables passed;
  passed.table_fd.Reset(fcntl(session->memory->table_fd(), F_DUPFD_CLOEXEC, 0));
  if (!passed.table_fd) {
    return ResourceExhausted("DESCRIPTORS",
                             "the daemon has no file descriptors left; raise LimitNOFILE");
  }
  passed.table_bytes = session->memory->table_bytes();
  passed.daemon_epoch = daemon_epoch_;
  passed.device = session->device;
  session->writers += writable ? 1 : 0;
  session->sink = std::move(sink);
  session->sink_writes = writable;
  std::vector<uint32_t> ids;
  for (const auto& [arena, written] : session->granted) ids.push_back(arena);
  std::ranges::sort(ids);
  for (const uint32_t id : ids) PassArena(books_.memory, *session, *books_.pools.Find(id));
  passed.arenas = static_cast<uint32_t>(ids.size());
  return passed;
}

Status Sessions::CheckWriter(uint64_t session_id) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(const Session* const session, catalog_.FindSession(session_id));
  if (session->writers != 0) return OkStatus();
  return FailedPrecondition("NOT_WRITABLE", "no process has session " + std::to_string(session_id) +
                                                "'s arenas writable; fetch them with a token of "
                                                "IssueAttachToken(writable), or send k and v");
}

void Sessions::EndWriter(uint64_t session_id) {
  {
    StoreLock lock(books_.mu);
    const auto found = catalog_.sessions().find(session_id);
    if (found == catalog_.sessions().end() || --found->second->writers != 0 ||
        !found->second->fenced)
      return;
  }
  EndSession(session_id, SessionEnd::kDied);
}

}  // namespace kvstrata
