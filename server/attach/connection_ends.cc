#include "server/attach/connection_ends.h"

#include <sys/socket.h>

#include <chrono>
#include <utility>

#include "server/attach/packet.h"
#include "server/telemetry/refusals.h"

namespace kvstrata {

void ConnectionEnds::Refuse(AttachConnection* c, const Status& why) {
  state_->counts.Count(AttachCounts::kRefused);
  CountRefusal(why.reason());
  uint64_t suppressed = 0;
  if (state_->MayLog(&suppressed)) {
    LogEvent(LogLevel::kWarn, "attach_refused",
             {{"reason", why.reason()},
              {"pid", c->peer.pid},
              {"uid", c->peer.uid},
              {"why", why.message()},
              {"suppressed", suppressed}});
  }
  SendRefused(c->socket.get(), why);
  CloseChannels(c);
  Erase(c);
}

// The reply is in the ring: the session stays until the client has read it and closed its socket.
void ConnectionEnds::OnDetach(AttachConnection* c) {
  state_->counts.Count(AttachCounts::kDetached);
  LogEvent(LogLevel::kInfo, "detached", {{"session", c->session}});
  state_->connections.StopServing(c);
  c->state = AttachConnection::State::kDetaching;
  c->deadline = std::chrono::steady_clock::now() + state_->hello_timeout.load();
  if (c->ring->has_backlog()) EndDetached(c);  // it reads no replies: EOF is its answer
}

void ConnectionEnds::EndDetached(AttachConnection* c) {
  EndSession(c, SessionEnd::kDetached, [this, c] {
    CloseChannels(c);
    Erase(c);
  });
}

// The connection is gone but the process may live, with its mappings: only its death is the end.
void ConnectionEnds::HangUp(AttachConnection* c, std::string_view why) {
  LogEvent(LogLevel::kInfo, "hung_up",
           {{"session", c->session}, {"pid", c->peer.pid}, {"why", why}});
  c->state = AttachConnection::State::kFenced;
  EndSession(c, SessionEnd::kEof, [this, c] {
    state_->counts.Count(AttachCounts::kHungUp);
    CloseChannels(c);
  });
}

void ConnectionEnds::EndDead(AttachConnection* c) {
  // A dead client's last commits are in the ring, whole or not at all; nobody will use them.
  LogEvent(LogLevel::kInfo, "died", {{"session", c->session}, {"pid", c->peer.pid}});
  EndSession(c, SessionEnd::kDied, [this, c] {
    state_->counts.Count(AttachCounts::kDied);
    CloseChannels(c);
    Erase(c);
  });
}

void ConnectionEnds::EndSession(AttachConnection* c, SessionEnd how, ConnectionLending::Then then) {
  c->end_is_long = c->end_is_long || (c->ring != nullptr && c->ring->end_is_long());
  const auto length = c->end_is_long ? FairQueue::Length::kLong : FairQueue::Length::kShort;
  const auto work = [this, c, how] {
    state_->store->sessions().EndSession(c->session, how);
    c->ring.reset();
    c->inbox.reset();
  };
  lending_->Lend(c, length, work, std::move(then));
}

void ConnectionEnds::CloseChannels(AttachConnection* c) {
  if (c->mailbox) c->mailbox->Close();
  state_->connections.StopServing(c);
  c->ring.reset();
  c->inbox.reset();
  // epoll forgets a descriptor with its last copy, and the client holds one of the doorbell.
  if (c->doorbell) state_->events.Unwatch(c->doorbell.get());
  c->doorbell.Reset();
  DropSocket(c);
}

// The client sees it at once, whenever the socket is closed.
void ConnectionEnds::DropSocket(AttachConnection* c) {
  if (!c->socket) return;
  state_->events.Unwatch(c->socket.get());
  shutdown(c->socket.get(), SHUT_RDWR);
  c->socket.Reset();
}

void ConnectionEnds::Erase(AttachConnection* c) {
  DropSocket(c);
  state_->connections.Erase(c);
}

}  // namespace kvstrata
