// SPDX-License-Identifier: Apache-2.0
// Daemon::Parts: what a daemon consists of. For the files of Daemon alone:
//
//   daemon.cc          how the parts start, reload and end
//   daemon_offers.cc   what they offer to gRPC's services
//   daemon_numbers.cc  what they tell of themselves, each second and when asked
//
// Ownership: each part borrows parts above it, and config. Thread-safety: Start and the steps of
// the end in one thread; Apply in that of whoever reloads, one at a time (config_reload.h); State
// in kvs-watch; what is const, and what Offers and OfferCluster hand out, in any thread while gRPC
// serves.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "kernels/backend/backend.h"
#include "kernels/codec/codec.h"
#include "kernels/cpu/executor.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/plan/plan.h"
#include "server/attach/attach_server.h"
#include "server/attach/peers/attach_tokens.h"
#include "server/chunks/chunk_server.h"
#include "server/config/config.h"
#include "server/config/config_reload.h"
#include "server/daemon/daemon.h"
#include "server/daemon/tiers/local_tier.h"
#include "server/daemon/tiers/remote_tier.h"
#include "server/http/http_server.h"
#include "server/http/trace_exporter.h"
#include "server/memory/memory_resource.h"
#include "server/nodes/cluster_view.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/steps/work_queue.h"
#include "server/sockets/descriptor_closer.h"
#include "server/sockets/unix_listener.h"
#include "server/store/store.h"
#include "server/telemetry/state_watch.h"
#include "server/web/daemon_numbers.h"
#include "server/web/pages.h"
#include "server/work/importer.h"
#include "server/work/mover.h"
#include "server/work/recompress.h"
#include "server/work/tiers/value_catalog.h"

namespace kvstrata {

// Where the daemon's pages will be served, http.listen: whoever connects waits until a PageServer
// does. Errors: those of ListenOnLoopback and UnixListener::Listen.
class PageListener {
 public:
  // REQUIRES: config.http is some address.
  static Result<PageListener> Listen(const Config& config);

  int fd() const { return path_ != nullptr ? path_->fd() : port_.get(); }
  const std::string& address() const { return address_; }

 private:
  std::unique_ptr<UnixListener> path_;  // null: a port
  UniqueFd port_;
  std::string address_;
};

// The daemon's pages (server/web/pages.h) at http.listen. Errors: HttpServer::Start's.
class PageServer {
 public:
  // Serves when it returns. The source has numbers, and outlives the server.
  static Result<std::unique_ptr<PageServer>> Start(PageListener listener, PageSource* source);

 private:
  explicit PageServer(PageListener listener) : listener_(std::move(listener)) {}

  PageListener listener_;
  std::unique_ptr<HttpServer> server_;
};

// What the daemon computes with on GPUs.
struct Gpus {
  const cuda::CudaOps* ops = nullptr;  // null: no GPU
  std::vector<int> ordinals;           // in this process, by device
  std::vector<GpuPackers> packers;     // by device
};

// What the pools lie on: the devices of pool.device, emulated ones or GPUs, and the host pool's
// memory, placed on NUMA nodes as pool.host_numa says.
//
// Thread-safety: a function without state. Cost: of GPUs, that each gets a context. Errors: what
// NewCudaDevices, LoadCudaOps, NewGpuPackers and NumaTopology::Choose answer; memory that cannot be
// placed, where nobody asked for it, is a warning in the log.
struct PoolResources {
  std::vector<StoreDevice> devices;
  std::unique_ptr<MemoryResource> host;
  Gpus gpus;
};
Result<PoolResources> FindPoolResources(const Config& config);

// What of the configuration may change while the daemon runs, where no part has it.
struct Running {
  ConfigReload reload;
  std::atomic<std::chrono::microseconds> shutdown_timeout, shutdown_write_timeout;
  uint64_t limited_device_bytes = 0;  // device memory that limits may be shares of
};

struct DevicePools {
  UniqueFd failed;  // tells the gRPC server
  std::vector<std::string> names;
};

// Tiers below memory. Destroyed from the last to the first, so that the chain ends before its rows.
struct LowerTiers {
  std::unique_ptr<LocalTier> local;    // null: no disk
  std::unique_ptr<RemoteTier> remote;  // null: there is none
  std::unique_ptr<TierChain> chain;    // those two, where they are
};

// Whose clients map memory.
struct MappedServers {
  std::unique_ptr<AttachServer> attach;
  EngineRecalls recalls{PresetNames()};  // outlives `chunks`
  std::unique_ptr<ChunkServer> chunks;
};

// What the gRPC server accepts with.
struct GrpcDoor {
  std::unique_ptr<UnixListener> listener;
  DescriptorCloser closer;
  AttachTokens tokens;
};

// What the cgroup is charged now; nothing: it has no limit. In daemon_numbers.cc.
std::optional<CgroupInfo> ReadCgroup();

// Destroyed from the last to the first.
struct Daemon::Parts {
  Config config;
  Running running{{config, [this](const Config& next) { Apply(next); }},
                  config.shutdown_timeout,
                  config.shutdown_write_timeout};
  PageSource page_source;  // source for PageServer, and for Admin.GetMetrics
  UniqueFd lock;           // locks the path
  DevicePools device_pools;
  std::unique_ptr<Store> store;
  std::unique_ptr<Mover> mover;
  std::unique_ptr<WorkQueue> replications;  // one thread: the second open of a prefix finds it
  LowerTiers tiers;
  std::unique_ptr<ValueCatalog> catalog;
  std::unique_ptr<ClusterView> cluster;  // null: no remote tier, or its engine lists no nodes
  Gpus gpus;
  const Backend* backend = nullptr;  // for sessions that name none
  std::unique_ptr<RecompressQueue> work;
  std::unique_ptr<Importer> importer;
  std::unique_ptr<Executor> executor;
  GrpcDoor door;
  MappedServers mapped;
  std::unique_ptr<GrpcServer> grpc;
  std::unique_ptr<PageServer> pages;  // null: none are served
  std::unique_ptr<StateWatch> watch;
  std::unique_ptr<TraceExporter> tracing;  // null: spans go nowhere
  int steps_of_end = 0;                    // that were made

  // -- daemon.cc
  explicit Parts(const Config& with);
  Status Start();
  // The steps of Start, in its order.
  Status MakeStore();
  Status OpenTiers();
  Status StartWork();  // what goes on beside steps, and the tiers behind memory
  Status StartGrpc();
  // As Daemon's.
  void EndServing();
  void Settle();
  // What reloads of a configuration, whichever of it has changed.
  void Apply(const Config& next);
  void TellPoolFailure(PoolId pool, const Status& why) const;

  // -- daemon_offers.cc
  // What the services call, and what they run on.
  GrpcOptions Offers();
  // Makes `cluster`, and offers it; where the engine lists no nodes callers are told why.
  Status OfferCluster(GrpcOptions* options);
  // Whether the machine has memory for a pool of that size beside the others.
  Status CheckResize(Tier tier, uint64_t bytes, std::string_view device) const;

  // -- daemon_numbers.cc
  std::vector<PartHealth> PartsOf(std::span<const PoolInfo> pools) const;
  // "serving", "degraded: why" or "hangs: why".
  std::string Health() const;
  DaemonNumbers Numbers(bool all) const;  // or those of each second alone
  // Whoever asks for a page gets what is found here.
  DaemonState State();
};

}  // namespace kvstrata
