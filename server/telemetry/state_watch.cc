// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/state_watch.h"

#include <algorithm>
#include <utility>

#include "server/telemetry/log.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

constexpr std::chrono::seconds kBetween{1};
constexpr uint32_t kPatience = 15;

std::string TextOf(const DaemonState& state) {
  return state.health + (state.draining ? ", draining the disk" : "");
}

// "hangs: kvs-move has not answered for 7 s" is the same state a second later.
std::string WithoutNumbers(std::string text) {
  std::erase_if(text, [](char c) { return c >= '0' && c <= '9'; });
  return text;
}

}  // namespace

void StateChanges::TellServers(const DaemonState& now) const {
  for (const auto& [server, why] : now.left_alone) {
    if (last_.left_alone.contains(server)) continue;
    LogEvent(LogLevel::kWarn, "remote_left_alone", {{"server", server}, {"why", why}});
  }
  for (const auto& [server, why] : last_.left_alone) {
    if (now.left_alone.contains(server)) continue;
    if (now.servers.contains(server)) {
      LogEvent(LogLevel::kInfo, "remote_back", {{"server", server}});
    } else {
      LogEvent(LogLevel::kInfo, "remote_unlisted", {{"server", server}});
    }
  }
}

void StateChanges::Note(const DaemonState& now) {
  TellServers(now);
  const std::string before = TextOf(last_), after = TextOf(now);
  if (WithoutNumbers(before) != WithoutNumbers(after)) {
    const bool well = now.health == "serving";
    LogEvent(well ? LogLevel::kInfo : LogLevel::kWarn, "state_changed",
             {{"from", before}, {"to", after}});
  }
  const bool evicts = now.evicted_pages != last_.evicted_pages ||
                      now.disk_evicted != last_.disk_evicted ||
                      now.evicted_chunks != last_.evicted_chunks;
  if (looks_ == 0 && evicts) burst_ = last_;
  const uint32_t fullest = std::max(last_.fullest_percent, now.fullest_percent);
  last_ = now;
  if (looks_ == 0 && !evicts) return;
  burst_.fullest_percent = std::max(burst_.fullest_percent, fullest);
  ++looks_;
  if (!evicts || looks_ == kLongestBurst) TellBurst();
}

void StateChanges::End() {
  if (looks_ != 0) TellBurst();
}

void StateChanges::TellBurst() {
  LogEvent(LogLevel::kInfo, "evicted",
           {{"pages", last_.evicted_pages - burst_.evicted_pages},
            {"stored_pages", last_.evicted_stored_pages - burst_.evicted_stored_pages},
            {"disk_values", last_.disk_evicted - burst_.disk_evicted},
            {"chunks", last_.evicted_chunks - burst_.evicted_chunks},
            {"fullest_pool_percent", burst_.fullest_percent},
            {"seconds", looks_}});
  looks_ = 0;
}

StateWatch::StateWatch(std::function<DaemonState()> look) : look_(std::move(look)) {
  thread_ = StartThread("kvs-watch", [this] { Run(); });
}

StateWatch::~StateWatch() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

bool StateWatch::AwaitNext() {
  std::unique_lock<std::mutex> lock(mu_.native());
  return !wake_.wait_for(lock, kBetween,
                         [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return stopping_; });
}

void StateWatch::Run() {
  Heartbeat beat("kvs-watch", kPatience);
  StateChanges changes({"serving"});
  for (bool goes_on = true; goes_on;) {
    goes_on = AwaitNext();
    Survive("kvs-watch", [&] {
      const LoopIteration iteration(&beat);
      changes.Note(look_());
    });
  }
  Survive("kvs-watch", [&] { changes.End(); });
}

}  // namespace kvstrata
