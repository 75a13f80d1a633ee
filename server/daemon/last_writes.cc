// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/last_writes.h"

#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLookAgain{10};

}  // namespace

uint64_t LastWrites::State::steps() const {
  const ChunkCounters& c = chunks.counters;
  const uint64_t unsummed = chunks.of(ChunkState::kSumming).chunks;
  return c.written + c.write_failures + c.unsaved + c.changed + pages.written + pages.failed +
         pages.gone - pages.waiting - unsummed;
}

LastWrites::State LastWrites::Look() const {
  return {chunks_->Saves(), chunks_->Numbers(),
          disk_ == nullptr ? TierRowCounters() : disk_->counters()};
}

LastWrites::Amount LastWrites::Waiting(const State& now) const {
  const ChunkAmount chunks = chunks_->Unwritten();
  return {chunks.chunks, now.pages.waiting, chunks.bytes + now.pages.waiting_bytes};
}

std::string_view LastWrites::Await(
    std::chrono::microseconds timeout, std::chrono::microseconds patience,
    const std::function<bool(std::chrono::milliseconds)>& ends) const {
  const Clock::time_point end = Clock::now() + timeout;
  Clock::time_point stepped = Clock::now();
  uint64_t steps = 0;
  for (State now = Look(); now.waits(); now = Look()) {
    if (now.steps() != steps) stepped = Clock::now();
    steps = now.steps();
    if (Clock::now() >= end) return "shutdown.write_timeout was over";
    if (Clock::now() >= stepped + patience) return "no tier took anything for shutdown.timeout";
    if (ends(kLookAgain)) return "another signal to end came";
  }
  return "";
}

void LastWrites::WriteOn(std::chrono::microseconds timeout, std::chrono::microseconds patience,
                         const std::function<bool(std::chrono::milliseconds)>& ends) const {
  const State before = Look();
  if (!before.waits()) return;
  if (timeout.count() > 0) {
    const Amount waiting = Waiting(before);
    LogEvent(LogLevel::kInfo, "stop_writes",
             {{"chunks", waiting.chunks},
              {"pages", waiting.pages},
              {"bytes", waiting.bytes},
              {"timeout_us", timeout.count()}});
  }
  const std::string_view why = Await(timeout, patience, ends);
  const State after = Look();
  const Amount left = Waiting(after);
  const uint64_t chunks =
      left.chunks + after.chunks.counters.write_failures - before.chunks.counters.write_failures;
  const uint64_t pages = left.pages + after.pages.failed - before.pages.failed;
  if (chunks + pages == 0) return;
  LogEvent(LogLevel::kWarn, "stop_dropped",
           {{"chunks", chunks},
            {"pages", pages},
            {"bytes", left.bytes},
            {"why", why.empty() ? "tiers did not take them" : why}});
}

}  // namespace kvstrata
