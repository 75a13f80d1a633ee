// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/state/segment_marks.h"

#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/tier/guard.h"

namespace kvstrata::disk {

using Op = IoRequest::Op;

Status SlotErasure::Overwrite(std::vector<Condemned> slots, Deadline deadline) {
  std::set<uint32_t> segments;
  for (const Condemned& slot : slots) segments.insert(slot.at.segment);
  const SegmentMarks::Errors failed = marks_->MarkDirty(segments, deadline);
  Status first;
  const auto finish = [&](const Condemned& slot, const IoOutcome& outcome) {
    const int error = outcome.error;
    state_->Observe(outcome, slot.at.segment);
    if (error != 0 && first.ok()) first = IoError(outcome, SegmentName(slot.at.segment));
    MutexLock lock(state_->mu);
    // Else it stays taken until the next start.
    if (error == 0 && slot.reuse) state_->table.Free(slot.at);
  };
  size_t next = 0;
  const auto more = [&]() -> std::optional<Transfer> {
    while (next < slots.size()) {
      const Condemned& slot = slots[next++];
      if (const auto error = failed.find(slot.at.segment); error != failed.end()) {
        finish(slot, error->second);
        continue;
      }
      if (!Holds(Guard::kErasure)) {
        finish(slot, {});
        continue;
      }
      const std::shared_ptr<std::byte> scratch = files_->writer().scratch.Take();
      KVS_CHECK(scratch != nullptr);
      MutexLock lock(state_->mu);
      const Place place = state_->PlaceOf(slot.at);
      WriteHeader(place, SlotState::kErased, ++state_->generation, "", {},
                  reinterpret_cast<SlotHeader*>(scratch.get()));
      const uint64_t offset = uint64_t{place.block} * kBlockBytes;
      return Transfer{
          {{Op::kWrite, files_->FileOf(slot.at.segment), kBlockBytes, offset, scratch.get()}},
          scratch,
          [&finish, &slot](const IoOutcome& outcome) { finish(slot, outcome); }};
    }
    return std::nullopt;
  };
  files_->writer().transfers.Run(more, deadline);
  if (first.reason() == "DISK_DEADLINE") state_->ObserveDeadline();
  return first;
}

void SlotErasure::OverwriteCondemned(Deadline deadline) {
  std::vector<Condemned> slots;
  {
    MutexLock lock(state_->mu);
    slots.swap(state_->condemned);
  }
  // An error is counted; those slots stay taken, and the next start judges them.
  (void)Overwrite(std::move(slots), deadline);
}

SegmentMarks::Errors SegmentMarks::MarkDirty(const std::set<uint32_t>& segments,
                                             Deadline deadline) {
  Errors failed;
  std::vector<uint32_t> to_mark;
  {
    MutexLock lock(state_->mu);
    for (const uint32_t i : segments) {
      Segment& segment = state_->table.at(i);
      segment.written = true;
      const bool marked = segment.dirty || !Holds(Guard::kDirtyMark);
      if (!segment.formatted || !marked) to_mark.push_back(i);
    }
  }
  size_t next = 0;
  files_->writer().transfers.Run(
      [&]() -> std::optional<Transfer> {
        if (next == to_mark.size()) return std::nullopt;
        return MarkTransfer(to_mark[next++], &failed);
      },
      deadline);
  return failed;
}

Transfer SegmentMarks::MarkTransfer(uint32_t i, Errors* failed) {
  const std::shared_ptr<std::byte> scratch = files_->writer().scratch.Take();
  KVS_CHECK(scratch != nullptr);
  Transfer transfer;
  transfer.keep = scratch;
  MutexLock lock(state_->mu);
  Segment& segment = state_->table.at(i);
  const uint32_t copies = segment.formatted ? 1 : 2;  // an empty one may lose both
  for (uint32_t copy = 0; copy < copies; ++copy) {
    std::byte* at = scratch.get() + copy * kBlockBytes;
    auto* block = new (at) Superblock{};
    block->segment = i;
    block->store = state_->store;
    block->sequence = ++segment.sequence;
    block->dirty_after = state_->checkpoint_sequence;
    block->segment_bytes = state_->options.segment_bytes;
    block->slot_blocks = segment.slot_blocks;
    Seal(block);
    const uint64_t offset = segment.sequence % 2 * kBlockBytes;
    transfer.requests.push_back({Op::kWrite, files_->FileOf(i), kBlockBytes, offset, at});
  }
  transfer.done = [this, i, failed](const IoOutcome& outcome) {
    const int error = outcome.error;
    state_->Observe(outcome, i);
    MutexLock relock(state_->mu);
    if (error != 0) (*failed)[i] = outcome;
    state_->table.at(i).formatted = state_->table.at(i).dirty = error == 0;
  };
  return transfer;
}

Status SegmentMarks::FlushWritten(Deadline deadline) {
  std::vector<uint32_t> written;
  uint64_t generation = 0;
  {
    MutexLock lock(state_->mu);
    generation = state_->generation;
    for (uint32_t i = 0; i < state_->table.size(); ++i) {
      if (state_->table.at(i).written) written.push_back(i);
    }
  }
  Status outcome;
  size_t next = 0;
  const auto more = [&]() -> std::optional<Transfer> {
    if (next == written.size()) return std::nullopt;
    const uint32_t i = written[next++];
    return Transfer{{{Op::kFlush, files_->FileOf(i)}}, nullptr, [&, i](const IoOutcome& how) {
                      const int error = how.error;
                      state_->Observe(how, i);
                      MutexLock lock(state_->mu);
                      state_->table.at(i).written = false;
                      if (error == 0 || !Holds(Guard::kFailedFlush)) {
                        state_->table.at(i).flushed = generation;
                      } else {
                        LoseUnflushed(i);
                        outcome = {Code::kDataLoss, "DISK_FLUSH",
                                   "segment " + std::to_string(i) + ": " + std::strerror(error) +
                                       "; what was put to it since its last flush is given up"};
                      }
                    }};
  };
  files_->writer().transfers.Run(more, deadline);
  return outcome;
}

// Nothing that the failed flush covered may count as written, nor be flushed again.
void SegmentMarks::LoseUnflushed(uint32_t i) {
  ++state_->stats.lost_flushes;
  const std::vector<const std::string*> keys = state_->table.at(i).keys;
  for (const std::string* key : keys) {
    const auto it = key == nullptr ? state_->index.end() : state_->index.find(*key);
    if (it == state_->index.end()) continue;
    if (it->second.generation > state_->table.at(i).flushed) state_->Forget(it);
  }
  state_->table.Stop(i);
}

}  // namespace kvstrata::disk
