// SPDX-License-Identifier: Apache-2.0
// Admin's calls about the remote tier.
#include <algorithm>
#include <chrono>
#include <string>

#include "server/rpc/admin/admin_service.h"
#include "server/rpc/calls/copy_fields.h"
#include "server/store/options/user_name.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

using std::chrono::microseconds;

constexpr microseconds kUsualTimeout{2'000'000}, kLongestTimeout{60'000'000};

std::chrono::steady_clock::time_point DeadlineOf(uint64_t timeout_us) {
  const auto most = static_cast<uint64_t>(kLongestTimeout.count());
  const microseconds timeout(static_cast<int64_t>(std::min(timeout_us, most)));
  return std::chrono::steady_clock::now() + (timeout_us == 0 ? kUsualTimeout : timeout);
}

Result<PromptValues> ValuesOf(ServiceContext* context, const v1::RemotePrompt& prompt) {
  const std::string& tenant = prompt.tenant().empty() ? context->user().tenant : prompt.tenant();
  constexpr std::string_view kCluster = "cluster:";
  if (!UidOf(tenant) && !(tenant.starts_with(kCluster) && tenant.size() > kCluster.size())) {
    return InvalidArgument("REMOTE_PROMPT", "tenant '" + tenant +
                                                "'; allowed: a user of this node, as uid:1000, or "
                                                "a tenant of the cluster, as cluster:search");
  }
  const std::span<const int32_t> tokens(prompt.tokens().data(),
                                        static_cast<size_t>(prompt.tokens_size()));
  KVS_ASSIGN_OR_RETURN(PromptValues values, ValuesOfPrompt(&context->store(), tenant,
                                                           prompt.model(), tokens, prompt.plan()));
  if (std::ranges::any_of(values.keys, &TierSearch::Key::page)) return values;
  return InvalidArgument("REMOTE_PROMPT",
                         std::to_string(tokens.size()) + " tokens have no whole page; a page has " +
                             std::to_string(values.page_tokens) + ", give as many at least");
}

void Write(const RemoteServerInfo& server, v1::RemoteServer* out) {
  KVS_COPY_FIELDS(out, server, address, role, breaker_open, values, held);
  out->set_round_trip_us(static_cast<uint64_t>(server.round_trip.count()));
  out->set_reason(std::string(server.status.reason()));
  out->set_why(std::string(server.status.message()));
}

// Pages count to the first that is missing.
void WriteHeld(const PromptValues& values, const std::vector<bool>& held,
               v1::ProbeRemoteResponse* out) {
  uint64_t pages = 0, leading = 0;
  for (size_t i = 0; i < values.keys.size(); ++i) {
    if (!values.keys[i].page) continue;
    leading += held[i] && leading == pages;
    ++pages;
  }
  out->set_values(values.keys.size());
  out->set_held(static_cast<uint64_t>(std::ranges::count(held, true)));
  out->set_tokens(pages * values.page_tokens);
  out->set_held_tokens(leading * values.page_tokens);
}

}  // namespace

UnaryReactor* AdminService::ProbeRemote(CallContext* call, const v1::ProbeRemoteRequest* request,
                                        v1::ProbeRemoteResponse* response) {
  return context_->AsAdminInQueue(call, [this, request, response]() -> Status {
    const GrpcOptions& options = context_->options();
    if (!options.probe_remote) return context_->NoRemote();
    PromptValues values;
    if (request->has_prompt()) {
      KVS_ASSIGN_OR_RETURN(values, ValuesOf(context_, request->prompt()));
    }
    const RemoteProbeInfo probe = options.probe_remote(values, DeadlineOf(request->timeout_us()));
    for (const RemoteServerInfo& server : probe.servers) Write(server, response->add_servers());
    WriteHeld(values, probe.held, response);
    return OkStatus();
  });
}

UnaryReactor* AdminService::PurgeRemote(CallContext* call, const v1::PurgeRemoteRequest* request,
                                        v1::PurgeRemoteResponse* response) {
  return context_->AsAdminInQueue(call, [this, request, response]() -> Status {
    const GrpcOptions& options = context_->options();
    if (!options.purge_remote) return context_->NoRemote();
    KVS_ASSIGN_OR_RETURN(const PromptValues values, ValuesOf(context_, request->prompt()));
    const RemotePurgeInfo purge = options.purge_remote(values, DeadlineOf(request->timeout_us()));
    response->set_values(values.keys.size());
    response->set_held(purge.held);
    response->set_failed(purge.failed);
    response->set_reason(std::string(purge.status.reason()));
    response->set_why(std::string(purge.status.message()));
    LogEvent(LogLevel::kInfo, "remote_purged",
             {{"tenant", values.tenant},
              {"values", values.keys.size()},
              {"held", purge.held},
              {"failed", purge.failed},
              {"by", context_->user().tenant}});
    return OkStatus();
  });
}

}  // namespace kvstrata
