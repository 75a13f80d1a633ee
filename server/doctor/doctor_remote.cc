// SPDX-License-Identifier: Apache-2.0
// The remote tier: whose files its secrets are, whether others can be listened for, its servers
// answer, and what a running daemon says of its own.
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "proto/reasons.h"
#include "server/daemon/tiers/remote_tier.h"
#include "server/doctor/doctor_checks.h"
#include "server/nodes/node_server.h"

namespace kvstrata::doctor {
namespace {

constexpr std::chrono::seconds kServersTime{5};  // for a server that is silent
constexpr size_t kMostNamed = 4;                 // servers, in one line

// "key = 'file' has mode 0644" where everybody may read it, or more than its owner may write it.
std::string OpenToOthers(std::string_view key, const std::string& file) {
  struct stat st {};
  if (file.empty() || stat(file.c_str(), &st) != 0) return "";
  if ((st.st_mode & (S_IWGRP | S_IRWXO)) == 0) return "";
  char mode[8];
  std::snprintf(mode, sizeof(mode), "%04o", static_cast<unsigned>(st.st_mode & 07777));
  return std::string(key) + " = '" + file + "' has mode " + mode;
}

// The remote tier of the daemon at the socket, as it tells; its engine is "" where there is none.
v1::Remote DaemonsTier(const std::string& socket, bool* denied) {
  const auto status = DaemonsStatus(socket, denied);
  return status && !status->remotes().empty() ? status->remotes(0) : v1::Remote();
}

// `text` up to the error that it ends with, where `said` has that error already.
std::string WithoutSaid(const std::string& text, std::string_view said) {
  constexpr std::string_view kBeforeError = ": ";
  for (size_t at = text.find(kBeforeError); at != text.npos; at = text.find(kBeforeError, at + 1)) {
    const std::string_view error = std::string_view(text).substr(at + kBeforeError.size());
    if (!error.empty() && said.find(error) != said.npos) return text.substr(0, at);
  }
  return text;
}

// What ails it, "" if nothing does. An error that `said` has is not said again.
std::string Illness(const v1::Remote& tier, std::string_view said) {
  const std::string& illness = tier.illness();
  std::string text = WithoutSaid(illness, said);
  for (const v1::RemoteShard& shard : tier.shards()) {
    if (!shard.breaker_open() || illness.find("server " + shard.address()) != illness.npos)
      continue;
    const std::string alone = "it leaves " + shard.address() + " alone";
    text += (text.empty() ? "" : "; ") +
            WithoutSaid(alone + ": " + shard.last_error(), illness + std::string(said));
  }
  return text;
}

constexpr std::string_view kAsksAgain =
    "it asks again by itself; kvstrata tier probe, kvstrata events";

Finding Silent(std::span<const RemoteServerInfo> servers, size_t silent,
               const v1::Remote& daemons) {
  std::string what =
      std::to_string(silent) + " of " + std::to_string(servers.size()) + " servers do not answer";
  const Status* first = nullptr;
  size_t named = 0;
  for (const RemoteServerInfo& server : servers) {
    if (server.status.ok()) continue;
    if (first == nullptr) first = &server.status;
    if (++named <= kMostNamed) {
      what += "; " + server.address + ": " + std::string(server.status.message());
    }
  }
  const std::string illness = Illness(daemons, what);
  if (!illness.empty()) what += "; the running daemon says: " + illness;
  const auto at = FindReason(first->reason());
  std::string fix(at ? AllReasons()[*at].next : "");
  if (fix.empty())
    fix = "see that it runs and is reached from here: redis-cli -h HOST -p PORT ping";
  return Warn("remote", what + "; a daemon starts without, and computes what they have", fix);
}

// What was found, and what the daemon says besides.
Finding WithDaemon(const std::string& found, const v1::Remote& daemons) {
  const std::string illness = Illness(daemons, found);
  if (illness.empty()) return Ok("remote", found);
  return Warn("remote", found + "; the running daemon says: " + illness, std::string(kAsksAgain));
}

// The configuration that is judged has none, and that of the daemon may be another one.
Finding DaemonsOwn(const Config& config) {
  const std::string none = "no remote tier is configured";
  bool denied = false;
  const v1::Remote tier = DaemonsTier(config.socket, &denied);
  if (denied) {
    return Ok("remote", none + " here; whether the daemon at '" + config.socket +
                            "' has one it tells its own user and root alone");
  }
  if (tier.engine().empty()) return Ok("remote", none);
  const std::string own = none + " here; the daemon at '" + config.socket + "' has one, " +
                          tier.servers() + ", by a configuration of its own";
  const std::string illness = Illness(tier, "");
  if (illness.empty()) return Ok("remote", own + ", and calls it well");
  return Warn("remote", own + ", and says: " + illness,
              std::string(kAsksAgain) +
                  "; to look at its servers from here: kvstrata doctor "
                  "--config FILE, the daemon's");
}

}  // namespace

Finding CheckRemoteFiles(const Config& config) {
  const RemoteConfig& remote = config.remote;
  if (!remote.on()) return Ok("remote_files", "no remote tier is configured");
  std::string open;
  for (const std::string& file : {OpenToOthers("remote.password_file", remote.password_file),
                                  OpenToOthers("remote.tls_key_file", remote.tls.key_file)}) {
    if (!file.empty()) open += (open.empty() ? "" : "; ") + file;
  }
  if (open.empty())
    return Ok("remote_files", "secret, password and keys can be read, and not by all");
  return Warn("remote_files", open + ": others of this machine may read or change it",
              "chmod 600 it; change what others may have read");
}

Finding CheckAnnounce(const Config& config) {
  const std::string& address = config.remote.announce;
  if (address.empty() || !config.remote.on()) return Ok("announce", "this node is not announced");
  const Status free = CheckCanListen(address);
  if (free.ok()) return Ok("announce", address + " is free");
  bool denied = false;
  if (free.reason() == "REMOTE_ANNOUNCE_IN_USE" &&
      DaemonsKey(config.socket, "remote.announce", &denied) == address) {
    return Ok("announce", address + " is served by the daemon at '" + config.socket + "'");
  }
  return Fail("announce", Located(free, config));
}

Finding CheckRemoteServers(const Config& config) {
  if (!config.remote.on()) return DaemonsOwn(config);
  bool denied = false;
  const v1::Remote daemons = DaemonsTier(config.socket, &denied);
  // Mooncake is reached through an agent, which would join the store here.
  if (!config.remote.servers.contains("redis")) {
    return WithDaemon("Mooncake's master is not asked by this check", daemons);
  }
  const auto tier = RemoteTier::Open(config);
  if (!tier.ok()) {
    return Warn("remote", "its servers were not asked: " + std::string(tier.status().message()),
                "mend its files and run doctor again");
  }
  const std::vector<RemoteServerInfo> servers =
      (*tier)->engine().Ping(std::chrono::steady_clock::now() + kServersTime);
  const auto silent = static_cast<size_t>(std::ranges::count_if(
      servers, [](const RemoteServerInfo& server) { return !server.status.ok(); }));
  if (servers.empty()) {
    return Warn("remote", "the servers tell of none that has slots",
                "redis-cli --cluster create, or --cluster fix");
  }
  if (silent != 0) return Silent(servers, silent, daemons);
  const auto slowest = std::ranges::max(servers, {}, &RemoteServerInfo::round_trip).round_trip;
  return WithDaemon("all " + std::to_string(servers.size()) + " servers answer, the slowest in " +
                        std::to_string(slowest.count()) + " us",
                    daemons);
}

}  // namespace kvstrata::doctor
