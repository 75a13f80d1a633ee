// SPDX-License-Identifier: Apache-2.0
#include "server/daemon.h"

#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <new>
#include <optional>
#include <span>
#include <system_error>
#include <thread>

#include "base/spare_threads.h"
#include "kernels/backend.h"
#include "kernels/codec/codec.h"
#include "kernels/codec/cuda_packer.h"
#include "kernels/cuda/cuda_library.h"
#include "kernels/executor.h"
#include "kernels/step/cuda_step.h"
#include "server/attach/unix_listener.h"
#include "server/config_limits.h"
#include "server/config_reload.h"
#include "server/http/trace_exporter.h"
#include "server/memory/cgroup.h"
#include "server/memory/numa_topology.h"
#include "server/nodes/cluster_view.h"
#include "server/nodes/node_address.h"
#include "server/page_server.h"
#include "server/part_health.h"
#include "server/pool_memory.h"
#include "server/remote_tier.h"
#include "server/rpc/grpc_server.h"
#include "server/rpc/work_queue.h"
#include "server/start_memory.h"
#include "server/store/session_totals.h"
#include "server/telemetry/heartbeat.h"
#include "server/telemetry/state_watch.h"
#include "server/telemetry/thread_top.h"
#include "server/work/disk_value_tier.h"
#include "server/work/importer.h"
#include "server/work/lost_value_log.h"
#include "server/work/mover.h"
#include "server/work/pin_records.h"
#include "server/work/recompress.h"
#include "server/work/tier_pages.h"
#include "server/work/tier_records.h"
#include "server/work/value_catalog.h"

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
constexpr std::chrono::seconds kResizeTimeout{10};
// How much of what waits for the disk a stop still writes; the rest is dropped.
constexpr uint64_t kMostBytesAtStop = uint64_t{64} << 20;

// Beside the binary, <prefix>/bin/kvstratad: of an installation, and of a build tree.
std::string Shipped(const char* what) {
  std::error_code unknown;
  const auto binary = std::filesystem::read_symlink("/proc/self/exe", unknown);
  if (unknown) return "";
  return binary.parent_path().parent_path() / "share/kvstrata" / what;
}

std::vector<ConfigItem> ItemsOf(const std::vector<ConfigEntry>& entries) {
  std::vector<ConfigItem> items;
  for (const ConfigEntry& e : entries) {
    items.push_back({e.key, e.value, e.origin, e.where, e.description, e.reloads});
  }
  return items;
}

std::vector<ConfigChangeItem> ItemsOf(const std::vector<ConfigChange>& changes) {
  std::vector<ConfigChangeItem> items;
  for (const ConfigChange& c : changes) {
    items.push_back({c.key, c.before, c.after, c.where, c.applies});
  }
  return items;
}

void OfferConfig(ConfigReload* reload, GrpcOptions* options) {
  options->config = [reload] { return ItemsOf(reload->entries()); };
  options->reload = [reload](bool dry_run,
                             std::string_view by) -> Result<std::vector<ConfigChangeItem>> {
    KVS_ASSIGN_OR_RETURN(const auto changes, reload->Reload(dry_run, by));
    return ItemsOf(changes);
  };
  options->set_log_level = [reload](std::string_view level, std::string_view by) {
    return reload->SetLevel(level, by);
  };
}

// Null: none is configured. Nodes are answered only when all else is there, at a port that is
// looked at here.
Result<std::unique_ptr<RemoteTier>> OpenRemote(const Config& config) {
  if (!config.remote.on()) return std::unique_ptr<RemoteTier>();
  if (!config.remote.announce.empty()) {
    KVS_RETURN_IF_ERROR(CheckCanListen(config.remote.announce));
  }
  return RemoteTier::Open(config);
}

