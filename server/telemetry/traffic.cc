// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/traffic.h"

#include <algorithm>
#include <atomic>
#include <numeric>

namespace kvstrata {
namespace {

struct TimeCounts {
  std::array<std::atomic<uint64_t>, kLatencyBounds + 1> of{};
  std::atomic<uint64_t> sum_us{0};
};
std::array<TimeCounts, kTimed> g_times;
std::array<std::atomic<uint64_t>, kBytePaths> g_bytes;
std::atomic<uint64_t> g_waiting_replies;

uint64_t MicrosOf(std::chrono::steady_clock::duration took) {
  return static_cast<uint64_t>(
      std::max<int64_t>(0, std::chrono::duration_cast<std::chrono::microseconds>(took).count()));
}

size_t BinOf(uint64_t us) {
  size_t bin = 0;
  while (bin < kLatencyBounds && us > LatencyBoundUs(bin)) ++bin;
  return bin;
}

}  // namespace

void LatencyHistogram::Add(std::chrono::steady_clock::duration took) {
  const uint64_t us = MicrosOf(took);
  ++counts[BinOf(us)];
  sum_us += us;
}

uint64_t LatencyHistogram::count() const {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

std::string_view NameOf(Timed what) {
  static constexpr std::string_view kNames[] = {"open", "lookup",        "disk_load",  "publish",
                                                "rpc",  "remote_search", "remote_load"};
  return kNames[static_cast<size_t>(what)];
}

std::string_view NameOf(BytePath path) {
  static constexpr std::string_view kNames[] = {"disk_to_memory", "memory_to_disk",
                                                "engine_to_memory", "remote_to_memory",
                                                "memory_to_remote"};
  return kNames[static_cast<size_t>(path)];
}

void NoteTime(Timed what, std::chrono::steady_clock::duration took) {
  const uint64_t us = MicrosOf(took);
  TimeCounts& counts = g_times[static_cast<size_t>(what)];
  counts.of[BinOf(us)].fetch_add(1, std::memory_order_relaxed);
  counts.sum_us.fetch_add(us, std::memory_order_relaxed);
}

void NoteBytes(BytePath path, uint64_t bytes) {
  g_bytes[static_cast<size_t>(path)].fetch_add(bytes, std::memory_order_relaxed);
}

void NoteReplyWaits() { g_waiting_replies.fetch_add(1, std::memory_order_relaxed); }

LatencyHistogram TimesOf(Timed what) {
  const TimeCounts& counts = g_times[static_cast<size_t>(what)];
  LatencyHistogram out;
  for (size_t i = 0; i < out.counts.size(); ++i) {
    out.counts[i] = counts.of[i].load(std::memory_order_relaxed);
  }
  out.sum_us = counts.sum_us.load(std::memory_order_relaxed);
  return out;
}

uint64_t BytesOf(BytePath path) {
  return g_bytes[static_cast<size_t>(path)].load(std::memory_order_relaxed);
}

uint64_t RepliesThatWaited() { return g_waiting_replies.load(std::memory_order_relaxed); }

}  // namespace kvstrata
