// SPDX-License-Identifier: Apache-2.0
#include "server/work/remote/remote_writer.h"

#include <pthread.h>

#include <algorithm>
#include <string>
#include <utility>

#include "server/telemetry/heartbeat.h"
#include "server/telemetry/thread_top.h"
#include "server/telemetry/traffic.h"
#include "server/tier/blocking_calls.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kThread = "kvs-remote-write";
constexpr std::chrono::seconds kPutTimeout{10};
constexpr std::chrono::seconds kReadTimeout{1};
constexpr std::chrono::milliseconds kLookAgain{50};  // whether the local tier has it by now
constexpr uint32_t kPatience = 60;  // for requests that have deadlines of their own
constexpr size_t kTaken = 256;      // offers of each queue in one go

}  // namespace

RemoteWriter::RemoteWriter(const RemoteWriterOptions& options, Store* store, ValueTier* local,
                           ValueTier* remote, TierBuffers* buffers, RecentKeys* present,
                           RecentKeys* absent)
    : options_(options),
      policy_(options.write),
      rate_(options.rate),
      store_(store),
      local_(local),
      remote_(remote),
      buffers_(buffers),
      present_(present),
      absent_(absent),
      tenant_rates_(options.tenant_rates),
      thread_([this] { Write(); }) {
  pthread_setname_np(thread_.native_handle(), kThread);
}

RemoteWriter::~RemoteWriter() { Stop(); }

