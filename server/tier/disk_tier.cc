#include "server/tier/disk_tier.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_set>

#include "server/tier/disk_tier_impl.h"
#include "server/tier/guard.h"
#include "server/tier/value_requests.h"

namespace kvstrata {

using disk::BlocksOf;
using disk::CheckBuffers;
using disk::ForScratch;
using disk::HeaderOf;
using disk::IoError;
using disk::kBlockBytes;
using disk::PayloadRequests;
using disk::SizesOf;
using disk::SlotBlocks;
using disk::SlotHeader;
using disk::SlotId;
using disk::Transfer;
using Op = IoRequest::Op;

namespace {

constexpr uint32_t kSegmentErrors = 4;  // then a segment takes no more writes

Status Miss() { return NotFound("DISK_MISS", "no such key on disk"); }

}  // namespace

Status disk::IoError(int error) {
  if (error == ETIMEDOUT) return DeadlineExceeded("the disk");
  if (error == ENOSPC || error == EDQUOT) {
    return ResourceExhausted("DISK_SPACE", std::string("write: ") + std::strerror(error));
  }
  return {Code::kDataLoss, "DISK_IO", std::strerror(error)};
}

Status disk::DeadlineExceeded(const char* what) {
  return {Code::kDeadlineExceeded, "DISK_DEADLINE", std::string(what) + " did not answer in time"};
}

// -- shared by both sides

Status DiskTier::Impl::MayAsk() {
  MutexLock lock(mu_);
  if (breaker_.Allow(std::chrono::steady_clock::now())) return OkStatus();
  return Unavailable("DISK_BREAKER", options_.directory + " failed repeatedly and is left alone");
}

void DiskTier::Impl::Observe(int error, uint32_t segment) {
  MutexLock lock(mu_);
  if (error == 0) return breaker_.Succeeded();
  if (error == ETIMEDOUT || error == ENOSPC || error == EDQUOT) return;
  ++stats_.io_errors;
  breaker_.Failed(std::chrono::steady_clock::now());
  if (++table_.at(segment).errors >= kSegmentErrors) table_.Stop(segment);
}

void DiskTier::Impl::ObserveDeadline() {
  MutexLock lock(mu_);
  ++stats_.deadlines;
  breaker_.Failed(std::chrono::steady_clock::now());
}

disk::Place DiskTier::Impl::PlaceOf(SlotId at) const {
  return {store_, at.segment, table_.BlockOf(at), table_.at(at.segment).slot_blocks};
}

SlotId DiskTier::Impl::Forget(disk::Index::iterator it) {
  const SlotId at = it->second.at;
  table_.at(at.segment).keys[at.slot] = nullptr;
  index_.erase(it);
  return at;
}

// -- Put

Status DiskTier::Impl::CheckPut(const TierPut& request) const {
  if (request.key.empty() || request.key.size() > disk::kMaxKeyBytes) {
    return InvalidArgument(
        "DISK_VALUE", "a key of " + std::to_string(request.key.size()) + " bytes; it has 1 to 64");
  }
  KVS_RETURN_IF_ERROR(CheckBuffers(request.buffers));
  const uint64_t bytes = uint64_t{SlotBlocks(SizesOf(request.buffers))} * kBlockBytes;
  const uint64_t room = options_.segment_bytes - disk::kFirstSlotBlock * kBlockBytes;
  if (bytes <= room) return OkStatus();
  return InvalidArgument("DISK_VALUE", "a value of " + std::to_string(bytes) +
                                           " bytes; a segment has room for " +
                                           std::to_string(room));
}

std::vector<DiskTier::Impl::PlannedPut> DiskTier::Impl::PlanPuts(std::span<TierPut> requests) {
  std::vector<PlannedPut> puts;
  std::unordered_set<std::string_view> keys;
  MutexLock lock(mu_);
  for (TierPut& request : requests) {
    request.status = CheckPut(request);
    if (!request.status.ok() || index_.contains(request.key)) continue;
    if (!keys.insert(request.key).second) continue;  // the first of that key decides
    const auto at = table_.Allocate(SlotBlocks(SizesOf(request.buffers)));
    if (!at) {
      request.status = ResourceExhausted("DISK_FULL", "no slot for the value; erase some");
      continue;
    }
    puts.push_back({&request, *at, PlaceOf(*at), ++generation_});
  }
  return puts;
}

void DiskTier::Impl::Put(std::span<TierPut> requests, Deadline deadline,
                         const std::stop_token& cancel) {
  const disk::HeldSide held_side(&writer_.lock, deadline);
  const Status may = held_side.held() ? MayAsk() : disk::DeadlineExceeded("another writer");
  if (!may.ok()) {
    for (TierPut& request : requests) request.status = may;
    return;
  }
  OverwriteCondemned(deadline);
  const std::vector<PlannedPut> puts = PlanPuts(requests);
  std::set<uint32_t> segments;
  for (const PlannedPut& put : puts) segments.insert(put.at.segment);
  const Errors failed = MarkDirty(segments, deadline);
  size_t next = 0;
  writer_.transfers.Run(
      [&]() -> std::optional<Transfer> {
        for (; next < puts.size(); ++next) {
          const PlannedPut& put = puts[next];
          const auto error = failed.find(put.at.segment);
          const bool cancelled = cancel.stop_requested();
          if (error == failed.end() && !cancelled) return TransferOf(puts[next++]);
          put.request->status = cancelled ? TierCancelled() : IoError(error->second);
          MutexLock lock(mu_);
          table_.Free(put.at);
        }
        return std::nullopt;
      },
      deadline);
  for (const PlannedPut& put : puts) {
    if (put.request->status.reason() == "DISK_DEADLINE") return ObserveDeadline();
  }
}

Transfer DiskTier::Impl::TransferOf(const PlannedPut& put) {
  const std::shared_ptr<std::byte> scratch = writer_.scratch.Take();
  KVS_CHECK(scratch != nullptr);  // as many as may run and be abandoned
  const auto& buffers = put.request->buffers;
  std::vector<SlotHeader::Buffer> described;
  for (const auto& buffer : buffers) {
    described.push_back({buffer.size(), disk::ChecksumOf(buffer.data(), buffer.size())});
  }
  std::byte* const header = HeaderOf(*put.request, scratch.get());
  disk::WriteHeader(put.place, disk::SlotState::kValue, put.generation, put.request->key, described,
                    reinterpret_cast<SlotHeader*>(header));
  ForScratch(buffers, scratch.get(), [](std::byte* to, std::span<const std::byte> from) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());  // ranges::copy goes byte by byte
    const uint64_t end = BlocksOf(from.size()) * kBlockBytes;
    std::memset(to + from.size(), 0, end - from.size());
  });
  Transfer transfer;
  transfer.requests =
      PayloadRequests(Op::kWrite, FileOf(put.at.segment), put.place, buffers, scratch.get());
  AddHeader(Op::kWrite, put.place, header, &transfer.requests);
  transfer.keep = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
      scratch, put.request->keep);
  transfer.done = [this, &put](int error) { FinishPut(put, error); };
  return transfer;
}

