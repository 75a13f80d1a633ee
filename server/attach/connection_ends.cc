// SPDX-License-Identifier: Apache-2.0
#include "server/attach/connection_ends.h"

#include <sys/socket.h>

#include <chrono>
#include <utility>

#include "server/sockets/packet.h"
#include "server/telemetry/refusals.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

void TellEnd(const AttachConnection& c, std::string_view event, std::string_view why) {
  const EndedSession& ended = c.ended;
  if (why.empty()) {
    return LogEvent(LogLevel::kInfo, event,
                    {{"session", c.session},
                     {"client", ended.client_name},
                     {"pid", c.peer.pid},
                     {"uid", c.peer.uid},
                     {"sequences", ended.sequences},
                     {"freed_bytes", ended.freed_bytes}});
  }
  LogEvent(LogLevel::kInfo, event,
           {{"session", c.session},
            {"client", ended.client_name},
            {"pid", c.peer.pid},
            {"uid", c.peer.uid},
            {"sequences", ended.sequences},
            {"freed_bytes", ended.freed_bytes},
            {"why", why}});
}

}  // namespace

void ConnectionEnds::Refuse(AttachConnection* c, const Status& why) {
  state_->counts.Count(AttachCounts::kRefused);
  CountRefusal(why.reason());
  uint64_t suppressed = 0;
  if (state_->limiter.Allow(&suppressed)) {
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
  state_->connections.StopServing(c);
  c->state = AttachConnection::State::kDetaching;
  c->deadline = std::chrono::steady_clock::now() + state_->hello_timeout.load();
  if (c->ring->has_backlog()) EndDetached(c);  // it reads no replies: EOF is its answer
}

void ConnectionEnds::EndDetached(AttachConnection* c) {
  EndSession(c, SessionEnd::kDetached, "detached", "", [this, c] {
    CloseChannels(c);
    Erase(c);
  });
}

// The connection is gone but the process may live, with its mappings: only its death is the end.
void ConnectionEnds::HangUp(AttachConnection* c, std::string_view why) {
  c->state = AttachConnection::State::kFenced;
  EndSession(c, SessionEnd::kEof, "hung_up", why, [this, c] {
    state_->counts.Count(AttachCounts::kHungUp);
    CloseChannels(c);
  });
}

void ConnectionEnds::EndDead(AttachConnection* c) {
  // A dead client's last commits are in the ring, whole or not at all; nobody will use them.
  EndSession(c, SessionEnd::kDied, "died", "", [this, c] {
    state_->counts.Count(AttachCounts::kDied);
    CloseChannels(c);
    Erase(c);
  });
}

void ConnectionEnds::EndSession(AttachConnection* c, SessionEnd how, std::string_view event,
                                std::string_view why, ConnectionLending::Then then) {
  c->end_is_long = c->end_is_long || (c->ring != nullptr && c->ring->end_is_long());
  const auto length = c->end_is_long ? FairQueue::Length::kLong : FairQueue::Length::kShort;
  const auto work = [this, c, how] {
    c->ended = state_->store->sessions().EndSession(c->session, how);
    c->ring.reset();
    c->inbox.reset();
  };
  lending_->Lend(c, length, work, [c, event, why = std::string(why), then = std::move(then)] {
    TellEnd(*c, event, why);
    then();
  });
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

void ConnectionLending::Lend(AttachConnection* c, FairQueue::Length length,
                             std::function<void()> work, Then then) {
  KVS_CHECK(!c->lent);
  {
    MutexLock lock(returned_mu_);
    returned_.reserve(state_->connections.all().size());
  }
  c->then = std::move(then);
  state_->queue.Post(c->peer.uid, length, [this, c, work = std::move(work)] {
    Survive("kvs-long", work);
    {
      MutexLock lock(returned_mu_);
      returned_.push_back(c);
    }
    any_returned_.store(true, std::memory_order_release);
    state_->events.Wake();
  });
  c->lent = true;  // only this thread looks
  state_->connections.StopServing(c);
}

bool ConnectionLending::TakeBack() {
  if (!any_returned_.exchange(false, std::memory_order_acquire)) return false;
  std::vector<AttachConnection*> back;
  back.reserve(state_->connections.all().size());  // it becomes returned_
  {
    MutexLock lock(returned_mu_);
    back.swap(returned_);
  }
  for (AttachConnection* c : back) {
    c->lent = false;
    Unmute(c);
    Survive("kvs-attach", std::exchange(c->then, nullptr));  // c may be gone behind it
  }
  return true;
}

void ConnectionLending::Mute(AttachConnection* c, EventPoll::Kind kind) {
  const int fd = kind == EventPoll::kSocket ? c->socket.get() : c->pidfd.get();
  state_->events.Unwatch(fd);
  (kind == EventPoll::kSocket ? c->socket_muted : c->pidfd_muted) = true;
}

// Events are level-triggered: what came meanwhile comes again.
void ConnectionLending::Unmute(AttachConnection* c) {
  if (std::exchange(c->socket_muted, false) && c->socket) state_->WatchSocket(c);
  if (std::exchange(c->pidfd_muted, false)) state_->WatchPidfd(c);
}

}  // namespace kvstrata
