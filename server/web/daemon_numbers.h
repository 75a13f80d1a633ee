// SPDX-License-Identifier: Apache-2.0
// DaemonNumbers: what the daemon's pages tell, looked up once a second by kvs-watch: a scrape takes
// no lock that a step could wait for, however many come. LatestNumbers is where it is put.
//
// Plain values; LatestNumbers: any thread, a leaf lock for as long as a pointer is copied.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "server/chunks/room/chunk.h"
#include "server/chunks/room/engine_recalls.h"
#include "server/rpc/calls/grpc_options.h"
#include "server/store/options/user_limits.h"
#include "server/store/reports/session_totals.h"
#include "server/store/reports/store_info.h"
#include "server/store/requests/recompress_job.h"
#include "server/store/sequences/recall_audits.h"

namespace kvstrata {

// A part of the daemon that may fail by itself.
struct PartHealth {
  std::string_view part;  // "descriptors", "pools", "disk", "remote"
  std::string failure;    // "": well
  bool needed = false;    // without it the daemon is not ready
};

// What the status page shows besides; looked up only while somebody has it open.
struct LiveNumbers {
  static constexpr size_t kMostSequences = 64;  // the newest
  static constexpr uint32_t kBuckets = 128;

  std::vector<LiveSequence> sequences;
  size_t all_sequences = 0;
  std::vector<WorkInfo> work;
};

struct DaemonNumbers {
  std::chrono::steady_clock::time_point taken;
  std::vector<PartHealth> parts;
  std::vector<PoolInfo> pools;
  StoreCounters counters;
  ChunkNumbers chunks;
  std::optional<DiskInfo> disk;
  std::optional<RemoteInfo> remote;
  PinLimits pins;
  std::vector<UserReport> users;
  SessionTotals sessions;
  std::vector<SampledRecall> recall;
  std::vector<EngineRecall> engine_recalls;
  std::vector<PlanRecall> plan_recalls;  // that engines tell
  std::optional<CgroupInfo> cgroup;
  std::optional<LiveNumbers> live;
};

class LatestNumbers {
 public:
  void Put(DaemonNumbers numbers) KVS_EXCLUDES(mu_) {
    auto latest = std::make_shared<const DaemonNumbers>(std::move(numbers));
    MutexLock lock(mu_);
    latest_.swap(latest);
  }
  // REQUIRES: some were put.
  std::shared_ptr<const DaemonNumbers> Get() const KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    return latest_;
  }

 private:
  mutable Mutex mu_;
  std::shared_ptr<const DaemonNumbers> latest_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata
