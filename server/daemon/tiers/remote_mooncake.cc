// SPDX-License-Identifier: Apache-2.0
// Mooncake Store as the engine of the remote tier. Its one server is the master: which store has a
// value, the master's clients alone know, and ours is the agent.
#include <utility>

#include "server/daemon/tiers/remote_engine.h"
#include "server/tier/mooncake/mooncake_value_tier.h"

namespace kvstrata {
namespace {

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

}  // namespace

Result<std::unique_ptr<RemoteEngine>> OpenMooncake(const RemoteConfig& config,
                                                   const remote::RemoteFormat& format) {
  MooncakeTierOptions options;
  options.agent = config.agent;
  KVS_ASSIGN_OR_RETURN(auto values, MooncakeValueTier::Open(options, format));
  return std::unique_ptr<RemoteEngine>(new MooncakeEngine(config.agent.master, std::move(values)));
}

}  // namespace kvstrata
