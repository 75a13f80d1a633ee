// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/disk_value_tier.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <utility>

#include "server/tier/tier_buffers.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kDiskThread = "kvs-disk-io";
constexpr std::chrono::seconds kCheckpointTimeout{60};

template <typename Request>
uint64_t WholeBytesOf(const Request& request) {
  uint64_t bytes = 0;
  for (const auto& buffer : request.buffers) bytes += WholeBlocks(buffer.size());
  return bytes;
}

template <typename Request>
bool IsAligned(const Request& request) {
  return std::ranges::all_of(request.buffers, [](const auto& buffer) {
    return reinterpret_cast<uintptr_t>(buffer.data()) % kValueAlignment == 0;
  });
}

// IsAligned buffers of the sizes of those of `from`, and its key.
template <typename Request>
Request AlignedTwin(const Request& from) {
  const std::shared_ptr<std::byte> memory = HeapBuffers(WholeBytesOf(from));
  Request twin;
  twin.key = from.key;
  twin.keep = memory;
  twin.header_room = true;
  uint64_t at = 0;
  for (const auto& buffer : from.buffers) {
    twin.buffers.emplace_back(memory.get() + at, buffer.size());
    at += WholeBlocks(buffer.size());
  }
  return twin;
}

// What the engine wants aligned, and is not, goes by a twin: `run` sees those in place of theirs.
template <typename Request, typename Copy, typename Run>
void ByTwins(std::span<Request> requests, const Copy& copy, const Run& run) {
  constexpr uint64_t kAnyAlignment = uint64_t{64} << 10;  // the engine itself copies up to this
  std::vector<size_t> places;
  for (size_t i = 0; i < requests.size(); ++i) {
    const bool sound =
        !requests[i].buffers.empty() && requests[i].buffers.size() <= kMaxValueBuffers;
    const bool copied = sound && WholeBytesOf(requests[i]) <= kAnyAlignment;
    if (sound && !copied && !IsAligned(requests[i])) places.push_back(i);
  }
  if (places.empty()) return run(requests);
  std::vector<Request> all(requests.begin(), requests.end());
  for (const size_t i : places) {
    all[i] = AlignedTwin(requests[i]);
    copy(&all[i], &requests[i], false);
  }
  run(std::span<Request>(all));
  for (size_t i = 0; i < requests.size(); ++i) requests[i].status = all[i].status;
  for (const size_t i : places) copy(&all[i], &requests[i], true);
}

// "12:00:05 UTC".
std::string TimeOfDay(int64_t since_1970_us) {
  const auto time = static_cast<time_t>(since_1970_us / 1'000'000);
  tm parts{};
  gmtime_r(&time, &parts);
  char text[16];
  return {text, std::strftime(text, sizeof(text), "%H:%M:%S UTC", &parts)};
}

// "" for an engine that is well. Slower I/O (no io_uring) is no illness: the log and the stats tell
// it.
std::string IllnessOf(const DiskTierStats& stats) {
  if (stats.breaker_open) {
    const auto wait = std::chrono::ceil<std::chrono::seconds>(stats.retry);
    return "the disk tier failed repeatedly and is left alone since " +
           TimeOfDay(stats.left_alone_since_us) + ", tried again in " +
           std::to_string(wait.count()) + " s; last error: " + stats.last_error;
  }
  if (stats.stopped_segments != 0) {
    return std::to_string(stats.stopped_segments) +
           " segments of the disk tier take no more writes after errors";
  }
  if (stats.degraded.reason() == "DISK_SPACE") return "disk tier: " + stats.degraded.message();
  return "";
}

}  // namespace

DiskValueTier::DiskValueTier(const DiskValueTierOptions& options, DiskTier* disk)
    : options_(options),
      disk_(disk),
      queue_(kLanes),
      threads_(kDiskThread, options.readers + kLanes, &queue_) {}

// -- the interface

void DiskValueTier::Probe(std::span<TierProbe> probes, TierCall call) {
  disk_->Probe(probes);
  call.done();
}

void DiskValueTier::Get(std::span<TierGet> gets, TierCall call) {
  queue_.Add(kReads, {std::move(call), [this, gets](const TierCall& terms) { Read(gets, terms); },
                      Refusing(gets)});
}

template <typename Request>
void DiskValueTier::Later(std::span<Request> requests, TierCall call,
                          void (DiskValueTier::*make)(std::span<Request>, TierCall)) {
  const auto run = [this, requests, make](TierCall terms) {
    terms.waits = true;
    terms.done = [] {};  // the queue calls it
    (this->*make)(requests, std::move(terms));
  };
  queue_.Add(kWrites, {std::move(call), run, Refusing(requests)});
}

void DiskValueTier::Put(std::span<TierPut> puts, TierCall call) {
  if (!call.waits) return Later(puts, std::move(call), &DiskValueTier::Put);
  const auto copy = [](TierPut* twin, TierPut* put, bool back) {
    if (back) return;
    for (size_t i = 0; i < put->buffers.size(); ++i) {
      auto* to = const_cast<std::byte*>(twin->buffers[i].data());  // its own memory
      std::memcpy(to, put->buffers[i].data(), put->buffers[i].size());
    }
  };
  if (const Status why = WhyNotNow(call); !why.ok()) {
    Refusing(puts)(why);
    return call.done();
  }
  ByTwins(puts, copy, [&](std::span<TierPut> all) {
    disk_->Put(all, call.deadline, call.cancel);
    WriteInPlaceOfOthers(all, call);
  });
  const auto written = std::ranges::count_if(puts, [](const TierPut& p) { return p.status.ok(); });
  NotePut(static_cast<uint64_t>(written));
  const Status flushed = call.durable && written != 0 ? disk_->Flush(call.deadline) : OkStatus();
  for (TierPut& put : puts) {
    if (!flushed.ok() && put.status.ok()) put.status = flushed;
  }
  call.done();
}

