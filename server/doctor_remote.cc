// SPDX-License-Identifier: Apache-2.0
// The remote tier: whose files its secrets are, and whether its servers answer.
#include <grpcpp/grpcpp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "kvstrata/v1/admin.grpc.pb.h"
#include "proto/reasons.h"
#include "server/doctor_checks.h"
#include "server/remote_tier.h"

namespace kvstrata::doctor {
namespace {

constexpr std::chrono::seconds kServersTime{5};  // of a server that is silent
constexpr std::chrono::seconds kDaemonTime{5};
constexpr size_t kMostNamed = 4;  // servers, in one line

// "key = 'file' has mode 0644" where everybody may read it, or more than its owner may write it.
std::string OpenToOthers(std::string_view key, const std::string& file) {
  struct stat st {};
  if (file.empty() || stat(file.c_str(), &st) != 0) return "";
  if ((st.st_mode & (S_IWGRP | S_IRWXO)) == 0) return "";
  char mode[8];
  std::snprintf(mode, sizeof(mode), "%04o", static_cast<unsigned>(st.st_mode & 07777));
  return std::string(key) + " = '" + file + "' has mode " + mode;
}

// What the daemon at the socket says of its remote tier; "": nobody tells, or it is well.
std::string DaemonsView(const std::string& socket) {
  if (access(socket.c_str(), F_OK) != 0) return "";
  const auto stub =
      v1::Admin::NewStub(grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDaemonTime);
  v1::GetStatusResponse status;
  if (!stub->GetStatus(&context, v1::GetStatusRequest(), &status).ok()) return "";
  std::string view;
  for (const v1::Remote& remote : status.remotes()) {
    view += remote.illness();
    for (const v1::RemoteShard& shard : remote.shards()) {
      if (!shard.breaker_open()) continue;
      view += (view.empty() ? "it leaves " : "; it leaves ") + shard.address() +
              " alone: " + shard.last_error();
    }
  }
  return view;
}

Finding Silent(std::span<const RemoteServerInfo> servers, size_t silent, const std::string& view) {
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
  if (!view.empty()) what += "; the running daemon says: " + view;
  const auto at = FindReason(first->reason());
  std::string fix(at ? AllReasons()[*at].next : "");
  if (fix.empty())
    fix = "see that it runs and is reached from here: redis-cli -h HOST -p PORT ping";
  return Warn("remote", what + "; a daemon starts without, and computes what they have", fix);
}

// Mooncake is reached through an agent, which would join the store here.
Finding AskedByItsAgentAlone(const std::string& view) {
  const std::string what = "Mooncake's master is not asked by this check";
  if (view.empty()) return Ok("remote", what);
  return Warn("remote", what + "; the running daemon says: " + view,
              "it asks again by itself; kvstrata tier probe, kvstrata events");
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

Finding CheckRemoteServers(const Config& config) {
  if (!config.remote.on()) return Ok("remote", "no remote tier is configured");
  if (config.remote.redis.empty()) return AskedByItsAgentAlone(DaemonsView(config.socket));
  const auto tier = RemoteTier::Open(config);
  if (!tier.ok()) {
    return Warn("remote", "its servers were not asked: " + std::string(tier.status().message()),
                "mend its files and run doctor again");
  }
  const std::vector<RemoteServerInfo> servers =
      (*tier)->engine().Ping(std::chrono::steady_clock::now() + kServersTime);
  const auto silent = static_cast<size_t>(std::ranges::count_if(
      servers, [](const RemoteServerInfo& server) { return !server.status.ok(); }));
  const std::string view = DaemonsView(config.socket);
  if (servers.empty()) {
    return Warn("remote", "the servers tell of none that has slots",
                "redis-cli --cluster create, or --cluster fix");
  }
  if (silent != 0) return Silent(servers, silent, view);
  const auto slowest = std::ranges::max(servers, {}, &RemoteServerInfo::round_trip).round_trip;
  const std::string answers = "all " + std::to_string(servers.size()) +
                              " servers answer, the slowest in " + std::to_string(slowest.count()) +
                              " us";
  if (view.empty()) return Ok("remote", answers);
  return Warn("remote", answers + "; the running daemon says: " + view,
              "it asks again by itself; kvstrata tier probe, kvstrata events");
}

}  // namespace kvstrata::doctor
