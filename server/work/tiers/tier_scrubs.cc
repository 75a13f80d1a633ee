// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/tier_scrubs.h"

#include <pthread.h>

#include <optional>
#include <utility>

#include "server/telemetry/heartbeat.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

constexpr const char* kThread = "kvs-tier-scrub";
constexpr uint32_t kPatience = 60;  // for requests that have deadlines of their own

Status Stopping() { return Unavailable("DAEMON_STOPPING", "the daemon is stopping"); }

}  // namespace

TierScrubs::TierScrubs(Store* store, ValueTier* tier, TierBuffers* buffers,
                       std::function<bool()> may, std::chrono::microseconds timeout)
    : store_(store),
      tier_(tier),
      buffers_(buffers),
      may_(std::move(may)),
      timeout_(timeout),
      thread_([this] { Run(); }) {
  pthread_setname_np(thread_.native_handle(), kThread);
}

TierScrubs::~TierScrubs() { Stop(); }

Status TierScrubs::Begin(TierScrub scrub) {
  {
    MutexLock lock(mu_);
    if (refuses_) return Stopping();
    if (scrub_ != nullptr) {
      return {Code::kFailedPrecondition, "SCRUB_RUNNING", "another scrub of the disk runs"};
    }
    scrub_ = std::make_unique<ValueScrub>(std::move(scrub), store_, tier_, buffers_, &log_);
  }
  changed_.notify_one();
  return OkStatus();
}

void TierScrubs::Refuse() {
  {
    MutexLock lock(mu_);
    refuses_ = true;
  }
  changed_.notify_all();
}

void TierScrubs::Stop() {
  {
    MutexLock lock(mu_);
    refuses_ = stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

// The lock: whoever looks sees what changed, or hears this.
void TierScrubs::Wake() {
  MutexLock lock(mu_);
  if (scrub_ != nullptr) changed_.notify_one();
}

bool TierScrubs::refuses() const {
  MutexLock lock(mu_);
  return refuses_;
}

ValueScrub* TierScrubs::Next() {
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS -> ValueScrub* {
    for (;;) {
      const bool may = scrub_ != nullptr && may_();
      const bool due = may && std::chrono::steady_clock::now() >= scrub_->next_look();
      if (due || (scrub_ != nullptr && refuses_)) return scrub_.get();
      if (stopping_) return nullptr;
      if (may) {
        changed_.wait_until(lock, scrub_->next_look());
      } else {
        changed_.wait(lock);
      }
    }
  }();
}

void TierScrubs::Run() {
  WarmUpAllocator();
  Heartbeat beat(kThread, kPatience);
  while (ValueScrub* scrub = Next()) {
    const LoopIteration iteration(&beat);
    std::optional<Status> end = Stopping();
    if (!refuses() && !Survive(kThread, [&] { end = scrub->GoOn(timeout_); })) {
      end = ResourceExhausted("MEMORY", "the daemon has no memory to scrub");
    }
    if (!end) continue;
    std::unique_ptr<ValueScrub> ended;
    {
      MutexLock lock(mu_);
      ended = std::move(scrub_);
    }
    Survive(kThread, [&] { ended->End(*end); });
  }
}

}  // namespace kvstrata
