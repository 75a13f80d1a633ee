// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/spans.h"

#include <sys/random.h>

#include <algorithm>
#include <cstdio>

#include "base/check.h"

namespace kvstrata {
namespace {

constexpr std::string_view kHex = "0123456789abcdef";

std::string NewSpanId() {
  uint64_t id = 0;
  while (id == 0) KVS_CHECK(getrandom(&id, sizeof(id), 0) == sizeof(id));
  std::array<char, 17> text;
  std::snprintf(text.data(), text.size(), "%016lx", static_cast<unsigned long>(id));
  return text.data();
}

bool IsId(std::string_view text) {
  return text.find_first_not_of(kHex) == text.npos && text.find_first_not_of('0') != text.npos;
}

// "00-TRACE-SPAN-FLAGS", of a later version perhaps with more behind it.
bool Parse(std::string_view text, SpanRecord* out) {
  constexpr size_t kLength = 55;
  if (text.size() < kLength || text[2] != '-' || text[35] != '-' || text[52] != '-') return false;
  const std::string_view version = text.substr(0, 2), flags = text.substr(53, 2);
  if (version == "ff" || version.find_first_not_of(kHex) != version.npos) return false;
  if (version == "00" ? text.size() != kLength : text.size() > kLength && text[kLength] != '-') {
    return false;
  }
  out->trace = text.substr(3, 32);
  out->parent = text.substr(36, 16);
  const bool sampled = flags.find_first_not_of(kHex) == flags.npos && kHex.find(flags[1]) % 2 == 1;
  return sampled && IsId(out->trace) && IsId(out->parent);
}

}  // namespace

void SpanQueue::Add(SpanRecord span) {
  {
    MutexLock lock(mu_);
    if (spans_.size() >= kMost) return Count(kDropped, 1);
    spans_.push_back(std::move(span));
  }
  came_.notify_one();
}

std::vector<SpanRecord> SpanQueue::Take(size_t most, std::chrono::milliseconds linger) {
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    came_.wait(lock, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return ended_ || !spans_.empty(); });
    came_.wait_for(lock, linger, [this, most]() KVS_NO_THREAD_SAFETY_ANALYSIS {
      return ended_ || spans_.size() >= most;
    });
    const auto end = spans_.begin() + static_cast<std::ptrdiff_t>(std::min(most, spans_.size()));
    std::vector<SpanRecord> taken(std::make_move_iterator(spans_.begin()),
                                  std::make_move_iterator(end));
    spans_.erase(spans_.begin(), end);
    return taken;
  }();
}

void SpanQueue::End() {
  {
    MutexLock lock(mu_);
    ended_ = true;
  }
  enabled_ = false;
  came_.notify_all();
}

SpanQueue& Spans() {
  static SpanQueue spans;
  return spans;
}

std::string_view NameOf(SpanQueue::Result result) {
  static constexpr std::array<std::string_view, SpanQueue::kResults> kNames = {"exported",
                                                                               "dropped", "failed"};
  return kNames[result];
}

std::shared_ptr<RequestSpan> RequestSpan::Begin(std::string_view name,
                                                std::string_view traceparent) {
  if (!Spans().enabled()) return nullptr;
  auto span = std::make_shared<RequestSpan>();
  if (!Parse(traceparent, &span->record_)) return nullptr;
  span->record_.span = NewSpanId();
  span->record_.name = name;
  span->record_.request = true;
  span->record_.begun_ns =
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                std::chrono::system_clock::now().time_since_epoch())
                                .count());
  return span;
}

uint64_t RequestSpan::UnixNs(Clock::time_point at) const {
  return record_.begun_ns + static_cast<uint64_t>((at - begun_).count());
}

void RequestSpan::Part(std::string_view name, Clock::time_point begun, Clock::time_point ended,
                       SpanNumbers numbers) const {
  SpanRecord part;
  part.trace = record_.trace;
  part.parent = record_.span;
  part.span = NewSpanId();
  part.name = name;
  part.begun_ns = UnixNs(begun);
  part.ended_ns = UnixNs(ended);
  part.numbers = std::move(numbers);
  Spans().Add(std::move(part));
}

void RequestSpan::End(const Status& status, SpanNumbers numbers) {
  record_.ended_ns = UnixNs(Clock::now());
  record_.numbers = std::move(numbers);
  record_.reason = status.ok() ? "" : std::string(status.reason());
  Spans().Add(std::move(record_));
}

}  // namespace kvstrata
