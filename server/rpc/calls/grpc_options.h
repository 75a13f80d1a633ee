// SPDX-License-Identifier: Apache-2.0
// GrpcOptions: what the gRPC services are given of the daemon (grpc_server.h), and what its parts
// tell them. Plain values; what is called says from which thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/backend/backend.h"
#include "kernels/cpu/executor.h"
#include "kernels/cuda/cuda_ops.h"
#include "server/attach/peers/attach_tokens.h"
#include "server/chunks/room/chunk.h"
#include "server/chunks/room/engine_recalls.h"
#include "server/sockets/descriptor_closer.h"
#include "server/store/prompt_values.h"
#include "server/store/reports/tier_scrub.h"
#include "server/store/reports/value_info.h"
#include "server/store/store.h"
#include "server/telemetry/traffic.h"

namespace kvstrata {

namespace v1 {
class LookupClusterRequest;
class LookupClusterResponse;
}  // namespace v1

// One key of the configuration as Admin.GetConfig shows it.
struct ConfigItem {
  std::string key, value;
  std::string origin;  // "default", "file", "environment" or "flag"
  std::string where;   // the file, line and column, or the variable's name
  std::string description;
  bool reloads = false;  // Admin.ReloadConfig applies it
};

// What Admin.ReloadConfig found changed.
struct ConfigChangeItem {
  std::string key, before, after, where;
  bool applies = false;  // else it needs a restart
};

// The disk tier as Admin.GetStatus shows it.
struct DiskInfo {
  std::string path, queue, degraded;
  bool direct = false, breaker_open = false;
  bool sick = false;  // GrpcOptions::health calls it so
  uint64_t capacity_bytes = 0, used_bytes = 0, entries = 0, waiting = 0;
  uint64_t written = 0, dropped = 0, gone = 0, failed = 0, evicted = 0;
  uint64_t read = 0, late_loads = 0, refused_loads = 0;
  uint64_t corrupt = 0, io_errors = 0, deadlines = 0;
  uint32_t stopped_segments = 0;
  std::string last_error;
  int64_t last_error_time_us = 0, left_alone_since_us = 0;
  std::chrono::microseconds retry{0};
  bool draining = false, drained = false;
  uint64_t refused = 0;
};

// What became of values, or of their headers, that a server of the remote tier was asked for.
struct RemoteAnswersInfo {
  uint64_t hits = 0, absent = 0, refused = 0, late = 0, lost = 0, damaged = 0;
};

// One server of the remote tier.
struct RemoteShardInfo {
  std::string address, last_error;
  bool breaker_open = false;
  uint64_t requests = 0, failures = 0, timeouts = 0, hedges = 0;
  uint64_t openings = 0, connections = 0, sent_bytes = 0, received_bytes = 0;
  // Memory of calls that Mooncake's agent has not answered: now, and the most that it was.
  uint64_t agent_bytes = 0, agent_peak_bytes = 0;
  RemoteAnswersInfo probes, reads;
  LatencyHistogram answers;  // from a request until its whole answer
};

// What the remote tier's rates cut of one user's.
struct OverRateInfo {
  uint64_t opens = 0, values = 0;
};

// The remote tier as Admin.GetStatus shows it.
struct RemoteInfo {
  std::string engine, servers, illness, write, secret_fingerprint;
  std::vector<RemoteShardInfo> shards;
  uint64_t searches = 0, searched = 0, found = 0, late_searches = 0;
  uint64_t known_misses = 0, not_worth = 0, refused_searches = 0;
  uint64_t read = 0, missed = 0, late_loads = 0, refused_loads = 0, over_rate = 0;
  uint64_t bytes_per_second = 0;
  uint64_t waiting = 0, waiting_bytes = 0, written = 0, written_bytes = 0;
  std::map<std::string, OverRateInfo> over_rates;  // by user
  uint64_t dropped_full = 0, dropped_rate = 0, dropped_local = 0, dropped_stop = 0, gone = 0,
           failed = 0;
};

// Admin.ProbeRemote and PurgeRemote.
struct RemoteServerInfo {
  std::string address, role;
  bool breaker_open = false;
  std::chrono::microseconds round_trip{0};
  Status status;  // outcome of the PING
  uint64_t values = 0, held = 0;
};
struct RemoteProbeInfo {
  std::vector<RemoteServerInfo> servers;
  std::vector<bool> held;  // by value of the prompt
};
struct RemotePurgeInfo {
  uint64_t held = 0, failed = 0;
  Status status;  // the first that is not OK
};

// What the daemon's cgroup is charged for memory, as Admin.ListPools shows it.
struct CgroupInfo {
  std::string file;  // that has the limit
  uint64_t limit_bytes = 0, charged_bytes = 0, reclaimable_bytes = 0, available_bytes = 0;
};

// Values one by one (server/work/tiers/value_catalog.h). Any thread; get and verify wait for the
// disk.
struct ValueCalls {
  std::function<ValueList(const ValueFilter& filter, uint64_t after, size_t limit)> list;
  std::function<Result<ValueBytes>(const std::string& key)> get;
  std::function<Result<ValueVerdict>(const std::string& key)> verify;
};

struct GrpcOptions {
  int listen_fd = -1;       // listening SOCK_STREAM Unix socket, non-blocking (UnixListener::fd)
  std::string socket_path;  // shown by Admin.GetStatus
  Store* store = nullptr;
  const Backend* backend = nullptr;    // for sessions that name none
  Executor* executor = nullptr;        // runs the parts of ops
  bool takes_descriptors = true;       // the listener: they may wait in connections
  DescriptorCloser* closer = nullptr;  // for sockets; the accepting thread ticks it
  AttachTokens* tokens = nullptr;      // that the attach server redeems; null: none are given
  // Where sessions compute if the devices are GPUs: their numbers in this process, by the store's;
  // null: nowhere.
  const cuda::CudaOps* cuda = nullptr;
  std::vector<int> cuda_devices;
  std::chrono::milliseconds cuda_patience{10000};  // with the GPU, in one call
  std::string version = "0.0.0";
  std::string commit = "unknown";
  std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();
  int workers = 2;                                  // threads for steps and moves; >= 1
  std::function<std::vector<ConfigItem>()> config;  // any thread; null: no entries
  // Admin.ReloadConfig and SetLogLevel (its answer: the level before), by whom; any thread; they
  // read files. Null: UNIMPLEMENTED.
  std::function<Result<std::vector<ConfigChangeItem>>(bool dry_run, std::string_view by)> reload;
  std::function<Result<std::string>(std::string_view level, std::string_view by)> set_log_level;
  std::function<std::string()> metrics;  // Admin.GetMetrics; any thread; null: UNIMPLEMENTED
  // "serving", "degraded: why", or else why it does not serve; any thread; null: serving.
  std::function<std::string()> health;
  // What it is charged now; any thread. Nothing, or null: there is no limit.
  std::function<std::optional<CgroupInfo>()> cgroup;
  int pools_fd = -1;  // an eventfd, written when a pool has failed; -1: nobody tells
  std::function<ChunkNumbers()> chunks;  // any thread; null: there is no chunk socket
  std::function<std::vector<EngineRecall>()> engine_recalls;  // the same
  std::function<DiskInfo()> disk;                             // any thread; null: there is none
  std::function<RemoteInfo()> remote;                         // the same
  std::string remote_keys;  // "remote.redis or ...": which one may set for a remote tier
  // Both wait for servers, until the deadline; any thread; null with `remote`.
  std::function<RemoteProbeInfo(const PromptValues&, std::chrono::steady_clock::time_point)>
      probe_remote;
  std::function<RemotePurgeInfo(const PromptValues&, std::chrono::steady_clock::time_point)>
      purge_remote;
  std::function<Status(TierScrub)> scrub;  // scrubs the disk; any thread; null: there is none
  // Admin.Resize of a pool: whether the machine has memory for it beside the others, whose
  // capacities stay. `device` empty: of each. Any thread; null: nothing is refused.
  std::function<Status(Tier tier, uint64_t bytes, std::string_view device)> check_resize;
  // Admin.Resize of the disk: values that gave their place. Any thread; waits for the disk; null
  // with `disk`.
  std::function<Result<uint64_t>(uint64_t budget_bytes)> resize_disk;
  // Admin.Drain and its `resume`; any thread, never waits. Null with `disk`.
  std::function<Status()> drain;
  std::function<void()> resume;
  ValueCalls values;  // null: UNIMPLEMENTED
  // Cluster.LookupCluster of a tenant: fills the answer, then calls `done` once, in any thread;
  // does not wait. Null: there is no remote tier.
  std::function<void(const std::string& tenant, const v1::LookupClusterRequest& request,
                     v1::LookupClusterResponse* response, std::function<void(const Status&)> done)>
      lookup_cluster;
};

}  // namespace kvstrata
