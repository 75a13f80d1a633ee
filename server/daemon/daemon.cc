// SPDX-License-Identifier: Apache-2.0
// How the daemon's parts start, reload and end.
#include "server/daemon/daemon.h"

#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <new>
#include <optional>
#include <system_error>

#include "base/spare_threads.h"
#include "kernels/codec/codec.h"
#include "kernels/step/gpu/cuda_step.h"
#include "server/config/config_keys.h"
#include "server/config/pool_memory.h"
#include "server/daemon/daemon_parts.h"
#include "server/daemon/last_writes.h"
#include "server/nodes/node_server.h"
#include "server/telemetry/thread_top.h"

#ifndef KVS_VERSION
#define KVS_VERSION "0.0.0"
#endif
#ifndef KVS_COMMIT
#define KVS_COMMIT "unknown"
#endif

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kReplicationPatience = 30;
constexpr size_t kLargeAllocation = size_t{16} << 20;  // more than jemalloc's oversize_threshold
// For calls under way when the daemon stops.
constexpr std::chrono::milliseconds kGrace{150};

// Beside the binary, <prefix>/bin/kvstratad: of an installation, and of a build tree.
std::string Shipped(const char* what) {
  std::error_code unknown;
  const auto binary = std::filesystem::read_symlink("/proc/self/exe", unknown);
  if (unknown) return "";
  return binary.parent_path().parent_path() / "share/kvstrata" / what;
}

// What chunks get of the configuration, and the tiers below them.
ChunkServerOptions ChunkOptionsOf(const Config& config, uint64_t epoch, LocalTier* local,
                                  RemoteTier* remote, EngineRecalls* recalls) {
  ChunkServerOptions options;
  options.recalls = recalls;
  options.bytes = config.chunk_bytes;
  options.layout_percent = config.chunk_layout_percent;
  options.daemon_epoch = epoch;
  options.door.hello_timeout = config.attach.hello_timeout;
  if (local != nullptr) {
    options.tiers.disk = local->values();
    options.tiers.write_shown = kDisk;
  }
  if (remote != nullptr) {
    options.tiers.remote = remote->engine().values();
    const TierWrite write = config.remote.pages.writer.write;
    if (write == TierWrite::kAll) options.tiers.write_shown |= kRemote;
    if (write == TierWrite::kReused) options.tiers.write_reused = kRemote;
  }
  return options;
}

// What an operator sees of chunks in memory. `server` is null before it is started.
ChunkValues ChunkValuesOf(const std::unique_ptr<ChunkServer>* server) {
  ChunkValues values;
  values.list = [server](uint64_t* at, size_t n) {
    static_assert(ChunkServer::kNoMore == kNoMoreValues);
    std::vector<ValueInfo> found;
    for (const ChunkServer::Listed& chunk : (*server)->List(at, n)) {
      ValueInfo& info = found.emplace_back();
      info.key = TierKeyOf(chunk.key);
      info.kind = ValueKind::kChunk;
      info.bytes = chunk.bytes;
      info.tiers = {Tier::kHost};
    }
    return found;
  };
  values.has = [server](const std::string& key) {
    const std::optional<ChunkKey> chunk = ChunkKeyFrom(key);
    return chunk && (*server)->Has(*chunk);
  };
  values.get = [server](const std::string& key) -> Result<ValueBytes> {
    const std::optional<ChunkKey> chunk = ChunkKeyFrom(key);
    std::optional<std::vector<std::byte>> bytes;
    if (chunk) bytes = (*server)->Copy(*chunk);
    if (!bytes) return NotFound("VALUE_UNKNOWN", "memory has no chunk under this key");
    ValueBytes value;
    value.from = Tier::kHost;
    value.kind = ValueKind::kChunk;
    value.buffers.push_back(*std::move(bytes));
    return value;
  };
  return values;
}

}  // namespace

int ExitCodeOf(const Status& status) {
  if (status.reason() == "SOCKET_IN_USE" || status.reason() == "DISK_LOCKED" ||
      status.reason() == "HTTP_IN_USE" || status.reason() == "REMOTE_ANNOUNCE_IN_USE") {
    return kExitInUse;
  }
  switch (status.code()) {
    case Code::kOk:
      return kExitClean;
    case Code::kPermissionDenied:
      return kExitPermission;
    case Code::kInvalidArgument:
    case Code::kNotFound:
    case Code::kUnimplemented:
    case Code::kFailedPrecondition:  // a disk.path that was made by another configuration
      return kExitUsage;
    default:
      return kExitFailed;
  }
}

