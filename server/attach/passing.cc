// Connections that redeem a token (attach_tokens.h) instead of saying Hello: a process without the
// library fetches descriptors of a session of gRPC's. It has no ring and says nothing more; arenas
// that the session is granted later follow as they do on a session's own connection.
#include <fcntl.h>

#include <algorithm>
#include <string>
#include <utility>

#include "server/attach/attach_loop.h"
#include "server/attach/packet.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {

void AttachServer::Loop::OnRedeem(Connection* c, const shm::Redeem& redeem, size_t bytes) {
  if (const Status status = CheckRedeem(redeem, bytes); !status.ok()) return Refuse(c, status);
  AttachToken token;
  std::copy(std::begin(redeem.token), std::end(redeem.token), token.begin());
  c->status = ResourceExhausted("MEMORY", "the daemon has no memory for another connection");
  Lend(
      c, FairQueue::Length::kShort, [=, this] { c->status = PassDescriptors(c, token); },
      [=, this] { OnPassed(c, c->status); });
}

Status AttachServer::Loop::PassDescriptors(Connection* c, const AttachToken& token) {
  if (options_.tokens == nullptr) {
    return Unimplemented("TOKEN_UNKNOWN", "this daemon gives no tokens");
  }
  KVS_ASSIGN_OR_RETURN(const TokenGrant grant, options_.tokens->Redeem(c->peer.uid, token));
  UniqueFd socket(fcntl(c->socket.get(), F_DUPFD_CLOEXEC, 0));
  if (!socket) {
    return ResourceExhausted("DESCRIPTORS",
                             "the daemon has no file descriptors left; raise LimitNOFILE");
  }
  c->mailbox = std::make_shared<ArenaMailbox>(std::move(socket));
  auto granting = std::make_shared<const char>();
  c->granting = granting;
  const Result<PassedTables> tables =
      store_->sessions().PassArenas(grant.session, grant.writable,
                                    [box = c->mailbox, granting = std::move(granting)](
                                        const ArenaGrant& arena) { box->Put(arena); });
  if (!tables.ok()) return tables.status();
  c->session = grant.session;
  c->writes = grant.writable;
  Status status = ResourceExhausted("MEMORY", "the daemon has no memory for another connection");
  Survive("kvs-long", [&] { status = SendTables(c, *tables); });
  // It has got nothing that it could write to.
  if (!status.ok() && std::exchange(c->writes, false)) store_->sessions().EndWriter(c->session);
  return status;
}

Status AttachServer::Loop::SendTables(Connection* c, const PassedTables& tables) {
  shm::Tables packet{};
  packet.type = shm::kTables;
  packet.version = shm::kVersion;
  packet.session_id = c->session;
  packet.daemon_epoch = tables.daemon_epoch;
  packet.table_bytes = tables.table_bytes;
  packet.arenas = tables.arenas;
  CopyText(store_->devices().DeviceName(tables.device), packet.device_uuid);
  const int fd = tables.table_fd.get();
  if (SendPacket(c->socket.get(), packet, std::span(&fd, 1)) != SendOutcome::kSent) {
    return Unavailable("PEER_GONE", "the client hung up before its descriptors");
  }
  return OkStatus();
}

void AttachServer::Loop::OnPassed(Connection* c, const Status& status) {
  if (!status.ok()) return Refuse(c, status);
  c->state = Connection::State::kPassed;
  c->mailbox->Open();
  Count(kPassed);
  LogEvent(LogLevel::kInfo, "descriptors_passed",
           {{"session", c->session},
            {"pid", c->peer.pid},
            {"uid", c->peer.uid},
            {"writable", c->writes}});
  EndPassedOver();
}

// A process that may write keeps its mappings: only its death is the end.
void AttachServer::Loop::EndPassing(Connection* c, std::string_view why) {
  LogEvent(LogLevel::kInfo, "passing_ended",
           {{"session", c->session}, {"pid", c->peer.pid}, {"why", why}});
  c->state = Connection::State::kFenced;
  CloseChannels(c);
  if (!c->writes) Erase(c);
}

void AttachServer::Loop::EndPassedOver() {
  std::vector<Connection*> over;
  for (const auto& [number, c] : connections_) {
    if (c->state == Connection::State::kPassed && !c->lent && c->granting.expired()) {
      over.push_back(c.get());
    }
  }
  for (Connection* c : over) EndPassing(c, "its session ended, or another process took its place");
}

void AttachServer::Loop::EndWriter(Connection* c) {
  LogEvent(LogLevel::kInfo, "writer_died", {{"session", c->session}, {"pid", c->peer.pid}});
  Lend(
      c, FairQueue::Length::kShort, [this, c] { store_->sessions().EndWriter(c->session); },
      [this, c] {
        CloseChannels(c);
        Erase(c);
      });
}

}  // namespace kvstrata
