// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/value_reads.h"

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "server/tier/disk/format/value_requests.h"
#include "server/tier/guard.h"

namespace kvstrata::disk {

using Op = IoRequest::Op;

namespace {

Status Miss() { return NotFound("DISK_MISS", "no such key on disk"); }

}  // namespace

std::vector<ValueReads::PlannedGet> ValueReads::PlanGets(std::span<TierGet> requests) {
  std::vector<PlannedGet> gets;
  MutexLock lock(state_->mu);
  for (TierGet& request : requests) {
    const auto it = state_->index.find(request.key);
    request.status = it == state_->index.end() ? Miss() : CheckBuffers(request.buffers);
    if (!request.status.ok()) continue;
    if (SizesOf(request.buffers) != it->second.sizes) {
      request.status = InvalidArgument("DISK_VALUE", "the value was put with other sizes");
      continue;
    }
    if (!request.inspects) it->second.used = true;
    gets.push_back(
        {&request, it->second.at, state_->PlaceOf(it->second.at), it->second.generation});
  }
  return gets;
}

void ValueReads::Get(std::span<TierGet> requests, Deadline deadline,
                     const std::stop_token& cancel) {
  const HeldSide held_side(&files_->reader().lock, deadline);
  const Status may = held_side.held() ? state_->MayAsk() : DeadlineExceeded("another reader");
  if (!may.ok()) {
    for (TierGet& request : requests) request.status = may;
    return;
  }
  const std::vector<PlannedGet> gets = PlanGets(requests);
  size_t next = 0;
  files_->reader().transfers.Run(
      [&]() -> std::optional<Transfer> {
        for (; next < gets.size() && cancel.stop_requested(); ++next) {
          gets[next].request->status = TierCancelled();
        }
        if (next == gets.size()) return std::nullopt;
        return TransferOf(gets[next++]);
      },
      deadline);
  for (const PlannedGet& get : gets) {
    if (get.request->status.reason() == "DISK_DEADLINE") return state_->ObserveDeadline();
  }
}

Transfer ValueReads::TransferOf(const PlannedGet& get) {
  const std::shared_ptr<std::byte> scratch = files_->reader().scratch.Take();
  KVS_CHECK(scratch != nullptr);
  Transfer transfer;
  transfer.requests = PayloadRequests(Op::kRead, files_->FileOf(get.at.segment), get.place,
                                      get.request->buffers, scratch.get());
  AddHeader(Op::kRead, get.place, HeaderOf(*get.request, scratch.get()), &transfer.requests);
  transfer.keep = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
      scratch, get.request->keep);
  transfer.done = [this, &get, scratch](const IoOutcome& outcome) {
    get.request->status = FinishGet(get, scratch.get(), outcome);
  };
  return transfer;
}

Status ValueReads::FinishGet(const PlannedGet& get, std::byte* scratch, const IoOutcome& outcome) {
  state_->Observe(outcome, get.at.segment);
  if (outcome.error != 0) {
    const Status why = IoError(outcome, SegmentName(get.at.segment));
    return outcome.error == ETIMEDOUT ? why : Lose(get, false, why);
  }
  const auto* header = reinterpret_cast<const SlotHeader*>(HeaderOf(*get.request, scratch));
  const Status corrupt{Code::kDataLoss, "DISK_CORRUPT", "a value failed its check on disk"};
  if (!HeaderCounts(*header, get.place)) return Lose(get, true, corrupt);
  if (Holds(Guard::kIdentity) &&
      (header->state != SlotState::kValue || header->generation != get.generation ||
       header->key_view() != get.request->key)) {
    return Lose(get, true, corrupt);
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
  if (!whole && Holds(Guard::kPayloadChecksum)) return Lose(get, true, corrupt);
  return OkStatus();
}

Status ValueReads::Lose(const PlannedGet& get, bool reuse, Status why) {
  {
    MutexLock lock(state_->mu);
    const auto it = state_->index.find(get.request->key);
    // Erased meanwhile: its slot may have been written again under the read.
    if (it == state_->index.end() || it->second.generation != get.generation) return Miss();
    state_->condemned.push_back({state_->Forget(it), reuse});
    if (why.reason() == "DISK_CORRUPT") ++state_->stats.corrupt;
  }
  const DiskTierOptions& options = state_->options;
  if (options.lost) options.lost(get.request->key, get.at.segment, why);
  return why;
}

}  // namespace kvstrata::disk
