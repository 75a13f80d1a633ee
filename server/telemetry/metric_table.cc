// SPDX-License-Identifier: Apache-2.0
#include "server/telemetry/metric_table.h"

#include <algorithm>

namespace kvstrata {
namespace {

using enum MetricType;

constexpr Metric kRows[] = {
    // --- the daemon
    {"kvstrata_build_info", kGauge, "", "version,commit", "1, with what this daemon is."},
    {"kvstrata_snapshot_age_seconds", kGauge, "seconds", "",
     "How old the numbers of the store and the disk are: they are looked up once a second."},
    {"kvstrata_healthy", kGauge, "", "", "1 while the daemon serves and lacks nothing."},
    {"kvstrata_degraded", kGauge, "", "what",
     "1 while that part hangs, is lost or is ill: what /readyz?verbose lists."},
    {"kvstrata_draining", kGauge, "", "", "1 while the disk takes no new values."},
    {"kvstrata_sessions", kGauge, "sessions", "", "Sessions that are open, on both transports."},
    {"kvstrata_sequences", kGauge, "sequences", "", "Sequences that are open."},
    {"kvstrata_models", kGauge, "models", "", "Models that are registered."},

    // --- requests
    {"kvstrata_duration_seconds", kHistogram, "seconds", "what",
     "How long it took: open, lookup, rpc of a client; disk_load and remote_load, a batch that an "
     "open "
     "waits for; remote_search, what it asked before; publish, of a recompression."},
    {"kvstrata_refusals_total", kCounter, "refusals", "reason",
     "What clients were told instead of an answer, by reason."},
    {"kvstrata_spans_total", kCounter, "spans", "result",
     "Spans of traced requests: exported to trace.endpoint; failed, it did not take them; dropped, "
     "the queue had no room."},
    {"kvstrata_lookup_tokens_total", kCounter, "tokens", "",
     "Tokens of prompts that sequences were opened with."},
    {"kvstrata_lookup_hit_tokens_total", kCounter, "tokens", "",
     "Tokens of these that were held already."},
    {"kvstrata_verified_hits_total", kCounter, "hits", "result",
     "Held positions that engines computed anew and compared: equal, mismatch."},
    {"kvstrata_artefact_hits_total", kCounter, "prompts", "",
     "Recompressed prompts that a sequence was opened on."},
    {"kvstrata_loaded_pages_total", kCounter, "pages", "",
     "Pages and index blocks that came from disk because a sequence opened on them."},
    {"kvstrata_loaded_artefacts_total", kCounter, "prompts", "",
     "Recompressed prompts that came from disk."},

    // --- steps
    {"kvstrata_decode_steps_total", kCounter, "steps", "",
     "Decode steps that ended, one for each sequence in a batch."},
    {"kvstrata_decode_steps_in_full_total", kCounter, "steps", "",
     "Decode steps of a plan that selects, whose sequence is shorter than the plan's break-even "
     "length (min_tokens): it is attended in full."},
    {"kvstrata_selections_total", kCounter, "selections", "",
     "A layer's selections by selectors that keep theirs (vote, cascade), on CPUs."},
    {"kvstrata_selections_kept_total", kCounter, "selections", "",
     "Selections of these that an earlier step had made."},
    {"kvstrata_recall_samples_total", kCounter, "steps", "plan",
     "Decode steps that were measured beside full attention in the background."},
    {"kvstrata_recall_ratio", kGauge, "ratio", "plan",
     "Share of full attention on what the plan attended, of the last sample; 0 without a sample."},
    {"kvstrata_recall_error_ratio", kGauge, "ratio", "plan",
     "Relative error of the plan's output, of the last sample; 0 without a sample."},

    // --- rings
    {"kvstrata_ring_depth_bytes", kGauge, "bytes", "ring",
     "What waits in the rings of all sessions together: requests, replies."},
    {"kvstrata_ring_fullest_bytes", kGauge, "bytes", "ring",
     "What waits in the ring of the session where most does."},
    {"kvstrata_ring_full_total", kCounter, "messages", "ring", "Messages that found a ring full."},

    // --- pools
    {"kvstrata_pool_capacity_bytes", kGauge, "bytes", "tier,device", "What the pool may take."},
    {"kvstrata_pool_taken_bytes", kGauge, "bytes", "tier,device",
     "Arenas: each is one session's as a whole, however little of it is used."},
    {"kvstrata_pool_used_bytes", kGauge, "bytes", "tier,device",
     "Pages, index blocks and extents that something refers to."},
    {"kvstrata_pool_cached_bytes", kGauge, "bytes", "tier,device",
     "Of the used ones, what no sequence needs: it goes when room is needed."},
    {"kvstrata_pool_pinned_bytes", kGauge, "bytes", "tier,device",
     "Of the used ones, what only pins keep."},
    {"kvstrata_pool_retired_bytes", kGauge, "bytes", "tier,device",
     "What was replaced and a reader may still see."},
    {"kvstrata_pool_lost", kGauge, "", "tier,device", "1 when the daemon has lost its device."},
    {"kvstrata_prefix_pages", kGauge, "pages", "", "Pages that the prefix index names."},
    {"kvstrata_artefacts", kGauge, "prompts", "",
     "Recompressed prompts that the next sequence can use."},
    {"kvstrata_pins_used_bytes", kGauge, "bytes", "", "What pins keep, all together."},
    {"kvstrata_pins_limit_bytes", kGauge, "bytes", "", "What pins may keep (pin.limit_bytes)."},
    {"kvstrata_evicted_pages_total", kCounter, "pages", "stored",
     "Pages and index blocks that left memory for others: stored on disk too, or lost."},
    {"kvstrata_moved_pages_total", kCounter, "pages", "path",
     "Pages that were moved between pools in the background, or for a sequence that opened."},
    {"kvstrata_transfer_bytes_total", kCounter, "bytes", "path", "Bytes that went this way."},
    {"kvstrata_publications_total", kCounter, "tables", "", "Tables of sequences, published."},
    {"kvstrata_recompressions_total", kCounter, "runs", "result",
     "Runs of a plan's codec over a sequence: published, failed."},
    {"kvstrata_recompressed_bytes_total", kCounter, "bytes", "", "Extents that these wrote."},
    {"kvstrata_released_bytes_total", kCounter, "bytes", "",
     "Raw pages that were given up for extents, or moved to the host."},

    // --- engine chunks
    {"kvstrata_chunk_capacity_bytes", kGauge, "bytes", "", "chunks.bytes."},
    {"kvstrata_chunks", kGauge, "chunks", "state",
     "Chunks by state: credited, an engine may write it; summing, complete; reading, it comes from "
     "a tier; shown, whoever asks finds it; dropped, it was changed and is leased still."},
    {"kvstrata_chunks_bytes", kGauge, "bytes", "state", "What these take."},
    {"kvstrata_chunk_leased_bytes", kGauge, "bytes", "",
     "Chunks that engines hold, so that they are not evicted."},
    {"kvstrata_chunk_engines", kGauge, "engines", "",
     "Engines that are connected, or may still copy."},
    {"kvstrata_chunk_connections", kGauge, "connections", "",
     "Connections of schedulers and workers."},
    {"kvstrata_chunk_resting", kGauge, "schedulers", "",
     "Schedulers that were lost and whose processes may still copy: what they had is nobody's."},
    {"kvstrata_chunk_starved", kGauge, "connections", "",
     "Connections that get no credits now, because all room is leased, credited or being summed."},
    {"kvstrata_chunk_asked_total", kCounter, "chunks", "result",
     "Chunks that engines asked for: hit, in memory; miss; coming, from a tier or being summed."},
    {"kvstrata_chunk_arrived_total", kCounter, "chunks", "", "Chunks of those that came."},
    {"kvstrata_chunk_stored_total", kCounter, "chunks", "", "Chunks that engines stored."},
    {"kvstrata_chunk_stored_bytes_total", kCounter, "bytes", "", "What these take."},
    {"kvstrata_chunk_duplicates_total", kCounter, "chunks", "",
     "Chunks that engines stored and that were there already."},
    {"kvstrata_chunk_evicted_total", kCounter, "chunks", "", "Chunks that gave room to others."},
    {"kvstrata_chunk_changed_total", kCounter, "chunks", "",
     "Chunks that an engine wrote to after it had stored them: they were dropped."},
    {"kvstrata_chunk_written_total", kCounter, "chunks", "", "Chunks that tiers below took."},
    {"kvstrata_chunk_written_bytes_total", kCounter, "bytes", "", "What these take."},
    {"kvstrata_chunk_unwritten_total", kCounter, "chunks", "why",
     "Chunks that no tier has: gone (evicted before), failed (a tier did not take them)."},
    {"kvstrata_chunk_read_total", kCounter, "chunks", "", "Chunks that came from tiers below."},
    {"kvstrata_chunk_read_bytes_total", kCounter, "bytes", "", "What these take."},
    {"kvstrata_chunk_read_failures_total", kCounter, "chunks", "",
     "Chunks that a tier seemed to have and that did not come: late, damaged or gone."},
    {"kvstrata_engine_recall_samples_total", kCounter, "samples", "plan",
     "Query heads of a layer and step that engines measured beside full attention over their own "
     "blocks."},
    {"kvstrata_engine_recall_ratio", kGauge, "ratio", "plan",
     "Share of full attention on what the plan attended, as an engine told it last; 0 without a "
     "sample."},

    // --- the disk tier; 0 without one
    {"kvstrata_disk_capacity_bytes", kGauge, "bytes", "", "What values may take on disk."},
    {"kvstrata_disk_used_bytes", kGauge, "bytes", "", "What they take."},
    {"kvstrata_disk_values", kGauge, "values", "", "Values on disk."},
    {"kvstrata_disk_waiting_pages", kGauge, "pages", "", "Pages that wait to be written."},
    {"kvstrata_disk_written_pages_total", kCounter, "pages", "", "Pages that were written."},
    {"kvstrata_disk_read_pages_total", kCounter, "pages", "", "Pages that were read."},
    {"kvstrata_disk_unwritten_pages_total", kCounter, "pages", "why",
     "Pages that were not written: dropped (the queue was full), gone (evicted before), failed "
     "(the disk did not take them), draining."},
    {"kvstrata_disk_evicted_values_total", kCounter, "values", "",
     "Values that gave their place on a full disk."},
    {"kvstrata_disk_late_loads_total", kCounter, "loads", "",
     "Loads that disk.load_timeout ended: the sequence opened with less."},
    {"kvstrata_disk_refused_loads_total", kCounter, "loads", "",
     "Loads that were not begun because too many waited."},
    {"kvstrata_disk_corrupt_values_total", kCounter, "values", "",
     "Values that failed their check and left."},
    {"kvstrata_disk_io_errors_total", kCounter, "errors", "", "Errors of the device."},
    {"kvstrata_disk_deadlines_total", kCounter, "requests", "",
     "Requests that the device did not answer in time."},
    {"kvstrata_disk_stopped_segments", kGauge, "segments", "",
     "Segments that take no more writes, after errors."},
    {"kvstrata_disk_breaker_open", kGauge, "", "", "1 while the disk is left alone, after errors."},

    // --- the remote tier; 0 without one
    {"kvstrata_remote_searches_total", kCounter, "searches", "",
     "What opening sequences asked the remote tier for, each in one call."},
    {"kvstrata_remote_late_searches_total", kCounter, "searches", "",
     "Searches of these that their deadline ended."},
    {"kvstrata_remote_skipped_searches_total", kCounter, "searches", "why",
     "Searches that were not made: known_miss (missed within remote.miss_ttl), not_worth "
     "(computing is quicker), refused (too many under way)."},
    {"kvstrata_remote_searched_values_total", kCounter, "values", "",
     "Values that searches asked for."},
    {"kvstrata_remote_found_values_total", kCounter, "values", "",
     "Values of these that it said it has."},
    {"kvstrata_remote_read_values_total", kCounter, "values", "", "Values that were read."},
    {"kvstrata_remote_missed_values_total", kCounter, "values", "",
     "Values that were found and did not come: the prefix ended there."},
    {"kvstrata_remote_late_loads_total", kCounter, "loads", "",
     "Loads that their deadline ended: the sequence opened with less."},
    {"kvstrata_remote_refused_loads_total", kCounter, "loads", "",
     "Loads that were not begun because too many waited."},
    {"kvstrata_remote_over_rate_total", kCounter, "opens", "",
     "Opens that remote.read_rate or their tenant's rate cut."},
    {"kvstrata_remote_read_rate_bytes", kGauge, "bytes", "",
     "Bytes a second of the last loads, from the request on; 0: none for a minute."},
    {"kvstrata_remote_waiting_values", kGauge, "values", "",
     "Pages and artefacts that wait to be written."},
    {"kvstrata_remote_waiting_bytes", kGauge, "bytes", "",
     "What these stand for; at most remote.queue_bytes."},
    {"kvstrata_remote_written_values_total", kCounter, "values", "", "Values that were written."},
    {"kvstrata_remote_unwritten_values_total", kCounter, "values", "why",
     "Values that were not written: full (the queue), over_rate (their tenant's), not_on_disk (the "
     "disk did not come to have it), gone (it left memory and disk), failed (the servers did not "
     "take it), stop."},
    {"kvstrata_remote_shards", kGauge, "servers", "",
     "Servers of the remote tier that the daemon knows."},
    {"kvstrata_remote_breakers_open", kGauge, "servers", "",
     "Servers of these that are left alone, after errors."},

    {"kvstrata_remote_answers_total", kCounter, "values", "server,what,result",
     "What became of values that a server was asked for. what: probe, whether it has one; read. "
     "result: hit; absent; refused, it answered with an error; late; lost, the connection ended "
     "first, and another server may have been asked; damaged, of the hits, failed its check."},
    {"kvstrata_remote_answer_seconds", kHistogram, "seconds", "server",
     "How long a server took, from a request of any kind until its whole answer."},
    {"kvstrata_remote_server_bytes_total", kCounter, "bytes", "server,direction",
     "Bytes sent to a server and received from it, without those of TLS itself."},
    {"kvstrata_remote_agent_bytes", kGauge, "bytes", "server",
     "Memory of calls that Mooncake's agent has not answered, waited for or not; at most 64 MiB. "
     "Of Redis 0."},
    {"kvstrata_remote_agent_peak_bytes", kGauge, "bytes", "server", "The most that this was."},
    {"kvstrata_remote_requests_total", kCounter, "requests", "server",
     "Requests that a server was sent, of any kind."},
    {"kvstrata_remote_connection_failures_total", kCounter, "connections", "server",
     "Connections to a server that failed, or were closed because it was silent."},
    {"kvstrata_remote_hedges_total", kCounter, "requests", "server",
     "Requests to a slow server for which a replica was asked instead."},
    {"kvstrata_remote_breaker_open", kGauge, "", "server",
     "1 while the server is left alone, after errors."},
    {"kvstrata_remote_breaker_openings_total", kCounter, "openings", "server",
     "How often that began."},

    // --- users
    {"kvstrata_user_sequences", kGauge, "sequences", "user", "Sequences that the user has open."},
    {"kvstrata_user_used_bytes", kGauge, "bytes", "user,tier", "Arenas that the user holds."},
    {"kvstrata_user_refusals_total", kCounter, "refusals", "user",
     "Requests that a limit of the user's refused."},

    // --- the process
    {"kvstrata_cgroup_limit_bytes", kGauge, "bytes", "",
     "Memory that the daemon's cgroup may be charged; 0: no limit."},
    {"kvstrata_cgroup_charged_bytes", kGauge, "bytes", "", "Memory that it is charged."},
    {"kvstrata_http_requests_total", kCounter, "requests", "path",
     "Requests to http.listen that were answered; other: a path that there is not."},
    {"kvstrata_http_dropped_total", kCounter, "connections", "why",
     "Connections to http.listen that were closed without an answer: busy (too many), late (the "
     "deadline), malformed."},
    {"process_cpu_seconds_total", kCounter, "seconds", "", "CPU time of the process."},
    {"process_resident_memory_bytes", kGauge, "bytes", "",
     "Memory of the process that is present, shared memory among it."},
    {"process_open_fds", kGauge, "descriptors", "", "Descriptors that are open."},
    {"process_max_fds", kGauge, "descriptors", "", "Descriptors that may be."},
    {"process_start_time_seconds", kGauge, "seconds", "", "When the process began, since 1970."},
};

}  // namespace

std::span<const Metric> AllMetrics() { return kRows; }

std::optional<size_t> FindMetric(std::string_view name) {
  const auto* const row = std::ranges::find(kRows, name, &Metric::name);
  if (row == std::ranges::end(kRows)) return std::nullopt;
  return static_cast<size_t>(row - kRows);
}

}  // namespace kvstrata
