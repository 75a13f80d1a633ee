// SPDX-License-Identifier: Apache-2.0
// /status.json and /audit.json: what the status page shows. Counters are since the start; the page
// makes rates and maps of two answers, so that any number of pages share one look of the daemon's.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <nlohmann/json.hpp>
#include <string>

#include "server/telemetry/event_ring.h"
#include "server/telemetry/traffic.h"
#include "server/web/pages.h"

namespace kvstrata {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMostEvents = 200;  // events in one answer

HttpAnswer JsonAnswer(unsigned status, const Json& document) {
  HttpAnswer answer;
  answer.status = status;
  answer.type = "application/json";
  answer.policy = "default-src 'none'; frame-ancestors 'none'";
  answer.body = document.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  return answer;
}

uint64_t UptimeUs(const PageSource& source) {
  const auto up = std::chrono::steady_clock::now() - source.started;
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(up).count());
}

Json PartsJson(const PageSource& source) {
  Json parts = Json::array();
  for (const PartHealth& part : HealthNow(source)) {
    parts.push_back({{"part", part.part}, {"failure", part.failure}});
  }
  return parts;
}

Json TiersJson(const DaemonNumbers& numbers) {
  Json tiers = Json::array();
  for (const PoolInfo& pool : numbers.pools) {
    tiers.push_back({{"tier", NameOf(pool.tier)},
                     {"device", pool.device},
                     {"used_bytes", pool.used_bytes},
                     {"cached_bytes", pool.cached_bytes},
                     {"pinned_bytes", pool.pinned_bytes},
                     {"capacity_bytes", pool.capacity_bytes},
                     {"failure", pool.failure}});
  }
  if (numbers.chunks.region_bytes != 0) {
    const ChunkNumbers& chunks = numbers.chunks;
    tiers.push_back(
        {{"tier", "chunks"},
         {"used_bytes", chunks.used_bytes()},
         {"cached_bytes", chunks.of(ChunkState::kShown).bytes -
                              std::min(chunks.of(ChunkState::kShown).bytes, chunks.leased.bytes)},
         {"pinned_bytes", chunks.leased.bytes},
         {"capacity_bytes", chunks.capacity_bytes}});
  }
  if (numbers.disk) {
    const DiskInfo& disk = *numbers.disk;
    tiers.push_back({{"tier", "disk"},
                     {"used_bytes", disk.used_bytes},
                     {"capacity_bytes", disk.capacity_bytes},
                     {"waiting", disk.waiting},
                     {"errors", disk.corrupt + disk.io_errors + disk.deadlines},
                     {"draining", disk.draining}});
  }
  return tiers;
}

// What nodes share; null: no remote tier. It has no capacity that the daemon knows.
Json RemoteJson(const DaemonNumbers& numbers) {
  if (!numbers.remote) return nullptr;
  const RemoteInfo& remote = *numbers.remote;
  uint64_t received = 0, sent = 0, left_alone = 0;
  for (const RemoteShardInfo& shard : remote.shards) {
    received += shard.received_bytes;
    sent += shard.sent_bytes;
    left_alone += shard.breaker_open;
  }
  return {{"engine", remote.engine},   {"shards", remote.shards.size()},
          {"left_alone", left_alone},  {"received_bytes", received},
          {"sent_bytes", sent},        {"read", remote.read},
          {"written", remote.written}, {"waiting", remote.waiting},
          {"failed", remote.failed},   {"illness", remote.illness}};
}

// Engines' chunks; null: no engine has come.
Json ChunksJson(const ChunkNumbers& n) {
  if (n.region_bytes == 0) return nullptr;
  const ChunkCounters& c = n.counters;
  return {{"uid", n.user},        {"shown", n.of(ChunkState::kShown).chunks},
          {"engines", n.engines}, {"connections", n.connections},
          {"resting", n.resting}, {"starved", n.starved},
          {"hits", c.hits},       {"misses", c.misses},
          {"stored", c.stored},   {"read", c.read},
          {"written", c.written}, {"evicted", c.evicted}};
}

// What plans lose in engines that said it.
Json EngineRecallsJson(const std::vector<EngineRecall>& engines) {
  Json rows = Json::array();
  for (const EngineRecall& engine : engines) {
    const LayerRecall all = engine.all();
    const LayerRecall& worst = engine.worst();
    rows.push_back({{"engine", engine.engine},
                    {"plan", engine.plan},
                    {"model_name", engine.model},
                    {"samples", all.samples},
                    {"recall", all.recall},
                    {"worst_layer", worst.layer},
                    {"worst_recall", worst.recall}});
  }
  return rows;
}

Json CountersJson(const DaemonNumbers& numbers) {
  const StepTotals& steps = numbers.sessions.steps;
  Json traffic = Json::object();
  for (size_t i = 0; i < kBytePaths; ++i) {
    const auto path = static_cast<BytePath>(i);
    traffic[std::string(NameOf(path))] = BytesOf(path);
  }
  const StoreCounters& c = numbers.counters;
  traffic["device_to_host"] = c.demoted_bytes;
  traffic["host_to_device"] = c.promoted_bytes;
  traffic["device_to_device"] = c.replicated_bytes;
  return {{"decode_steps", steps.decoded},    {"decode_steps_in_full", steps.in_full},
          {"selections", steps.selected},     {"selections_kept", steps.reused},
          {"lookup_tokens", c.lookup_tokens}, {"lookup_hit_tokens", c.lookup_hit_tokens},
          {"evicted_pages", c.evicted_pages}, {"traffic_bytes", traffic}};
}

