// SPDX-License-Identifier: Apache-2.0
// One start of a disk tier: whose segments these are, and the index from checkpoint and slots.
// Nobody else uses the tier meanwhile.
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/tier/disk/disk_tier_impl.h"
#include "server/tier/disk/tier_budget.h"
#include "server/tier/guard.h"

namespace kvstrata::disk {

namespace {

using Op = IoRequest::Op;

class TierStart {
 public:
  TierStart(TierState* state, TierFiles* files, CheckpointFiles* checkpoints)
      : state_(state), files_(files), checkpoints_(checkpoints) {}

  Status Run(Deadline deadline);

 private:
  struct Superblocks {  // what a segment's first blocks say
    Superblock newest{};
    bool valid = false;
    bool both = false;
  };

  Status ReadSuperblocks(std::vector<Superblocks>* all, Deadline deadline);
  Status ChooseStore(std::span<const Superblocks> all);
  void AdoptSegments(std::span<const Superblocks> all);
  Status ScanSegments(const std::set<uint32_t>& segments, std::vector<NamedEntry>* found,
                      Deadline deadline);
  void EnterFound(NamedEntry found) KVS_EXCLUDES(state_->mu);
  void FreeUnheld() KVS_EXCLUDES(state_->mu);

  TierState* const state_;
  TierFiles* const files_;
  CheckpointFiles* const checkpoints_;
  std::set<SlotId> unreadable_;
};

Status TierStart::Run(Deadline deadline) {
  std::vector<Superblocks> all(files_->first_segments());
  KVS_RETURN_IF_ERROR(ReadSuperblocks(&all, deadline));
  KVS_RETURN_IF_ERROR(ChooseStore(all));
  AdoptSegments(all);
  std::optional<CheckpointFiles::Covered> checkpoint = checkpoints_->Load(deadline);
  std::set<uint32_t> to_scan;
  for (uint32_t i = 0; i < files_->first_segments(); ++i) {
    if (!all[i].valid || all[i].newest.slot_blocks == 0) continue;
    const bool unchanged = checkpoint && (all[i].newest.dirty_after < checkpoint->sequence ||
                                          !Holds(Guard::kDirtyMark));
    if (!all[i].both || !unchanged) to_scan.insert(i);
  }
  std::vector<NamedEntry> found;
  KVS_RETURN_IF_ERROR(ScanSegments(to_scan, &found, deadline));
  if (checkpoint) {
    for (NamedEntry& named : checkpoint->entries) {
      const Superblocks& seen = all[named.entry.at.segment];
      if (seen.valid && !to_scan.contains(named.entry.at.segment)) EnterFound(std::move(named));
    }
  }
  for (NamedEntry& named : found) EnterFound(std::move(named));
  FreeUnheld();
  // Not before it is certain whose they are.
  const size_t cut = files_->CutLonger();
  MutexLock lock(state_->mu);
  // Above that of any header that a lost mark hides from us.
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  state_->generation = std::max(
      state_->generation,
      static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count()));
  state_->stats.scanned_segments = to_scan.size();
  state_->stats.cut_segments = cut;
  for (uint32_t i = 0; i < files_->first_segments(); ++i) {
    state_->table.at(i).flushed = state_->generation;  // what was found is on the disk
    state_->table.at(i).dirty =
        all[i].both && state_->table.at(i).dirty_after == state_->checkpoint_sequence;
  }
  return OkStatus();
}

Status TierStart::ReadSuperblocks(std::vector<Superblocks>* all, Deadline deadline) {
  uint32_t next = 0;
  bool late = false;
  files_->reader().transfers.Run(
      [&]() -> std::optional<Transfer> {
        if (next == files_->first_segments()) return std::nullopt;
        const uint32_t i = next++;
        const std::shared_ptr<std::byte> scratch = files_->reader().scratch.Take();
        KVS_CHECK(scratch != nullptr);
        const auto done = [&, i, scratch](const IoOutcome& outcome) {
          const int error = outcome.error;
          late |= error == ETIMEDOUT;
          const auto* copies = reinterpret_cast<const Superblock*>(scratch.get());
          uint32_t whole = 0;
          for (uint32_t copy = 0; copy < 2 && error == 0; ++copy) {
            const Superblock& block = copies[copy];
            if (Look(block) == Seen::kDamaged || block.segment != i) continue;
            ++whole;
            Superblock& newest = (*all)[i].newest;
            if (!(*all)[i].valid || block.sequence > newest.sequence) newest = block;
            (*all)[i].valid = true;
          }
          (*all)[i].both = whole == 2;
        };
        return Transfer{{{Op::kRead, i, 2 * kBlockBytes, 0, scratch.get()}}, scratch, done};
      },
      deadline);
  return late ? DeadlineExceeded("the disk") : OkStatus();
}

// The store that most segments belong to; a new one when there is none.
Status TierStart::ChooseStore(std::span<const Superblocks> all) {
  std::map<StoreId, uint32_t> votes;
  for (const Superblocks& seen : all) {
    if (!seen.valid) continue;
    KVS_RETURN_IF_ERROR(CheckGeometry(seen.newest, state_->options));
    ++votes[seen.newest.store];
  }
  if (votes.empty()) {
    KVS_CHECK(getrandom(state_->store.data(), state_->store.size(), 0) ==
              static_cast<ssize_t>(state_->store.size()));
    return OkStatus();
  }
  uint32_t most = 0;
  for (const auto& [store, count] : votes) {
    if (count > most) state_->store = store;
    most = std::max(most, count);
  }
  return OkStatus();
}

void TierStart::AdoptSegments(std::span<const Superblocks> all) {
  MutexLock lock(state_->mu);
  for (uint32_t i = 0; i < all.size(); ++i) {
    const Superblock& block = all[i].newest;
    if (!all[i].valid || block.store != state_->store) continue;
    if (block.slot_blocks >= 2 && state_->table.SlotsOf(block.slot_blocks) > 0) {
      state_->table.Adopt(i, block.slot_blocks);
    }
    state_->checkpoint_sequence = std::max(state_->checkpoint_sequence, block.dirty_after);
    state_->table.at(i).sequence = block.sequence;
    state_->table.at(i).dirty_after = block.dirty_after;
  }
}

Status TierStart::ScanSegments(const std::set<uint32_t>& segments, std::vector<NamedEntry>* found,
                               Deadline deadline) {
  auto segment = segments.begin();
  uint32_t slot = 0;
  Status outcome;
  const auto more = [&]() -> std::optional<Transfer> {
    MutexLock lock(state_->mu);
    while (segment != segments.end() && slot >= state_->table.at(*segment).keys.size()) {
      ++segment;
      slot = 0;
    }
    if (segment == segments.end()) return std::nullopt;
    const SlotId at{*segment, slot++};
    const Place place = state_->PlaceOf(at);
    const std::shared_ptr<std::byte> scratch = files_->reader().scratch.Take();
    KVS_CHECK(scratch != nullptr);
    const auto done = [&, at, place, scratch](const IoOutcome& how) {
      const int error = how.error;
      MutexLock relock(state_->mu);
      if (error == ETIMEDOUT) outcome = DeadlineExceeded("the disk");
      if (error != 0) unreadable_.insert(at);
      const auto* header = reinterpret_cast<const SlotHeader*>(scratch.get());
      if (error != 0 || !HeaderCounts(*header, place)) return;
      state_->generation = std::max(state_->generation, header->generation);
      if (header->state != SlotState::kValue) return;
      Entry entry{at, header->generation, {}};
      for (uint32_t i = 0; i < header->buffer_count; ++i) {
        entry.sizes.push_back(header->buffers[i].bytes);
      }
      found->push_back({std::string(header->key_view()), std::move(entry)});
    };
    const uint64_t offset = uint64_t{place.block} * kBlockBytes;
    return Transfer{{{Op::kRead, at.segment, kBlockBytes, offset, scratch.get()}}, scratch, done};
  };
  files_->reader().transfers.Run(more, deadline);
  return outcome;
}

void TierStart::EnterFound(NamedEntry found) {
  MutexLock lock(state_->mu);
  const SlotId at = found.entry.at;
  Segment& segment = state_->table.at(at.segment);
  if (at.slot >= segment.keys.size() || segment.keys[at.slot] != nullptr) return;
  if (SlotBlocks(found.entry.sizes) != segment.slot_blocks) return;
  const auto it = state_->index.find(found.key);
  if (it != state_->index.end()) {
    const bool newer = found.entry.generation > it->second.generation;
    if (newer != Holds(Guard::kNewest)) return state_->condemned.push_back({at, true});
    state_->condemned.push_back({state_->Forget(it), true});
  }
  const auto entered = state_->index.emplace(std::move(found.key), std::move(found.entry)).first;
  segment.keys[at.slot] = &entered->first;
}

// Slots that nobody claimed, but for those that wait for their header to be overwritten.
void TierStart::FreeUnheld() {
  MutexLock lock(state_->mu);
  std::set<SlotId> held = unreadable_;
  for (const Condemned& slot : state_->condemned) held.insert(slot.at);
  for (uint32_t i = 0; i < state_->table.size(); ++i) {
    for (uint32_t slot = static_cast<uint32_t>(state_->table.at(i).keys.size()); slot-- > 0;) {
      const bool free = state_->table.at(i).keys[slot] == nullptr && !held.contains({i, slot});
      if (free) state_->table.Free({i, slot});
    }
  }
  unreadable_.clear();
}

}  // namespace

Status StartTier(TierState* state, TierFiles* files, CheckpointFiles* checkpoints,
                 Deadline deadline) {
  return TierStart(state, files, checkpoints).Run(deadline);
}

}  // namespace kvstrata::disk