void DiskValueTier::Forget(std::span<TierForget> keys, TierCall call) {
  if (!call.waits) return Later(keys, std::move(call), &DiskValueTier::Forget);
  std::vector<std::string> names;
  for (const TierForget& forget : keys) names.push_back(forget.key);
  Status status = WhyNotNow(call);
  if (status.ok()) status = disk_->Erase(names, call.deadline);
  if (status.ok() && call.durable) status = disk_->Flush(call.deadline);
  Refusing(keys)(status);
  call.done();
}

void DiskValueTier::Walk(TierWalk* walk, TierCall call) {
  walk->values.clear();
  walk->status = WhyNotNow(call);
  if (walk->status.ok()) walk->values = disk_->Scan(&walk->cursor, walk->most);
  call.done();
}

TierStats DiskValueTier::Stats() const {
  const DiskTierStats engine = disk_->Stats();
  TierStats stats;
  {
    MutexLock lock(mu_);
    stats = counted_;
  }
  stats.capacity_bytes = engine.capacity_bytes;
  stats.used_bytes = engine.used_bytes;
  stats.entries = engine.entries;
  stats.damaged = engine.corrupt;
  stats.illness = IllnessOf(engine);
  return stats;
}

// -- in the threads

void DiskValueTier::Read(std::span<TierGet> gets, const TierCall& call) {
  const auto copy = [](TierGet* twin, TierGet* get, bool back) {
    twin->inspects = get->inspects;
    if (!back || !get->status.ok()) return;
    for (size_t i = 0; i < get->buffers.size(); ++i) {
      std::memcpy(get->buffers[i].data(), twin->buffers[i].data(), get->buffers[i].size());
    }
  };
  ByTwins(gets, copy, [&](std::span<TierGet> all) { disk_->Get(all, call.deadline, call.cancel); });
  uint64_t hits = 0, misses = 0;
  for (const TierGet& get : gets) {
    hits += get.status.ok();
    misses += get.status.code() == Code::kNotFound;
  }
  MutexLock lock(mu_);
  counted_.hits += hits;
  counted_.misses += misses;
}

// One by one, which takes its time: a batch has hundreds.
void DiskValueTier::WriteInPlaceOfOthers(std::span<TierPut> puts, const TierCall& call) {
  for (TierPut& put : puts) {
    if (put.status.reason() != "DISK_FULL") continue;
    if (call.cancel.stop_requested()) {
      put.status = TierCancelled();
      continue;
    }
    if (Clock::now() >= call.deadline) continue;
    const std::vector<std::string> victims = disk_->Victims(ValueSizes::Of(put.buffers).all());
    if (const Status erased = disk_->Erase(victims, call.deadline); !erased.ok()) {
      put.status = erased;
      continue;
    }
    {
      MutexLock lock(mu_);
      counted_.evicted += victims.size();
    }
    disk_->Put({&put, 1}, call.deadline, call.cancel);
  }
}

// -- checkpoints

void DiskValueTier::NotePut(uint64_t values) {
  if (values == 0) return;
  Deadline due{};
  {
    MutexLock lock(mu_);
    counted_.puts += values;
    if (std::exchange(unsaved_, true)) return;
    due = checkpoint_at_ = Clock::now() + options_.checkpoint_interval;
  }
  if (options_.checkpoint_interval.count() == 0) return;
  queue_.Add(kWrites, {{Deadline::max(), {}, [] {}},
                       [this](const TierCall&) { CheckpointIfDue(); },
                       [](const Status&) {},
                       due});
}

void DiskValueTier::CheckpointIfDue() {
  {
    MutexLock lock(mu_);
    if (!unsaved_ || Clock::now() < checkpoint_at_) return;
  }
  const Status status = Checkpoint(Clock::now() + kCheckpointTimeout);
  if (!status.ok()) log_.Warn("disk_checkpoint_failed", status);
}

Status DiskValueTier::Checkpoint(Deadline deadline) {
  {
    MutexLock lock(mu_);
    unsaved_ = false;  // what is put meanwhile may be left out
  }
  const Status status = disk_->Checkpoint(deadline);
  MutexLock lock(mu_);
  checkpoints_ += status.ok();
  return status;
}

uint64_t DiskValueTier::checkpoints() const {
  MutexLock lock(mu_);
  return checkpoints_;
}

Result<uint64_t> DiskValueTier::Resize(uint64_t budget_bytes, Deadline deadline) {
  KVS_ASSIGN_OR_RETURN(const uint64_t left, disk_->Resize(budget_bytes, deadline));
  {
    MutexLock lock(mu_);
    counted_.evicted += left;
  }
  const Status saved = Checkpoint(Clock::now() + kCheckpointTimeout);
  if (!saved.ok()) log_.Warn("disk_checkpoint_failed", saved);
  return left;
}

TierHooks DiskValueTier::Hooks() {
  TierHooks hooks;
  hooks.pin = [this](std::span<const std::string> keys) { disk_->Pin(keys); };
  hooks.unpin = [this](std::span<const std::string> keys) { disk_->Unpin(keys); };
  hooks.checkpoint = [this](Deadline deadline) { return Checkpoint(deadline); };
  hooks.add_memory = [this](std::shared_ptr<std::byte> memory, uint64_t bytes, Deadline deadline) {
    return disk_->AddMemory(std::move(memory), bytes, deadline);
  };
  return hooks;
}

}  // namespace kvstrata