void DiskTier::Impl::FinishPut(const PlannedPut& put, int error) {
  Observe(error, put.at.segment);
  MutexLock lock(mu_);
  if (error != 0) {
    put.request->status = IoError(error);
    // A request that was not answered may still be carried out: nothing may lie there later.
    if (error != ETIMEDOUT) condemned_.push_back({put.at, error == ENOSPC || error == EDQUOT});
    return;
  }
  disk::Entry entry{put.at, put.generation, SizesOf(put.request->buffers)};
  const auto it = index_.emplace(put.request->key, std::move(entry)).first;
  table_.at(put.at.segment).keys[put.at.slot] = &it->first;
}

// -- Get

std::vector<DiskTier::Impl::PlannedGet> DiskTier::Impl::PlanGets(std::span<TierGet> requests) {
  std::vector<PlannedGet> gets;
  MutexLock lock(mu_);
  for (TierGet& request : requests) {
    const auto it = index_.find(request.key);
    request.status = it == index_.end() ? Miss() : CheckBuffers(request.buffers);
    if (!request.status.ok()) continue;
    if (SizesOf(request.buffers) != it->second.sizes) {
      request.status = InvalidArgument("DISK_VALUE", "the value was put with other sizes");
      continue;
    }
    if (!request.inspects) it->second.used = true;
    gets.push_back({&request, it->second.at, PlaceOf(it->second.at), it->second.generation});
  }
  return gets;
}

void DiskTier::Impl::Get(std::span<TierGet> requests, Deadline deadline,
                         const std::stop_token& cancel) {
  const disk::HeldSide held_side(&reader_.lock, deadline);
  const Status may = held_side.held() ? MayAsk() : disk::DeadlineExceeded("another reader");
  if (!may.ok()) {
    for (TierGet& request : requests) request.status = may;
    return;
  }
  const std::vector<PlannedGet> gets = PlanGets(requests);
  size_t next = 0;
  reader_.transfers.Run(
      [&]() -> std::optional<Transfer> {
        for (; next < gets.size() && cancel.stop_requested(); ++next) {
          gets[next].request->status = TierCancelled();
        }
        if (next == gets.size()) return std::nullopt;
        return TransferOf(gets[next++]);
      },
      deadline);
  for (const PlannedGet& get : gets) {
    if (get.request->status.reason() == "DISK_DEADLINE") return ObserveDeadline();
  }
}

