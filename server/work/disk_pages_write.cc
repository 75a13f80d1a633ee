// DiskPages' way out: offers, the writer's batches, drains.
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "server/telemetry/heartbeat.h"
#include "server/telemetry/thread_top.h"
#include "server/work/disk_pages.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPutValues = 256;  // of one batch
constexpr std::chrono::seconds kCheckpointTimeout{60};
constexpr uint32_t kPatience = 60;  // of requests that have deadlines of their own
// Of a batch while it stops. Not the stop's deadline: a disk that is merely cut short must not
// count as one that fails, which is left alone and gets no checkpoint.
constexpr std::chrono::seconds kLastPutTimeout{1};

}  // namespace

void DiskPages::Offer(const PageKey& key) {
  {
    MutexLock lock(mu_);
    if (drains_ != Drains::kNo) {
      ++counters_.refused;
      return;
    }
    if (stopping_ || offers_.size() >= options_.queue) {
      ++counters_.dropped;
      return;
    }
    offers_.push_back(key);
  }
  offered_.notify_one();
}

Status DiskPages::Drain() {
  {
    MutexLock lock(mu_);
    if (drains_ == Drains::kDrained) return OkStatus();
    if (drains_ == Drains::kFailed && !drain_failed_.ok()) {
      return std::exchange(drain_failed_, OkStatus());
    }
    drains_ = Drains::kDrying;
  }
  offered_.notify_one();
  return OkStatus();
}

bool DiskPages::draining() const {
  MutexLock lock(mu_);
  return drains_ != Drains::kNo;
}

bool DiskPages::drained() const {
  MutexLock lock(mu_);
  return drains_ == Drains::kDrained;
}

bool DiskPages::IsDry() const {
  MutexLock lock(mu_);
  return drains_ == Drains::kDrying && offers_.empty();
}

void DiskPages::EndDrying(const Status& checkpoint) {
  MutexLock lock(mu_);
  // Resumed, and perhaps begun again, meanwhile: what was offered in between comes first.
  if (drains_ != Drains::kDrying || !offers_.empty()) return;
  drains_ = checkpoint.ok() ? Drains::kDrained : Drains::kFailed;
  drain_failed_ = checkpoint;
}

void DiskPages::Resume() {
  {
    MutexLock lock(mu_);
    if (std::exchange(drains_, Drains::kNo) == Drains::kNo) return;
  }
  std::vector<BlockInfo> here = store_->ArtefactBlocks();
  std::erase_if(here, [](const BlockInfo& b) { return b.kind != BlockKind::kRecord; });
  for (uint64_t cursor = 0; cursor != kNoMoreBlocks;) {
    std::ranges::move(store_->Blocks(&cursor, kPutValues), std::back_inserter(here));
    for (const BlockInfo& block : here) {
      PageKey key{};
      std::ranges::copy(block.key, key.begin());
      if (block.changed || !Holds(key)) Offer(key);
    }
    here.clear();
  }
}

std::optional<std::vector<PageKey>> DiskPages::NextOffers() {
  std::unique_lock<std::mutex> lock(mu_.native());
  const auto ready = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    writing_ = 0;
    return stopping_ || !offers_.empty() || drains_ == Drains::kDrying;
  };
  if (unsaved_ && options_.checkpoint_interval.count() != 0) {
    offered_.wait_until(lock, checkpoint_at_, ready);
  } else {
    offered_.wait(lock, ready);
  }
  return [this]() KVS_NO_THREAD_SAFETY_ANALYSIS -> std::optional<std::vector<PageKey>> {
    if (stopping_ && (offers_.empty() || GivesUp())) {
      counters_.dropped += offers_.size();
      offers_.clear();
      return std::nullopt;
    }
    const auto end = offers_.begin() + static_cast<ptrdiff_t>(std::min(offers_.size(), kPutValues));
    std::vector<PageKey> keys(offers_.begin(), end);
    offers_.erase(offers_.begin(), end);
    writing_ = keys.size();
    return keys;
  }();
}

bool DiskPages::GivesUp() const {
  return stopping_ && (stop_bytes_ == 0 || Clock::now() >= stop_deadline_);
}

bool DiskPages::Drops() {
  MutexLock lock(mu_);
  counters_.dropped += GivesUp();
  return GivesUp();
}

Deadline DiskPages::PutDeadline(uint64_t bytes) {
  MutexLock lock(mu_);
  if (!stopping_) return Clock::now() + kPutTimeout;
  stop_bytes_ -= std::min(stop_bytes_, bytes);
  return Clock::now() + kLastPutTimeout;
}

// One by one, which takes its time: a batch has hundreds.
bool DiskPages::MayEvict(Deadline deadline) const {
  MutexLock lock(mu_);
  return Clock::now() < (stopping_ ? stop_deadline_ : deadline);
}

// Smaller while it stops, which looks at its time between batches.
uint64_t DiskPages::BatchBytes() const {
  MutexLock lock(mu_);
  return stopping_ ? std::min(options_.batch_bytes / 8, stop_bytes_) : options_.batch_bytes;
}

