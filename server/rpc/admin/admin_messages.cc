// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/admin/admin_messages.h"

#include <string>
#include <string_view>

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
  out->set_hits(answers.hits);
  out->set_absent(answers.absent);
  out->set_refused(answers.refused);
  out->set_late(answers.late);
  out->set_lost(answers.lost);
  out->set_damaged(answers.damaged);
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
  out->set_key(value.key);
  out->set_kind(std::string(NameOf(value.kind)));
  out->set_model(value.model);
  out->set_tokens(value.tokens);
  out->set_bytes(value.bytes);
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
  out->set_device(p.device);
  out->set_capacity_bytes(p.capacity_bytes);
  out->set_used_bytes(p.used_bytes);
  out->set_cached_bytes(p.cached_bytes);
  out->set_arena_bytes(p.arena_bytes);
  out->set_arenas(p.arenas);
  out->set_taken_bytes(p.taken_bytes);
  out->set_retired_bytes(p.retired_bytes);
  out->set_pinned_bytes(p.pinned_bytes);
  out->set_failure(p.failure);
}

void Write(const CgroupInfo& c, v1::CgroupMemory* out) {
  out->set_file(c.file);
  out->set_limit_bytes(c.limit_bytes);
  out->set_charged_bytes(c.charged_bytes);
  out->set_reclaimable_bytes(c.reclaimable_bytes);
  out->set_available_bytes(c.available_bytes);
}

void Write(const EvictedTier& t, v1::EvictedTier* out) {
  out->set_tier(std::string(NameOf(t.tier)));
  out->set_pages(t.pages);
  out->set_bytes(t.bytes);
  out->set_stored_pages(t.stored_pages);
  out->set_artefact_pages(t.artefact_pages);
  out->set_pinned_bytes(t.pinned_bytes);
}

void Write(const PinInfo& p, v1::PinnedPrefix* out) {
  out->set_pin(p.pin.id);
  out->set_tenant(p.pin.tenant);
  out->set_model_name(p.pin.model_name);
  out->set_tokens(p.pin.tokens());
  out->set_pages(static_cast<uint32_t>(p.pin.pages.size()));
  out->set_index_blocks(static_cast<uint32_t>(p.pin.index_blocks.size()));
  out->set_bytes(p.pin.bytes);
  out->set_device_pages(p.device_pages);
  out->set_host_pages(p.host_pages);
  out->set_disk_pages(p.disk_pages);
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
  out->set_sequences(s.sequences);
  out->set_used_bytes(s.used_bytes);
  out->set_age_us(s.age_us);
  out->set_open_steps(s.open_steps);
  out->set_device(s.device);
  out->set_fenced(s.fenced);
  out->set_last_step_us(s.last_step_us);
  out->set_cluster_tenant(ClusterTenantOf(s.peer.tenant, tenants));
}

void Write(const SequenceInfo& s, v1::Sequence* out) {
  out->set_sequence(s.sequence);
  out->set_session(s.session);
  out->set_model(s.model);
  out->set_model_name(s.model_name);
  out->set_plan(s.plan.name);
  out->set_plan_text(FormatPlan(s.plan));
  out->set_tokens(s.tokens);
  out->set_capacity_tokens(s.capacity_tokens);
  out->set_pages(s.pages);
  out->set_shared_pages(s.shared_pages);
  out->set_index_blocks(s.index_blocks);
  out->set_version(s.version);
  out->set_device_bytes(s.device_bytes);
  out->set_host_bytes(s.host_bytes);
  out->set_prompt_tokens(s.prompt_tokens);
  out->set_held_tokens(s.held_tokens);
  out->set_steps(s.steps);
  out->set_age_us(s.age_us);
  out->set_extents(s.extents);
  out->set_extent_device_bytes(s.extent_device_bytes);
  out->set_extent_host_bytes(s.extent_host_bytes);
  out->set_absent_pages(s.absent_pages);
  out->set_work_error(s.work_error);
  out->set_key(s.key);
  out->set_in_full(s.in_full);
  out->set_break_even_tokens(s.break_even_tokens);
  out->set_private_pages(s.private_pages);
}

void Write(const ExtentInfo& e, v1::ExtentInfo* out) {
  out->set_arena(e.arena);
  out->set_offset(e.offset);
  out->set_tier(std::string(NameOf(e.tier)));
  out->set_kind(std::string(KindName(e.kind)));
  out->set_bytes(e.bytes);
  out->set_begin(e.tokens.begin);
  out->set_end(e.tokens.end);
  out->set_references(e.references);
}

void Write(const WorkInfo& w, v1::Work* out) {
  out->set_sequence(w.sequence);
  out->set_session(w.session);
  out->set_plan(w.plan);
  out->set_state(w.state);
  out->set_waiting_us(w.waiting_us);
  out->set_releasable_bytes(w.releasable_bytes);
  out->set_runs(w.runs);
  out->set_failures(w.failures);
  out->set_error(w.error);
}

void Write(const PageInfo& p, v1::PageInfo* out) {
  out->set_absent(p.absent);
  out->set_selected(p.selected);
  if (p.absent) return;
  out->set_arena(p.arena);
  out->set_offset(p.offset);
  out->set_tier(std::string(NameOf(p.tier)));
  out->set_sealed(p.sealed);
  out->set_shared(p.shared);
  out->set_references(p.references);
}

