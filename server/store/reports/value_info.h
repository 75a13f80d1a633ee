// SPDX-License-Identifier: Apache-2.0
// Values as an operator sees them: what memory and the tier below hold under a key
// (docs/disk_format.md, "Values"). Plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/pages/tier.h"

namespace kvstrata {

// kUnknown: on disk only, and its key and sizes do not say it.
enum class ValueKind : uint8_t { kUnknown, kPage, kIndex, kRecord, kExtent, kPin, kChunk };
std::string_view NameOf(ValueKind kind);

// As the CLI shows a key: 64 hexadecimal digits, of a chunk behind "chunk/"; of a pin's record its
// name.
std::string ValueKeyText(std::string_view key);
// Whether an engine's chunk lies under it (docs/chunks.md).
bool IsChunkKey(std::string_view key);

struct ValueInfo {
  std::string key;  // 32 bytes, of a chunk behind "chunk/"; of a pin's record its name
  ValueKind kind = ValueKind::kUnknown;
  std::string model;    // "": not known
  uint32_t tokens = 0;  // 0: not known
  uint64_t bytes = 0;   // size of its buffers
  std::vector<Tier> tiers;
  bool pinned = false;
  bool changed = false;  // a series grew since the tier below was given it
};

inline constexpr uint64_t kNoMoreValues = ~uint64_t{0};

// A copy of a value.
struct ValueBytes {
  Tier from = Tier::kDevice;
  ValueKind kind = ValueKind::kUnknown;
  std::vector<std::vector<std::byte>> buffers;
  bool changed = false;  // a series grew since the tier below was offered it
};

struct ValueFilter {
  std::string model;  // "": all
  std::string tier;   // "device", "host", "disk"; "": all
};
struct ValueList {
  std::vector<ValueInfo> values;
  uint64_t next = 0;  // where the next list begins; 0: that was all
};

enum class ValueState : uint8_t {
  kSound,
  kCorrupt,
  kGone,
  kUnchecked,  // in memory only, which has no checksums
};
std::string_view NameOf(ValueState state);

struct ValueVerdict {
  ValueState state = ValueState::kGone;
  std::vector<Tier> tiers;
  std::string detail;
};

}  // namespace kvstrata
