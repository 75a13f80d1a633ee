// What the attach loop has others do: frames that take longer than a quantum, and whatever has to
// wait for the store behind such a frame. A connection that is lent is that thread's alone until it
// is taken back.
#include <unistd.h>

#include <utility>

#include "server/attach/attach_loop.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {

void AttachServer::Loop::Wake(const UniqueFd& event) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t n = write(event.get(), &one, sizeof(one));  // full: it wakes too
}

void AttachServer::Loop::Lend(Connection* c, FairQueue::Length length, std::function<void()> work,
                              Then then) {
  KVS_CHECK(!c->lent);
  {
    MutexLock lock(returned_mu_);
    returned_.reserve(connections_.size());
  }
  c->then = std::move(then);
  queue_.Post(c->peer.uid, length, [this, c, work = std::move(work)] {
    Survive("kvs-long", work);
    {
      MutexLock lock(returned_mu_);
      returned_.push_back(c);
    }
    any_returned_.store(true, std::memory_order_release);
    Wake(*wake_);
  });
  c->lent = true;  // only this thread looks
  std::erase(open_, c);
}

void AttachServer::Loop::TakeBack() {
  std::vector<Connection*> back;
  back.reserve(connections_.size());  // it becomes returned_
  {
    MutexLock lock(returned_mu_);
    back.swap(returned_);
  }
  for (Connection* c : back) {
    c->lent = false;
    Unmute(c);
    Survive("kvs-attach", std::exchange(c->then, nullptr));  // c may be gone behind it
  }
}

void AttachServer::Loop::Mute(Connection* c, Kind kind) {
  const int fd = kind == kSocket ? c->socket.get() : c->pidfd.get();
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  (kind == kSocket ? c->socket_muted : c->pidfd_muted) = true;
}

// Events are level-triggered: what came meanwhile comes again.
void AttachServer::Loop::Unmute(Connection* c) {
  if (std::exchange(c->socket_muted, false) && c->socket) WatchSocket(c);
  if (std::exchange(c->pidfd_muted, false)) Watch(c->pidfd.get(), kPidfd, c->number, EPOLLIN);
}

void AttachServer::Loop::LendRing(Connection* c) {
  const uint64_t before = c->ring->frames();
  const auto length =
      c->ring->next_is_long() ? FairQueue::Length::kLong : FairQueue::Length::kShort;
  Lend(
      c, length, [c] { c->outcome = c->ring->Drain(kLentQuantum); },
      [this, c, before] {
        Count(kFrames, c->ring->frames() - before);
        open_.push_back(c);
        OnRing(c, c->outcome);
      });
}

void AttachServer::Loop::EndSession(Connection* c, SessionEnd how, Then then) {
  c->end_is_long = c->end_is_long || (c->ring != nullptr && c->ring->end_is_long());
  const auto length = c->end_is_long ? FairQueue::Length::kLong : FairQueue::Length::kShort;
  const auto work = [this, c, how] {
    store_->sessions().EndSession(c->session, how);
    c->ring.reset();
    c->inbox.reset();
  };
  Lend(c, length, work, std::move(then));
}

void AttachServer::Loop::KeepHouse() {
  if (housekeeping_.exchange(true)) return;
  const auto work = [this] {
    Survive("kvs-long", [this] {
      if (store_->inspection().Counters().retired_bytes != 0) {
        Count(kReclaims);
        store_->references().Reclaim();
      }
      store_->pins().ExpirePins();
      store_->leases().ExpireLeases(std::chrono::steady_clock::now());
    });
    housekeeping_.store(false);
  };
  try {
    queue_.Post(kNoUser, FairQueue::Length::kShort, work);
  } catch (const std::bad_alloc&) {
    housekeeping_.store(false);  // the next tick tries again
  }
}

}  // namespace kvstrata
