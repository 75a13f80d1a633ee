// SPDX-License-Identifier: Apache-2.0
// What the daemon's parts offer to gRPC's services (GrpcOptions).
#include <utility>

#include "server/config/pool_memory.h"
#include "server/config/remote_engines.h"
#include "server/daemon/daemon_parts.h"
#include "server/sockets/unix_listener.h"
#include "server/tier/remote/remote_secret.h"

namespace kvstrata {
namespace {

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

}  // namespace

GrpcOptions Daemon::Parts::Offers() {
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
  options.health = [this] { return Health(); };
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
  options.chunks = [this] { return mapped.chunks->Numbers(); };
  options.engine_recalls = [this] { return mapped.recalls.Engines(); };
  if (tiers.local != nullptr) tiers.local->Offer(&options);
  options.remote_keys = RemoteEngineKeys();
  if (tiers.remote != nullptr) tiers.remote->Offer(&options);
  OfferConfig(&running.reload, &options);
  options.metrics = [this] {
    page_source.numbers.Put(Numbers(true));
    return MetricsPage(&page_source, HttpRequest()).body;
  };
  return options;
}

Status Daemon::Parts::OfferCluster(GrpcOptions* options) {
  const auto announcements = tiers.remote->engine().Announcements();
  if (!announcements.ok()) {
    options->lookup_cluster = [why = announcements.status()](
                                  const std::string&, const auto&, auto*,
                                  const std::function<void(const Status&)>& done) { done(why); };
    return OkStatus();
  }
  const gid_t tenants = SocketGroup(config.socket, config.socket_group);
  KVS_ASSIGN_OR_RETURN(const remote::RemoteSecret secret,
                       remote::RemoteSecret::Read(config.remote.secret_file, tenants));
  ClusterViewOptions with;
  with.announce = config.remote.announce;
  with.release = DaemonVersion();
  with.tls = config.remote.tls;
  with.seal = config.remote.seal == "gcm" ? remote::Seal::kGcm : remote::Seal::kNone;
  KVS_ASSIGN_OR_RETURN(cluster,
                       ClusterView::Make(with, secret, store.get(), tiers.remote->engine().values(),
                                         announcements.value()));
  options->lookup_cluster = [this](const std::string& tenant, const auto& request, auto* response,
                                   std::function<void(const Status&)> done) {
    cluster->Lookup(tenant, request, response, std::move(done));
  };
  return OkStatus();
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

}  // namespace kvstrata
