// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/tier_writer.h"

#include <pthread.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "server/telemetry/heartbeat.h"
#include "server/telemetry/thread_top.h"
#include "server/telemetry/traffic.h"
#include "server/tier/blocking_calls.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kThread = "kvs-tier-write";
constexpr std::chrono::seconds kPutTimeout{10};
constexpr size_t kPutValues = 256;  // values of one batch
constexpr std::chrono::seconds kCheckpointTimeout{60};
constexpr uint32_t kPatience = 60;  // for requests that have deadlines of their own
// For a batch while it stops. Not the stop's deadline: a disk that is merely cut short must not
// count as one that fails, which is left alone and gets no checkpoint.
constexpr std::chrono::seconds kLastPutTimeout{1};

bool Has(ValueTier* tier, const PageKey& key) { return !KnownSizes(tier, TierNameOf(key)).empty(); }

}  // namespace

TierWriter::TierWriter(const TierWriterOptions& options, Store* store, ValueTier* tier,
                       TierBuffers* buffers, std::function<Status(Deadline)> checkpoint)
    : options_(options),
      store_(store),
      tier_(tier),
      buffers_(buffers),
      checkpoint_(std::move(checkpoint)),
      thread_([this] { Write(); }) {
  pthread_setname_np(thread_.native_handle(), kThread);
}

TierWriter::~TierWriter() { Stop(Clock::now(), 0); }

void TierWriter::Stop(Deadline deadline, uint64_t most_bytes) {
  {
    MutexLock lock(mu_);
    if (stopping_) return;
    stopping_ = true;
    stop_deadline_ = deadline;
    stop_bytes_ = most_bytes;
  }
  offered_.notify_all();
  {
    std::unique_lock<std::mutex> lock(mu_.native());
    ended_.wait_until(lock, deadline,
                      [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return written_out_; });
  }
  end_writes_.request_stop();
  thread_.join();
}

TierWriterCounters TierWriter::counters() const {
  MutexLock lock(mu_);
  return counters_;
}

size_t TierWriter::waiting() const {
  MutexLock lock(mu_);
  return offers_.size() + writing_;
}

void TierWriter::Count(uint64_t TierWriterCounters::*what, uint64_t n) {
  MutexLock lock(mu_);
  counters_.*what += n;
}

