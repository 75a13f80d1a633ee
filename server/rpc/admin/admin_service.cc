// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/admin/admin_service.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "server/rpc/admin/admin_messages.h"
#include "server/rpc/calls/copy_fields.h"
#include "server/rpc/calls/prefix_messages.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

void LogResize(const v1::ResizeRequest& asked, const v1::ResizeResponse& done,
               const std::string& by) {
  LogEvent(LogLevel::kInfo, "resized",
           {{"tier", asked.tier()},
            {"device", asked.device()},
            {"bytes", asked.bytes()},
            {"capacity_bytes", done.capacity_bytes()},
            {"evicted", done.evicted()},
            {"by", by}});
}

// Response: has `cgroups`.
template <typename Response>
void WriteCgroup(const GrpcOptions& options, Response* out) {
  if (!options.cgroup) return;
  if (const std::optional<CgroupInfo> c = options.cgroup()) Write(*c, out->add_cgroups());
}

}  // namespace

AdminService::~AdminService() = default;

UnaryReactor* AdminService::GetStatus(CallContext* call, const v1::GetStatusRequest*,
                                      v1::GetStatusResponse* response) {
  return context_->AsAdmin(call, [&]() -> Status {
    const GrpcOptions& options = context_->options();
    response->set_version(options.version);
    response->set_commit(options.commit);
    response->set_pid(static_cast<uint64_t>(getpid()));
    response->set_uptime_us(MicrosSince(options.started));
    response->set_backend(std::string(options.backend->name));
    HealthLook health = LookAtHealth(options);
    response->set_health(std::move(health.text));
    for (const auto& [name, serves] : health.names) {
      v1::HealthName* const to = response->add_health_names();
      to->set_name(name);
      to->set_serves(serves);
    }
    response->set_socket(options.socket_path);
    WriteCatalog(context_->store(), response);
    WriteTelemetry(context_->store(), response);
    for (const PoolInfo& p : context_->store().inspection().Pools()) {
      Write(p, response->add_pools());
    }
    if (options.chunks) WriteChunks(options.chunks(), response);
    if (options.disk) Write(options.disk(), response->add_disks());
    if (options.remote) {
      Write(options.remote(), context_->store().cluster_tenants(), response->add_remotes());
    }
    WriteCgroup(options, response);
    for (const UserReport& user : context_->store().user_limits()->Report()) {
      if (user.refused == 0 && !HoldsAny(user)) continue;
      Write(user, context_->store().cluster_tenants(), response->add_users());
    }
    return OkStatus();
  });
}

UnaryReactor* AdminService::ListSessions(CallContext* call, const v1::ListSessionsRequest*,
                                         v1::ListSessionsResponse* response) {
  return context_->AsAdmin(call, [&]() -> Status {
    for (const SessionInfo& s : context_->store().inspection().Sessions()) {
      Write(s, context_->store().cluster_tenants(), response->add_sessions());
    }
    return OkStatus();
  });
}

UnaryReactor* AdminService::ListSequences(CallContext* call,
                                          const v1::ListSequencesRequest* request,
                                          v1::ListSequencesResponse* response) {
  return context_->AsAdmin(call, [&]() -> Status {
    for (const SequenceInfo& s : context_->store().inspection().Sequences(request->session())) {
      Write(s, response->add_sequences());
    }
    return OkStatus();
  });
}

UnaryReactor* AdminService::ShowSequence(CallContext* call, const v1::ShowSequenceRequest* request,
                                         v1::ShowSequenceResponse* response) {
  return context_->AsAdmin(call, [&]() -> Status {
    Result<SequenceDetail> detail = context_->store().inspection().Show(request->sequence());
    if (!detail.ok()) return detail.status();
    Write(detail->info, response->mutable_sequence());
    for (const PageInfo& p : detail->pages) Write(p, response->add_pages());
    for (const PageInfo& p : detail->index_blocks) Write(p, response->add_index_blocks());
    for (const ExtentInfo& e : detail->extents) Write(e, response->add_extents());
    return OkStatus();
  });
}

UnaryReactor* AdminService::ListPools(CallContext* call, const v1::ListPoolsRequest*,
                                      v1::ListPoolsResponse* response) {
  return context_->AsAdmin(call, [&]() -> Status {
    for (const PoolInfo& p : context_->store().inspection().Pools()) {
      Write(p, response->add_pools());
    }
    WriteCgroup(context_->options(), response);
    return OkStatus();
  });
}

UnaryReactor* AdminService::ListWork(CallContext* call, const v1::ListWorkRequest*,
                                     v1::ListWorkResponse* response) {
  return context_->AsAdmin(call, [&]() -> Status {
    for (const WorkInfo& w : context_->store().requests().Work()) Write(w, response->add_work());
    return OkStatus();
  });
}

