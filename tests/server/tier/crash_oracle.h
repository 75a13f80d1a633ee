// SPDX-License-Identifier: Apache-2.0
// What a disk may do to a tier, replayed: crashes at every point of a recorded history, and bit
// flips. Each state is mounted, read back whole and compared with what it may be.
//
// An honest disk (killed, lost, reordered, torn) keeps what a flush covered: such a value must be
// there. One that lies (stale, misdirected) may lose anything. Neither may show a byte that is not
// the value of its key, or an older value than the last one that was durable.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace kvstrata {

enum class CrashKind : uint8_t {
  kKilled,       // all that was written is there
  kLost,         // nothing that was not flushed is
  kReordered,    // any of it
  kTorn512,      // sectors of one write that was not flushed are missing
  kTorn4096,     // blocks of it
  kStale,        // a write, or a sector of one, is missing although it was flushed
  kMisdirected,  // one went elsewhere, or all of one value
  kCount,
};

struct Findings {
  uint64_t states = 0;
  std::array<uint64_t, static_cast<size_t>(CrashKind::kCount)> by_kind{};
  uint64_t reads = 0;  // values compared
  uint64_t wrong = 0;  // bytes that may not be there
  uint64_t lost = 0;   // durable values of an honest disk that are not there
  uint64_t failed_starts = 0;
  std::string first;  // the first of these, in words

  bool none() const { return wrong == 0 && lost == 0 && failed_starts == 0; }
};

enum class Until : uint8_t { kAll, kFirstFinding };

// At least `states` states of random histories; fewer when `until` asks for no more.
Findings ReplayCrashes(uint32_t seed, uint64_t states, Until until = Until::kAll);

struct FlipCounts {
  uint64_t values = 0;   // in payloads and headers of a mounted tier
  uint64_t headers = 0;  // before a start that reads every header
  uint64_t checkpoints = 0;
  uint64_t superblocks = 0;
};
struct FlipFindings {
  uint64_t flips = 0;
  uint64_t undetected =
      0;              // the value was served, the checkpoint or superblock believed, or no start
  uint64_t lost = 0;  // values that the flip did not touch and that are not there
};
FlipFindings FlipBits(uint32_t seed, const FlipCounts& counts);

// KVS_TEST_SEED, or a fresh one; prints it.
uint32_t TestSeed();

}  // namespace kvstrata