std::string_view DaemonVersion() { return KVS_VERSION; }
std::string_view DaemonCommit() { return KVS_COMMIT; }

// -- the start

Daemon::Parts::Parts(const Config& with) : config(with) {
  page_source.patience = with.patience;
  page_source.version = DaemonVersion();
  page_source.commit = DaemonCommit();
  page_source.started = Clock::now();
}

Status Daemon::Parts::Start() {
  // Libraries abort when they get no thread while they start, and the standard library throws.
  KVS_RETURN_IF_ERROR(CheckSpareThreads(static_cast<int>(StartThreads(config))));
  if (config.socket_directory != 0) {
    KVS_RETURN_IF_ERROR(MakeSocketDirectory(config.socket, config.socket_directory));
  }
  KVS_RETURN_IF_ERROR(CheckSocketPath(config.socket));
  KVS_RETURN_IF_ERROR(CheckSocketDirectory(config.socket));
  KVS_ASSIGN_OR_RETURN(lock, LockSocketPath(config.socket));
  // What fails at a start does so before the disk is reserved, which stays behind.
  KVS_ASSIGN_OR_RETURN(door.listener,
                       UnixListener::Bind(config.socket, SOCK_STREAM, config.socket_group));
  KVS_ASSIGN_OR_RETURN(auto attach_listener,
                       UnixListener::Bind(config.socket + std::string(kAttachSuffix),
                                          SOCK_SEQPACKET, config.socket_group));
  KVS_ASSIGN_OR_RETURN(auto chunk_listener,
                       UnixListener::Bind(config.socket + std::string(kChunksSuffix),
                                          SOCK_SEQPACKET, config.socket_group));
  std::optional<PageListener> page_listener;
  if (config.http.kind != HttpAddress::Kind::kNone) {
    KVS_ASSIGN_OR_RETURN(page_listener, PageListener::Listen(config));
  }
  KVS_RETURN_IF_ERROR(MakeStore());
  KVS_RETURN_IF_ERROR(OpenTiers());
  KVS_RETURN_IF_ERROR(StartWork());
  KVS_RETURN_IF_ERROR(door.listener->StartListening());
  KVS_RETURN_IF_ERROR(attach_listener->StartListening());
  KVS_RETURN_IF_ERROR(chunk_listener->StartListening());
  if (door.listener->takes_descriptors()) {
    LogEvent(LogLevel::kWarn, "descriptors_accepted",
             {{"socket", config.socket},
              {"why",
               "before Linux 6.16 a client can pass descriptors along with its calls, and "
               "make gRPC wait until they are closed"}});
  }
  config.attach.imports = importer.get();
  config.attach.tokens = &door.tokens;
  KVS_ASSIGN_OR_RETURN(mapped.attach,
                       AttachServer::Start(config.attach, std::move(attach_listener), store.get()));
  KVS_ASSIGN_OR_RETURN(
      mapped.chunks,
      ChunkServer::Start(ChunkOptionsOf(config, store->daemon_epoch(), tiers.local.get(),
                                        tiers.remote.get(), &mapped.recalls),
                         std::move(chunk_listener)));
  KVS_RETURN_IF_ERROR(StartGrpc());
  if (page_listener) {
    KVS_ASSIGN_OR_RETURN(pages, PageServer::Start(*std::move(page_listener), &page_source));
  }
  watch = std::make_unique<StateWatch>([this] { return State(); });
  return OkStatus();
}

