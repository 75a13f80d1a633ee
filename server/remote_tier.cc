// SPDX-License-Identifier: Apache-2.0
#include "server/remote_tier.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "server/attach/unix_listener.h"
#include "server/tier/remote_secret.h"

namespace kvstrata {
namespace {

std::string_view NameOf(RemoteWrite write) {
  if (write == RemoteWrite::kOff) return "off";
  return write == RemoteWrite::kAll ? "all" : "reused";
}

}  // namespace

RemoteTier::RemoteTier(const RemoteConfig& config, std::unique_ptr<RedisValueTier> values)
    : config_(config), write_(config.pages.writer.write), values_(std::move(values)) {}

Result<std::unique_ptr<RemoteTier>> RemoteTier::Open(const Config& daemon) {
  const RemoteConfig& config = daemon.remote;
  const gid_t tenants = SocketGroup(daemon.socket, daemon.socket_group);
  KVS_ASSIGN_OR_RETURN(const remote::RemoteSecret secret,
                       remote::RemoteSecret::Read(config.secret_file, tenants));
  remote::RemoteFormatOptions format;
  format.seal = config.seal == "gcm" ? remote::Seal::kGcm : remote::Seal::kNone;
  format.max_age = std::chrono::duration_cast<std::chrono::seconds>(config.ttl);
  RedisTierOptions options;
  for (std::string_view text = config.redis; !text.empty();) {
    const size_t comma = std::min(text.find(','), text.size());
    options.servers.emplace_back(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  options.user = config.user;
  options.password_file = config.password_file;
  options.tls = config.tls;
  options.ttl = std::chrono::duration_cast<std::chrono::milliseconds>(config.ttl);
  KVS_ASSIGN_OR_RETURN(auto values, RedisValueTier::Open(options, {secret, config.tenant, format}));
  return std::unique_ptr<RemoteTier>(new RemoteTier(config, std::move(values)));
}

void RemoteTier::Use(Store* store, TierPages* local, ValueTier* local_values) {
  pages_ = std::make_unique<RemotePages>(config_.pages, store, local_values, values_.get());
  tiers_ = std::make_unique<PageTiers>(store, local, pages_.get(), config_.pages.min_tokens);
}

void RemoteTier::Configure(const RemoteConfig& config) {
  pages_->Configure(config.pages);
  tiers_->SetMinTokens(config.pages.min_tokens);
  write_ = config.pages.writer.write;
}

void RemoteTier::Stop() { pages_->Stop(); }

std::string RemoteTier::illness() const { return values_->Stats().illness; }

RemoteInfo RemoteTier::Info() const {
  const RemotePagesCounters c = pages_->counters();
  RemoteInfo info;
  info.engine = "redis";
  info.servers = config_.redis;
  info.illness = illness();
  info.write = NameOf(write_);
  for (const redis::RedisServerStats& s : values_->Servers()) {
    info.shards.push_back(
        {s.address.ToString(), s.last_error, s.open, s.requests, s.failures, s.timeouts, s.hedges});
  }
  info.searches = c.searches;
  info.searched = c.searched;
  info.found = c.found;
  info.late_searches = c.late_searches;
  info.known_misses = c.known_misses;
  info.not_worth = c.not_worth;
  info.refused_searches = c.refused;
  info.read = c.read;
  info.missed = c.missed;
  info.late_loads = c.late_loads;
  info.refused_loads = c.refused_loads;
  info.over_rate = c.over_rate;
  info.bytes_per_second = static_cast<uint64_t>(pages_->bytes_per_second());
  info.waiting = c.waiting;
  info.waiting_bytes = c.waiting_bytes;
  info.written = c.written;
  info.written_bytes = c.written_bytes;
  info.dropped_full = c.dropped_full;
  info.dropped_local = c.dropped_local;
  info.dropped_stop = c.dropped_stop;
  info.gone = c.gone;
  info.failed = c.failed;
  return info;
}

}  // namespace kvstrata
