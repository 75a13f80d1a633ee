// SPDX-License-Identifier: Apache-2.0
// The read path. A value's header and payload are read together, and nothing of it counts unless
// both are what the index says; one that fails a check leaves the index, and its slot is
// overwritten later.
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "server/tier/disk/disk_tier_impl.h"
#include "server/tier/disk/format/value_requests.h"
#include "server/tier/guard.h"

namespace kvstrata {
namespace disk {
namespace {

using Op = IoRequest::Op;

struct PlannedGet {
  TierGet* request = nullptr;
  SlotId at;
  Place place;
  uint64_t generation = 0;
};

Status Miss() { return NotFound("DISK_MISS", "no such key on disk"); }

std::vector<PlannedGet> PlanGets(TierState* state, std::span<TierGet> requests) {
  std::vector<PlannedGet> gets;
  MutexLock lock(state->mu);
  for (TierGet& request : requests) {
    const auto it = state->index.find(request.key);
    request.status = it == state->index.end() ? Miss() : CheckBuffers(request.buffers);
    if (!request.status.ok()) continue;
    if (SizesOf(request.buffers) != it->second.sizes) {
      request.status = InvalidArgument("DISK_VALUE", "the value was put with other sizes");
      continue;
    }
    if (!request.inspects) it->second.used = true;
    gets.push_back({&request, it->second.at, state->PlaceOf(it->second.at), it->second.generation});
  }
  return gets;
}

// Forgets the value at `at` if it is still that one, and has its slot overwritten later.
Status Lose(TierState* state, const PlannedGet& get, bool reuse, Status why) {
  {
    MutexLock lock(state->mu);
    const auto it = state->index.find(get.request->key);
    // Erased meanwhile: its slot may have been written again under the read.
    if (it == state->index.end() || it->second.generation != get.generation) return Miss();
    state->condemned.push_back({state->Forget(it), reuse});
    if (why.reason() == "DISK_CORRUPT") ++state->stats.corrupt;
  }
  const DiskTierOptions& options = state->options;
  if (options.lost) options.lost(get.request->key, get.at.segment, why);
  return why;
}

Status FinishGet(TierState* state, const PlannedGet& get, std::byte* scratch,
                 const IoOutcome& outcome) {
  state->Observe(outcome, get.at.segment);
  if (outcome.error != 0) {
    const Status why = IoError(outcome, SegmentName(get.at.segment));
    return outcome.error == ETIMEDOUT ? why : Lose(state, get, false, why);
  }
  const auto* header = reinterpret_cast<const SlotHeader*>(HeaderOf(*get.request, scratch));
  const Status corrupt{Code::kDataLoss, "DISK_CORRUPT", "a value failed its check on disk"};
  if (!HeaderCounts(*header, get.place)) return Lose(state, get, true, corrupt);
  if (Holds(Guard::kIdentity) &&
      (header->state != SlotState::kValue || header->generation != get.generation ||
       header->key_view() != get.request->key)) {
    return Lose(state, get, true, corrupt);
  }
  const auto& buffers = get.request->buffers;
  ForScratch(buffers, scratch, [](std::byte* from, std::span<std::byte> to) {
    if (!to.empty()) std::memcpy(to.data(), from, to.size());
  });
  bool whole = header->buffer_count == buffers.size();
  for (size_t i = 0; whole && i < buffers.size(); ++i) {
    const SlotHeader::Buffer& described = header->buffers[i];
    whole = described.bytes == buffers[i].size() && described.checksum == ChecksumOf(buffers[i]);
  }
  if (!whole && Holds(Guard::kPayloadChecksum)) return Lose(state, get, true, corrupt);
  return OkStatus();
}

Transfer TransferOf(TierState* state, TierFiles* files, const PlannedGet& get) {
  const std::shared_ptr<std::byte> scratch = files->reader().scratch.Take();
  KVS_CHECK(scratch != nullptr);
  Transfer transfer;
  transfer.requests = PayloadRequests(Op::kRead, files->FileOf(get.at.segment), get.place,
                                      get.request->buffers, scratch.get());
  AddHeader(Op::kRead, get.place, HeaderOf(*get.request, scratch.get()), &transfer.requests);
  transfer.keep = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
      scratch, get.request->keep);
  transfer.done = [state, &get, scratch](const IoOutcome& outcome) {
    get.request->status = FinishGet(state, get, scratch.get(), outcome);
  };
  return transfer;
}

}  // namespace
}  // namespace disk

void DiskTier::Get(std::span<TierGet> requests, Deadline deadline, const std::stop_token& cancel) {
  disk::TierState& state = impl_->state;
  disk::Side& reader = impl_->files.reader();
  const disk::HeldSide held_side(&reader.lock, deadline);
  const Status may = held_side.held() ? state.MayAsk() : disk::DeadlineExceeded("another reader");
  if (!may.ok()) {
    for (TierGet& request : requests) request.status = may;
    return;
  }
  const std::vector<disk::PlannedGet> gets = disk::PlanGets(&state, requests);
  size_t next = 0;
  reader.transfers.Run(
      [&]() -> std::optional<disk::Transfer> {
        for (; next < gets.size() && cancel.stop_requested(); ++next) {
          gets[next].request->status = TierCancelled();
        }
        if (next == gets.size()) return std::nullopt;
        return disk::TransferOf(&state, &impl_->files, gets[next++]);
      },
      deadline);
  for (const disk::PlannedGet& get : gets) {
    if (get.request->status.reason() == "DISK_DEADLINE") return state.ObserveDeadline();
  }
}

}  // namespace kvstrata
