// SPDX-License-Identifier: Apache-2.0
// The entries of a checkpoint as bytes (docs/disk_format.md, "Checkpoint").
// Thread-safety: pure functions. Cost: linear.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/tier/disk/format/segment_table.h"

namespace kvstrata::disk {

// A value on disk, as the index knows it.
struct Entry {
  SlotId at;
  uint64_t generation = 0;
  std::vector<uint64_t> sizes;  // bytes of each buffer
  bool used = true;             // since the hand of Victims passed
};

struct NamedEntry {
  std::string key;
  Entry entry;
};

void AppendEntry(const std::string& key, const Entry& entry, std::vector<std::byte>* out);

// None when the bytes are no list of `count` entries.
std::optional<std::vector<NamedEntry>> ParseEntries(std::span<const std::byte> bytes,
                                                    uint64_t count);

}  // namespace kvstrata::disk
