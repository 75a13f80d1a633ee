// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/thread_top.h"

#include <algorithm>

#include "base/sync.h"

namespace kvstrata {

// All that live. Never destroyed: threads may outlive what is static.
struct HeartbeatList {
  static HeartbeatList& Get() {
    static auto* const list = new HeartbeatList;
    return *list;
  }
  static int64_t SinceOf(const Heartbeat& beat) {
    return beat.since_us_.load(std::memory_order_relaxed);
  }
  static HangingLoop LoopOf(const Heartbeat& beat, int64_t taken_us) {
    return {beat.thread_, std::chrono::seconds(taken_us / 1'000'000)};
  }
  static int64_t PatienceOf(const Heartbeat& beat) { return beat.patience_; }

  Mutex mu;
  std::vector<const Heartbeat*> all KVS_GUARDED_BY(mu);
};

Heartbeat::Heartbeat(std::string_view thread, uint32_t patience)
    : thread_(thread), patience_(patience) {
  HeartbeatList& list = HeartbeatList::Get();
  MutexLock lock(list.mu);
  list.all.push_back(this);
}

Heartbeat::~Heartbeat() {
  HeartbeatList& list = HeartbeatList::Get();
  MutexLock lock(list.mu);
  std::erase(list.all, this);
}

std::vector<HangingLoop> HangingLoops(std::chrono::microseconds limit) {
  const auto now = std::chrono::duration_cast<std::chrono::microseconds>(
                       std::chrono::steady_clock::now().time_since_epoch())
                       .count();
  std::vector<HangingLoop> hanging;
  HeartbeatList& list = HeartbeatList::Get();
  MutexLock lock(list.mu);
  for (const Heartbeat* beat : list.all) {
    const int64_t since = HeartbeatList::SinceOf(*beat);
    if (since == 0 || now - since <= HeartbeatList::PatienceOf(*beat) * limit.count()) continue;
    hanging.push_back(HeartbeatList::LoopOf(*beat, now - since));
  }
  std::ranges::sort(hanging, std::greater<>(), &HangingLoop::since);
  return hanging;
}

}  // namespace kvstrata