Status Daemon::Parts::MakeStore() {
  config.store.new_recompressor = NewRecompressor;
  config.store.parse_parameters = ParseParameters;
  config.store.shipped_parameters = Shipped("parameters");
  config.remote.agent.program = Shipped("mooncake_agent/agent.py");
  device_pools.failed.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  config.store.on_pool_failure = [this](PoolId pool, const Status& why) {
    TellPoolFailure(pool, why);
  };
  KVS_RETURN_IF_ERROR(FitPools(&config));
  KVS_ASSIGN_OR_RETURN(PoolResources found, FindPoolResources(config));
  gpus = std::move(found.gpus);
  if (gpus.ops != nullptr) {
    config.store.serves = CudaServes;
    config.store.steps_on = StepsOn::kGpu;
    config.attach.backend = "cuda";
  }
  for (const StoreDevice& device : found.devices) {
    device_pools.names.push_back(device.name);
    running.limited_device_bytes += std::min(config.store.device_bytes, device.bytes);
  }
  config.store.user_limits = std::make_shared<UserLimits>(
      UserLimitsOf(config, running.limited_device_bytes, config.store.host_bytes));
  KVS_ASSIGN_OR_RETURN(
      store, Store::Create(config.store, std::move(found.devices), std::move(found.host)));
  return OkStatus();
}

Status Daemon::Parts::OpenTiers() {
  if (config.remote.on()) {
    // Nodes are answered only when all else is there, at a port that is looked at here.
    if (!config.remote.announce.empty()) {
      KVS_RETURN_IF_ERROR(CheckCanListen(config.remote.announce));
    }
    KVS_ASSIGN_OR_RETURN(tiers.remote, RemoteTier::Open(config));
  }
  if (!config.disk.directory.empty()) {
    KVS_ASSIGN_OR_RETURN(tiers.local, LocalTier::Open(config));
  }
  return OkStatus();
}

Status Daemon::Parts::StartWork() {
  mover = std::make_unique<Mover>(config.mover, store.get());
  replications = std::make_unique<WorkQueue>(1, "replications", kReplicationPatience);
  store->replication().SetReplicationQueue(
      [queue = replications.get()](std::function<void()> open) {
        queue->Post([open = std::move(open)] { Survive("replications", open); });
      });
  tiers.chain = std::make_unique<TierChain>(store.get());
  ValueTier* const local_values = tiers.local == nullptr ? nullptr : tiers.local->values();
  if (tiers.local != nullptr) tiers.local->Use(store.get(), tiers.chain.get());
  if (tiers.remote != nullptr) tiers.remote->Use(store.get(), local_values, tiers.chain.get());
  catalog =
      std::make_unique<ValueCatalog>(store.get(), local_values, ChunkValuesOf(&mapped.chunks));
  KVS_ASSIGN_OR_RETURN(backend, FindBackend(config.backend));
  std::vector<const GpuPackers*> packers;
  for (const GpuPackers& of_gpu : gpus.packers) packers.push_back(&of_gpu);
  work = std::make_unique<RecompressQueue>(config.work, store.get(), backend, std::move(packers));
  ImporterOptions importing;
  for (const int gpu : gpus.ordinals) importing.devices.push_back({gpus.ops, gpu});
  importer = std::make_unique<Importer>(importing, store.get(), backend);
  return OkStatus();
}

Status Daemon::Parts::StartGrpc() {
  executor = NewThreadPool(static_cast<int>(OpThreads(config)));
  GrpcOptions options = Offers();
  if (tiers.remote != nullptr) {
    KVS_RETURN_IF_ERROR(OfferCluster(&options));
  }
  page_source.numbers.Put(Numbers(true));
  if (const auto endpoint = ParseTraceEndpoint(config.trace_endpoint)) {
    KVS_ASSIGN_OR_RETURN(tracing, TraceExporter::Start(*endpoint, std::string(DaemonVersion())));
  }
  KVS_ASSIGN_OR_RETURN(grpc, GrpcServer::Start(options));
  return cluster == nullptr ? OkStatus() : cluster->Serve();
}

// -- while it runs

void Daemon::Parts::Apply(const Config& next) {
  SetLogLevel(next.log_level);
  store->Apply(next.store);
  Result<Plans::Named> plans = Plans::Parse(next.store);
  KVS_CHECK(plans.ok());  // ReadConfig has parsed them
  store->plans().SetNamed(std::move(plans).value());
  UserLimitsOptions limits =
      UserLimitsOf(next, running.limited_device_bytes, config.store.host_bytes);
  store->user_limits()->Configure(limits.defaults, std::move(limits.users));
  mover->SetRate(next.mover.bytes_per_second);
  mapped.attach->SetHelloTimeout(next.attach.hello_timeout);
  if (tiers.local != nullptr) tiers.local->Configure(next.tier_pages);
  if (tiers.remote != nullptr) tiers.remote->Configure(next.remote);
  page_source.patience = next.patience;
  running.shutdown_timeout = next.shutdown_timeout;
  running.shutdown_write_timeout = next.shutdown_write_timeout;
}

