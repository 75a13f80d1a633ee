// SPDX-License-Identifier: Apache-2.0
// What callers write: values put and erased, and made durable. Each call holds the writer's side,
// and first overwrites the slots that were condemned since the last one.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>

#include "server/tier/disk/disk_tier_impl.h"
#include "server/tier/disk/format/value_requests.h"

namespace kvstrata {
namespace disk {
namespace {

using Op = IoRequest::Op;

// A value that has a slot and is not yet in the index.
struct PlannedPut {
  TierPut* request = nullptr;
  SlotId at;
  Place place;
  uint64_t generation = 0;
};

Status CheckPut(const TierPut& request, uint64_t segment_bytes) {
  if (request.key.empty() || request.key.size() > kMaxKeyBytes) {
    return InvalidArgument(
        "DISK_VALUE", "a key of " + std::to_string(request.key.size()) + " bytes; it has 1 to 64");
  }
  KVS_RETURN_IF_ERROR(CheckBuffers(request.buffers));
  const uint64_t bytes = uint64_t{SlotBlocks(SizesOf(request.buffers))} * kBlockBytes;
  const uint64_t room = segment_bytes - kFirstSlotBlock * kBlockBytes;
  if (bytes <= room) return OkStatus();
  return InvalidArgument("DISK_VALUE", "a value of " + std::to_string(bytes) +
                                           " bytes; a segment has room for " +
                                           std::to_string(room));
}

std::vector<PlannedPut> PlanPuts(TierState* state, std::span<TierPut> requests) {
  std::vector<PlannedPut> puts;
  std::unordered_set<std::string_view> keys;
  MutexLock lock(state->mu);
  for (TierPut& request : requests) {
    request.status = CheckPut(request, state->options.segment_bytes);
    if (!request.status.ok() || state->index.contains(request.key)) continue;
    if (!keys.insert(request.key).second) continue;  // the first of that key decides
    const auto at = state->table.Allocate(SlotBlocks(SizesOf(request.buffers)));
    if (!at) {
      request.status = ResourceExhausted("DISK_FULL", "no slot for the value; erase some");
      continue;
    }
    puts.push_back({&request, *at, state->PlaceOf(*at), ++state->generation});
  }
  return puts;
}

void FinishPut(TierState* state, const PlannedPut& put, const IoOutcome& outcome) {
  const int error = outcome.error;
  state->Observe(outcome, put.at.segment);
  MutexLock lock(state->mu);
  if (error != 0) {
    put.request->status = IoError(outcome, SegmentName(put.at.segment));
    // A request that was not answered may still be carried out: nothing may lie there later.
    if (error != ETIMEDOUT) {
      state->condemned.push_back({put.at, error == ENOSPC || error == EDQUOT});
    }
    return;
  }
  Entry entry{put.at, put.generation, SizesOf(put.request->buffers)};
  const auto it = state->index.emplace(put.request->key, std::move(entry)).first;
  state->table.at(put.at.segment).keys[put.at.slot] = &it->first;
}

Transfer TransferOf(TierState* state, TierFiles* files, const PlannedPut& put) {
  const std::shared_ptr<std::byte> scratch = files->writer().scratch.Take();
  KVS_CHECK(scratch != nullptr);  // as many as may run and be abandoned
  const auto& buffers = put.request->buffers;
  std::vector<SlotHeader::Buffer> described;
  for (const auto& buffer : buffers) {
    described.push_back({buffer.size(), ChecksumOf(buffer)});
  }
  std::byte* const header = HeaderOf(*put.request, scratch.get());
  WriteHeader(put.place, SlotState::kValue, put.generation, put.request->key, described,
              reinterpret_cast<SlotHeader*>(header));
  ForScratch(buffers, scratch.get(), [](std::byte* to, std::span<const std::byte> from) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());  // ranges::copy goes byte by byte
    const uint64_t end = BlocksOf(from.size()) * kBlockBytes;
    std::memset(to + from.size(), 0, end - from.size());
  });
  Transfer transfer;
  transfer.requests =
      PayloadRequests(Op::kWrite, files->FileOf(put.at.segment), put.place, buffers, scratch.get());
  AddHeader(Op::kWrite, put.place, header, &transfer.requests);
  transfer.keep = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
      scratch, put.request->keep);
  transfer.done = [state, &put](const IoOutcome& outcome) { FinishPut(state, put, outcome); };
  return transfer;
}

}  // namespace
}  // namespace disk

void DiskTier::Put(std::span<TierPut> requests, Deadline deadline, const std::stop_token& cancel) {
  disk::TierState& state = impl_->state;
  disk::Side& writer = impl_->files.writer();
  const disk::HeldSide held_side(&writer.lock, deadline);
  const Status may = held_side.held() ? state.MayAsk() : disk::DeadlineExceeded("another writer");
  if (!may.ok()) {
    for (TierPut& request : requests) request.status = may;
    return;
  }
  impl_->erasure.OverwriteCondemned(deadline);
  const std::vector<disk::PlannedPut> puts = disk::PlanPuts(&state, requests);
  std::set<uint32_t> segments;
  for (const disk::PlannedPut& put : puts) segments.insert(put.at.segment);
  const disk::SegmentMarks::Errors failed = impl_->marks.MarkDirty(segments, deadline);
  size_t next = 0;
  writer.transfers.Run(
      [&]() -> std::optional<disk::Transfer> {
        for (; next < puts.size(); ++next) {
          const disk::PlannedPut& put = puts[next];
          const auto error = failed.find(put.at.segment);
          const bool cancelled = cancel.stop_requested();
          if (error == failed.end() && !cancelled) {
            return disk::TransferOf(&state, &impl_->files, puts[next++]);
          }
          put.request->status =
              cancelled ? TierCancelled()
                        : disk::IoError(error->second, disk::SegmentName(put.at.segment));
          MutexLock lock(state.mu);
          state.table.Free(put.at);
        }
        return std::nullopt;
      },
      deadline);
  for (const disk::PlannedPut& put : puts) {
    if (put.request->status.reason() == "DISK_DEADLINE") return state.ObserveDeadline();
  }
}

Status DiskTier::Erase(std::span<const std::string> keys, Deadline deadline) {
  const disk::HeldSide held_side(&impl_->files.writer().lock, deadline);
  if (!held_side.held()) return disk::DeadlineExceeded("another writer");
  KVS_RETURN_IF_ERROR(impl_->state.MayAsk());
  impl_->erasure.OverwriteCondemned(deadline);
  std::vector<disk::Condemned> slots;
  {
    MutexLock lock(impl_->state.mu);
    for (const std::string& key : keys) {
      const auto it = impl_->state.index.find(key);
      if (it != impl_->state.index.end()) slots.push_back({impl_->state.Forget(it), true});
    }
  }
  return impl_->erasure.Overwrite(std::move(slots), deadline);
}

Status DiskTier::Flush(Deadline deadline) {
  const disk::HeldSide held_side(&impl_->files.writer().lock, deadline);
  if (!held_side.held()) return disk::DeadlineExceeded("another writer");
  KVS_RETURN_IF_ERROR(impl_->state.MayAsk());
  impl_->erasure.OverwriteCondemned(deadline);
  return impl_->marks.FlushWritten(deadline);
}

}  // namespace kvstrata
