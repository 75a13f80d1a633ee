// SPDX-License-Identifier: Apache-2.0
// Traffic: how long what clients wait for takes, how many bytes went which way, and how many
// replies found no room, since the start.
//
// Histograms have fixed bounds, a power of four each, so that those of several daemons add up.
// Thread-safety: any thread. Cost: three relaxed increments.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvstrata {

enum class Timed : uint8_t {
  kOpen,          // a sequence, from the request to its answer, what it waits for on disk included
  kLookup,        // a client asks
  kDiskLoad,      // one batch that an open waits for
  kPublish,       // publishing a recompression's result
  kRpc,           // a call of one answer
  kRemoteSearch,  // what an open asks a remote tier for first
  kRemoteLoad,    // one batch of it that an open waits for
};
inline constexpr size_t kTimed = 7;

enum class BytePath : uint8_t {
  kDiskToMemory,  // payloads, without headers
  kMemoryToDisk,
  kEngineToMemory,  // blocks that engines lend
  kRemoteToMemory,  // payloads, without headers
  kMemoryToRemote,
};
inline constexpr size_t kBytePaths = 5;

// 16 us, 64 us, .. 67 s; then the rest.
inline constexpr size_t kLatencyBounds = 12;
constexpr uint64_t LatencyBoundUs(size_t i) { return uint64_t{16} << (2 * i); }

struct LatencyHistogram {
  std::array<uint64_t, kLatencyBounds + 1> counts{};  // counts[i]: at most bound i, above i - 1
  uint64_t sum_us = 0;
  uint64_t count() const;
  void Add(std::chrono::steady_clock::duration took);  // not thread-safe
};

std::string_view NameOf(Timed what);     // "open"
std::string_view NameOf(BytePath path);  // "disk_to_memory"

void NoteTime(Timed what, std::chrono::steady_clock::duration took);
void NoteBytes(BytePath path, uint64_t bytes);
// A reply ring had no room: the reply waits in the daemon.
void NoteReplyWaits();

LatencyHistogram TimesOf(Timed what);
uint64_t BytesOf(BytePath path);
uint64_t RepliesThatWaited();

}  // namespace kvstrata
