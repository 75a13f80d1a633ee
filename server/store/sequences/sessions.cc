// SPDX-License-Identifier: Apache-2.0
#include "server/store/sequences/sessions.h"

#include <sys/random.h>

#include <chrono>
#include <string>
#include <utility>

#include "base/check.h"
#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/references/models.h"
#include "server/store/references/page_references.h"
#include "server/store/references/watermarks.h"
#include "server/store/requests/answers.h"
#include "server/store/sequences/sequences.h"

namespace kvstrata {
namespace {

constexpr uint32_t kOperatorsSessions = 16;
constexpr size_t kMaxName = 256;

uint64_t NewDaemonEpoch() {
  uint64_t epoch = 0;
  if (getrandom(&epoch, sizeof(epoch), 0) != sizeof(epoch)) {
    epoch = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  }
  return epoch | 1;  // never 0
}

}  // namespace

Sessions::Sessions(Books& books, const StoreOptions& options, Answers& answers,
                   SessionCatalog& catalog, Models& models, PageReferences& references,
                   Watermarks& watermarks, Sequences& sequences)
    : books_(books),
      options_(options),
      answers_(answers),
      catalog_(catalog),
      models_(models),
      references_(references),
      watermarks_(watermarks),
      sequences_(sequences),
      daemon_epoch_(NewDaemonEpoch()) {}

Status Sessions::CheckRoomForSession(const Tenant& tenant) const {
  const bool reserved =
      !options_.user_limits->IsOperator(tenant.name) && options_.max_sessions >= 64;
  const uint32_t most = options_.max_sessions - (reserved ? kOperatorsSessions : 0);
  if (catalog_.sessions().size() < most) return OkStatus();
  return ResourceExhausted("SESSION_LIMIT",
                           "the daemon has all the sessions that it may have (session.max " +
                               std::to_string(options_.max_sessions) +
                               (reserved ? ", some for operators" : "") + "); try again later");
}

Result<SessionSegments> Sessions::OpenSession(const PeerIdentity& peer, Transport transport,
                                              std::string_view client_name, ArenaSink sink,
                                              uint32_t device) {
  StoreLock lock(books_.mu);
  KVS_CHECK(device < books_.memory.devices());  // FindDevice
  Tenant* tenant = catalog_.TenantOf(peer.tenant);
  KVS_RETURN_IF_ERROR(options_.user_limits->Take(tenant->user, Limit::kAttachesPerSecond));
  KVS_ASSIGN_OR_RETURN(UserPlace place,
                       UserPlace::Take(options_.user_limits, tenant->name, Limit::kSessions));
  KVS_RETURN_IF_ERROR(CheckRoomForSession(*tenant));
  const uint64_t id = tenant->NextId(&tenant->sessions_made);
  KVS_ASSIGN_OR_RETURN(std::unique_ptr<SessionMemory> memory,
                       SessionMemory::Create(id, daemon_epoch_, tenant->epoch));
  auto session = std::make_unique<Session>();
  session->id = id;
  session->place = std::move(place);
  session->tenant = tenant;
  session->peer = peer;
  session->transport = transport;
  session->device = device;
  session->client_name = client_name.substr(0, kMaxName);
  session->sink = std::move(sink);
  session->memory = std::move(memory);
  session->opened = Clock::now();
  const SessionMemory& m = *session->memory;
  const SessionSegments segments{id,         daemon_epoch_, m.session_fd(),    m.table_fd(),
                                 m.header(), m.tables(),    m.session_bytes(), m.table_bytes()};
  catalog_.Enter(std::move(session));
  return segments;
}

EndedSession Sessions::EndSession(uint64_t id, SessionEnd how) {
  EndedSession ended;
  answers_.TellAfter([&] {
    StoreLock lock(books_.mu);
    Session* const session = catalog_.AwaitSession(id);
    if (session == nullptr) return;
    Tenant* const tenant = session->tenant;
    LongRequest request(&catalog_, session);
    if (!session->fenced) CloseAll(session);
    request.End();
    ended = session->ended;
    ended.client_name = session->client_name;
    ended.uid = session->peer.uid;
    if (how != SessionEnd::kEof && session->writers == 0) DropSession(session);
    references_.ReclaimByPieces(tenant);
    watermarks_.NoteFill();
  });
  return ended;
}

void Sessions::CloseAll(Session* session) {
  session->ended.sequences = static_cast<uint32_t>(session->sequences.size());
  session->ended.freed_bytes += sequences_.CloseAllOf(session);
  for (auto& [model_id, model] : session->models) models_.LeaveModel(model.first.get());
  session->models.clear();
  session->sink = nullptr;
  session->fenced = true;
  references_.Advance(session->tenant);
}

void Sessions::DropSession(Session* session) {
  books_.pools.Orphan(session->id);
  catalog_.Drop(session);
}

}  // namespace kvstrata