void WriteCatalog(const Store& store, v1::GetStatusResponse* out) {
  out->set_daemon_epoch(store.daemon_epoch());
  const StoreCounters counters = store.inspection().Counters();
  out->set_sessions(static_cast<uint32_t>(counters.sessions));
  out->set_sequences(static_cast<uint32_t>(counters.sequences));
  out->set_models(static_cast<uint32_t>(counters.models));
  out->set_prefix_pages(counters.prefix_pages);
  out->set_publications(counters.publications);
  out->set_retired_bytes(counters.retired_bytes);
  out->set_lookup_tokens(counters.lookup_tokens);
  out->set_lookup_hit_tokens(counters.lookup_hit_tokens);
  out->set_recompressions(counters.recompressions);
  out->set_recompress_failures(counters.recompress_failures);
  out->set_recompressed_bytes(counters.recompressed_bytes);
  out->set_released_bytes(counters.released_bytes);
  out->set_artefacts(counters.artefacts);
  out->set_artefact_hits(counters.artefact_hits);
  out->set_evicted_pages(counters.evicted_pages);
  out->set_evicted_stored_pages(counters.evicted_stored_pages);
  out->set_promoted_pages(counters.promoted_pages);
  out->set_demoted_pages(counters.demoted_pages);
  out->set_replicated_pages(counters.replicated_pages);
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
  out->set_asked(c.asked);
  out->set_hits(c.hits);
  out->set_misses(c.misses);
  out->set_coming(c.coming);
  out->set_arrived(c.arrived);
  out->set_stored(c.stored);
  out->set_duplicates(c.duplicates);
  out->set_evicted(c.evicted);
  out->set_changed(c.changed);
  out->set_written(c.written);
  out->set_unwritten(c.unsaved + c.write_failures);
  out->set_read(c.read);
  out->set_read_failures(c.read_failures);
}

void Write(const DiskInfo& d, v1::Disk* out) {
  out->set_path(d.path);
  out->set_queue(d.queue);
  out->set_direct(d.direct);
  out->set_degraded(d.degraded);
  out->set_capacity_bytes(d.capacity_bytes);
  out->set_used_bytes(d.used_bytes);
  out->set_entries(d.entries);
  out->set_waiting(d.waiting);
  out->set_written(d.written);
  out->set_dropped(d.dropped);
  out->set_gone(d.gone);
  out->set_failed(d.failed);
  out->set_evicted(d.evicted);
  out->set_read(d.read);
  out->set_late_loads(d.late_loads);
  out->set_refused_loads(d.refused_loads);
  out->set_corrupt(d.corrupt);
  out->set_io_errors(d.io_errors);
  out->set_deadlines(d.deadlines);
  out->set_stopped_segments(d.stopped_segments);
  out->set_breaker_open(d.breaker_open);
  out->set_draining(d.draining);
  out->set_refused(d.refused);
  out->set_last_error(d.last_error);
  out->set_last_error_time_us(d.last_error_time_us);
  out->set_left_alone_since_us(d.left_alone_since_us);
  out->set_retry_us(static_cast<uint64_t>(d.retry.count()));
}

void Write(const RemoteInfo& r, const ClusterTenants& tenants, v1::Remote* out) {
  out->set_engine(r.engine);
  out->set_servers(r.servers);
  out->set_illness(r.illness);
  out->set_write(r.write);
  for (const RemoteShardInfo& shard : r.shards) {
    v1::RemoteShard* const to = out->add_shards();
    to->set_address(shard.address);
    to->set_breaker_open(shard.breaker_open);
    to->set_last_error(shard.last_error);
    to->set_requests(shard.requests);
    to->set_failures(shard.failures);
    to->set_timeouts(shard.timeouts);
    to->set_hedges(shard.hedges);
    to->set_openings(shard.openings);
    to->set_connections(shard.connections);
    to->set_sent_bytes(shard.sent_bytes);
    to->set_received_bytes(shard.received_bytes);
    Write(shard.probes, to->mutable_probes());
    Write(shard.reads, to->mutable_reads());
    Write("answer", shard.answers, to->mutable_answers());
  }
  out->set_searched(r.searched);
  out->set_found(r.found);
  out->set_searches(r.searches);
  out->set_late_searches(r.late_searches);
  out->set_known_misses(r.known_misses);
  out->set_not_worth(r.not_worth);
  out->set_refused_searches(r.refused_searches);
  out->set_read(r.read);
  out->set_missed(r.missed);
  out->set_late_loads(r.late_loads);
  out->set_refused_loads(r.refused_loads);
  out->set_over_rate(r.over_rate);
  out->set_bytes_per_second(r.bytes_per_second);
  out->set_waiting(r.waiting);
  out->set_waiting_bytes(r.waiting_bytes);
  out->set_written(r.written);
  out->set_written_bytes(r.written_bytes);
  out->set_dropped_full(r.dropped_full);
  out->set_dropped_rate(r.dropped_rate);
  out->set_dropped_local(r.dropped_local);
  out->set_dropped_stop(r.dropped_stop);
  out->set_gone(r.gone);
  out->set_failed(r.failed);
  out->set_secret_fingerprint(r.secret_fingerprint);
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
