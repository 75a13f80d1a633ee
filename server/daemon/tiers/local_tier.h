// SPDX-License-Identifier: Apache-2.0
// LocalTier: the daemon's disk tier: the disk that disk.path names, what goes there and comes from
// there (server/work/tiers/tier_row.h), and what is told of it. As RemoteTier (remote_tier.h) is
// for what nodes share.
//
// Ownership: borrows the store, which outlives it. Thread-safety: one thread makes, uses, stops and
// destroys it; the rest from any thread between Use and the end. Errors of Open: those of
// DiskTier::Open.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "base/status.h"
#include "server/config/config.h"
#include "server/rpc/calls/grpc_options.h"
#include "server/store/store.h"
#include "server/tier/disk/disk_tier.h"
#include "server/tier/disk/disk_value_tier.h"
#include "server/work/tiers/tier_chain.h"

namespace kvstrata {

class LocalTier {
 public:
  // REQUIRES: config.disk has a directory. Reads what lies there, for disk.start_timeout at most.
  static Result<std::unique_ptr<LocalTier>> Open(const Config& config);

  // From now on it is a row of the store's tiers, with what the last daemon left besides pages:
  // pins, of which those that are over leave the disk, and records of artefacts. Waits as Open;
  // once.
  void Use(Store* store, TierChain* tiers);
  // What reloads of its configuration.
  void Configure(const TierRowOptions& options);
  // Drops what waits for the disk, and writes a checkpoint, for a quarter of `timeout`, so that the
  // next start need not read every slot: what is put is there without it. Logs what was done. Once.
  void Stop(std::chrono::microseconds timeout);

  std::string illness() const;  // "": well
  DiskInfo Info() const;
  // These, and what operators may ask of the disk, as calls of Admin.
  void Offer(GrpcOptions* options);
  TierRow* row() const { return row_.get(); }
  ValueTier* values() { return &values_; }

 private:
  LocalTier(const Config& config, std::unique_ptr<DiskTier> disk);

  void RestorePins(Store* store, Deadline deadline);

  const std::string directory_;
  const std::chrono::microseconds start_timeout_;
  const TierRowOptions options_;  // as of the start
  const std::unique_ptr<DiskTier> disk_;
  DiskValueTier values_;
  std::unique_ptr<TierRow> row_;
};

}  // namespace kvstrata