Transfer DiskTier::Impl::TransferOf(const PlannedGet& get) {
  const std::shared_ptr<std::byte> scratch = reader_.scratch.Take();
  KVS_CHECK(scratch != nullptr);
  Transfer transfer;
  transfer.requests = PayloadRequests(Op::kRead, FileOf(get.at.segment), get.place,
                                      get.request->buffers, scratch.get());
  AddHeader(Op::kRead, get.place, HeaderOf(*get.request, scratch.get()), &transfer.requests);
  transfer.keep = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(
      scratch, get.request->keep);
  transfer.done = [this, &get, scratch](int error) {
    get.request->status = FinishGet(get, scratch.get(), error);
  };
  return transfer;
}

Status DiskTier::Impl::FinishGet(const PlannedGet& get, std::byte* scratch, int error) {
  Observe(error, get.at.segment);
  if (error == ETIMEDOUT) return IoError(error);
  if (error != 0) return Lose(get, false, IoError(error));
  const auto* header = reinterpret_cast<const SlotHeader*>(HeaderOf(*get.request, scratch));
  const Status corrupt{Code::kDataLoss, "DISK_CORRUPT", "a value failed its check on disk"};
  if (!disk::HeaderCounts(*header, get.place)) return Lose(get, true, corrupt);
  if (Holds(Guard::kIdentity) &&
      (header->state != disk::SlotState::kValue || header->generation != get.generation ||
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
    whole = described.bytes == buffers[i].size() &&
            described.checksum == disk::ChecksumOf(buffers[i].data(), buffers[i].size());
  }
  if (!whole && Holds(Guard::kPayloadChecksum)) return Lose(get, true, corrupt);
  return OkStatus();
}

Status DiskTier::Impl::Lose(const PlannedGet& get, bool reuse, Status why) {
  {
    MutexLock lock(mu_);
    const auto it = index_.find(get.request->key);
    // Erased meanwhile: its slot may have been written again under the read.
    if (it == index_.end() || it->second.generation != get.generation) return Miss();
    condemned_.push_back({Forget(it), reuse});
    if (why.reason() == "DISK_CORRUPT") ++stats_.corrupt;
  }
  if (options_.lost) options_.lost(get.request->key, get.at.segment, why);
  return why;
}

// -- the index

void DiskTier::Impl::Probe(std::span<TierProbe> probes) const {
  MutexLock lock(mu_);
  for (TierProbe& probe : probes) {
    const auto it = index_.find(probe.key);
    probe.sizes = it == index_.end() ? ValueSizes() : ValueSizes(it->second.sizes);
  }
}

std::vector<TierValue> DiskTier::Impl::Scan(uint64_t* cursor, size_t slots) const {
  std::vector<TierValue> found;
  auto segment = static_cast<uint32_t>(*cursor >> 32);
  auto slot = static_cast<uint32_t>(*cursor);
  MutexLock lock(mu_);
  for (; segment < table_.size(); ++segment, slot = 0) {
    const std::vector<const std::string*>& keys = table_.at(segment).keys;
    for (; slot < keys.size(); ++slot) {
      if (slots-- == 0) {
        *cursor = uint64_t{segment} << 32 | slot;
        return found;
      }
      if (keys[slot] == nullptr) continue;
      found.push_back({*keys[slot], index_.find(*keys[slot])->second.sizes});
    }
  }
  *cursor = kWalkEnd;
  return found;
}

std::vector<std::string> DiskTier::Impl::Victims(std::span<const uint64_t> sizes) {
  const uint32_t blocks = SlotBlocks(sizes);
  MutexLock lock(mu_);
  if (table_.HasRoom(blocks)) return {};
  const std::vector<uint32_t> segments = table_.OfClass(blocks);
  const auto pinned = [this](const std::string& key)
                          KVS_NO_THREAD_SAFETY_ANALYSIS { return pinned_.contains(key); };
  if (segments.empty()) return table_.KeysOfEmptiest(pinned);
  const uint64_t slots = table_.SlotsOf(blocks);
  uint64_t& hand = hands_[blocks];
  for (uint64_t i = 0; i < 2 * slots * segments.size(); ++i) {
    hand = (hand + 1) % (slots * segments.size());
    const std::string* key = table_.at(segments[hand / slots]).keys[hand % slots];
    if (key == nullptr || pinned(*key)) continue;
    if (!std::exchange(index_.find(*key)->second.used, false)) return {*key};
  }
  return table_.KeysOfEmptiest(pinned);  // all of its size are beyond use, or pinned
}

void DiskTier::Impl::Pin(std::span<const std::string> keys) {
  MutexLock lock(mu_);
  for (const std::string& key : keys) ++pinned_[key];
}

void DiskTier::Impl::Unpin(std::span<const std::string> keys) {
  MutexLock lock(mu_);
  for (const std::string& key : keys) {
    const auto it = pinned_.find(key);
    if (it != pinned_.end() && --it->second == 0) pinned_.erase(it);
  }
}

DiskTierStats DiskTier::Impl::Stats() const {
  MutexLock lock(mu_);
  DiskTierStats stats = stats_;
  stats.direct = directory_.direct;
  stats.queue = queue_name_;
  stats.degraded = degraded_;
  stats.entries = index_.size();
  stats.breaker_open = breaker_.open();
  stats.capacity_bytes = uint64_t{table_.size()} * options_.segment_bytes;
  for (uint32_t i = 0; i < table_.size(); ++i) {
    const disk::Segment& segment = table_.at(i);
    stats.used_bytes += uint64_t{segment.used} * segment.slot_blocks * kBlockBytes;
    stats.stopped_segments += segment.stopped;
  }
  return stats;
}

Status DiskTier::Impl::AddMemory(std::shared_ptr<std::byte> memory, uint64_t bytes,
                                 Deadline deadline) {
  {
    MutexLock lock(mu_);
    memory_.push_back(memory);
  }
  for (disk::Side* side : {&reader_, &writer_}) {
    const disk::HeldSide held_side(&side->lock, deadline);
    if (!held_side.held()) return disk::DeadlineExceeded("another user");
    side->transfers.queue().AddMemory(memory.get(), bytes);
  }
  return OkStatus();
}

// -- DiskTier

DiskTier::DiskTier(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DiskTier::~DiskTier() = default;

void DiskTier::Put(std::span<TierPut> requests, Deadline deadline, const std::stop_token& cancel) {
  impl_->Put(requests, deadline, cancel);
}
void DiskTier::Get(std::span<TierGet> requests, Deadline deadline, const std::stop_token& cancel) {
  impl_->Get(requests, deadline, cancel);
}
void DiskTier::Probe(std::span<TierProbe> probes) const { impl_->Probe(probes); }
Status DiskTier::Erase(std::span<const std::string> keys, Deadline deadline) {
  return impl_->Erase(keys, deadline);
}
Status DiskTier::Flush(Deadline deadline) { return impl_->Flush(deadline); }
Status DiskTier::Checkpoint(Deadline deadline) { return impl_->Checkpoint(deadline); }
Result<uint64_t> DiskTier::Resize(uint64_t budget_bytes, Deadline deadline) {
  return impl_->Resize(budget_bytes, deadline);
}
bool DiskTier::Contains(std::string_view key) const { return !Sizes(key).empty(); }
std::vector<uint64_t> DiskTier::Sizes(std::string_view key) const {
  TierProbe probe{key, {}};
  impl_->Probe({&probe, 1});
  return {probe.sizes.all().begin(), probe.sizes.all().end()};
}
void DiskTier::ForEach(const std::function<void(const std::string& key,
                                                std::span<const uint64_t> sizes)>& visit) const {
  constexpr size_t kSlots = 4096;  // at a time
  for (uint64_t cursor = 0; cursor != kWalkEnd;) {
    for (const TierValue& value : impl_->Scan(&cursor, kSlots)) visit(value.key, value.sizes);
  }
}
std::vector<TierValue> DiskTier::Scan(uint64_t* cursor, size_t slots) const {
  return impl_->Scan(cursor, slots);
}
std::vector<std::string> DiskTier::Victims(std::span<const uint64_t> sizes) {
  return impl_->Victims(sizes);
}
void DiskTier::Pin(std::span<const std::string> keys) { impl_->Pin(keys); }
void DiskTier::Unpin(std::span<const std::string> keys) { impl_->Unpin(keys); }
Status DiskTier::AddMemory(std::shared_ptr<std::byte> memory, uint64_t bytes, Deadline deadline) {
  return impl_->AddMemory(std::move(memory), bytes, deadline);
}
DiskTierStats DiskTier::Stats() const { return impl_->Stats(); }

}  // namespace kvstrata
