// SPDX-License-Identifier: Apache-2.0
#include "client/cli/top_source.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "client/cli/page_grid.h"

namespace kvstrata::cli {
namespace {

constexpr uint32_t kBuckets = 128;  // more cells than a strip ever has

double Rate(uint64_t before, uint64_t now, double seconds) {
  return seconds > 0 && now > before ? static_cast<double>(now - before) / seconds : 0;
}
// Below 0: nothing was counted.
double Share(uint64_t part_before, uint64_t part, uint64_t all_before, uint64_t all) {
  if (all <= all_before) return -1;
  return static_cast<double>(part - std::min(part, part_before)) /
         static_cast<double>(all - all_before);
}

uint64_t Moved(const v1::GetStatusResponse& status) {
  uint64_t bytes = 0;
  for (const v1::Traffic& traffic : status.traffic()) bytes += traffic.bytes();
  return bytes;
}

std::vector<TopTier> TiersOf(const v1::GetStatusResponse& status) {
  std::vector<TopTier> tiers;
  for (const v1::Pool& pool : status.pools()) {
    std::string note = "cached " + Bytes(pool.cached_bytes());
    if (pool.pinned_bytes() > 0) note += "  pinned " + Bytes(pool.pinned_bytes());
    if (!pool.failure().empty()) note = "LOST: " + Printable(pool.failure());
    tiers.push_back({pool.tier(), pool.used_bytes(), pool.capacity_bytes(), note});
  }
  for (const v1::Disk& disk : status.disks()) {
    std::string note = "waiting " + std::to_string(disk.waiting()) + "  errors " +
                       std::to_string(disk.corrupt() + disk.io_errors() + disk.deadlines());
    if (disk.draining()) note += "  draining";
    tiers.push_back({"disk", disk.used_bytes(), disk.capacity_bytes(), note});
  }
  for (const v1::Remote& remote : status.remotes()) {
    std::string note = "found " + std::to_string(remote.found()) + "  read " +
                       std::to_string(remote.read()) + "  missed " +
                       std::to_string(remote.missed()) + "  " + Bytes(remote.bytes_per_second()) +
                       "/s";
    const auto alone = std::ranges::count_if(remote.shards(), &v1::RemoteShard::breaker_open);
    if (alone != 0) {
      note += "  " + std::to_string(alone) + " of " + std::to_string(remote.shards_size()) +
              " left alone";
    }
    tiers.push_back({"remote", 0, 0, note});
  }
  for (const v1::ChunkRoom& room : status.chunk_rooms()) {
    std::string note =
        "leased " + Bytes(room.leased_bytes()) + "  engines " + std::to_string(room.engines());
    if (room.resting() > 0) note += "  resting " + std::to_string(room.resting());
    tiers.push_back({"chunks", room.used_bytes(), room.capacity_bytes(), note});
  }
  return tiers;
}

// There is one room at a time.
std::optional<TopChunks> ChunksOf(const v1::GetStatusResponse& status,
                                  const v1::GetStatusResponse* before, double seconds) {
  if (status.chunk_rooms().empty()) return std::nullopt;
  const v1::ChunkRoom& room = status.chunk_rooms(0);
  TopChunks chunks;
  chunks.shown = room.shown();
  chunks.leased_bytes = room.leased_bytes();
  chunks.engines = room.engines();
  chunks.resting = room.resting();
  if (before == nullptr) return chunks;
  const bool first = before->chunk_rooms().empty();  // counters are since the daemon's start
  const v1::ChunkRoom& then = first ? v1::ChunkRoom::default_instance() : before->chunk_rooms(0);
  chunks.hits = Rate(then.hits(), room.hits(), seconds);
  chunks.misses = Rate(then.misses(), room.misses(), seconds);
  chunks.stored = Rate(then.stored(), room.stored(), seconds);
  chunks.read = Rate(then.read(), room.read(), seconds);
  chunks.evicted = Rate(then.evicted(), room.evicted(), seconds);
  return chunks;
}

std::vector<TopEngine> EnginesOf(const v1::ListEngineRecallsResponse& told) {
  std::vector<TopEngine> engines;
  for (const v1::EngineRecall& e : told.engines()) {
    engines.push_back({e.engine(), e.plan(), e.model_name(), e.all().samples(), e.all().recall(),
                       e.worst().recall(), e.worst().layer()});
  }
  return engines;
}

TopRow RowOf(const v1::Sequence& s, const v1::Sequence* before, double seconds) {
  TopRow row;
  row.sequence = s.sequence();
  row.model = s.model_name();
  row.plan = s.plan();
  row.key = s.key();
  row.in_full = s.in_full();
  row.tokens = s.tokens();
  row.device_bytes = s.device_bytes();
  row.host_bytes = s.host_bytes();
  row.age_us = s.age_us();
  if (before != nullptr) {
    row.tokens_per_second = Rate(before->tokens(), s.tokens(), seconds);
    row.steps_per_second = Rate(before->steps(), s.steps(), seconds);
  }
  return row;
}

}  // namespace

Status TopSource::Dial() {
  if (connection_ != nullptr) return OkStatus();
  KVS_ASSIGN_OR_RETURN(connection_, Connection::Dial(options_));
  return OkStatus();
}

// A connection that failed is not used again; one whose daemon refused something is.
template <typename T>
Result<T> TopSource::Kept(Result<T> answer) {
  if (!answer.ok() && (answer.status().code() == Code::kUnavailable ||
                       answer.status().code() == Code::kDeadlineExceeded)) {
    connection_.reset();
  }
  return answer;
}

TopView TopSource::ViewOf(const Seen& now, const v1::ListSessionsResponse& sessions) const {
  TopView view;
  const v1::GetStatusResponse& s = now.status;
  view.version = s.version();
  view.health = s.health();
  view.uptime_us = s.uptime_us();
  view.sessions = s.sessions();
  view.sequences = s.sequences();
  view.models = s.models();
  view.tiers = TiersOf(s);
  const Seen* before = last_ ? &*last_ : nullptr;
  if (before != nullptr) {
    const v1::GetStatusResponse& b = before->status;
    view.seconds = std::chrono::duration<double>(now.at - before->at).count();
    view.moved_bytes_per_second = Rate(Moved(b), Moved(s), view.seconds);
    view.hit_share =
        Share(b.lookup_hit_tokens(), s.lookup_hit_tokens(), b.lookup_tokens(), s.lookup_tokens());
    view.kept_share =
        Share(b.selections_kept(), s.selections_kept(), b.selections(), s.selections());
    view.in_full_share = Share(b.decode_steps_in_full(), s.decode_steps_in_full(), b.decode_steps(),
                               s.decode_steps());
  }
  view.chunks = ChunksOf(s, before != nullptr ? &before->status : nullptr, view.seconds);
  std::map<uint64_t, std::string> clients;
  for (const v1::Session& session : sessions.sessions()) {
    clients[session.session()] = session.client_name();
  }
  for (const auto& [id, sequence] : now.sequences) {
    const bool known = before != nullptr && before->sequences.contains(id);
    TopRow row = RowOf(sequence, known ? &before->sequences.at(id) : nullptr, view.seconds);
    row.client = clients[sequence.session()];
    view.tokens_per_second += row.tokens_per_second;
    view.steps_per_second += row.steps_per_second;
    view.rows.push_back(std::move(row));
  }
  return view;
}

Result<TopView> TopSource::Look() {
  KVS_RETURN_IF_ERROR(Dial());
  Seen now;
  now.at = std::chrono::steady_clock::now();
  KVS_ASSIGN_OR_RETURN(
      now.status, Kept(connection_->Call(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest())));
  KVS_ASSIGN_OR_RETURN(const auto listed, Kept(connection_->Call(&v1::Admin::Stub::ListSequences,
                                                                 v1::ListSequencesRequest())));
  KVS_ASSIGN_OR_RETURN(const auto sessions, Kept(connection_->Call(&v1::Admin::Stub::ListSessions,
                                                                   v1::ListSessionsRequest())));
  const auto engines =
      Kept(connection_->Call(&v1::Admin::Stub::ListEngineRecalls, v1::ListEngineRecallsRequest()));
  // A daemon of an older release has none.
  if (!engines.ok() && engines.status().code() != Code::kUnimplemented) return engines.status();
  for (const v1::Sequence& s : listed.sequences()) now.sequences[s.sequence()] = s;
  if (last_ && last_->status.daemon_epoch() != now.status.daemon_epoch()) {
    last_.reset();
    cursors_.clear();
  }
  std::erase_if(cursors_, [&](const auto& entry) { return !now.sequences.contains(entry.first); });
  TopView view = ViewOf(now, sessions);
  if (engines.ok()) view.engines = EnginesOf(*engines);
  last_ = std::move(now);
  return view;
}

Status TopSource::Sample(std::span<TopRow> rows) {
  for (TopRow& row : rows) {
    KVS_RETURN_IF_ERROR(Dial());
    v1::SampleSelectionsRequest request;
    request.set_sequence(row.sequence);
    request.set_buckets(kBuckets);
    const auto known = cursors_.find(row.sequence);
    if (known != cursors_.end()) *request.mutable_since() = known->second;
    auto answer = Kept(connection_->Call(&v1::Admin::Stub::SampleSelections, request));
    if (!answer.ok() && answer.status().code() == Code::kNotFound) continue;  // it was closed
    KVS_RETURN_IF_ERROR(answer.status());
    row.uncounted = answer->uncounted();
    row.sampled = known != cursors_.end() && row.uncounted.empty();
    cursors_[row.sequence] = answer->cursor();
    if (!row.sampled) continue;
    row.selected.assign(answer->selected().begin(), answer->selected().end());
    const uint64_t sum = std::accumulate(row.selected.begin(), row.selected.end(), uint64_t{0});
    const uint32_t page = std::max(answer->page_tokens(), 1u);
    row.selected_share = SelectedShare(sum, (answer->tokens() + page - 1) / page, answer->layers(),
                                       answer->steps_since());
  }
  return OkStatus();
}

Result<v1::ShowSequenceResponse> TopSource::Show(uint64_t sequence) {
  KVS_RETURN_IF_ERROR(Dial());
  v1::ShowSequenceRequest request;
  request.set_sequence(sequence);
  return Kept(connection_->Call(&v1::Admin::Stub::ShowSequence, request));
}

Result<v1::AuditResponse> TopSource::Audit() {
  KVS_RETURN_IF_ERROR(Dial());
  return Kept(connection_->Call(&v1::Admin::Stub::Audit, v1::AuditRequest()));
}

Result<std::vector<v1::Event>> TopSource::EventsAfter(uint64_t after, uint64_t* missed) {
  KVS_RETURN_IF_ERROR(Dial());
  v1::WatchRequest request;
  request.set_after(after);
  std::vector<v1::Event> events;
  const Status ended =
      connection_->Stream(&v1::Admin::Stub::Watch, request, [&](const v1::WatchResponse& batch) {
        *missed += batch.missed();
        events.insert(events.end(), batch.events().begin(), batch.events().end());
      });
  if (!ended.ok()) return Kept(Result<std::vector<v1::Event>>(ended));
  return events;
}

}  // namespace kvstrata::cli
