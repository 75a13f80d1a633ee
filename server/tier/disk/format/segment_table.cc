// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/format/segment_table.h"

#include <algorithm>

#include "base/check.h"
#include "server/tier/disk/format/format.h"

namespace kvstrata::disk {

uint32_t SegmentTable::SlotsOf(uint32_t slot_blocks) const {
  return static_cast<uint32_t>((segment_blocks_ - kFirstSlotBlock) / slot_blocks);
}

uint32_t SegmentTable::BlockOf(SlotId id) const {
  return kFirstSlotBlock + id.slot * segments_[id.segment].slot_blocks;
}

void SegmentTable::Assign(uint32_t i, uint32_t slot_blocks) {
  Segment& segment = segments_[i];
  if (segment.slot_blocks != 0) with_room_[segment.slot_blocks].erase(i);
  segment.slot_blocks = slot_blocks;
  segment.formatted = false;
  segment.keys.assign(SlotsOf(slot_blocks), nullptr);
  segment.free.clear();
  for (uint32_t slot = SlotsOf(slot_blocks); slot-- > 0;) segment.free.push_back(slot);
  with_room_[slot_blocks].insert(i);
}

void SegmentTable::Grow(uint32_t segments) {
  for (uint32_t i = size(); i < segments; ++i) empty_.insert(i);
  segments_.resize(segments);
}

void SegmentTable::Shrink(uint32_t segments) {
  for (uint32_t i = segments; i < size(); ++i) {
    for (const std::string* key : segments_[i].keys) KVS_CHECK(key == nullptr);
    empty_.erase(i);
    if (segments_[i].slot_blocks != 0) with_room_[segments_[i].slot_blocks].erase(i);
  }
  segments_.resize(segments);
}

std::optional<SlotId> SegmentTable::Allocate(uint32_t slot_blocks) {
  std::set<uint32_t>& room = with_room_[slot_blocks];
  if (room.empty()) {
    if (empty_.empty() || SlotsOf(slot_blocks) == 0) return std::nullopt;
    Assign(*empty_.begin(), slot_blocks);
  }
  const uint32_t i = *room.begin();
  Segment& segment = segments_[i];
  const SlotId id{i, segment.free.back()};
  segment.free.pop_back();
  ++segment.used;
  empty_.erase(i);
  if (segment.free.empty()) room.erase(i);
  return id;
}

void SegmentTable::Free(SlotId id) {
  Segment& segment = segments_[id.segment];
  KVS_CHECK(segment.used > 0 && segment.keys[id.slot] == nullptr);
  --segment.used;
  segment.free.push_back(id.slot);
  if (segment.stopped) return;
  with_room_[segment.slot_blocks].insert(id.segment);
  if (segment.used == 0) empty_.insert(id.segment);
}

bool SegmentTable::HasRoom(uint32_t slot_blocks) const {
  const auto room = with_room_.find(slot_blocks);
  return !empty_.empty() || (room != with_room_.end() && !room->second.empty());
}

void SegmentTable::Adopt(uint32_t i, uint32_t slot_blocks) {
  Assign(i, slot_blocks);
  Segment& segment = segments_[i];
  segment.formatted = true;
  segment.used = SlotsOf(slot_blocks);
  segment.free.clear();
  with_room_[slot_blocks].erase(i);
  empty_.erase(i);
}

void SegmentTable::Stop(uint32_t i) {
  segments_[i].stopped = true;
  empty_.erase(i);
  if (segments_[i].slot_blocks != 0) with_room_[segments_[i].slot_blocks].erase(i);
}

std::vector<uint32_t> SegmentTable::OfClass(uint32_t slot_blocks) const {
  std::vector<uint32_t> found;
  for (uint32_t i = 0; i < size(); ++i) {
    if (segments_[i].slot_blocks == slot_blocks && !segments_[i].stopped) found.push_back(i);
  }
  return found;
}

std::vector<std::string> SegmentTable::KeysOfEmptiest(
    const std::function<bool(const std::string& key)>& stays) const {
  std::vector<std::string> fewest;
  for (const Segment& segment : segments_) {
    if (segment.stopped) continue;
    std::vector<std::string> keys;
    for (const std::string* key : segment.keys) {
      if (key != nullptr) keys.push_back(*key);
    }
    // One with a slot that is no value's (not trusted any more) cannot be emptied.
    if (keys.empty() || keys.size() < segment.used) continue;
    if (!fewest.empty() && keys.size() >= fewest.size()) continue;
    if (std::ranges::none_of(keys, stays)) fewest = std::move(keys);
  }
  return fewest;
}

}  // namespace kvstrata::disk