void DiskPages::Write() {
  WarmUpAllocator();
  Heartbeat beat("kvs-disk-write", kPatience);
  for (auto keys = NextOffers(); keys; keys = NextOffers()) {
    const Turning turning(&beat);
    const bool written = Survive("kvs-disk-write", [&] {
      Batch batch;
      for (const PageKey& key : *keys) {
        beat.Begin();
        if (!Drops()) WriteOffered(key, &batch);
      }
      PutAll(&batch);
    });
    if (!written) Count(&DiskPagesCounters::failed, keys->size());
    Survive("kvs-disk-write", [&] { CheckpointIfDue(); });
  }
}

void DiskPages::WriteOffered(const PageKey& key, Batch* batch) {
  const std::vector<SealedValue> values = store_->Sealed(key);
  if (values.empty() && !Holds(key)) Count(&DiskPagesCounters::gone, 1);
  if (values.empty()) return;
  for (size_t i = 0; i + 1 < values.size(); ++i) Add(key, i, values[i], batch);
  if (values.size() > 1) {
    PutAll(batch);
    const auto there = [this](const SealedValue& value) { return Holds(value.key); };
    if (!std::all_of(values.begin(), values.end() - 1, there)) return;
  }
  Add(key, values.size() - 1, values.back(), batch);
}

void DiskPages::Add(const PageKey& offered, size_t i, const SealedValue& value, Batch* batch) {
  if (!value.changed && Holds(value.key)) return store_->NoteStored({&value.key, 1});
  TierPut put{TierNameOf(value.key), {}, nullptr, {}, true};
  const auto same = [&put](const TierPut& other) { return other.key == put.key; };
  uint64_t total = 0;
  for (const uint64_t bytes : value.sizes) total += WholeBlocks(bytes);
  const bool full = !batch->puts.empty() && batch->bytes + total > BatchBytes();
  if (full || std::any_of(batch->puts.begin(), batch->puts.end(), same)) PutAll(batch);
  const std::shared_ptr<std::byte> memory = buffers_.Take(total);
  std::vector<std::span<std::byte>> to;
  uint64_t at = 0;
  for (const uint64_t bytes : value.sizes) {
    to.emplace_back(memory.get() + at, bytes);
    at += WholeBlocks(bytes);
  }
  if (!store_->CopySealed(offered, i, to)) return Count(&DiskPagesCounters::gone, 1);
  put.buffers.assign(to.begin(), to.end());
  put.keep = memory;
  if (value.changed) batch->changed.push_back(put.key);
  batch->puts.push_back(std::move(put));
  batch->bytes += total;
}

void DiskPages::PutAll(Batch* batch) {
  const uint64_t bytes = batch->bytes;
  std::vector<TierPut> puts = std::move(batch->puts);
  const std::vector<std::string> changed = std::move(batch->changed);
  *batch = {};
  if (puts.empty()) return;
  const Deadline deadline = PutDeadline(bytes);
  // What cannot be erased stays as it was put: no later value takes its place.
  if (const Status erased = disk_->Erase(changed, deadline); !erased.ok()) {
    write_log_.Warn("disk_erase_failed", erased);
  }
  disk_->Put(puts, deadline);
  uint64_t written = 0, dropped = 0;
  std::vector<PageKey> stored;
  for (TierPut& put : puts) {
    if (put.status.reason() == "DISK_FULL") {
      if (!MayEvict(deadline)) {
        ++dropped;
        continue;
      }
      PutInPlaceOfOthers(&put, deadline);
    }
    written += put.status.ok();
    if (put.status.ok()) std::ranges::copy(put.key, stored.emplace_back().begin());
    if (!put.status.ok()) write_log_.Warn("disk_write_failed", put.status);
  }
  store_->NoteStored(stored);
  if (written != 0 && !std::exchange(unsaved_, true)) {
    checkpoint_at_ = Clock::now() + options_.checkpoint_interval;
  }
  Count(&DiskPagesCounters::written, written);
  Count(&DiskPagesCounters::dropped, dropped);
  Count(&DiskPagesCounters::failed, puts.size() - written - dropped);
}

void DiskPages::CheckpointIfDue() {
  const bool dry = IsDry();
  const bool timed = unsaved_ && options_.checkpoint_interval.count() != 0;
  if (!dry && !(timed && Clock::now() >= checkpoint_at_)) return;
  unsaved_ = false;
  const Status status = disk_->Checkpoint(Clock::now() + kCheckpointTimeout);
  if (dry) EndDrying(status);
  if (!status.ok()) return write_log_.Warn("disk_checkpoint_failed", status);
  Count(&DiskPagesCounters::checkpoints, 1);
}

void DiskPages::PutInPlaceOfOthers(TierPut* put, Deadline deadline) {
  std::vector<uint64_t> sizes;
  for (const auto& buffer : put->buffers) sizes.push_back(buffer.size());
  const std::vector<std::string> victims = disk_->Victims(sizes);
  if (const Status erased = disk_->Erase(victims, deadline); !erased.ok()) {
    put->status = erased;
    return;
  }
  Count(&DiskPagesCounters::evicted, victims.size());
  disk_->Put({put, 1}, deadline);
}

}  // namespace kvstrata