void TierWriter::Offer(const PageKey& key) {
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

Status TierWriter::Drain() {
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

bool TierWriter::draining() const {
  MutexLock lock(mu_);
  return drains_ != Drains::kNo;
}

bool TierWriter::drained() const {
  MutexLock lock(mu_);
  return drains_ == Drains::kDrained;
}

void TierWriter::Resume() {
  {
    MutexLock lock(mu_);
    if (std::exchange(drains_, Drains::kNo) == Drains::kNo) return;
  }
  std::vector<ValueInfo> here = store_->values().ArtefactValues();
  std::erase_if(here, [](const ValueInfo& b) { return b.kind != ValueKind::kRecord; });
  for (uint64_t cursor = 0; cursor != kNoMoreValues;) {
    std::ranges::move(store_->values().PageValues(&cursor, kPutValues), std::back_inserter(here));
    for (const ValueInfo& value : here) {
      PageKey key{};
      std::ranges::copy(value.key, key.begin());
      if (value.changed || !Has(tier_, key)) Offer(key);
    }
    here.clear();
  }
}

std::optional<std::vector<PageKey>> TierWriter::NextOffers() {
  std::unique_lock<std::mutex> lock(mu_.native());
  const auto ready = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    writing_ = 0;
    return stopping_ || !offers_.empty() || drains_ == Drains::kDrying;
  };
  offered_.wait(lock, ready);
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

bool TierWriter::GivesUp() const {
  return stopping_ && (stop_bytes_ == 0 || Clock::now() >= stop_deadline_);
}

Deadline TierWriter::PutDeadline(uint64_t bytes) {
  MutexLock lock(mu_);
  if (!stopping_) return Clock::now() + kPutTimeout;
  stop_bytes_ -= std::min(stop_bytes_, bytes);
  return Clock::now() + kLastPutTimeout;
}

void TierWriter::Write() {
  WarmUpAllocator();
  Heartbeat beat(kThread, kPatience);
  for (auto keys = NextOffers(); keys; keys = NextOffers()) {
    const LoopIteration iteration(&beat);
    const bool written = Survive(kThread, [&] {
      Batch batch;
      for (const PageKey& key : *keys) {
        beat.Begin();
        WriteOffered(key, &batch);
      }
      PutAll(&batch);
    });
    if (!written) Count(&TierWriterCounters::failed, keys->size());
    Survive(kThread, [&] { CheckpointIfDry(); });
  }
  MutexLock lock(mu_);
  written_out_ = true;
  ended_.notify_all();
}

void TierWriter::WriteOffered(const PageKey& key, Batch* batch) {
  {
    MutexLock lock(mu_);
    if (GivesUp()) {
      ++counters_.dropped;
      return;
    }
    batch->most =
        stopping_ ? std::min(options_.batch_bytes / 8, stop_bytes_) : options_.batch_bytes;
  }
  const std::vector<SealedValue> values = store_->values().Sealed(key);
  if (values.empty() && !Has(tier_, key)) Count(&TierWriterCounters::gone, 1);
  if (values.empty()) return;
  for (size_t i = 0; i + 1 < values.size(); ++i) Add(key, i, values[i], batch);
  if (values.size() > 1) {
    PutAll(batch);
    const auto there = [this](const SealedValue& value) { return Has(tier_, value.key); };
    if (!std::all_of(values.begin(), values.end() - 1, there)) return;
  }
  Add(key, values.size() - 1, values.back(), batch);
}

void TierWriter::Add(const PageKey& offered, size_t i, const SealedValue& value, Batch* batch) {
  if (!value.changed && Has(tier_, value.key)) return store_->values().NoteStored({&value.key, 1});
  TierPut put{TierNameOf(value.key), {}, nullptr, {}, true};
  const auto same = [&put](const TierPut& other) { return other.key == put.key; };
  uint64_t total = 0;
  for (const uint64_t bytes : value.sizes) total += WholeBlocks(bytes);
  const bool full = !batch->puts.empty() && batch->bytes + total > batch->most;
  if (full || std::any_of(batch->puts.begin(), batch->puts.end(), same)) PutAll(batch);
  const std::shared_ptr<std::byte> memory = buffers_->Take(total);
  std::vector<std::span<std::byte>> to;
  uint64_t at = 0;
  for (const uint64_t bytes : value.sizes) {
    to.emplace_back(memory.get() + at, bytes);
    at += WholeBlocks(bytes);
  }
  if (!store_->values().CopySealed(offered, i, to)) return Count(&TierWriterCounters::gone, 1);
  put.buffers.assign(to.begin(), to.end());
  put.keep = memory;
  if (value.changed) batch->changed.push_back(put.key);
  batch->puts.push_back(std::move(put));
  batch->bytes += total;
}

void TierWriter::PutAll(Batch* batch) {
  const uint64_t bytes = batch->bytes;
  std::vector<TierPut> puts = std::move(batch->puts);
  const std::vector<std::string> changed = std::move(batch->changed);
  *batch = {{}, {}, 0, batch->most};
  if (puts.empty()) return;
  const Deadline deadline = PutDeadline(bytes);
  // What cannot be forgotten stays as it was put: no later value takes its place.
  if (const Status gone = ForgetAndWait(tier_, changed, deadline); !gone.ok()) {
    log_.Warn("tier_forget_failed", gone);
  }
  PutAndWait(tier_, puts, deadline, end_writes_.get_token());
  bool stops = false;
  {
    MutexLock lock(mu_);
    stops = stopping_;
  }
  uint64_t dropped = 0;
  std::vector<PageKey> stored;
  for (const TierPut& put : puts) {
    const Code code = put.status.code();
    const bool untimely = code == Code::kAborted || code == Code::kDeadlineExceeded;
    if (put.status.ok()) {
      for (const auto& buffer : put.buffers) NoteBytes(BytePath::kMemoryToDisk, buffer.size());
      std::ranges::copy(put.key, stored.emplace_back().begin());
    } else if (stops && untimely) {
      ++dropped;
    } else {
      log_.Warn("tier_write_failed", put.status);
    }
  }
  store_->values().NoteStored(stored);
  Count(&TierWriterCounters::written, stored.size());
  Count(&TierWriterCounters::dropped, dropped);
  Count(&TierWriterCounters::failed, puts.size() - stored.size() - dropped);
}

void TierWriter::CheckpointIfDry() {
  {
    MutexLock lock(mu_);
    if (drains_ != Drains::kDrying || !offers_.empty()) return;
  }
  const Status status = checkpoint_ ? checkpoint_(Clock::now() + kCheckpointTimeout) : OkStatus();
  if (!status.ok()) log_.Warn("tier_checkpoint_failed", status);
  MutexLock lock(mu_);
  // Resumed, and perhaps begun again, meanwhile: what was offered in between comes first.
  if (drains_ != Drains::kDrying || !offers_.empty()) return;
  drains_ = status.ok() ? Drains::kDrained : Drains::kFailed;
  drain_failed_ = status;
}

}  // namespace kvstrata
