// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/state/tier_victims.h"

#include <utility>

namespace kvstrata::disk {

std::vector<std::string> TierVictims::Choose(std::span<const uint64_t> sizes) {
  const uint32_t blocks = SlotBlocks(sizes);
  MutexLock lock(state_->mu);
  if (state_->table.HasRoom(blocks)) return {};
  const std::vector<uint32_t> segments = state_->table.OfClass(blocks);
  const auto pinned = [this](const std::string& key)
                          KVS_NO_THREAD_SAFETY_ANALYSIS { return state_->pinned.contains(key); };
  if (segments.empty()) return state_->table.KeysOfEmptiest(pinned);
  const uint64_t slots = state_->table.SlotsOf(blocks);
  uint64_t& hand = hands_[blocks];
  for (uint64_t i = 0; i < 2 * slots * segments.size(); ++i) {
    hand = (hand + 1) % (slots * segments.size());
    const std::string* key = state_->table.at(segments[hand / slots]).keys[hand % slots];
    if (key == nullptr || pinned(*key)) continue;
    if (!std::exchange(state_->index.find(*key)->second.used, false)) return {*key};
  }
  return state_->table.KeysOfEmptiest(pinned);  // all of its size are beyond use, or pinned
}

void TierVictims::Pin(std::span<const std::string> keys) {
  MutexLock lock(state_->mu);
  for (const std::string& key : keys) ++state_->pinned[key];
}

void TierVictims::Unpin(std::span<const std::string> keys) {
  MutexLock lock(state_->mu);
  for (const std::string& key : keys) {
    const auto it = state_->pinned.find(key);
    if (it != state_->pinned.end() && --it->second == 0) state_->pinned.erase(it);
  }
}

}  // namespace kvstrata::disk
