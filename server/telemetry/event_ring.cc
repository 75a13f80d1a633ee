// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/event_ring.h"

#include <chrono>
#include <utility>

namespace kvstrata {
namespace {

int64_t NowMicros() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

}  // namespace

void EventRing::Add(LogLevel level, std::string_view event,
                    std::initializer_list<LogField> fields) {
  RecordedEvent added{0, NowMicros(), level, std::string(event), {}};
  for (const LogField& field : fields) {
    added.fields.push_back(
        {std::string(field.key), field.value.substr(0, kMostValueBytes), field.quoted});
  }
  MutexLock lock(mu_);
  added.number = ++last_;
  events_.push_back(std::move(added));
  if (events_.size() > kEvents) events_.pop_front();
}

std::optional<RecordedEvent> EventRing::Next(uint64_t after, uint64_t* missed) const {
  MutexLock lock(mu_);
  *missed = 0;
  if (after >= last_) return std::nullopt;
  const uint64_t first = events_.front().number;
  if (after + 1 < first) {
    *missed = first - after - 1;
    return events_.front();
  }
  return events_[after + 1 - first];
}

uint64_t EventRing::Begin(uint64_t after) const {
  MutexLock lock(mu_);
  return after == 0 || after > last_ ? last_ - events_.size() : after;
}

// Never destroyed: what ends last may still log.
EventRing& RecentEvents() {
  static EventRing* const ring = new EventRing;
  return *ring;
}

std::string_view NameOf(LogLevel level) {
  static constexpr std::string_view kNames[] = {"trace", "debug", "info", "warning", "error"};
  return kNames[static_cast<size_t>(level)];
}

}  // namespace kvstrata