void RemoteWriter::Stop() {
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  end_writes_.request_stop();
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void RemoteWriter::Configure(const RemoteWriterOptions& options) {
  policy_ = options.write;
  rate_.Set(options.rate);
  MutexLock lock(mu_);
  tenant_rates_.Set(options.tenant_rates);
}

RemoteWriterCounters RemoteWriter::counters() const {
  MutexLock lock(mu_);
  RemoteWriterCounters all = counters_;
  all.waiting = keys_.size();
  all.over_write_rates = tenant_rates_.refused();
  return all;
}

void RemoteWriter::Count(uint64_t RemoteWriterCounters::*what, uint64_t n) {
  MutexLock lock(mu_);
  counters_.*what += n;
}

// What was reported of positions goes where the page went before.
bool RemoteWriter::Wants(const TierOffer& offer) const {
  const RemoteWrite policy = policy_;
  if (policy == RemoteWrite::kOff || offer.place == PageKey{}) return false;
  const bool known = present_->Contains(offer.key);
  switch (offer.why) {
    case OfferedFor::kLoaded:
      return false;
    case OfferedFor::kSealed:
      return policy == RemoteWrite::kAll && !known;
    case OfferedFor::kReported:
      return policy == RemoteWrite::kAll || known;
    case OfferedFor::kArtefact:
      return true;
    case OfferedFor::kReused:
    case OfferedFor::kPinned:
      return !known;
  }
  return false;
}

void RemoteWriter::Offer(const TierOffer& offer) {
  if (!Wants(offer)) return;
  {
    MutexLock lock(mu_);
    if (keys_.contains(offer.key)) return;  // it is copied as it is then
    if (stopping_) {
      ++counters_.dropped_stop;
      return;
    }
    if (counters_.waiting_bytes + offer.bytes > options_.queue_bytes) {
      ++counters_.dropped_full;
      return;
    }
    const Clock::time_point now = Clock::now();
    if (!tenant_rates_.Take(offer.tenant, offer.bytes, now)) {
      ++counters_.dropped_rate;
      return;
    }
    keys_.insert(offer.key);
    counters_.waiting_bytes += offer.bytes;
    offers_.push_back({offer, now});
    offers_.back().offer.tenant = {};  // whoever offered it has that name
  }
  changed_.notify_one();
}

void RemoteWriter::Leave(const TierOffer& offer) {
  MutexLock lock(mu_);
  if (keys_.erase(offer.key) != 0) counters_.waiting_bytes -= offer.bytes;
}

std::optional<std::deque<RemoteWriter::Waiting>> RemoteWriter::Next() {
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS -> std::optional<std::deque<Waiting>> {
    const auto ready = [this]()
                           KVS_NO_THREAD_SAFETY_ANALYSIS { return stopping_ || !offers_.empty(); };
    if (not_local_.empty()) {
      changed_.wait(lock, ready);
    } else {
      (void)changed_.wait_for(lock, kLookAgain, ready);
    }
    if (stopping_) {
      counters_.dropped_stop += keys_.size();
      keys_.clear();
      counters_.waiting_bytes = 0;
      return std::nullopt;
    }
    std::deque<Waiting> taken;
    for (std::deque<Waiting>* const from : {&not_local_, &offers_}) {
      for (size_t n = std::min(from->size(), kTaken); n > 0; --n) {
        taken.push_back(std::move(from->front()));
        from->pop_front();
      }
    }
    return taken;
  }();
}

void RemoteWriter::Write() {
  WarmUpAllocator();
  Heartbeat beat(kThread, kPatience);
  for (auto taken = Next(); taken; taken = Next()) {
    const LoopIteration iteration(&beat);
    const bool written = Survive(kThread, [&] {
      Batch batch;
      std::vector<const TierOffer*> going;
      for (const Waiting& waiting : *taken) {
        beat.Begin();
        if (end_writes_.stop_requested() || !IsLocal(waiting)) continue;
        WriteOffered(waiting.offer, &batch);
        going.push_back(&waiting.offer);
      }
      PutAll(&batch);
      for (const TierOffer* offer : going) Leave(*offer);
    });
    if (written) continue;
    Count(&RemoteWriterCounters::failed, taken->size());
    for (const Waiting& waiting : *taken) Leave(waiting.offer);
  }
}

bool RemoteWriter::IsLocal(const Waiting& waiting) {
  if (local_ == nullptr) return true;
  if (!KnownSizes(local_, TierNameOf(waiting.offer.key)).empty()) return true;
  if (Clock::now() - waiting.since > options_.local_patience) {
    Count(&RemoteWriterCounters::dropped_local, 1);
    Leave(waiting.offer);
    return false;
  }
  MutexLock lock(mu_);
  not_local_.push_back(waiting);
  return false;
}

void RemoteWriter::WriteOffered(const TierOffer& offer, Batch* batch) {
  const std::vector<SealedValue> values = store_->values().Sealed(offer.key);
  if (values.empty()) return AddFromLocal(offer, batch);
  if (values.size() == 1) return AddFromMemory(offer, 0, values[0], batch);
  Batch artefact;
  for (size_t i = 0; i + 1 < values.size(); ++i) AddFromMemory(offer, i, values[i], &artefact);
  PutAll(&artefact);
  if (!artefact.whole) return;
  AddFromMemory(offer, values.size() - 1, values.back(), &artefact);
  PutAll(&artefact);
}

TierPut RemoteWriter::NewPut(const TierOffer& offer, const PageKey& key, uint64_t bytes,
                             Batch* batch) {
  // What goes at once is a second's worth, so that a rate is one of any ten seconds, too.
  const uint64_t rate = rate_.bytes_a_second();
  const uint64_t most = rate == 0 ? options_.batch_bytes : std::min(options_.batch_bytes, rate);
  if (!batch->puts.empty() && batch->bytes + bytes > most) PutAll(batch);
  TierPut put;
  put.key = TierNameOf(key);
  put.place = TierNameOf(offer.place);
  put.header_room = true;
  return put;
}

void RemoteWriter::AddFromMemory(const TierOffer& offer, size_t i, const SealedValue& value,
                                 Batch* batch) {
  uint64_t total = 0;
  for (const uint64_t bytes : value.sizes) total += WholeBlocks(bytes);
  TierPut put = NewPut(offer, value.key, total, batch);
  const std::shared_ptr<std::byte> memory = buffers_->Take(total);
  std::vector<std::span<std::byte>> to;
  uint64_t at = 0;
  for (const uint64_t bytes : value.sizes) {
    to.emplace_back(memory.get() + at, bytes);
    at += WholeBlocks(bytes);
  }
  if (!store_->values().CopySealed(offer.key, i, to, CopyFor::kRemoteTier)) {
    batch->whole = false;
    return Count(&RemoteWriterCounters::gone, 1);
  }
  put.buffers.assign(to.begin(), to.end());
  put.keep = memory;
  const bool changed = offer.why == OfferedFor::kReported || offer.why == OfferedFor::kArtefact;
  if (changed && present_->Contains(offer.key)) {
    batch->changed.push_back({put.key, {}, put.place});
  }
  batch->puts.push_back(std::move(put));
  batch->bytes += total;
}

// For an artefact it would be the record alone, which is not told from other values here.
void RemoteWriter::AddFromLocal(const TierOffer& offer, Batch* batch) {
  const std::string name = TierNameOf(offer.key);
  const bool readable = local_ != nullptr && offer.why != OfferedFor::kArtefact;
  const ValueSizes sizes = readable ? KnownSizes(local_, name) : ValueSizes();
  if (sizes.empty()) return Count(&RemoteWriterCounters::gone, 1);
  TierGet get = NewTierGet(name, sizes.all(), buffers_);
  GetAndWait(local_, {&get, 1}, Clock::now() + kReadTimeout, end_writes_.get_token());
  if (!get.status.ok()) return Count(&RemoteWriterCounters::gone, 1);
  uint64_t total = 0;
  for (const uint64_t bytes : sizes.all()) total += WholeBlocks(bytes);
  TierPut put = NewPut(offer, offer.key, total, batch);
  put.buffers.assign(get.buffers.begin(), get.buffers.end());
  put.keep = std::move(get.keep);
  batch->puts.push_back(std::move(put));
  batch->bytes += total;
}

bool RemoteWriter::Pace(uint64_t bytes) {
  const Clock::time_point begin = rate_.Begin(bytes, Clock::now());
  std::unique_lock<std::mutex> lock(mu_.native());
  const auto stops = [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return stopping_; };
  return !changed_.wait_until(lock, begin, stops);
}

void RemoteWriter::PutAll(Batch* batch) {
  std::vector<TierPut> puts = std::exchange(batch->puts, {});
  std::vector<TierForget> changed = std::exchange(batch->changed, {});
  const uint64_t bytes = std::exchange(batch->bytes, 0);
  if (puts.empty()) return;
  const Deadline deadline = [&] {
    const bool goes = Pace(bytes);
    return Clock::now() + (goes ? kPutTimeout : std::chrono::seconds(0));
  }();
  // What cannot be forgotten stays as it was put: no later value takes its place.
  if (const Status gone = ForgetAndWait(remote_, std::span(changed), deadline); !gone.ok()) {
    log_.Warn("remote_forget_failed", gone);
  }
  PutAndWait(remote_, puts, deadline, end_writes_.get_token());
  RemoteWriterCounters done;
  for (const TierPut& put : puts) {
    PageKey key{};
    std::ranges::copy(put.key, key.begin());
    if (put.status.ok()) {
      for (const auto& buffer : put.buffers) done.written_bytes += buffer.size();
      ++done.written;
      present_->Add(key);
      absent_->Erase(key);
    } else if (end_writes_.stop_requested()) {
      ++done.dropped_stop;
    } else {
      ++done.failed;
      // That a server is left alone, REDIS_ or MOONCAKE_, was told once (remote_left_alone).
      if (!put.status.reason().ends_with("_LEFT_ALONE")) {
        log_.Warn("remote_write_failed", put.status);
      }
    }
  }
  batch->whole = batch->whole && done.written == puts.size();
  NoteBytes(BytePath::kMemoryToRemote, done.written_bytes);
  MutexLock lock(mu_);
  counters_.written += done.written;
  counters_.written_bytes += done.written_bytes;
  counters_.dropped_stop += done.dropped_stop;
  counters_.failed += done.failed;
}

}  // namespace kvstrata