// The view of the nodes that share the tier; the options borrow it. Null: the tier's engine lists
// none, which callers are told.
Result<std::unique_ptr<ClusterView>> OfferClusterView(const Config& daemon, Store* store,
                                                      const RemoteTier& tier,
                                                      GrpcOptions* options) {
  const RemoteConfig& config = daemon.remote;
  const auto announcements = tier.engine().Announcements();
  if (!announcements.ok()) {
    options->lookup_cluster = [why = announcements.status()](
                                  const std::string&, const auto&, auto*,
                                  const std::function<void(const Status&)>& done) { done(why); };
    return std::unique_ptr<ClusterView>();
  }
  const gid_t tenants = SocketGroup(daemon.socket, daemon.socket_group);
  KVS_ASSIGN_OR_RETURN(const remote::RemoteSecret secret,
                       remote::RemoteSecret::Read(config.secret_file, tenants));
  ClusterViewOptions with;
  with.announce = config.announce;
  with.release = DaemonVersion();
  with.tls = config.tls;
  with.seal = config.seal == "gcm" ? remote::Seal::kGcm : remote::Seal::kNone;
  KVS_ASSIGN_OR_RETURN(auto view, ClusterView::Make(with, secret, store, tier.engine().values(),
                                                    announcements.value()));
  options->lookup_cluster = [view = view.get()](const std::string& tenant, const auto& request,
                                                auto* response,
                                                std::function<void(const Status&)> done) {
    view->Lookup(tenant, request, response, std::move(done));
  };
  return view;
}

std::vector<StoreDevice> EmulatedDevices(uint32_t count) {
  std::vector<StoreDevice> devices;
  for (uint32_t i = 0; i < count; ++i) {
    devices.push_back({i == 0 ? "emulated" : "emulated-" + std::to_string(i), NewEmulatedDevice()});
  }
  return devices;
}

std::optional<CgroupInfo> ReadCgroup() {
  const std::optional<CgroupMemory> c = ReadCgroupMemory();
  if (!c) return std::nullopt;
  return CgroupInfo{c->file, c->limit, c->charged, c->reclaimable, c->available()};
}

// The host pool's memory, of `host`, on the NUMA nodes that it belongs to. gpus: by UUID.
Result<std::unique_ptr<MemoryResource>> PlaceHost(const HostNuma& numa,
                                                  std::unique_ptr<MemoryResource> host,
                                                  std::span<const std::string> gpus) {
  const bool automatic = numa.kind == HostNuma::Kind::kAuto;
  if (automatic && gpus.empty()) return host;
  const auto warn = [](const Status& why) {
    LogEvent(LogLevel::kWarn, "host_numa", {{"reason", why.reason()}, {"why", why.message()}});
  };
  const auto topology = NumaTopology::OfThisMachine();
  if (!topology.ok()) {
    warn(topology.status());
    return host;
  }
  std::vector<std::string> devices;
  for (const std::string& gpu : gpus) devices.push_back(PciBusIdOf(gpu));
  KVS_ASSIGN_OR_RETURN(NumaNodes nodes, (*topology)->Choose(numa, devices));
  if (nodes.empty()) return host;
  if (const Status placed = (*topology)->TryPlace(nodes); !placed.ok()) {
    warn(placed);
    return host;
  }
  std::string text;
  for (const uint32_t node : nodes) text += (text.empty() ? "" : ",") + std::to_string(node);
  LogEvent(LogLevel::kInfo, "host_numa", {{"nodes", text}});
  return NewPlacedResource(std::move(host), *topology, std::move(nodes));
}

