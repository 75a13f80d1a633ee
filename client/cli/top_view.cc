// SPDX-License-Identifier: Apache-2.0
#include "client/cli/top_view.h"

#include <algorithm>
#include <cmath>

namespace kvstrata::cli {
namespace {

bool ComesFirst(TopSort sort, const TopRow& a, const TopRow& b) {
  switch (sort) {
    case TopSort::kTokensPerSecond:
      // By what is shown at a glance: rows that are as fast keep their places.
      return std::lround(a.tokens_per_second) > std::lround(b.tokens_per_second);
    case TopSort::kTokens:
      return a.tokens > b.tokens;
    case TopSort::kMemory:
      return a.device_bytes + a.host_bytes > b.device_bytes + b.host_bytes;
    case TopSort::kAge:
      return a.age_us > b.age_us;
    case TopSort::kSequence:
      return a.sequence < b.sequence;
  }
  return false;
}

bool Matches(const TopRow& row, const std::string& filter) {
  const std::string number = std::to_string(row.sequence);
  for (const std::string* text : {&number, &row.client, &row.model, &row.plan, &row.key}) {
    if (text->find(filter) != std::string::npos) return true;
  }
  return false;
}

Json RowJson(const TopRow& row) {
  return {{"sequence", row.sequence},
          {"client", row.client},
          {"model_name", row.model},
          {"plan", row.plan},
          {"key", row.key},
          {"tokens", row.tokens},
          {"tokens_per_second", row.tokens_per_second},
          {"steps_per_second", row.steps_per_second},
          {"device_bytes", row.device_bytes},
          {"host_bytes", row.host_bytes},
          {"age_us", row.age_us},
          {"selected_share", row.sampled ? Json(row.selected_share) : Json()},
          {"selected", row.selected},
          {"uncounted", row.uncounted},
          {"in_full", row.in_full}};
}

Json ChunksJson(const std::optional<TopChunks>& chunks) {
  if (!chunks) return nullptr;
  return {{"shown", chunks->shown},
          {"leased_bytes", chunks->leased_bytes},
          {"engines", chunks->engines},
          {"resting", chunks->resting},
          {"hits_per_second", chunks->hits},
          {"misses_per_second", chunks->misses},
          {"stored_per_second", chunks->stored},
          {"read_per_second", chunks->read},
          {"evicted_per_second", chunks->evicted}};
}

Json EngineJson(const TopEngine& engine) {
  return {{"engine", engine.engine},
          {"plan", engine.plan},
          {"model_name", engine.model},
          {"samples", engine.samples},
          {"recall", engine.recall},
          {"worst_layer", engine.worst_layer},
          {"worst_recall", engine.worst_recall}};
}

Json ShareJson(double share) { return share < 0 ? Json() : Json(share); }

}  // namespace

const char* NameOf(TopSort sort) {
  static constexpr const char* kNames[kTopSorts] = {"tokens/s", "tokens", "memory", "age",
                                                    "sequence"};
  return kNames[static_cast<int>(sort)];
}

void Arrange(TopSort sort, const std::string& filter, std::vector<TopRow>* rows) {
  if (!filter.empty())
    std::erase_if(*rows, [&](const TopRow& row) { return !Matches(row, filter); });
  std::stable_sort(rows->begin(), rows->end(),
                   [sort](const TopRow& a, const TopRow& b) { return ComesFirst(sort, a, b); });
}

Json ToJson(const TopView& view) {
  Json out = {{"version", view.version},
              {"health", view.health},
              {"uptime_us", view.uptime_us},
              {"sessions", view.sessions},
              {"sequences", view.sequences},
              {"models", view.models},
              {"seconds", view.seconds},
              {"steps_per_second", view.steps_per_second},
              {"tokens_per_second", view.tokens_per_second},
              {"moved_bytes_per_second", view.moved_bytes_per_second},
              {"hit_share", ShareJson(view.hit_share)},
              {"kept_share", ShareJson(view.kept_share)},
              {"in_full_share", ShareJson(view.in_full_share)},
              {"tiers", Json::array()},
              {"chunks", ChunksJson(view.chunks)},
              {"engines", Json::array()},
              {"rows", Json::array()}};
  for (const TopTier& tier : view.tiers) {
    out["tiers"].push_back({{"tier", tier.name},
                            {"used_bytes", tier.used_bytes},
                            {"capacity_bytes", tier.capacity_bytes},
                            {"note", tier.note}});
  }
  for (const TopEngine& engine : view.engines) out["engines"].push_back(EngineJson(engine));
  for (const TopRow& row : view.rows) out["rows"].push_back(RowJson(row));
  return out;
}

}  // namespace kvstrata::cli
