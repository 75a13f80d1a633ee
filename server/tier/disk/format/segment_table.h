// SPDX-License-Identifier: Apache-2.0
// SegmentTable: which slots of which segments are taken. RAM only; the engine writes the disk.
//
// A segment serves slots of one size, or of none while it is empty; an empty one changes its size
// when another size has no slot left. Thread-safety: none, the tier's lock. Cost: O(log segments).
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace kvstrata::disk {

struct SlotId {
  uint32_t segment = 0;
  uint32_t slot = 0;
  auto operator<=>(const SlotId&) const = default;
};

struct Segment {
  uint32_t slot_blocks = 0;  // 0: none yet
  uint64_t sequence = 0;     // sequence of the superblock's newest copy
  uint64_t dirty_after = 0;
  bool formatted = false;                // the superblock on disk says slot_blocks
  bool dirty = false;                    // marked since the last checkpoint
  bool written = false;                  // since the last good flush
  bool stopped = false;                  // takes no writes any more
  uint64_t flushed = 0;                  // generations up to this one are durable
  uint32_t errors = 0;                   // EIO so far
  uint32_t used = 0;                     // slots that are not free
  std::vector<uint32_t> free;            // the next one to take is the last
  std::vector<const std::string*> keys;  // per slot the index's key; null: none
};

class SegmentTable {
 public:
  SegmentTable(uint32_t segments, uint64_t segment_blocks)
      : segment_blocks_(segment_blocks), segments_(segments) {
    for (uint32_t i = 0; i < segments; ++i) empty_.insert(i);
  }

  // Further segments, empty.
  void Grow(uint32_t segments);
  // Segments from this one on are no more. REQUIRES: they hold no key.
  void Shrink(uint32_t segments);

  uint32_t size() const { return static_cast<uint32_t>(segments_.size()); }
  Segment& at(uint32_t i) { return segments_[i]; }
  const Segment& at(uint32_t i) const { return segments_[i]; }
  uint32_t SlotsOf(uint32_t slot_blocks) const;
  uint32_t BlockOf(SlotId id) const;

  // A free slot of that size, now taken; none: there is neither a slot nor an empty segment.
  std::optional<SlotId> Allocate(uint32_t slot_blocks);
  void Free(SlotId id);
  bool HasRoom(uint32_t slot_blocks) const;

  // At start: the segment has this size and all of its slots are taken; Free those that are not.
  void Adopt(uint32_t segment, uint32_t slot_blocks);
  // No slot of it is taken any more.
  void Stop(uint32_t segment);

  // Segments that serve this size; empty: none does.
  std::vector<uint32_t> OfClass(uint32_t slot_blocks) const;
  // The keys of the segment that would be empty soonest, of those without a key that must stay.
  std::vector<std::string> KeysOfEmptiest(
      const std::function<bool(const std::string& key)>& stays) const;

 private:
  void Assign(uint32_t segment, uint32_t slot_blocks);

  const uint64_t segment_blocks_;
  std::vector<Segment> segments_;
  std::set<uint32_t> empty_;                          // without a size, or with no slot taken
  std::map<uint32_t, std::set<uint32_t>> with_room_;  // by size
};

}  // namespace kvstrata::disk
