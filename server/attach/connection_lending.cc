// SPDX-License-Identifier: Apache-2.0
#include "server/attach/connection_lending.h"

#include <utility>

#include "server/telemetry/thread_top.h"

namespace kvstrata {

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
