// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/format/checkpoint.h"

#include <algorithm>

#include "server/tier/disk/format/format.h"

namespace kvstrata::disk {
namespace {

// What an entry begins with; key and sizes follow.
struct EntryHead {
  uint32_t segment;
  uint32_t slot;
  uint64_t generation;
  uint16_t key_bytes;
  uint16_t buffers;
} __attribute__((packed));
static_assert(sizeof(EntryHead) == 20);

void Append(const void* data, size_t bytes, std::vector<std::byte>* out) {
  const auto* begin = static_cast<const std::byte*>(data);
  out->insert(out->end(), begin, begin + bytes);
}

// Moves `bytes` from the front of `from`; false: there are fewer.
bool Take(std::span<const std::byte>* from, void* to, size_t bytes) {
  if (from->size() < bytes) return false;
  std::copy_n(from->data(), bytes, static_cast<std::byte*>(to));
  *from = from->subspan(bytes);
  return true;
}

}  // namespace

void AppendEntry(const std::string& key, const Entry& entry, std::vector<std::byte>* out) {
  const EntryHead head{entry.at.segment, entry.at.slot, entry.generation,
                       static_cast<uint16_t>(key.size()),
                       static_cast<uint16_t>(entry.sizes.size())};
  Append(&head, sizeof(head), out);
  Append(key.data(), key.size(), out);
  Append(entry.sizes.data(), entry.sizes.size() * sizeof(uint64_t), out);
}

std::optional<std::vector<NamedEntry>> ParseEntries(std::span<const std::byte> bytes,
                                                    uint64_t count) {
  std::vector<NamedEntry> entries;
  entries.reserve(std::min(count, bytes.size() / sizeof(EntryHead)));
  for (uint64_t i = 0; i < count; ++i) {
    EntryHead head;
    if (!Take(&bytes, &head, sizeof(head))) return std::nullopt;
    if (head.key_bytes > kMaxKeyBytes || head.buffers > kMaxBuffers) return std::nullopt;
    NamedEntry& named = entries.emplace_back();
    named.key.resize(head.key_bytes);
    named.entry = {{head.segment, head.slot}, head.generation, {}};
    named.entry.sizes.resize(head.buffers);
    if (!Take(&bytes, named.key.data(), head.key_bytes) ||
        !Take(&bytes, named.entry.sizes.data(), head.buffers * sizeof(uint64_t))) {
      return std::nullopt;
    }
  }
  if (!bytes.empty()) return std::nullopt;
  return entries;
}

}  // namespace kvstrata::disk