UnaryReactor* AdminService::GetMetrics(CallContext* call, const v1::GetMetricsRequest*,
                                       v1::GetMetricsResponse* response) {
  if (!context_->options().metrics) return Missing(call, "METRICS");
  return context_->AsAdminInQueue(call, [this, response]() -> Status {
    response->set_text(context_->options().metrics());
    return OkStatus();
  });
}

UnaryReactor* AdminService::Audit(CallContext* call, const v1::AuditRequest*,
                                  v1::AuditResponse* response) {
  return context_->AsAdminInQueue(call, [this, response]() -> Status {
    const AuditReport report = context_->store().inspection().Audit();
    response->set_clean(report.findings.empty());
    for (const std::string& finding : report.findings) response->add_findings(finding);
    KVS_COPY_FIELDS(response, report, pages, bytes, sequences, sessions);
    return OkStatus();
  });
}

UnaryReactor* AdminService::Move(CallContext* call, const v1::MoveRequest* request,
                                 v1::MoveResponse* response, Tier to) {
  return context_->AsAdminInQueue(call, [this, request, response, to]() -> Status {
    KVS_ASSIGN_OR_RETURN(const MoveResult moved,
                         context_->store().moves().Move(request->sequence(), to));
    KVS_COPY_FIELDS(response, moved, pages, bytes, version);
    return OkStatus();
  });
}

UnaryReactor* AdminService::Demote(CallContext* call, const v1::MoveRequest* request,
                                   v1::MoveResponse* response) {
  return Move(call, request, response, Tier::kHost);
}

UnaryReactor* AdminService::Prefetch(CallContext* call, const v1::MoveRequest* request,
                                     v1::MoveResponse* response) {
  return Move(call, request, response, Tier::kDevice);
}

UnaryReactor* AdminService::LookupPrefix(CallContext* call, const v1::LookupPrefixRequest* request,
                                         v1::LookupResponse* response) {
  return context_->AsAdminInQueue(call, [this, request, response]() -> Status {
    const std::string& tenant =
        request->tenant().empty() ? context_->user().tenant : request->tenant();
    const std::span<const int32_t> tokens(request->tokens().data(),
                                          static_cast<size_t>(request->tokens_size()));
    KVS_ASSIGN_OR_RETURN(const std::vector<PageKey> keys, ReadPageKeys(*request));
    KVS_ASSIGN_OR_RETURN(
        const PrefixHit hit,
        keys.empty() ? context_->store().lookups().LookupFor(tenant, request->model(), tokens,
                                                             ReadLookupPlan(*request))
                     : context_->store().lookups().LookupFor(tenant, request->model(), keys));
    Write(hit, request->by_page(), response);
    return OkStatus();
  });
}

UnaryReactor* AdminService::Evict(CallContext* call, const v1::EvictRequest* request,
                                  v1::EvictResponse* response) {
  return context_->AsAdminInQueue(call, [this, request, response]() -> Status {
    const EvictResult evicted = context_->store().eviction().Evict(request->dry_run());
    response->set_pages(evicted.pages());
    response->set_bytes(evicted.bytes());
    for (const EvictedTier& tier : evicted.tiers) Write(tier, response->add_tiers());
    return OkStatus();
  });
}

UnaryReactor* AdminService::Pin(CallContext* call, const v1::PinRequest* request,
                                v1::PinResponse* response) {
  return context_->AsAdminInQueue(call, [this, request, response]() -> Status {
    const std::string& tenant =
        request->tenant().empty() ? context_->user().tenant : request->tenant();
    const std::span<const int32_t> tokens(request->tokens().data(),
                                          static_cast<size_t>(request->tokens_size()));
    // What does not fit is beyond the longest time, too.
    const std::chrono::microseconds ttl(
        static_cast<int64_t>(std::min<uint64_t>(request->ttl_us(), INT64_MAX)));
    Store& store = context_->store();
    KVS_ASSIGN_OR_RETURN(const PinInfo pin,
                         request->sequence() != 0
                             ? store.pins().PinSequence(request->sequence(), ttl)
                             : store.pins().PinPrefix(tenant, request->model(), tokens, ttl));
    Write(pin, response->mutable_pin());
    return OkStatus();
  });
}

UnaryReactor* AdminService::Unpin(CallContext* call, const v1::UnpinRequest* request,
                                  v1::UnpinResponse*) {
  return context_->AsAdminInQueue(call, [this, request]() -> Status {
    return context_->store().pins().RemovePin(request->pin());
  });
}

