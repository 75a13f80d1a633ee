// SPDX-License-Identifier: Apache-2.0
// Spans: how long a client's request took and each part of it, in the trace of whoever asked: W3C
// Trace Context, `traceparent` among a call's metadata. Numbers and names of parts alone, nothing
// of a prompt.
//
// Nothing is recorded until somebody takes spans (server/http/trace_exporter.h), and only of traces
// that their caller samples. The queue is bounded: what has no room is dropped, and counted.
// Thread-safety: SpanQueue any thread; a RequestSpan one at a time. Cost: none without a trace;
// else an allocation, and a short lock a span.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/sync.h"

namespace kvstrata {

using SpanNumbers = std::vector<std::pair<std::string_view, uint64_t>>;  // "sequence", 7

struct SpanRecord {
  std::string trace, span, parent;  // hexadecimal
  std::string_view name;
  bool request = false;                 // else a part of one
  uint64_t begun_ns = 0, ended_ns = 0;  // since 1970
  SpanNumbers numbers;
  std::string reason;  // why it failed; "": it did not
};

class SpanQueue {
 public:
  static constexpr size_t kMost = 4096;
  enum Result { kExported, kDropped, kFailed, kResults };

  // Whether somebody takes them.
  bool enabled() const { return enabled_.load(std::memory_order_relaxed); }
  void Enable() { enabled_ = true; }
  void Add(SpanRecord span) KVS_EXCLUDES(mu_);
  // Waits for the first, then for `linger` at most until there are `most`; at once what there is
  // after End.
  std::vector<SpanRecord> Take(size_t most, std::chrono::milliseconds linger) KVS_EXCLUDES(mu_);
  void End() KVS_EXCLUDES(mu_);

  void Count(Result result, uint64_t n) { counts_[result].fetch_add(n, std::memory_order_relaxed); }
  uint64_t count(Result result) const { return counts_[result].load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> enabled_{false};
  std::array<std::atomic<uint64_t>, kResults> counts_{};
  Mutex mu_;
  std::condition_variable came_;
  std::deque<SpanRecord> spans_ KVS_GUARDED_BY(mu_);
  bool ended_ KVS_GUARDED_BY(mu_) = false;
};
SpanQueue& Spans();                                 // the process's own
std::string_view NameOf(SpanQueue::Result result);  // "exported", "dropped", "failed"

// One request, from now to End.
class RequestSpan {
 public:
  using Clock = std::chrono::steady_clock;

  // Null: nobody takes spans, or that is no `traceparent` of a trace that is sampled.
  static std::shared_ptr<RequestSpan> Begin(std::string_view name, std::string_view traceparent);

  void Part(std::string_view name, Clock::time_point begun, Clock::time_point ended,
            SpanNumbers numbers = {}) const;
  void End(const Status& status, SpanNumbers numbers = {});

 private:
  uint64_t UnixNs(Clock::time_point at) const;

  SpanRecord record_;
  const Clock::time_point begun_ = Clock::now();
};

}  // namespace kvstrata
