// SPDX-License-Identifier: Apache-2.0
// /metrics: the table of metrics (server/telemetry/metric_table.h), filled in.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>

#include "server/telemetry/metric_text.h"
#include "server/telemetry/refusals.h"
#include "server/telemetry/spans.h"
#include "server/telemetry/traffic.h"
#include "server/telemetry/verified_hits.h"
#include "server/web/pages.h"

namespace kvstrata {
namespace {

// What every process tells Prometheus of itself, by its conventions: from /proc/self.
//
// Any thread. Cost: three small files and a directory; what cannot be read is 0.
struct ProcessNumbers {
  double cpu_seconds = 0, started = 0;  // since 1970
  uint64_t resident_bytes = 0, open_descriptors = 0, most_descriptors = 0;
};

double SecondsOf(const timeval& t) {
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
}

// Field `n` of /proc/self/stat, from 3 on: the second one is a name, with anything in it.
uint64_t StatField(int n) {
  std::ifstream file("/proc/self/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream rest(text.substr(name_end + 1));
  std::string field;
  for (int i = 3; i <= n; ++i) rest >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
}

uint64_t BootTime() {
  std::ifstream file("/proc/stat");
  for (std::string key; file >> key;) {
    uint64_t seconds = 0;
    if (key == "btime" && file >> seconds) return seconds;
  }
  return 0;
}

ProcessNumbers ReadProcessNumbers() {
  ProcessNumbers numbers;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  numbers.cpu_seconds = SecondsOf(usage.ru_utime) + SecondsOf(usage.ru_stime);
  constexpr int kStarted = 22, kResidentPages = 24;
  // Neither changes.
  static const double started =
      static_cast<double>(BootTime()) +
      static_cast<double>(StatField(kStarted)) / static_cast<double>(sysconf(_SC_CLK_TCK));
  numbers.started = started;
  numbers.resident_bytes = StatField(kResidentPages) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  std::error_code error;
  for (auto fd = std::filesystem::directory_iterator("/proc/self/fd", error);
       !error && fd != std::filesystem::directory_iterator(); fd.increment(error)) {
    ++numbers.open_descriptors;
  }
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) numbers.most_descriptors = files.rlim_cur;
  return numbers;
}

uint64_t Flag(bool is) { return is ? 1 : 0; }

void AddDaemon(const PageSource& source, const DaemonNumbers& numbers, MetricText* to) {
  to->Add("kvstrata_build_info", {{"version", source.version}, {"commit", source.commit}},
          uint64_t{1});
  const std::chrono::duration<double> age = std::chrono::steady_clock::now() - numbers.taken;
  to->Add("kvstrata_snapshot_age_seconds", {}, age.count());
  bool well = true;
  for (const PartHealth& part : HealthNow(source)) {
    well = well && part.failure.empty();
    to->Add("kvstrata_degraded", {{"what", part.part}}, Flag(!part.failure.empty()));
  }
  to->Add("kvstrata_healthy", {}, Flag(well));
  to->Add("kvstrata_draining", {}, Flag(numbers.disk && numbers.disk->draining));
  to->Add("kvstrata_sessions", {}, numbers.counters.sessions);
  to->Add("kvstrata_sequences", {}, numbers.counters.sequences);
  to->Add("kvstrata_models", {}, numbers.counters.models);
}

void AddRequests(const StoreCounters& counters, MetricText* to) {
  for (size_t i = 0; i < kTimed; ++i) {
    const auto what = static_cast<Timed>(i);
    to->Add("kvstrata_duration_seconds", {{"what", NameOf(what)}}, TimesOf(what));
  }
  for (const auto& [reason, count] : Refusals()) {
    to->Add("kvstrata_refusals_total", {{"reason", reason}}, count);
  }
  for (size_t i = 0; i < SpanQueue::kResults; ++i) {
    const auto result = static_cast<SpanQueue::Result>(i);
    to->Add("kvstrata_spans_total", {{"result", NameOf(result)}}, Spans().count(result));
  }
  to->Add("kvstrata_lookup_tokens_total", {}, counters.lookup_tokens);
  to->Add("kvstrata_lookup_hit_tokens_total", {}, counters.lookup_hit_tokens);
  for (const bool equal : {true, false}) {
    to->Add("kvstrata_verified_hits_total", {{"result", equal ? "equal" : "mismatch"}},
            VerifiedHits(equal));
  }
  to->Add("kvstrata_artefact_hits_total", {}, counters.artefact_hits);
  to->Add("kvstrata_loaded_pages_total", {}, counters.loaded_pages);
  to->Add("kvstrata_loaded_artefacts_total", {}, counters.loaded_artefacts);
}

void AddSteps(const DaemonNumbers& numbers, MetricText* to) {
  const StepTotals& steps = numbers.sessions.steps;
  to->Add("kvstrata_decode_steps_total", {}, steps.decoded);
  to->Add("kvstrata_decode_steps_in_full_total", {}, steps.in_full);
  to->Add("kvstrata_selections_total", {}, steps.selected);
  to->Add("kvstrata_selections_kept_total", {}, steps.reused);
  for (const SampledRecall& recall : numbers.recall) {
    to->Add("kvstrata_recall_samples_total", {{"plan", recall.plan}}, recall.steps);
    to->Add("kvstrata_recall_ratio", {{"plan", recall.plan}}, recall.recall);
    to->Add("kvstrata_recall_error_ratio", {{"plan", recall.plan}}, recall.error);
  }
}

void AddRings(const SessionTotals& sessions, MetricText* to) {
  const auto add = [to](std::string_view ring, const RingDepths& depths, uint64_t full) {
    to->Add("kvstrata_ring_depth_bytes", {{"ring", ring}}, depths.bytes);
    to->Add("kvstrata_ring_fullest_bytes", {{"ring", ring}}, depths.fullest);
    to->Add("kvstrata_ring_full_total", {{"ring", ring}}, full);
  };
  add("request", sessions.requests, sessions.steps.request_ring_full);
  add("reply", sessions.replies, RepliesThatWaited());
}

void AddPools(const DaemonNumbers& numbers, MetricText* to) {
  for (const PoolInfo& pool : numbers.pools) {
    const MetricText::Labels labels = {{"tier", NameOf(pool.tier)}, {"device", pool.device}};
    to->Add("kvstrata_pool_capacity_bytes", labels, pool.capacity_bytes);
    to->Add("kvstrata_pool_taken_bytes", labels, pool.taken_bytes);
    to->Add("kvstrata_pool_used_bytes", labels, pool.used_bytes);
    to->Add("kvstrata_pool_cached_bytes", labels, pool.cached_bytes);
    to->Add("kvstrata_pool_pinned_bytes", labels, pool.pinned_bytes);
    to->Add("kvstrata_pool_retired_bytes", labels, pool.retired_bytes);
    to->Add("kvstrata_pool_lost", labels, Flag(!pool.failure.empty()));
  }
  to->Add("kvstrata_prefix_pages", {}, numbers.counters.prefix_pages);
  to->Add("kvstrata_artefacts", {}, numbers.counters.artefacts);
  to->Add("kvstrata_pins_used_bytes", {}, numbers.pins.used_bytes);
  to->Add("kvstrata_pins_limit_bytes", {}, numbers.pins.limit_bytes);
}

void AddMoves(const StoreCounters& c, MetricText* to) {
  to->Add("kvstrata_evicted_pages_total", {{"stored", "true"}}, c.evicted_stored_pages);
  to->Add("kvstrata_evicted_pages_total", {{"stored", "false"}},
          c.evicted_pages - std::min(c.evicted_pages, c.evicted_stored_pages));
  const auto moved = [to](std::string_view path, uint64_t pages, uint64_t bytes) {
    to->Add("kvstrata_moved_pages_total", {{"path", path}}, pages);
    to->Add("kvstrata_transfer_bytes_total", {{"path", path}}, bytes);
  };
  moved("device_to_host", c.demoted_pages, c.demoted_bytes);
  moved("host_to_device", c.promoted_pages, c.promoted_bytes);
  moved("device_to_device", c.replicated_pages, c.replicated_bytes);
  for (size_t i = 0; i < kBytePaths; ++i) {
    const auto path = static_cast<BytePath>(i);
    to->Add("kvstrata_transfer_bytes_total", {{"path", NameOf(path)}}, BytesOf(path));
  }
  to->Add("kvstrata_publications_total", {}, c.publications);
  to->Add("kvstrata_recompressions_total", {{"result", "published"}}, c.recompressions);
  to->Add("kvstrata_recompressions_total", {{"result", "failed"}}, c.recompress_failures);
  to->Add("kvstrata_recompressed_bytes_total", {}, c.recompressed_bytes);
  to->Add("kvstrata_released_bytes_total", {}, c.released_bytes);
}

void AddChunks(const ChunkNumbers& numbers, MetricText* to) {
  to->Add("kvstrata_chunk_capacity_bytes", {}, numbers.capacity_bytes);
  for (size_t i = 1; i < kChunkStates; ++i) {
    const auto state = static_cast<ChunkState>(i);
    to->Add("kvstrata_chunks", {{"state", NameOf(state)}}, numbers.of(state).chunks);
    to->Add("kvstrata_chunks_bytes", {{"state", NameOf(state)}}, numbers.of(state).bytes);
  }
  to->Add("kvstrata_chunk_leased_bytes", {}, numbers.leased.bytes);
  to->Add("kvstrata_chunk_engines", {}, numbers.engines);
  to->Add("kvstrata_chunk_connections", {}, numbers.connections);
  to->Add("kvstrata_chunk_resting", {}, numbers.resting);
  to->Add("kvstrata_chunk_starved", {}, numbers.starved);
  const ChunkCounters& c = numbers.counters;
  to->Add("kvstrata_chunk_asked_total", {{"result", "hit"}}, c.hits);
  to->Add("kvstrata_chunk_asked_total", {{"result", "miss"}}, c.misses);
  to->Add("kvstrata_chunk_asked_total", {{"result", "coming"}}, c.coming);
  to->Add("kvstrata_chunk_arrived_total", {}, c.arrived);
  to->Add("kvstrata_chunk_stored_total", {}, c.stored);
  to->Add("kvstrata_chunk_stored_bytes_total", {}, c.stored_bytes);
  to->Add("kvstrata_chunk_duplicates_total", {}, c.duplicates);
  to->Add("kvstrata_chunk_evicted_total", {}, c.evicted);
  to->Add("kvstrata_chunk_changed_total", {}, c.changed);
  to->Add("kvstrata_chunk_written_total", {}, c.written);
  to->Add("kvstrata_chunk_written_bytes_total", {}, c.written_bytes);
  to->Add("kvstrata_chunk_unwritten_total", {{"why", "gone"}}, c.unsaved);
  to->Add("kvstrata_chunk_unwritten_total", {{"why", "failed"}}, c.write_failures);
  to->Add("kvstrata_chunk_read_total", {}, c.read);
  to->Add("kvstrata_chunk_read_bytes_total", {}, c.read_bytes);
  to->Add("kvstrata_chunk_read_failures_total", {}, c.read_failures);
}

void AddDisk(const DiskInfo& disk, MetricText* to) {
  to->Add("kvstrata_disk_capacity_bytes", {}, disk.capacity_bytes);
  to->Add("kvstrata_disk_used_bytes", {}, disk.used_bytes);
  to->Add("kvstrata_disk_values", {}, disk.entries);
  to->Add("kvstrata_disk_waiting_pages", {}, disk.waiting);
  to->Add("kvstrata_disk_written_pages_total", {}, disk.written);
  to->Add("kvstrata_disk_read_pages_total", {}, disk.read);
  const auto unwritten = [to](std::string_view why, uint64_t pages) {
    to->Add("kvstrata_disk_unwritten_pages_total", {{"why", why}}, pages);
  };
  unwritten("dropped", disk.dropped);
  unwritten("gone", disk.gone);
  unwritten("failed", disk.failed);
  unwritten("draining", disk.refused);
  to->Add("kvstrata_disk_evicted_values_total", {}, disk.evicted);
  to->Add("kvstrata_disk_late_loads_total", {}, disk.late_loads);
  to->Add("kvstrata_disk_refused_loads_total", {}, disk.refused_loads);
  to->Add("kvstrata_disk_corrupt_values_total", {}, disk.corrupt);
  to->Add("kvstrata_disk_io_errors_total", {}, disk.io_errors);
  to->Add("kvstrata_disk_deadlines_total", {}, disk.deadlines);
  to->Add("kvstrata_disk_stopped_segments", {}, uint64_t{disk.stopped_segments});
  to->Add("kvstrata_disk_breaker_open", {}, Flag(disk.breaker_open));
}

void AddEngineRecalls(const std::vector<PlanRecall>& recalls, MetricText* to) {
  for (const PlanRecall& recall : recalls) {
    to->Add("kvstrata_engine_recall_samples_total", {{"plan", recall.plan}}, recall.samples);
    to->Add("kvstrata_engine_recall_ratio", {{"plan", recall.plan}}, recall.recall);
  }
}

void AddSum(const RemoteAnswersInfo& add, RemoteAnswersInfo* sum) {
  sum->hits += add.hits;
  sum->absent += add.absent;
  sum->refused += add.refused;
  sum->late += add.late;
  sum->lost += add.lost;
  sum->damaged += add.damaged;
}

void AddSum(const RemoteShardInfo& add, RemoteShardInfo* sum) {
  AddSum(add.probes, &sum->probes);
  AddSum(add.reads, &sum->reads);
  for (size_t i = 0; i < add.answers.counts.size(); ++i) {
    sum->answers.counts[i] += add.answers.counts[i];
  }
  sum->answers.sum_us += add.answers.sum_us;
  sum->sent_bytes += add.sent_bytes;
  sum->received_bytes += add.received_bytes;
  sum->agent_bytes += add.agent_bytes;
  sum->agent_peak_bytes += add.agent_peak_bytes;
  sum->requests += add.requests;
  sum->failures += add.failures;
  sum->hedges += add.hedges;
  sum->openings += add.openings;
  sum->breaker_open |= add.breaker_open;
}

void AddAnswers(std::string_view server, std::string_view what, const RemoteAnswersInfo& answers,
                MetricText* to) {
  const auto add = [&](std::string_view result, uint64_t values) {
    to->Add("kvstrata_remote_answers_total",
            {{"server", server}, {"what", what}, {"result", result}}, values);
  };
  add("hit", answers.hits);
  add("absent", answers.absent);
  add("refused", answers.refused);
  add("late", answers.late);
  add("lost", answers.lost);
  add("damaged", answers.damaged);
}

// Those of the configuration are told from the start, others from when the daemon hears of them.
void AddRemoteServers(const RemoteInfo& remote, LabelCap* names, MetricText* to) {
  std::map<std::string_view, RemoteShardInfo> sums;
  sums[LabelCap::kOther];
  for (std::string_view left = remote.servers; !left.empty();) {
    const size_t comma = std::min(left.find(','), left.size());
    sums[names->Of(left.substr(0, comma))];
    left.remove_prefix(std::min(comma + 1, left.size()));
  }
  for (const RemoteShardInfo& shard : remote.shards) AddSum(shard, &sums[names->Of(shard.address)]);
  for (const auto& [server, sum] : sums) {
    AddAnswers(server, "probe", sum.probes, to);
    AddAnswers(server, "read", sum.reads, to);
    to->Add("kvstrata_remote_answer_seconds", {{"server", server}}, sum.answers);
    to->Add("kvstrata_remote_server_bytes_total", {{"server", server}, {"direction", "sent"}},
            sum.sent_bytes);
    to->Add("kvstrata_remote_server_bytes_total", {{"server", server}, {"direction", "received"}},
            sum.received_bytes);
    to->Add("kvstrata_remote_agent_bytes", {{"server", server}}, sum.agent_bytes);
    to->Add("kvstrata_remote_agent_peak_bytes", {{"server", server}}, sum.agent_peak_bytes);
    to->Add("kvstrata_remote_requests_total", {{"server", server}}, sum.requests);
    to->Add("kvstrata_remote_connection_failures_total", {{"server", server}}, sum.failures);
    to->Add("kvstrata_remote_hedges_total", {{"server", server}}, sum.hedges);
    to->Add("kvstrata_remote_breaker_open", {{"server", server}}, Flag(sum.breaker_open));
    to->Add("kvstrata_remote_breaker_openings_total", {{"server", server}}, sum.openings);
  }
}

void AddRemote(const RemoteInfo& remote, MetricText* to) {
  to->Add("kvstrata_remote_searches_total", {}, remote.searches);
  to->Add("kvstrata_remote_late_searches_total", {}, remote.late_searches);
  const auto skipped = [to](std::string_view why, uint64_t searches) {
    to->Add("kvstrata_remote_skipped_searches_total", {{"why", why}}, searches);
  };
  skipped("known_miss", remote.known_misses);
  skipped("not_worth", remote.not_worth);
  skipped("refused", remote.refused_searches);
  to->Add("kvstrata_remote_searched_values_total", {}, remote.searched);
  to->Add("kvstrata_remote_found_values_total", {}, remote.found);
  to->Add("kvstrata_remote_read_values_total", {}, remote.read);
  to->Add("kvstrata_remote_missed_values_total", {}, remote.missed);
  to->Add("kvstrata_remote_late_loads_total", {}, remote.late_loads);
  to->Add("kvstrata_remote_refused_loads_total", {}, remote.refused_loads);
  to->Add("kvstrata_remote_over_rate_total", {}, remote.over_rate);
  to->Add("kvstrata_remote_read_rate_bytes", {}, remote.bytes_per_second);
  to->Add("kvstrata_remote_waiting_values", {}, remote.waiting);
  to->Add("kvstrata_remote_waiting_bytes", {}, remote.waiting_bytes);
  to->Add("kvstrata_remote_written_values_total", {}, remote.written);
  const auto unwritten = [to](std::string_view why, uint64_t values) {
    to->Add("kvstrata_remote_unwritten_values_total", {{"why", why}}, values);
  };
  unwritten("full", remote.dropped_full);
  unwritten("over_rate", remote.dropped_rate);
  unwritten("not_on_disk", remote.dropped_local);
  unwritten("gone", remote.gone);
  unwritten("failed", remote.failed);
  unwritten("stop", remote.dropped_stop);
  const auto open = std::ranges::count_if(remote.shards, &RemoteShardInfo::breaker_open);
  to->Add("kvstrata_remote_shards", {}, uint64_t{remote.shards.size()});
  to->Add("kvstrata_remote_breakers_open", {}, static_cast<uint64_t>(open));
}

void AddUsers(const std::vector<UserReport>& users, LabelCap* names, MetricText* to) {
  struct Sums {
    uint64_t sequences = 0, device_bytes = 0, host_bytes = 0, refused = 0;
  };
  std::map<std::string_view, Sums> sums;
  for (const UserReport& user : users) {
    Sums& sum = sums[names->Of(user.user)];
    sum.sequences += user.used[Limit::kSequences];
    sum.device_bytes += user.used[Limit::kDeviceBytes];
    sum.host_bytes += user.used[Limit::kHostBytes];
    sum.refused += user.refused;
  }
  for (const auto& [user, sum] : sums) {
    to->Add("kvstrata_user_sequences", {{"user", user}}, sum.sequences);
    to->Add("kvstrata_user_used_bytes", {{"user", user}, {"tier", "device"}}, sum.device_bytes);
    to->Add("kvstrata_user_used_bytes", {{"user", user}, {"tier", "host"}}, sum.host_bytes);
    to->Add("kvstrata_user_refusals_total", {{"user", user}}, sum.refused);
  }
}

void AddProcess(const CgroupInfo& cgroup, const HttpCounts& http, MetricText* to) {
  to->Add("kvstrata_cgroup_limit_bytes", {}, cgroup.limit_bytes);
  to->Add("kvstrata_cgroup_charged_bytes", {}, cgroup.charged_bytes);
  const std::vector<std::string_view> paths = PagePaths();
  for (size_t i = 0; i < paths.size(); ++i) {
    to->Add("kvstrata_http_requests_total", {{"path", paths[i]}}, http.answered[i].load());
  }
  to->Add("kvstrata_http_requests_total", {{"path", "other"}}, http.other.load());
  to->Add("kvstrata_http_dropped_total", {{"why", "busy"}}, http.busy.load());
  to->Add("kvstrata_http_dropped_total", {{"why", "late"}}, http.late.load());
  to->Add("kvstrata_http_dropped_total", {{"why", "malformed"}}, http.malformed.load());
  const ProcessNumbers process = ReadProcessNumbers();
  to->Add("process_cpu_seconds_total", {}, process.cpu_seconds);
  to->Add("process_resident_memory_bytes", {}, process.resident_bytes);
  to->Add("process_open_fds", {}, process.open_descriptors);
  to->Add("process_max_fds", {}, process.most_descriptors);
  to->Add("process_start_time_seconds", {}, process.started);
}

}  // namespace

HttpAnswer MetricsPage(PageSource* source, const HttpRequest& request) {
  const auto numbers = source->numbers.Get();
  MetricText text;
  AddDaemon(*source, *numbers, &text);
  AddRequests(numbers->counters, &text);
  AddSteps(*numbers, &text);
  AddRings(numbers->sessions, &text);
  AddPools(*numbers, &text);
  AddMoves(numbers->counters, &text);
  AddChunks(numbers->chunks, &text);
  AddEngineRecalls(numbers->plan_recalls, &text);
  AddDisk(numbers->disk.value_or(DiskInfo()), &text);
  const RemoteInfo remote = numbers->remote.value_or(RemoteInfo());
  AddRemote(remote, &text);
  AddRemoteServers(remote, &source->remote_servers, &text);
  AddUsers(numbers->users, &source->users, &text);
  AddProcess(numbers->cgroup.value_or(CgroupInfo()), source->http, &text);
  const bool open = request.accept.find("application/openmetrics-text") != std::string_view::npos;
  const MetricFormat format = open ? MetricFormat::kOpenMetrics : MetricFormat::kPrometheus;
  return {200, MetricText::ContentType(format), text.Page(format)};
}

}  // namespace kvstrata