UnaryReactor* AdminService::ListPins(CallContext* call, const v1::ListPinsRequest*,
                                     v1::ListPinsResponse* response) {
  return context_->AsAdminInQueue(call, [this, response]() -> Status {
    for (const PinInfo& pin : context_->store().pins().Pins()) Write(pin, response->add_pins());
    const PinLimits limits = context_->store().pins().PinUse();
    response->set_used_bytes(limits.used_bytes);
    response->set_limit_bytes(limits.limit_bytes);
    return OkStatus();
  });
}

UnaryReactor* AdminService::ListValues(CallContext* call, const v1::ListValuesRequest* request,
                                       v1::ListValuesResponse* response) {
  if (!context_->options().values.list) return Missing(call, "LIST_VALUES");
  return context_->AsAdminInQueue(call, [this, request, response]() -> Status {
    KVS_RETURN_IF_ERROR(CheckFilter(*request));
    const uint32_t limit = request->limit() == 0 ? kMaxListed : request->limit();
    const ValueList list = context_->options().values.list({request->model_name(), request->tier()},
                                                           request->after(), limit);
    for (const ValueInfo& value : list.values) Write(value, response->add_values());
    response->set_next(list.next);
    return OkStatus();
  });
}

UnaryReactor* AdminService::Verify(CallContext* call, const v1::VerifyRequest* request,
                                   v1::VerifyResponse* response) {
  if (!context_->options().values.verify) return Missing(call, "VERIFY");
  return context_->AsAdminInQueue(call, [this, request, response]() -> Status {
    if (request->keys_size() > kMaxVerified) {
      return InvalidArgument(
          "VALUE_KEY", std::to_string(request->keys_size()) + " keys; allowed: at most 64 a call");
    }
    for (const std::string& key : request->keys()) KVS_RETURN_IF_ERROR(CheckValueKey(key));
    for (const std::string& key : request->keys()) {
      KVS_ASSIGN_OR_RETURN(const ValueVerdict verdict, context_->options().values.verify(key));
      Write(key, verdict, response->add_values());
    }
    return OkStatus();
  });
}

UnaryReactor* AdminService::Drain(CallContext* call, const v1::DrainRequest* request,
                                  v1::DrainResponse* response) {
  return context_->AsAdminInQueue(call, [this, request, response]() -> Status {
    const GrpcOptions& options = context_->options();
    if (!options.disk) return ServiceContext::NoDisk();
    if (request->resume()) options.resume();
    if (!request->resume()) KVS_RETURN_IF_ERROR(options.drain());
    const DiskInfo disk = options.disk();
    KVS_COPY_FIELDS(response, disk, draining, drained, waiting, entries, refused);
    return OkStatus();
  });
}

UnaryReactor* AdminService::Resize(CallContext* call, const v1::ResizeRequest* request,
                                   v1::ResizeResponse* response) {
  return context_->AsAdminInQueue(call, [this, request, response]() -> Status {
    const GrpcOptions& options = context_->options();
    response->set_tier(request->tier());
    if (request->tier() == "disk") {
      if (!options.disk) return ServiceContext::NoDisk();
      KVS_ASSIGN_OR_RETURN(const uint64_t evicted, options.resize_disk(request->bytes()));
      const DiskInfo disk = options.disk();
      response->set_capacity_bytes(disk.capacity_bytes);
      response->set_taken_bytes(disk.used_bytes);
      response->set_evicted(evicted);
      response->set_key("disk.budget_bytes");
      LogResize(*request, *response, context_->user().tenant);
      return OkStatus();
    }
    if (request->tier() != NameOf(Tier::kDevice) && request->tier() != NameOf(Tier::kHost)) {
      return NotFound("TIER_UNKNOWN",
                      "no tier '" + request->tier() + "'; there are device, host and disk");
    }
    const Tier tier = request->tier() == NameOf(Tier::kHost) ? Tier::kHost : Tier::kDevice;
    if (options.check_resize) {
      KVS_RETURN_IF_ERROR(options.check_resize(tier, request->bytes(), request->device()));
    }
    KVS_ASSIGN_OR_RETURN(const ResizedPool pool, options.store->moves().ResizePool(
                                                     tier, request->bytes(), request->device()));
    response->set_capacity_bytes(pool.capacity_bytes);
    response->set_taken_bytes(pool.taken_bytes);
    response->set_evicted(pool.evicted_pages);
    response->set_key("pool." + request->tier() + "_bytes");
    LogResize(*request, *response, context_->user().tenant);
    return OkStatus();
  });
}

// --- left out by GrpcOptions ---------------------------------------------------------------------

UnaryReactor* AdminService::Missing(CallContext* call, std::string_view name) {
  return context_->AsAdmin(call, [name]() -> Status {
    return Unimplemented("ADMIN_" + std::string(name) + "_UNIMPLEMENTED",
                         "this daemon does not serve " + std::string(name));
  });
}

}  // namespace kvstrata