Json SequencesJson(const LiveNumbers& live) {
  Json sequences = Json::array();
  for (const LiveSequence& s : live.sequences) {
    const SelectionTotals& totals = s.sample.totals;
    sequences.push_back({{"sequence", s.info.sequence},
                         {"client", s.client},
                         {"model_name", s.info.model_name},
                         {"plan", s.info.plan.name},
                         {"tokens", s.info.tokens},
                         {"steps", totals.steps},
                         {"device_bytes", s.info.device_bytes},
                         {"host_bytes", s.info.host_bytes},
                         {"age_us", s.info.age_us},
                         {"layers", s.sample.layers},
                         {"page_tokens", s.sample.page_tokens},
                         {"uncounted", s.sample.uncounted},
                         {"in_full", s.info.in_full},
                         {"bucket_tokens", totals.bucket_tokens},
                         {"counts", totals.counts}});
  }
  return sequences;
}

Json QueueJson(const DaemonNumbers& numbers) {
  Json work = Json::array();
  for (const WorkInfo& w : numbers.live->work) {
    work.push_back({{"sequence", w.sequence},
                    {"plan", w.plan},
                    {"state", w.state},
                    {"waiting_us", w.waiting_us},
                    {"error", w.error}});
  }
  return {{"requests_bytes", numbers.sessions.requests.bytes},
          {"replies_bytes", numbers.sessions.replies.bytes},
          {"disk_waiting", numbers.disk ? numbers.disk->waiting : 0},
          {"work", work}};
}

// Those behind number `after`, the last kMostEvents at most.
Json EventsJson(uint64_t after) {
  Json events = Json::array();
  const EventRing& ring = RecentEvents();
  uint64_t missed = 0;
  for (uint64_t at = ring.Begin(after);;) {
    const std::optional<RecordedEvent> event = ring.Next(at, &missed);
    if (!event) return events;
    at = event->number;
    Json fields = Json::object();
    for (const auto& field : event->fields) fields[field.key] = field.value;
    if (events.size() == kMostEvents) events.erase(events.begin());
    events.push_back({{"number", event->number},
                      {"time_us", event->time_us},
                      {"level", NameOf(event->level)},
                      {"event", event->name},
                      {"fields", fields}});
  }
}

Json AuditJson(const PageAudits& audits) {
  const std::optional<PageAudits::Report> last = audits.last();
  if (!last) return nullptr;
  const AuditReport& audit = last->audit;
  return {{"time_us", last->time_us},   {"clean", audit.findings.empty()},
          {"findings", audit.findings}, {"pages", audit.pages},
          {"bytes", audit.bytes},       {"sequences", audit.sequences},
          {"sessions", audit.sessions}};
}

uint64_t AfterOf(std::string_view query) {
  constexpr std::string_view kAfter = "after=";
  uint64_t after = 0;
  if (query.starts_with(kAfter)) {
    query.remove_prefix(kAfter.size());
    std::from_chars(query.data(), query.data() + query.size(), after);
  }
  return after;
}

}  // namespace

HttpAnswer StatusDataPage(PageSource* source, const HttpRequest& request) {
  if (auto refused = RefuseForeign(request)) return *std::move(refused);
  source->status.Note();
  const auto numbers = source->numbers.Get();
  const auto age = std::chrono::steady_clock::now() - numbers->taken;
  Json document = {
      {"version", source->version},
      {"commit", source->commit},
      {"uptime_us", UptimeUs(*source)},
      {"taken_us",
       std::chrono::duration_cast<std::chrono::microseconds>(numbers->taken.time_since_epoch())
           .count()},
      {"age_us", std::chrono::duration_cast<std::chrono::microseconds>(age).count()},
      {"parts", PartsJson(*source)},
      {"sessions", numbers->counters.sessions},
      {"sequences", numbers->counters.sequences},
      {"models", numbers->counters.models},
      {"tiers", TiersJson(*numbers)},
      {"remote", RemoteJson(*numbers)},
      {"chunks", ChunksJson(numbers->chunks)},
      {"engines", EngineRecallsJson(numbers->engine_recalls)},
      {"counters", CountersJson(*numbers)},
      {"live", nullptr},  // at the next look: nobody had the page open
      {"events", EventsJson(AfterOf(request.query))},
      {"audit", AuditJson(source->audits)},
  };
  if (numbers->live) {
    document["live"] = {{"all_sequences", numbers->live->all_sequences},
                        {"sequences", SequencesJson(*numbers->live)},
                        {"queue", QueueJson(*numbers)}};
  }
  return JsonAnswer(200, document);
}

HttpAnswer AuditPage(PageSource* source, const HttpRequest& request) {
  if (auto refused = RefuseForeign(request)) return *std::move(refused);
  source->status.Note();
  const std::optional<std::chrono::seconds> wait = source->audits.Ask();
  if (wait) return JsonAnswer(429, {{"wait_seconds", wait->count()}});
  return JsonAnswer(202, {{"wait_seconds", 0}});
}

}  // namespace kvstrata
