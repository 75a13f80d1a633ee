// SPDX-License-Identifier: Apache-2.0
// EventRing: the last events of the daemon's log, for whoever looks later or goes on looking
// (Admin.Watch): everything from `info` up, and what log.level lets through below that.
//
// A reader asks by the number of the last event that it has; nothing is kept for it. One that is
// too slow finds that events are gone, and how many; it holds up nobody. Thread-safety: any thread.
// Cost: a copy of the event under a short lock; 1,000 events of a few hundred bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/sync.h"
#include "server/telemetry/log.h"

namespace kvstrata {

struct RecordedEvent {
  struct Field {
    std::string key, value;
    bool quoted = false;  // as LogField
  };
  uint64_t number = 0;  // from 1 on, without gaps
  int64_t time_us = 0;  // since the epoch, UTC
  LogLevel level = LogLevel::kInfo;
  std::string name;
  std::vector<Field> fields;
};

class EventRing {
 public:
  static constexpr size_t kEvents = 1000;
  static constexpr size_t kMostValueBytes = 1024;  // the rest is cut

  void Add(LogLevel level, std::string_view event, std::initializer_list<LogField> fields)
      KVS_EXCLUDES(mu_);

  // The first event behind number `after` that is still there; *missed counts those that are gone
  // between. Nothing: there is none yet.
  std::optional<RecordedEvent> Next(uint64_t after, uint64_t* missed) const KVS_EXCLUDES(mu_);
  // What Next is asked first to get all that there is, for who has none yet or has numbers of
  // another process.
  uint64_t Begin(uint64_t after = 0) const KVS_EXCLUDES(mu_);

 private:
  mutable Mutex mu_;
  std::deque<RecordedEvent> events_ KVS_GUARDED_BY(mu_);
  uint64_t last_ KVS_GUARDED_BY(mu_) = 0;
};

// The process's own, which LogEvent fills.
EventRing& RecentEvents();

// "trace", "debug", "info", "warning", "error": as in the log.
std::string_view NameOf(LogLevel level);

}  // namespace kvstrata
