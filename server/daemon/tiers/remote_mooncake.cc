// SPDX-License-Identifier: Apache-2.0
// Mooncake Store as the engine of the remote tier. Its one server is the master: which store has a
// value, the master's clients alone know, and ours is the agent.
#include <net/if.h>

#include <utility>

#include "server/config/config_numbers.h"
#include "server/config/remote_engines.h"
#include "server/daemon/tiers/remote_engine.h"
#include "server/tier/mooncake/mooncake_value_tier.h"

namespace kvstrata {
namespace {

constexpr size_t kMostTextBytes = 256;

constexpr ConfigKey kMooncakeKeys[] = {
    ConfigKey{
        "remote.mooncake", "", "HOST:PORT; '': no Mooncake Store",
        "master of the Mooncake Store that nodes share pages through, in place of remote.redis",
        KVS_READS(Take(v, &c->remote.agent.master) &&
                  (TakeServers("mooncake", v, c) || IsNodeAddress(v))),
        kText},
    ConfigKey{"remote.mooncake_metadata", "P2PHANDSHAKE",
              "P2PHANDSHAKE, or a URL of up to 256 characters",
              "where Mooncake's clients find each other, as its other clients have it",
              KVS_READS(Take(v, &c->remote.agent.metadata) &&
                        (v == "P2PHANDSHAKE" ||
                         (v.find("://") != std::string_view::npos && v.size() <= kMostTextBytes))),
              kText},
    ConfigKey{"remote.mooncake_protocol", "tcp", "tcp, rdma", "how Mooncake moves bytes",
              KVS_READS(Take(v, &c->remote.agent.protocol) && (v == "tcp" || v == "rdma")), kText},
    ConfigKey{"remote.mooncake_devices", "",
              "names with commas, up to 256 characters; '': as Mooncake finds them",
              "RDMA devices that Mooncake uses",
              KVS_READS(Take(v, &c->remote.agent.devices) &&
                        v.find(' ') == std::string_view::npos && v.size() <= kMostTextBytes),
              kText},
    ConfigKey{"remote.mooncake_interface", "lo", "a network interface, 1 to 15 characters",
              "by its IPv4 address the store knows this node",
              KVS_READS(Take(v, &c->remote.agent.interface) && !v.empty() && v.size() < IFNAMSIZ),
              kText},
    ConfigKey{"remote.mooncake_python", "/usr/bin/python3", "a file's absolute path",
              "the Python that has Mooncake's package",
              KVS_READS(Take(v, &c->remote.agent.python) && v.starts_with('/')), kText},
};

RemoteAnswersInfo InfoOf(const MooncakeAnswers& a, uint64_t damaged) {
  return {a.hits, a.absent, a.refused, a.late, a.lost, damaged};
}

class MooncakeEngine final : public RemoteEngine {
 public:
  MooncakeEngine(std::string master, std::unique_ptr<MooncakeValueTier> values)
      : master_(std::move(master)), values_(std::move(values)) {}

  ValueTier* values() override { return values_.get(); }
  std::vector<RemoteShardInfo> Shards() const override {
    const MooncakeAgentStats s = values_->Agent();
    RemoteShardInfo shard;
    shard.address = master_;
    shard.last_error = s.last_error;
    shard.breaker_open = s.left_alone;
    shard.requests = s.calls;
    shard.failures = s.failures;
    shard.timeouts = s.late;
    shard.openings = s.openings;
    shard.connections = s.ready ? 1 : 0;
    shard.sent_bytes = s.put_bytes;
    shard.received_bytes = s.got_bytes;
    shard.agent_bytes = s.held_bytes;
    shard.agent_peak_bytes = s.most_held_bytes;
    shard.probes = InfoOf(s.exists, 0);
    shard.reads = InfoOf(s.gets, values_->Stats().damaged);
    shard.answers = s.times;
    return {shard};
  }
  std::vector<RemoteServerInfo> Ping(Deadline deadline) override {
    const MooncakePing ping = values_->PingAndWait(deadline);
    return {{master_, "master", values_->Agent().left_alone, ping.round_trip, ping.status}};
  }
  std::string ServerOf(std::string_view, std::string_view) const override { return master_; }
  Result<std::shared_ptr<RedisThreads>> Announcements() const override {
    return Unimplemented("MOONCAKE_NODES",
                         "remote.mooncake = '" + master_ +
                             "': Mooncake Store keeps no list of nodes; ask each node for itself, "
                             "or share through remote.redis");
  }

 private:
  const std::string master_;
  const std::unique_ptr<MooncakeValueTier> values_;
};

Status CheckMooncake(const RemoteConfig& config) {
  if (!config.announce.empty()) {
    return RefusedBeside(config, "remote.announce = '" + config.announce + "'",
                         "nodes announce themselves in Redis alone; leave remote.announce out");
  }
  if (!config.user.empty() || !config.password_file.empty() || config.tls.on) {
    return RefusedBeside(config, "remote.user, remote.password_file or remote.tls",
                         "Mooncake Store has neither users nor TLS; leave them out, and let a "
                         "network of its own and remote.seal protect it");
  }
  return OkStatus();
}

Result<std::unique_ptr<RemoteEngine>> OpenMooncake(const RemoteConfig& config,
                                                   const remote::RemoteFormat& format) {
  MooncakeTierOptions options;
  options.agent = config.agent;
  KVS_ASSIGN_OR_RETURN(auto values, MooncakeValueTier::Open(options, format));
  return std::unique_ptr<RemoteEngine>(new MooncakeEngine(config.agent.master, std::move(values)));
}

}  // namespace

constinit const RemoteEngineRow kMooncakeEngine = {"mooncake", kMooncakeKeys, CheckMooncake,
                                                   OpenMooncake};

}  // namespace kvstrata