DiskInfo DiskInfoOf(const std::string& path, const DiskTier& disk, const DiskValueTier& disk_values,
                    TierPages* tier_pages) {
  const DiskTierStats stats = disk.Stats();
  const TierStats values = disk_values.Stats();
  const TierPagesCounters counters = tier_pages->counters();
  DiskInfo info;
  info.path = path;
  info.queue = stats.queue;
  info.degraded = stats.degraded.message();
  info.direct = stats.direct;
  info.breaker_open = stats.breaker_open;
  info.capacity_bytes = stats.capacity_bytes;
  info.used_bytes = stats.used_bytes;
  info.entries = stats.entries;
  info.waiting = tier_pages->writer().waiting();
  info.written = counters.written;
  info.dropped = counters.dropped;
  info.gone = counters.gone;
  info.failed = counters.failed;
  info.evicted = values.evicted;
  info.read = counters.read;
  info.late_loads = counters.late_loads;
  info.refused_loads = counters.refused_loads;
  info.corrupt = stats.corrupt;
  info.io_errors = stats.io_errors;
  info.deadlines = stats.deadlines;
  info.stopped_segments = stats.stopped_segments;
  info.last_error = stats.last_error;
  info.last_error_time_us = stats.last_error_time_us;
  info.left_alone_since_us = stats.left_alone_since_us;
  info.retry = stats.retry;
  info.sick = !values.illness.empty();
  info.draining = tier_pages->writer().draining();
  info.drained = tier_pages->writer().drained();
  info.refused = counters.refused;
  return info;
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

namespace {

// What of the configuration may change while the daemon runs, where no part has it.
struct Running {
  ConfigReload reload;
  std::atomic<std::chrono::microseconds> shutdown_timeout;
  uint64_t limited_device_bytes = 0;  // of which limits may be shares
};

struct DevicePools {
  UniqueFd failed;  // tells the gRPC server
  std::vector<std::string> names;
};

struct Gpus {
  const cuda::CudaOps* ops = nullptr;                   // null: no GPU
  std::vector<int> ordinals;                            // in this process, by device
  std::vector<std::unique_ptr<SegmentPacker>> packers;  // by device
};

// What the gRPC server accepts with.
struct GrpcDoor {
  std::unique_ptr<UnixListener> listener;
  DescriptorCloser closer;
  AttachTokens tokens;
};

// What ails the daemon first: a loop that has not answered for longer than `patience`, a part.
std::string HealthOf(std::span<const PartHealth> parts, std::chrono::microseconds patience) {
  for (const HangingLoop& loop : HangingLoops(patience)) {
    return "hangs: " + loop.thread + " has not answered for " + std::to_string(loop.since.count()) +
           " s";
  }
  for (const PartHealth& part : parts) {
    if (!part.failure.empty()) return "degraded: " + part.failure;
  }
  return "serving";
}

}  // namespace

// In the order of their start; destroyed from the last to the first.
struct Daemon::Parts {
  Config config;
  Running running{{config, [this](const Config& next) { Apply(next); }}, config.shutdown_timeout};
  PageSource page_source;  // of what PageServer serves, and Admin.GetMetrics
  UniqueFd lock;
  DevicePools device_pools;
  std::unique_ptr<DiskTier> disk;              // null: none
  std::unique_ptr<DiskValueTier> disk_values;  // null: no disk
  std::unique_ptr<Store> store;
  std::unique_ptr<Mover> mover;
  std::unique_ptr<WorkQueue> replications;  // one thread: the second open of a prefix finds it
  std::unique_ptr<TierPages> tier_pages;    // null: no tier
  std::unique_ptr<RemoteTier> remote;       // null: there is none
  std::unique_ptr<ValueCatalog> catalog;
  std::unique_ptr<ClusterView> cluster;  // null: no remote tier, or its engine lists no nodes
  Gpus gpus;
  std::unique_ptr<RecompressQueue> work;
  std::unique_ptr<Importer> importer;
  std::unique_ptr<Executor> executor;
  GrpcDoor door;
  std::unique_ptr<AttachServer> attach;
  std::unique_ptr<GrpcServer> grpc;
  std::unique_ptr<PageServer> pages;  // null: none are served
  std::unique_ptr<StateWatch> watch;
  std::unique_ptr<TraceExporter> tracing;  // null: spans go nowhere
  bool settled = false;

  explicit Parts(const Config& with) : config(with) {
    page_source.patience = with.patience;
    page_source.version = DaemonVersion();
    page_source.commit = DaemonCommit();
    page_source.started = Clock::now();
  }
  Status Start();
  // What reloads of a configuration, whichever of it has changed.
  void Apply(const Config& next);
  Status OpenDisk();
  void UseDisk();
  void SettleTiers();
  void Settle();
  std::vector<PartHealth> PartsOf(std::span<const PoolInfo> pools) const;
  DaemonNumbers Numbers(bool all) const;  // or those of each second alone
  DaemonState State();
  Status CheckResize(Tier tier, uint64_t bytes, std::string_view device) const;
  Status MakeStore();
  Result<std::vector<StoreDevice>> FindGpus(std::unique_ptr<MemoryResource>* host);
  void TellPoolFailure(PoolId pool, const Status& why) const;
  Status StartGrpc();
};

// A GPU's pool takes at most what is free, but for what the daemon's own context and copies need.
Result<std::vector<StoreDevice>> Daemon::Parts::FindGpus(std::unique_ptr<MemoryResource>* host) {
  constexpr uint64_t kReserve = uint64_t{512} << 20;
  KVS_ASSIGN_OR_RETURN(CudaDevices found, NewCudaDevices(config.devices.uuids));
  KVS_ASSIGN_OR_RETURN(gpus.ops, cuda::LoadCudaOps());
  std::vector<StoreDevice> devices;
  for (CudaDevice& gpu : found.devices) {
    const uint64_t most = gpu.free_bytes - std::min(gpu.free_bytes, kReserve);
    LogEvent(LogLevel::kInfo, "gpu",
             {{"device", gpu.uuid},
              {"free_bytes", gpu.free_bytes},
              {"pool_bytes", std::min(config.store.device_bytes, most)}});
    KVS_ASSIGN_OR_RETURN(gpus.packers.emplace_back(), NewCudaPacker(*gpus.ops, gpu.ordinal));
    gpus.ordinals.push_back(gpu.ordinal);
    devices.push_back({gpu.uuid, std::move(gpu.memory), most});
  }
  *host = std::move(found.host);
  config.store.serves = CudaServes;
  config.store.steps_on = StepsOn::kGpu;
  config.attach.backend = "cuda";
  return devices;
}

Status Daemon::Parts::MakeStore() {
  config.store.new_recompressor = NewRecompressor;
  config.store.parse_parameters = ParseSpanParameters;
  config.store.shipped_parameters = Shipped("parameters");
  config.remote.agent.program = Shipped("mooncake_agent/agent.py");
  device_pools.failed.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  config.store.on_pool_failure = [this](PoolId pool, const Status& why) {
    TellPoolFailure(pool, why);
  };
  KVS_RETURN_IF_ERROR(FitPools(&config));
  std::vector<StoreDevice> devices = EmulatedDevices(config.devices.emulated);
  std::unique_ptr<MemoryResource> host = NewHostMemory();
  if (devices.empty()) {
    KVS_ASSIGN_OR_RETURN(devices, FindGpus(&host));
  }
  for (const StoreDevice& device : devices) {
    device_pools.names.push_back(device.name);
    running.limited_device_bytes += std::min(config.store.device_bytes, device.bytes);
  }
  config.store.user_limits = std::make_shared<UserLimits>(
      UserLimitsOf(config, running.limited_device_bytes, config.store.host_bytes));
  const bool of_gpus = config.devices.emulated == 0;
  KVS_ASSIGN_OR_RETURN(host, PlaceHost(config.host_numa, std::move(host),
                                       of_gpus ? std::span<const std::string>(device_pools.names)
                                               : std::span<const std::string>()));
  KVS_ASSIGN_OR_RETURN(store, Store::Create(config.store, std::move(devices), std::move(host)));
  return OkStatus();
}

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
  attach->SetHelloTimeout(next.attach.hello_timeout);
  if (tier_pages != nullptr) tier_pages->SetLoadTimeout(next.tier_pages.loads.load_timeout);
  if (remote != nullptr) remote->Configure(next.remote);
  page_source.patience = next.patience;
  running.shutdown_timeout = next.shutdown_timeout;
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

Status Daemon::Parts::OpenDisk() {
  if (config.disk.directory.empty()) return OkStatus();
  config.disk.lost = [log = std::make_shared<LostValueLog>()](std::string_view key,
                                                              uint32_t segment, const Status& why) {
    const auto now = Clock::now().time_since_epoch();
    log->Tell(key, segment, why, std::chrono::duration_cast<std::chrono::seconds>(now).count());
  };
  KVS_ASSIGN_OR_RETURN(disk, DiskTier::Open(config.disk, Clock::now() + config.disk_start_timeout));
  config.disk_values.readers = config.tier_pages.loads.readers;
  disk_values = std::make_unique<DiskValueTier>(config.disk_values, disk.get());
  const DiskTierStats stats = disk->Stats();
  LogEvent(stats.degraded.ok() ? LogLevel::kInfo : LogLevel::kWarn, "disk_open",
           {{"path", config.disk.directory},
            {"queue", stats.queue},
            {"direct", stats.direct},
            {"capacity_bytes", stats.capacity_bytes},
            {"entries", stats.entries},
            {"scanned_segments", stats.scanned_segments},
            {"cut_segments", stats.cut_segments},
            {"degraded", stats.degraded.message()}});
  return OkStatus();
}

// Its pages, and what the last daemon left there besides: pins, of which those that are over leave
// the disk, and records of artefacts.
void Daemon::Parts::UseDisk() {
  tier_pages = std::make_unique<TierPages>(config.tier_pages, store.get(), disk_values.get(),
                                           disk_values->Hooks());
  const Deadline deadline = Clock::now() + config.disk_start_timeout;
  std::vector<PrefixPin> pins;
  for (PrefixPin& pin : ReadPins(disk_values.get(), deadline)) {
    const bool over = pin.expires <= Clock::now();
    const Status status =
        over ? ErasePin(disk_values.get(), pin.id, deadline) : tier_pages->Pin(pin);
    if (!status.ok()) {
      LogEvent(LogLevel::kWarn, "pin_restore",
               {{"pin", pin.id}, {"reason", status.reason()}, {"why", status.message()}});
    }
    if (!over) pins.push_back(std::move(pin));
  }
  if (!pins.empty()) LogEvent(LogLevel::kInfo, "pins_restored", {{"pins", pins.size()}});
  store->pins().RestorePins(std::move(pins));
  NoteRecords(store.get(), disk_values.get(), tier_pages.get(), [](size_t records) {
    LogEvent(LogLevel::kInfo, "artefact_records", {{"records", records}});
  });
}

// Writes what waits for the disk, then the index, so that the next start need not read every slot.
// What is put is there without it. What waits for a remote tier is dropped.
void Daemon::Parts::SettleTiers() {
  if (remote != nullptr) remote->Stop();
  if (disk == nullptr) return;
  tier_pages->Stop(Clock::now() + running.shutdown_timeout.load() / 8, kMostBytesAtStop);
  const TierPagesCounters c = tier_pages->counters();
  LogEvent(LogLevel::kInfo, "tier_pages",
           {{"written", c.written},
            {"dropped", c.dropped},
            {"gone", c.gone},
            {"failed", c.failed},
            {"evicted", disk_values->Stats().evicted},
            {"checkpoints", disk_values->checkpoints()},
            {"read", c.read},
            {"late", c.late_loads},
            {"refused", c.refused_loads}});
  const Status status = disk_values->Checkpoint(Clock::now() + running.shutdown_timeout.load() / 4);
  if (status.ok()) return;
  LogEvent(LogLevel::kWarn, "disk_checkpoint_failed",
           {{"reason", status.reason()}, {"why", status.message()}});
}

// Peers first hear that it ends, and nothing here waits for one of them longer than its grace.
void Daemon::Parts::Settle() {
  if (settled) return;
  settled = true;
  watch.reset();
  pages.reset();
  attach->Stop();
  work->Stop();  // what waits for it over gRPC has its answer then
  store->recalls().EndRecallAudits(Unavailable("DAEMON_STOPPING", "the daemon is stopping"));
  if (tier_pages != nullptr) tier_pages->scrubs().Refuse();
  if (cluster != nullptr) cluster->Stop();
  grpc->EndServing(kGrace);
  tracing.reset();
  SettleTiers();
  door.listener.reset();
}

// A GPU's pool is no memory of this machine.
Status Daemon::Parts::CheckResize(Tier tier, uint64_t bytes, std::string_view device) const {
  const bool emulates = config.devices.emulated != 0;
  if (tier == Tier::kDevice && !emulates) return OkStatus();
  uint64_t host = 0, emulated = 0;
  bool grows = false;  // less is no question, whatever the limit of the cgroup has become
  for (const PoolInfo& pool : store->inspection().Pools()) {
    const bool changes = pool.tier == tier && (device.empty() || pool.device == device);
    grows |= changes && bytes > pool.capacity_bytes;
    const uint64_t capacity = changes ? bytes : pool.capacity_bytes;
    if (pool.tier == Tier::kHost) host += capacity;
    if (pool.tier == Tier::kDevice && emulates) emulated += capacity;
  }
  return grows ? CheckCapacities(host, emulated) : OkStatus();
}

std::vector<PartHealth> Daemon::Parts::PartsOf(std::span<const PoolInfo> pools) const {
  const ClosingCounters closing[] = {attach->counters().closing, door.closer.counters()};
  return HealthOfParts(closing, pools, disk == nullptr ? "" : disk_values->Stats().illness,
                       remote == nullptr ? "" : remote->illness());
}

DaemonNumbers Daemon::Parts::Numbers(bool all) const {
  DaemonNumbers numbers;
  numbers.taken = Clock::now();
  numbers.pools = store->inspection().Pools();
  numbers.parts = PartsOf(numbers.pools);
  numbers.counters = store->inspection().Counters();
  if (disk != nullptr) {
    numbers.disk = DiskInfoOf(config.disk.directory, *disk, *disk_values, tier_pages.get());
  }
  if (remote != nullptr) numbers.remote = remote->Info();
  if (!all) return numbers;
  numbers.pins = store->pins().PinUse();
  numbers.users = config.store.user_limits->Report();
  numbers.sessions = ReadSessionTotals();
  numbers.recall = store->recalls().Sampled();
  numbers.cgroup = ReadCgroup();
  if (page_source.status.watched()) {
    LiveNumbers& live = numbers.live.emplace();
    live.sequences = store->inspection().Newest(LiveNumbers::kMostSequences, LiveNumbers::kBuckets);
    live.all_sequences = numbers.counters.sequences;
    live.work = store->recompression().Work();
  }
  return numbers;
}

// Once a second: whoever asks for a page gets what was found then.
DaemonState Daemon::Parts::State() {
  DaemonNumbers numbers = Numbers(config.http.kind != HttpAddress::Kind::kNone);
  DaemonState state;
  state.health = HealthOf(numbers.parts, page_source.patience);
  state.evicted_pages = numbers.counters.evicted_pages;
  state.evicted_stored_pages = numbers.counters.evicted_stored_pages;
  for (const PoolInfo& pool : numbers.pools) {
    if (pool.capacity_bytes == 0) continue;
    const uint64_t percent = pool.used_bytes * 100 / pool.capacity_bytes;
    state.fullest_percent = std::max(state.fullest_percent, static_cast<uint32_t>(percent));
  }
  if (numbers.disk) {
    state.draining = numbers.disk->draining;
    state.disk_evicted = numbers.disk->evicted;
  }
  if (numbers.remote) {
    for (const RemoteShardInfo& shard : numbers.remote->shards) {
      if (shard.breaker_open) state.left_alone[shard.address] = shard.last_error;
    }
  }
  if (pages != nullptr) {
    page_source.audits.MakeWanted([this] { return store->inspection().Audit(); });
  }
  page_source.numbers.Put(std::move(numbers));
  return state;
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
  std::optional<PageListener> page_listener;
  if (config.http.kind != HttpAddress::Kind::kNone) {
    KVS_ASSIGN_OR_RETURN(page_listener, PageListener::Listen(config));
  }
  KVS_RETURN_IF_ERROR(MakeStore());
  KVS_ASSIGN_OR_RETURN(remote, OpenRemote(config));
  KVS_RETURN_IF_ERROR(OpenDisk());
  mover = std::make_unique<Mover>(config.mover, store.get());
  replications = std::make_unique<WorkQueue>(1, "replications", kReplicationPatience);
  store->replication().SetReplicationQueue(
      [queue = replications.get()](std::function<void()> open) {
        queue->Post([open = std::move(open)] { Survive("replications", open); });
      });
  if (disk != nullptr) UseDisk();
  if (remote != nullptr) remote->Use(store.get(), tier_pages.get(), disk_values.get());
  catalog = std::make_unique<ValueCatalog>(store.get(), disk_values.get());
  KVS_ASSIGN_OR_RETURN(const Backend* backend, FindBackend(config.backend));
  std::vector<const SegmentPacker*> borrowed;
  for (const auto& packer : gpus.packers) borrowed.push_back(packer.get());
  work = std::make_unique<RecompressQueue>(config.work, store.get(), backend, std::move(borrowed));
  ImporterOptions importing;
  for (const int gpu : gpus.ordinals) importing.devices.push_back({gpus.ops, gpu});
  importer = std::make_unique<Importer>(importing, store.get(), backend);
  config.attach.imports = importer.get();
  config.attach.tokens = &door.tokens;
  KVS_RETURN_IF_ERROR(door.listener->StartListening());
  KVS_RETURN_IF_ERROR(attach_listener->StartListening());
  if (door.listener->takes_descriptors()) {
    LogEvent(LogLevel::kWarn, "descriptors_accepted",
             {{"socket", config.socket},
              {"why",
               "before Linux 6.16 a client can pass descriptors along with its calls, and "
               "make gRPC wait until they are closed"}});
  }
  KVS_ASSIGN_OR_RETURN(attach,
                       AttachServer::Start(config.attach, std::move(attach_listener), store.get()));
  KVS_RETURN_IF_ERROR(StartGrpc());
  if (page_listener) {
    KVS_ASSIGN_OR_RETURN(pages, PageServer::Start(*std::move(page_listener), &page_source));
  }
  watch = std::make_unique<StateWatch>([this] { return State(); });
  return OkStatus();
}

Status Daemon::Parts::StartGrpc() {
  KVS_ASSIGN_OR_RETURN(const Backend* backend, FindBackend(config.backend));
  executor = NewThreadPool(static_cast<int>(OpThreads(config)));
  GrpcOptions options;
  options.listen_fd = door.listener->fd();
  options.socket_path = config.socket;
  options.store = store.get();
  options.backend = backend;
  options.executor = executor.get();
  options.takes_descriptors = door.listener->takes_descriptors();
  options.closer = &door.closer;
  options.tokens = &door.tokens;
  options.cuda = gpus.ops;
  options.cuda_devices = gpus.ordinals;
  options.version = DaemonVersion();
  options.commit = DaemonCommit();
  options.started = page_source.started;
  options.health = [this] {
    return HealthOf(PartsOf(store->inspection().Pools()), page_source.patience);
  };
  options.pools_fd = device_pools.failed.get();
  options.cgroup = ReadCgroup;
  options.values.list = [this](const ValueFilter& filter, uint64_t after, size_t limit) {
    return catalog->List(filter, after, limit);
  };
  options.values.get = [this](const std::string& key) { return catalog->Get(key); };
  options.values.verify = [this](const std::string& key) { return catalog->Verify(key); };
  options.check_resize = [this](Tier tier, uint64_t bytes, std::string_view device) {
    return CheckResize(tier, bytes, device);
  };
  if (disk != nullptr) {
    options.disk = [this] {
      return DiskInfoOf(config.disk.directory, *disk, *disk_values, tier_pages.get());
    };
    options.drain = [this] { return tier_pages->writer().Drain(); };
    options.resume = [this] { tier_pages->writer().Resume(); };
    options.resize_disk = [this](uint64_t bytes) {
      return disk_values->Resize(bytes, Clock::now() + kResizeTimeout);
    };
    options.scrub = [this](TierScrub scrub) {
      return tier_pages->scrubs().Begin(std::move(scrub));
    };
  }
  if (remote != nullptr) {
    remote->Offer(&options);
    KVS_ASSIGN_OR_RETURN(cluster, OfferClusterView(config, store.get(), *remote, &options));
  }
  OfferConfig(&running.reload, &options);
  page_source.numbers.Put(Numbers(true));
  options.metrics = [this] {
    page_source.numbers.Put(Numbers(true));
    return MetricsPage(&page_source, HttpRequest()).body;
  };
  if (const auto endpoint = ParseTraceEndpoint(config.trace_endpoint)) {
    KVS_ASSIGN_OR_RETURN(tracing, TraceExporter::Start(*endpoint, std::string(DaemonVersion())));
  }
  KVS_ASSIGN_OR_RETURN(grpc, GrpcServer::Start(options));
  return cluster == nullptr ? OkStatus() : cluster->Serve();
}

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
Store& Daemon::store() { return *parts_->store; }
AttachServer& Daemon::attach() { return *parts_->attach; }

}  // namespace kvstrata
