// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/tiers/remote_tier.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "server/config/remote_engines.h"
#include "server/rpc/calls/copy_fields.h"
#include "server/sockets/unix_listener.h"
#include "server/telemetry/log.h"
#include "server/tier/blocking_calls.h"
#include "server/tier/remote/remote_secret.h"

namespace kvstrata {

namespace {

std::string_view NameOf(TierWrite write) {
  if (write == TierWrite::kOff) return "off";
  return write == TierWrite::kAll ? "all" : "reused";
}

std::string_view NameOf(const PageKey& key) {
  return {reinterpret_cast<const char*>(key.data()), key.size()};
}

}  // namespace

RemoteTier::RemoteTier(const RemoteConfig& config, std::string secret_fingerprint,
                       std::unique_ptr<RemoteEngine> engine)
    : config_(config),
      secret_fingerprint_(std::move(secret_fingerprint)),
      write_(config.pages.writer.write),
      engine_(std::move(engine)) {}

Result<std::unique_ptr<RemoteTier>> RemoteTier::Open(const Config& daemon) {
  const RemoteConfig& config = daemon.remote;
  const gid_t tenants = SocketGroup(daemon.socket, daemon.socket_group);
  KVS_ASSIGN_OR_RETURN(const remote::RemoteSecret secret,
                       remote::RemoteSecret::Read(config.secret_file, tenants));
  remote::RemoteFormatOptions options;
  options.seal = config.seal == "gcm" ? remote::Seal::kGcm : remote::Seal::kNone;
  options.max_age = std::chrono::duration_cast<std::chrono::seconds>(config.ttl);
  KVS_ASSIGN_OR_RETURN(auto engine,
                       RemoteEngineOf(config).open(config, {secret, config.tenant, options}));
  return std::unique_ptr<RemoteTier>(
      new RemoteTier(config, secret.Fingerprint(options.seal), std::move(engine)));
}

void RemoteTier::Use(Store* store, ValueTier* local, TierChain* tiers) {
  tiers_ = tiers;
  row_ = std::make_unique<TierRow>(config_.pages, store, engine_->values(), TierHooks{}, local);
  tiers->Add(row_.get());
  LogEvent(LogLevel::kInfo, "remote_open",
           {{"engine", RemoteEngineOf(config_).name},
            {"servers", std::ranges::count(config_.servers.begin()->second, ',') + 1},
            {"write", NameOf(write_)},
            {"seal", config_.seal},
            {"tls", config_.tls.on},
            {"secret_fingerprint", secret_fingerprint_}});
}

void RemoteTier::Configure(const RemoteConfig& config) {
  row_->Configure(config.pages);
  tiers_->Refresh();
  write_ = config.pages.writer.write;
}

void RemoteTier::Stop() {
  row_->Stop();
  const TierRowCounters c = row_->counters();
  LogEvent(LogLevel::kInfo, "remote_pages",
           {{"searches", c.searches},
            {"found", c.found},
            {"read", c.read},
            {"missed", c.missed},
            {"late", c.late_searches + c.late_loads},
            {"refused", c.refused_searches + c.refused_loads},
            {"written", c.written},
            {"dropped", c.dropped()},
            {"gone", c.gone},
            {"failed", c.failed}});
}

std::string RemoteTier::illness() const { return engine_->values()->Stats().illness; }

// Which of the prompt's values are there.
std::vector<bool> RemoteTier::Held(const PromptValues& prompt, Deadline deadline) {
  std::vector<TierProbe> probes;
  for (const TierSearch::Key& key : prompt.keys) {
    probes.push_back({NameOf(key.key), {}, NameOf(key.place)});
  }
  std::vector<bool> held;
  ProbeAndWait(engine_->values(), probes, deadline);
  for (const TierProbe& probe : probes) held.push_back(!probe.sizes.empty());
  return held;
}

RemoteProbeInfo RemoteTier::Probe(const PromptValues& prompt, Deadline deadline) {
  RemoteProbeInfo info;
  const auto now = std::chrono::steady_clock::now();
  // Servers that are silent leave time for what the others hold.
  info.servers = engine_->Ping(now + (deadline - now) / 2);
  if (prompt.keys.empty()) return info;
  info.held = Held(prompt, deadline);
  for (size_t i = 0; i < prompt.keys.size(); ++i) {
    const TierSearch::Key& key = prompt.keys[i];
    const auto server =
        std::ranges::find(info.servers, engine_->ServerOf(NameOf(key.key), NameOf(key.place)),
                          &RemoteServerInfo::address);
    if (server == info.servers.end()) continue;
    ++server->values;
    server->held += info.held[i];
  }
  return info;
}

RemotePurgeInfo RemoteTier::Purge(const PromptValues& prompt, Deadline deadline) {
  RemotePurgeInfo info;
  const auto now = std::chrono::steady_clock::now();
  const std::vector<bool> held = Held(prompt, now + (deadline - now) / 2);
  info.held = static_cast<uint64_t>(std::ranges::count(held, true));
  std::vector<TierForget> forgets;
  for (const TierSearch::Key& key : prompt.keys) {
    forgets.push_back({std::string(NameOf(key.key)), {}, std::string(NameOf(key.place))});
  }
  info.status = ForgetAndWait(engine_->values(), std::span(forgets), deadline);
  info.failed = static_cast<uint64_t>(
      std::ranges::count_if(forgets, [](const TierForget& forget) { return !forget.status.ok(); }));
  for (const TierSearch::Key& key : prompt.keys) row_->NotePurged(key.key);
  return info;
}

void RemoteTier::Offer(GrpcOptions* options) {
  options->remote = [this] { return Info(); };
  options->probe_remote = [this](const PromptValues& prompt, Deadline deadline) {
    return Probe(prompt, deadline);
  };
  options->purge_remote = [this](const PromptValues& prompt, Deadline deadline) {
    return Purge(prompt, deadline);
  };
}

RemoteInfo RemoteTier::Info() const {
  const TierRowCounters c = row_->counters();
  RemoteInfo info;
  info.engine = RemoteEngineOf(config_).name;
  info.servers = config_.servers.begin()->second;
  info.illness = illness();
  info.secret_fingerprint = secret_fingerprint_;
  info.write = NameOf(write_);
  info.shards = engine_->Shards();
  KVS_ASSIGN_FIELDS(info, c, searches, searched, found, late_searches, known_misses, not_worth,
                    refused_searches, read, missed, late_loads, refused_loads, over_rate, waiting,
                    waiting_bytes, written, written_bytes, dropped_full, dropped_rate, dropped_stop,
                    gone, failed);
  info.dropped_local = c.dropped_above;
  info.bytes_per_second = static_cast<uint64_t>(row_->bytes_per_second());
  for (const auto& [user, opens] : c.over_read_rates) info.over_rates[user].opens = opens;
  for (const auto& [user, values] : c.over_write_rates) {
    info.over_rates[user].values = values;
  }
  return info;
}

}  // namespace kvstrata
