// SPDX-License-Identifier: Apache-2.0
// DiskValueTier: the disk engine (server/tier/disk/disk_tier.h) as a ValueTier.
//
// Its threads ("kvs-disk-io") carry out one read and one write at a time, which keep the device
// busy by their batches; while one runs `done` of what it read, another reads on. Two more than
// may read see to deadlines while the device hangs (server/tier/call_queue.h). A write whose caller
// waits is carried out by that caller. A full disk gives
// up what was not used lately, one value after the other. When something was put, a checkpoint is
// made every `checkpoint_interval`. Large values whose buffers begin at no multiple of 4096 are
// copied once more.
//
// Ownership: borrows the engine, which outlives it. Thread-safety: all methods, from any thread.
// Blocking: Checkpoint and Resize wait for the disk.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>

#include "base/sync.h"
#include "server/telemetry/status_log.h"
#include "server/tier/call_queue.h"
#include "server/tier/call_threads.h"
#include "server/tier/disk/disk_tier.h"
#include "server/tier/tier_hooks.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

struct DiskValueTierOptions {
  uint32_t readers = 2;  // reads whose `done` runs or that read
  std::chrono::microseconds checkpoint_interval{60'000'000};  // 0: only when asked for
};

class DiskValueTier final : public ValueTier {
 public:
  DiskValueTier(const DiskValueTierOptions& options, DiskTier* disk);
  // Ends what waits; what runs goes on until its deadline.
  ~DiskValueTier() override = default;

  void Probe(std::span<TierProbe> probes, TierCall call) override;
  void Get(std::span<TierGet> gets, TierCall call) override;
  void Put(std::span<TierPut> puts, TierCall call) override;
  void Forget(std::span<TierForget> keys, TierCall call) override;
  void Walk(TierWalk* walk, TierCall call) override;
  TierStats Stats() const override;

  // As DiskTier::Checkpoint.
  Status Checkpoint(Deadline deadline) KVS_EXCLUDES(mu_);
  // Values that left count as evicted. Makes a checkpoint; that one may fail, which is logged.
  Result<uint64_t> Resize(uint64_t budget_bytes, Deadline deadline) KVS_EXCLUDES(mu_);
  TierHooks Hooks();
  uint64_t checkpoints() const KVS_EXCLUDES(mu_);  // that succeeded

 private:
  enum Lane : uint8_t { kReads, kWrites, kLanes };

  // Has a thread of its own make the call, which waits, in the lane of writes.
  template <typename Request>
  void Later(std::span<Request> requests, TierCall call,
             void (DiskValueTier::*make)(std::span<Request>, TierCall));
  void Read(std::span<TierGet> gets, const TierCall& call) KVS_EXCLUDES(mu_);
  // Writes those that found no room in place of others.
  void WriteInPlaceOfOthers(std::span<TierPut> puts, const TierCall& call) KVS_EXCLUDES(mu_);
  void NotePut(uint64_t values) KVS_EXCLUDES(mu_);
  void CheckpointIfDue() KVS_EXCLUDES(mu_);

  const DiskValueTierOptions options_;
  DiskTier* const disk_;
  CallQueue queue_;

  mutable Mutex mu_;
  TierStats counted_ KVS_GUARDED_BY(mu_);
  uint64_t checkpoints_ KVS_GUARDED_BY(mu_) = 0;
  bool unsaved_ KVS_GUARDED_BY(mu_) = false;  // something was put since the last checkpoint
  Deadline checkpoint_at_ KVS_GUARDED_BY(mu_){};
  StatusLog log_;
  CallThreads threads_;
};

}  // namespace kvstrata
