// SPDX-License-Identifier: Apache-2.0
#include "server/attach/token_passing.h"

#include <fcntl.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "server/attach/peers/hello.h"
#include "server/sockets/packet.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {

void TokenPassing::OnRedeem(AttachConnection* c, const shm::Redeem& redeem, size_t bytes) {
  const Status status = CheckRedeem(redeem, bytes);
  if (!status.ok()) return ends_->Refuse(c, status);
  AttachToken token;
  std::copy(std::begin(redeem.token), std::end(redeem.token), token.begin());
  c->status = ResourceExhausted("MEMORY", "the daemon has no memory for another connection");
  lending_->Lend(
      c, FairQueue::Length::kShort, [=, this] { c->status = PassDescriptors(c, token); },
      [=, this] { OnPassed(c, c->status); });
}

Status TokenPassing::PassDescriptors(AttachConnection* c, const AttachToken& token) {
  if (state_->options.tokens == nullptr) {
    return Unimplemented("TOKEN_UNKNOWN", "this daemon gives no tokens");
  }
  KVS_ASSIGN_OR_RETURN(const TokenGrant grant, state_->options.tokens->Redeem(c->peer.uid, token));
  UniqueFd socket(fcntl(c->socket.get(), F_DUPFD_CLOEXEC, 0));
  if (!socket) {
    return ResourceExhausted("DESCRIPTORS",
                             "the daemon has no file descriptors left; raise LimitNOFILE");
  }
  c->mailbox = std::make_shared<ArenaMailbox>(std::move(socket));
  auto granting = std::make_shared<const char>();
  c->granting = granting;
  const Result<PassedTables> tables =
      state_->store->sessions().PassArenas(grant.session, grant.writable,
                                           [box = c->mailbox, granting = std::move(granting)](
                                               const ArenaGrant& arena) { box->Put(arena); });
  if (!tables.ok()) return tables.status();
  c->session = grant.session;
  c->writes = grant.writable;
  Status status = ResourceExhausted("MEMORY", "the daemon has no memory for another connection");
  Survive("kvs-long", [&] { status = SendTables(c, *tables); });
  // It has got nothing that it could write to.
  if (!status.ok() && std::exchange(c->writes, false)) {
    state_->store->sessions().EndWriter(c->session);
  }
  return status;
}

Status TokenPassing::SendTables(AttachConnection* c, const PassedTables& tables) {
  shm::Tables packet{};
  packet.type = shm::kTables;
  packet.version = shm::kVersion;
  packet.session_id = c->session;
  packet.daemon_epoch = tables.daemon_epoch;
  packet.table_bytes = tables.table_bytes;
  packet.arenas = tables.arenas;
  CopyText(state_->store->devices().DeviceName(tables.device), packet.device_uuid);
  const int fd = tables.table_fd.get();
  if (SendPacket(c->socket.get(), packet, std::span(&fd, 1)) != SendOutcome::kSent) {
    return Unavailable("PEER_GONE", "the client hung up before its descriptors");
  }
  return OkStatus();
}

void TokenPassing::OnPassed(AttachConnection* c, const Status& status) {
  if (!status.ok()) return ends_->Refuse(c, status);
  c->state = AttachConnection::State::kPassed;
  c->mailbox->Open();
  state_->counts.Count(AttachCounts::kPassed);
  LogEvent(LogLevel::kInfo, "descriptors_passed",
           {{"session", c->session},
            {"pid", c->peer.pid},
            {"uid", c->peer.uid},
            {"writable", c->writes}});
  EndPassedOver();
}

// A process that may write keeps its mappings: only its death is the end.
void TokenPassing::EndPassing(AttachConnection* c, std::string_view why) {
  LogEvent(LogLevel::kInfo, "passing_ended",
           {{"session", c->session}, {"pid", c->peer.pid}, {"why", why}});
  c->state = AttachConnection::State::kFenced;
  ends_->CloseChannels(c);
  if (!c->writes) ends_->Erase(c);
}

void TokenPassing::EndPassedOver() {
  std::vector<AttachConnection*> over;
  for (const auto& [number, c] : state_->connections.all()) {
    if (c->state == AttachConnection::State::kPassed && !c->lent && c->granting.expired()) {
      over.push_back(c.get());
    }
  }
  for (AttachConnection* c : over) {
    EndPassing(c, "its session ended, or another process took its place");
  }
}

void TokenPassing::EndWriter(AttachConnection* c) {
  LogEvent(LogLevel::kInfo, "writer_died", {{"session", c->session}, {"pid", c->peer.pid}});
  lending_->Lend(
      c, FairQueue::Length::kShort, [this, c] { state_->store->sessions().EndWriter(c->session); },
      [this, c] {
        ends_->CloseChannels(c);
        ends_->Erase(c);
      });
}

}  // namespace kvstrata
