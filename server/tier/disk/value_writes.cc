// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/value_writes.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>

#include "server/tier/disk/format/value_requests.h"

namespace kvstrata::disk {

using Op = IoRequest::Op;

Status ValueWrites::CheckPut(const TierPut& request) const {
  if (request.key.empty() || request.key.size() > kMaxKeyBytes) {
    return InvalidArgument(
        "DISK_VALUE", "a key of " + std::to_string(request.key.size()) + " bytes; it has 1 to 64");
  }
  KVS_RETURN_IF_ERROR(CheckBuffers(request.buffers));
  const uint64_t bytes = uint64_t{SlotBlocks(SizesOf(request.buffers))} * kBlockBytes;
  const uint64_t room = state_->options.segment_bytes - kFirstSlotBlock * kBlockBytes;
  if (bytes <= room) return OkStatus();
  return InvalidArgument("DISK_VALUE", "a value of " + std::to_string(bytes) +
                                           " bytes; a segment has room for " +
                                           std::to_string(room));
}

std::vector<ValueWrites::PlannedPut> ValueWrites::PlanPuts(std::span<TierPut> requests) {
  std::vector<PlannedPut> puts;
  std::unordered_set<std::string_view> keys;
  MutexLock lock(state_->mu);
  for (TierPut& request : requests) {
    request.status = CheckPut(request);
    if (!request.status.ok() || state_->index.contains(request.key)) continue;
    if (!keys.insert(request.key).second) continue;  // the first of that key decides
    const auto at = state_->table.Allocate(SlotBlocks(SizesOf(request.buffers)));
    if (!at) {
      request.status = ResourceExhausted("DISK_FULL", "no slot for the value; erase some");
      continue;
    }
    puts.push_back({&request, *at, state_->PlaceOf(*at), ++state_->generation});
  }
  return puts;
}

void ValueWrites::Put(std::span<TierPut> requests, Deadline deadline,
                      const std::stop_token& cancel) {
  const HeldSide held_side(&files_->writer().lock, deadline);
  const Status may = held_side.held() ? state_->MayAsk() : DeadlineExceeded("another writer");
  if (!may.ok()) {
    for (TierPut& request : requests) request.status = may;
    return;
  }
  erasure_->OverwriteCondemned(deadline);
  const std::vector<PlannedPut> puts = PlanPuts(requests);
  std::set<uint32_t> segments;
  for (const PlannedPut& put : puts) segments.insert(put.at.segment);
  const SegmentMarks::Errors failed = marks_->MarkDirty(segments, deadline);
  size_t next = 0;
  files_->writer().transfers.Run(
      [&]() -> std::optional<Transfer> {
        for (; next < puts.size(); ++next) {
          const PlannedPut& put = puts[next];
          const auto error = failed.find(put.at.segment);
          const bool cancelled = cancel.stop_requested();
          if (error == failed.end() && !cancelled) return TransferOf(puts[next++]);
          put.request->status =
              cancelled ? TierCancelled() : IoError(error->second, SegmentName(put.at.segment));
          MutexLock lock(state_->mu);
          state_->table.Free(put.at);
        }
        return std::nullopt;
      },
      deadline);
  for (const PlannedPut& put : puts) {
    if (put.request->status.reason() == "DISK_DEADLINE") return state_->ObserveDeadline();
  }
}

Transfer ValueWrites::TransferOf(const PlannedPut& put) {
  const std::shared_ptr<std::byte> scratch = files_->writer().scratch.Take();
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
  transfer.requests = PayloadRequests(Op::kWrite, files_->FileOf(put.at.segment), put.place,
                                      buffers, scratch.get());
  AddHeader(Op::kWrite, put.place, header, &transfer.requests);
  transfer.keep = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
      scratch, put.request->keep);
  transfer.done = [this, &put](const IoOutcome& outcome) { FinishPut(put, outcome); };
  return transfer;
}

void ValueWrites::FinishPut(const PlannedPut& put, const IoOutcome& outcome) {
  const int error = outcome.error;
  state_->Observe(outcome, put.at.segment);
  MutexLock lock(state_->mu);
  if (error != 0) {
    put.request->status = IoError(outcome, SegmentName(put.at.segment));
    // A request that was not answered may still be carried out: nothing may lie there later.
    if (error != ETIMEDOUT) {
      state_->condemned.push_back({put.at, error == ENOSPC || error == EDQUOT});
    }
    return;
  }
  Entry entry{put.at, put.generation, SizesOf(put.request->buffers)};
  const auto it = state_->index.emplace(put.request->key, std::move(entry)).first;
  state_->table.at(put.at.segment).keys[put.at.slot] = &it->first;
}

Status ValueWrites::Erase(std::span<const std::string> keys, Deadline deadline) {
  const HeldSide held_side(&files_->writer().lock, deadline);
  if (!held_side.held()) return DeadlineExceeded("another writer");
  KVS_RETURN_IF_ERROR(state_->MayAsk());
  erasure_->OverwriteCondemned(deadline);
  std::vector<Condemned> slots;
  {
    MutexLock lock(state_->mu);
    for (const std::string& key : keys) {
      const auto it = state_->index.find(key);
      if (it != state_->index.end()) slots.push_back({state_->Forget(it), true});
    }
  }
  return erasure_->Overwrite(std::move(slots), deadline);
}

Status ValueWrites::Flush(Deadline deadline) {
  const HeldSide held_side(&files_->writer().lock, deadline);
  if (!held_side.held()) return DeadlineExceeded("another writer");
  KVS_RETURN_IF_ERROR(state_->MayAsk());
  erasure_->OverwriteCondemned(deadline);
  return marks_->FlushWritten(deadline);
}

}  // namespace kvstrata::disk
