// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/admin/admin_messages.h"

#include <string_view>

#include "server/rpc/calls/copy_fields.h"
#include "server/store/options/user_name.h"
#include "server/store/reports/session_totals.h"
#include "server/telemetry/refusals.h"
#include "server/telemetry/traffic.h"

namespace kvstrata {
namespace {

std::string_view KindName(ExtentKind kind) {
  switch (kind) {
    case ExtentKind::kPackedSegment:
      return "packed";
    case ExtentKind::kSpanSummary:
      return "span_summary";
    case ExtentKind::kSpanFactors:
      return "span_factors";
    case ExtentKind::kRawRows:
      return "raw_rows";
    case ExtentKind::kPlanes:
      return "planes";
    case ExtentKind::kLowerPlanes:
      return "lower_planes";
  }
  return "unknown";
}

void Write(std::string_view what, const LatencyHistogram& times, v1::Latency* out) {
  out->set_what(std::string(what));
  out->set_count(times.count());
  out->set_sum_us(times.sum_us);
  for (size_t bin = 0; bin < kLatencyBounds; ++bin) out->add_bounds_us(LatencyBoundUs(bin));
  for (const uint64_t count : times.counts) out->add_counts(count);
}

void Write(const RemoteAnswersInfo& answers, v1::RemoteAnswers* out) {
  KVS_COPY_FIELDS(out, answers, hits, absent, refused, late, lost, damaged);
}

// "": remote.tenants does not map the user.
std::string ClusterTenantOf(const std::string& user, const ClusterTenants& tenants) {
  const std::string name = tenants.NameOf(user);
  return name == user ? "" : name;
}

}  // namespace

Status CheckValueKey(const std::string& key) {
  if (key.size() == 32 || (key.starts_with("pin/") && key.size() == 20)) return OkStatus();
  if (IsChunkKey(key)) return OkStatus();
  return InvalidArgument("VALUE_KEY",
                         "a key of " + std::to_string(key.size()) +
                             " bytes; allowed: 32, pin/ and 16 digits, or chunk/ and 32");
}

Status CheckFilter(const v1::ListValuesRequest& request) {
  const std::string& tier = request.tier();
  if (!tier.empty() && tier != "device" && tier != "host" && tier != "disk") {
    return InvalidArgument("VALUE_FILTER", "tier '" + tier + "'; allowed: device, host, disk");
  }
  if (request.limit() <= kMaxListed) return OkStatus();
  return InvalidArgument("VALUE_FILTER", "limit " + std::to_string(request.limit()) +
                                             "; allowed: 1 .. " + std::to_string(kMaxListed));
}

void Write(const ValueInfo& value, v1::Value* out) {
  KVS_COPY_FIELDS(out, value, key, model, tokens, bytes);
  out->set_kind(std::string(NameOf(value.kind)));
  for (const Tier tier : value.tiers) out->add_tiers(std::string(NameOf(tier)));
  out->set_pinned(value.pinned);
}

void Write(const std::string& key, const ValueVerdict& verdict, v1::ValueVerdict* out) {
  out->set_key(key);
  out->set_verdict(std::string(NameOf(verdict.state)));
  for (const Tier tier : verdict.tiers) out->add_tiers(std::string(NameOf(tier)));
  out->set_detail(verdict.detail);
}

HealthLook LookAtHealth(const GrpcOptions& options) {
  HealthLook health{options.health ? options.health() : "serving", {}};
  std::map<std::string, bool>& names = health.names;
  const bool serves = health.text == "serving" || health.text.starts_with("degraded");
  names[""] = serves;
  for (const char* service : {"Control", "Compute", "Admin"}) {
    names[std::string("kvstrata.v1.") + service] = serves;
  }
  bool& devices = names["kvstrata.pool.device"] = true;
  for (const PoolInfo& pool : options.store->inspection().Pools()) {
    const std::string name = "kvstrata.pool." + std::string(NameOf(pool.tier));
    const bool there = pool.failure.empty();
    const bool host = pool.tier == Tier::kHost;
    names[host ? name : name + "." + pool.device] = there;
    devices = devices && (host || there);
  }
  if (options.disk) {
    const DiskInfo disk = options.disk();
    names["kvstrata.disk"] = !disk.sick;
    names["kvstrata.disk.writes"] = !disk.sick && !disk.draining;
  }
  if (options.remote) names["kvstrata.remote"] = options.remote().illness.empty();
  return health;
}

void Write(const PoolInfo& p, v1::Pool* out) {
  out->set_tier(std::string(NameOf(p.tier)));
  KVS_COPY_FIELDS(out, p, device, capacity_bytes, used_bytes, cached_bytes, arena_bytes, arenas,
                  taken_bytes, retired_bytes, pinned_bytes, failure);
}

void Write(const CgroupInfo& c, v1::CgroupMemory* out) {
  KVS_COPY_FIELDS(out, c, file, limit_bytes, charged_bytes, reclaimable_bytes, available_bytes);
}

void Write(const EvictedTier& t, v1::EvictedTier* out) {
  out->set_tier(std::string(NameOf(t.tier)));
  KVS_COPY_FIELDS(out, t, pages, bytes, stored_pages, artefact_pages, pinned_bytes);
}

void Write(const PinInfo& p, v1::PinnedPrefix* out) {
  out->set_pin(p.pin.id);
  out->set_tenant(p.pin.tenant);
  out->set_model_name(p.pin.model_name);
  out->set_tokens(p.pin.tokens());
  out->set_pages(static_cast<uint32_t>(p.pin.pages.size()));
  out->set_index_blocks(static_cast<uint32_t>(p.pin.index_blocks.size()));
  out->set_bytes(p.pin.bytes);
  KVS_COPY_FIELDS(out, p, device_pages, host_pages, disk_pages);
  out->set_ttl_left_us(static_cast<uint64_t>(p.ttl_left.count()));
}

void Write(const SessionInfo& s, const ClusterTenants& tenants, v1::Session* out) {
  out->set_session(s.session);
  out->set_client_name(s.client_name);
  // A gRPC server serves a user, not a process: the pid of the connection that made it says
  // nothing.
  if (s.transport == Transport::kLinked) out->set_pid(s.peer.pid);
  out->set_uid(s.peer.uid);
  out->set_tenant(s.peer.tenant);
  out->set_transport(s.transport == Transport::kLinked ? "linked" : "remote");
  KVS_COPY_FIELDS(out, s, sequences, used_bytes, age_us, open_steps, device, fenced, last_step_us);
  out->set_cluster_tenant(ClusterTenantOf(s.peer.tenant, tenants));
}

void Write(const SequenceInfo& s, v1::Sequence* out) {
  KVS_COPY_FIELDS(out, s, sequence, session, model, model_name, tokens, capacity_tokens, pages,
                  shared_pages, index_blocks, version, device_bytes, host_bytes, prompt_tokens,
                  held_tokens, steps, age_us, extents, extent_device_bytes, extent_host_bytes,
                  absent_pages, work_error, key, in_full, break_even_tokens, private_pages,
                  arriving);
  out->set_plan(s.plan.name);
  out->set_plan_text(FormatPlan(s.plan));
}

void Write(const ExtentInfo& e, v1::ExtentInfo* out) {
  KVS_COPY_FIELDS(out, e, arena, offset, bytes, references);
  out->set_tier(std::string(NameOf(e.tier)));
  out->set_kind(std::string(KindName(e.kind)));
  out->set_begin(e.tokens.begin);
  out->set_end(e.tokens.end);
}

void Write(const WorkInfo& w, v1::Work* out) {
  KVS_COPY_FIELDS(out, w, sequence, session, plan, state, waiting_us, releasable_bytes, runs,
                  failures, error);
}

void Write(const PageInfo& p, v1::PageInfo* out) {
  out->set_absent(p.absent);
  out->set_selected(p.selected);
  if (p.absent) return;
  KVS_COPY_FIELDS(out, p, arena, offset, sealed, shared, references);
  out->set_tier(std::string(NameOf(p.tier)));
}

void WriteCatalog(const Store& store, v1::GetStatusResponse* out) {
  out->set_daemon_epoch(store.daemon_epoch());
  const StoreCounters counters = store.inspection().Counters();
  out->set_sessions(static_cast<uint32_t>(counters.sessions));
  out->set_sequences(static_cast<uint32_t>(counters.sequences));
  out->set_models(static_cast<uint32_t>(counters.models));
  KVS_COPY_FIELDS(out, counters, prefix_pages, publications, retired_bytes, lookup_tokens,
                  lookup_hit_tokens, recompressions, recompress_failures, recompressed_bytes,
                  released_bytes, artefacts, artefact_hits, evicted_pages, evicted_stored_pages,
                  promoted_pages, demoted_pages, replicated_pages);
}

void WriteTelemetry(const Store& store, v1::GetStatusResponse* out) {
  const StepTotals steps = ReadSessionTotals().steps;
  out->set_decode_steps(steps.decoded);
  out->set_decode_steps_in_full(steps.in_full);
  out->set_selections(steps.selected);
  out->set_selections_kept(steps.reused);
  for (const auto& [reason, count] : Refusals()) {
    v1::Refusal* refusal = out->add_refusals();
    refusal->set_reason(std::string(reason));
    refusal->set_count(count);
  }
  for (size_t i = 0; i < kTimed; ++i) {
    const auto what = static_cast<Timed>(i);
    Write(NameOf(what), TimesOf(what), out->add_latencies());
  }
  const auto add = [out](std::string_view path, uint64_t bytes) {
    v1::Traffic* traffic = out->add_traffic();
    traffic->set_path(std::string(path));
    traffic->set_bytes(bytes);
  };
  for (size_t i = 0; i < kBytePaths; ++i) {
    add(NameOf(static_cast<BytePath>(i)), BytesOf(static_cast<BytePath>(i)));
  }
  const StoreCounters counters = store.inspection().Counters();
  add("device_to_host", counters.demoted_bytes);
  add("host_to_device", counters.promoted_bytes);
  add("device_to_device", counters.replicated_bytes);
}

void WriteChunks(const ChunkNumbers& n, v1::GetStatusResponse* response) {
  if (n.region_bytes == 0) return;
  v1::ChunkRoom* const out = response->add_chunk_rooms();
  out->set_user(UserName(n.user));
  out->set_capacity_bytes(n.capacity_bytes);
  out->set_used_bytes(n.used_bytes());
  out->set_shown(n.of(ChunkState::kShown).chunks);
  out->set_shown_bytes(n.of(ChunkState::kShown).bytes);
  out->set_leased_bytes(n.leased.bytes);
  out->set_credited_bytes(n.of(ChunkState::kCredited).bytes);
  out->set_engines(static_cast<uint32_t>(n.engines));
  out->set_connections(static_cast<uint32_t>(n.connections));
  out->set_resting(static_cast<uint32_t>(n.resting));
  const ChunkCounters& c = n.counters;
  KVS_COPY_FIELDS(out, c, asked, hits, misses, coming, arrived, stored, duplicates, evicted,
                  changed, written, read, read_failures);
  out->set_unwritten(c.unsaved + c.write_failures);
}

void Write(const DiskInfo& d, v1::Disk* out) {
  KVS_COPY_FIELDS(out, d, path, queue, direct, degraded, capacity_bytes, used_bytes, entries,
                  waiting, written, dropped, gone, failed, evicted, read, late_loads, refused_loads,
                  corrupt, io_errors, deadlines, stopped_segments, breaker_open, draining, refused,
                  last_error, last_error_time_us, left_alone_since_us);
  out->set_retry_us(static_cast<uint64_t>(d.retry.count()));
}

void Write(const RemoteInfo& r, const ClusterTenants& tenants, v1::Remote* out) {
  KVS_COPY_FIELDS(out, r, engine, servers, illness, write);
  for (const RemoteShardInfo& shard : r.shards) {
    v1::RemoteShard* const to = out->add_shards();
    KVS_COPY_FIELDS(to, shard, address, breaker_open, last_error, requests, failures, timeouts,
                    hedges, openings, connections, sent_bytes, received_bytes);
    Write(shard.probes, to->mutable_probes());
    Write(shard.reads, to->mutable_reads());
    Write("answer", shard.answers, to->mutable_answers());
  }
  KVS_COPY_FIELDS(out, r, searched, found, searches, late_searches, known_misses, not_worth,
                  refused_searches, read, missed, late_loads, refused_loads, over_rate,
                  bytes_per_second, waiting, waiting_bytes, written, written_bytes, dropped_full,
                  dropped_rate, dropped_local, dropped_stop, gone, failed, secret_fingerprint);
  for (const auto& [user, over] : r.over_rates) {
    v1::OverRate* const to = out->add_over_rates();
    to->set_user(user);
    to->set_cluster_tenant(ClusterTenantOf(user, tenants));
    to->set_opens(over.opens);
    to->set_values(over.values);
  }
}

void Write(const LimitNumbers& n, v1::UserNumbers* out) {
  out->set_sessions(n[Limit::kSessions]);
  out->set_attaches_per_second(n[Limit::kAttachesPerSecond]);
  out->set_connections(n[Limit::kConnections]);
  out->set_models(n[Limit::kModels]);
  out->set_sequences(n[Limit::kSequences]);
  out->set_device_bytes(n[Limit::kDeviceBytes]);
  out->set_host_bytes(n[Limit::kHostBytes]);
  out->set_queued_work(n[Limit::kQueuedWork]);
}

void Write(const UserReport& u, const ClusterTenants& tenants, v1::UserQuota* out) {
  out->set_user(u.user);
  Write(u.limits, out->mutable_limits());
  Write(u.used, out->mutable_used());
  out->set_refused(u.refused);
  for (const Limit limit : u.changed) out->add_changed(std::string(NameOf(limit)));
  out->set_cluster_tenant(ClusterTenantOf(u.user, tenants));
}

bool HoldsAny(const UserReport& u) {
  for (size_t i = 0; i < kLimits; ++i) {
    if (u.used[static_cast<Limit>(i)] != 0) return true;
  }
  return false;
}

}  // namespace kvstrata