void Daemon::Parts::TellPoolFailure(PoolId pool, const Status& why) const {
  const bool host = pool.tier() == Tier::kHost;
  LogEvent(LogLevel::kError, "pool_failed",
           {{"tier", NameOf(pool.tier())},
            {"device", host ? "" : device_pools.names[pool.device()]},
            {"reason", why.reason()},
            {"why", why.message()}});
  (void)eventfd_write(device_pools.failed.get(), 1);
}

// -- the end

// Peers first hear that it ends, and nothing here waits for one of them longer than its grace.
void Daemon::Parts::EndServing() {
  if (steps_of_end > 0) return;
  steps_of_end = 1;
  watch.reset();
  pages.reset();
  mapped.attach->Stop();
  work->Stop();  // what waits for it over gRPC has its answer then
  store->recalls().EndRecallAudits(Unavailable("DAEMON_STOPPING", "the daemon is stopping"));
  if (tiers.local != nullptr) tiers.local->row()->scrubs().Refuse();
  if (cluster != nullptr) cluster->Stop();
  grpc->EndServing(kGrace);
  tracing.reset();
  mapped.chunks->EndServing();
  door.listener.reset();
}

void Daemon::Parts::Settle() {
  EndServing();
  if (steps_of_end > 1) return;
  steps_of_end = 2;
  mapped.chunks->Stop();
  if (tiers.remote != nullptr) tiers.remote->Stop();
  if (tiers.local != nullptr) tiers.local->Stop(running.shutdown_timeout);
}

// -- Daemon

Result<std::unique_ptr<Daemon>> Daemon::Start(const Config& config) {
  auto parts = std::make_unique<Parts>(config);
  try {
    WarmUpAllocator(kLargeAllocation);
    KVS_RETURN_IF_ERROR(parts->Start());
  } catch (const std::system_error& error) {
    return ResourceExhausted("THREADS", std::string("cannot make a thread: ") + error.what() +
                                            "; raise RLIMIT_NPROC or the cgroup's pids.max");
  } catch (const std::bad_alloc&) {
    return ResourceExhausted("MEMORY",
                             "there is no memory to start with; raise RLIMIT_AS or the "
                             "cgroup's memory.max");
  }
  return std::unique_ptr<Daemon>(new Daemon(std::move(parts)));
}

Daemon::Daemon(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

void Daemon::EndServing() { parts_->EndServing(); }
void Daemon::WriteOn(const std::function<bool(std::chrono::milliseconds)>& ends) {
  const LowerTiers& tiers = parts_->tiers;
  const LastWrites writes(parts_->mapped.chunks.get(),
                          tiers.local == nullptr ? nullptr : tiers.local->row());
  writes.WriteOn(shutdown_write_timeout(), shutdown_timeout(), ends);
}
void Daemon::Settle() { parts_->Settle(); }

Daemon::~Daemon() {
  parts_->Settle();
  parts_->grpc->Shutdown(kGrace);
}

size_t Daemon::devices() const { return parts_->device_pools.names.size(); }
uint64_t Daemon::PoolBytes(Tier tier) const {
  uint64_t bytes = 0;
  for (const PoolInfo& pool : parts_->store->inspection().Pools()) {
    if (pool.tier == tier) bytes += pool.capacity_bytes;
  }
  return bytes;
}
void Daemon::Reload(std::string_view by) { (void)parts_->running.reload.Reload(false, by); }
std::chrono::microseconds Daemon::shutdown_timeout() const {
  return parts_->running.shutdown_timeout;
}
std::chrono::microseconds Daemon::shutdown_write_timeout() const {
  return parts_->running.shutdown_write_timeout;
}
Store& Daemon::store() { return *parts_->store; }
AttachServer& Daemon::attach() { return *parts_->mapped.attach; }

}  // namespace kvstrata
