// SPDX-License-Identifier: Apache-2.0
// What `kvstrata top` shows of a daemon at one moment, and of the time since the moment before.
// Plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/cli/printer.h"

namespace kvstrata::cli {

struct TopTier {
  std::string name;                             // "device", "host", "disk", "remote", "chunks"
  uint64_t used_bytes = 0, capacity_bytes = 0;  // 0: not known, as of what nodes share
  std::string note;                             // "cached 1.0 MiB"
};

// Engines' chunks (docs/chunks.md); doubles: a second, since the moment before.
struct TopChunks {
  uint64_t shown = 0, leased_bytes = 0, engines = 0, resting = 0;  // now
  double hits = 0, misses = 0, stored = 0, read = 0, evicted = 0;
};

// What an engine's plan loses, since the engine came.
struct TopEngine {
  std::string engine, plan, model;
  uint64_t samples = 0;
  double recall = 0, worst_recall = 0;
  int32_t worst_layer = 0;
};

struct TopRow {
  uint64_t sequence = 0;
  std::string client, model, plan, key;
  uint32_t tokens = 0;
  double tokens_per_second = 0, steps_per_second = 0;
  uint64_t device_bytes = 0, host_bytes = 0, age_us = 0;
  // For those that were sampled twice.
  bool sampled = false;
  double selected_share = 0;       // part of its pages, by a layer of a step on average
  std::vector<uint32_t> selected;  // by bucket of tokens, since the moment before
  std::string uncounted;           // why not: "full", "gpu"
  std::string in_full;             // why its steps attend everything; "": they choose
};

struct TopView {
  std::string version, health;
  uint64_t uptime_us = 0, sessions = 0, sequences = 0, models = 0;
  double seconds = 0;  // since the moment before; 0: there was none, and rates are 0
  double steps_per_second = 0, tokens_per_second = 0, moved_bytes_per_second = 0;
  // In the same time; below 0: nothing of the kind happened.
  double hit_share = -1, kept_share = -1, in_full_share = -1;
  std::vector<TopTier> tiers;
  std::optional<TopChunks> chunks;  // nothing: no engine has come
  std::vector<TopEngine> engines;   // that told what their plans lose
  std::vector<TopRow> rows;
};

enum class TopSort { kTokensPerSecond, kTokens, kMemory, kAge, kSequence };
inline constexpr int kTopSorts = 5;
const char* NameOf(TopSort sort);  // "tokens/s"

// Keeps the rows whose number, client, model, plan or key has `filter` in it, the first one first.
void Arrange(TopSort sort, const std::string& filter, std::vector<TopRow>* rows);

Json ToJson(const TopView& view);

// The frame of `kvstrata top`: lines of text made of a view. Pure functions.
struct TopLook {
  int columns = 80;
  int rows = 0;  // rows of the screen; 0: as many as there are sequences
  bool colour = false, ascii = false;
  TopSort sort = TopSort::kTokensPerSecond;
  std::string filter;
  size_t first = 0;     // row of the table at its top
  int marked = -1;      // row under the cursor; -1: none
  std::string trouble;  // why what is shown is old; "": it is not
};

// Name and state, rates, tiers: what stands above every pane.
std::vector<std::string> TopHeader(const TopView& view, const TopLook& look);
// The header of the table and its rows, as many as fit below the header and above one line of keys.
std::vector<std::string> TopTable(const TopView& view, const TopLook& look);
// Rows of the table that fit beside the header.
size_t TopTableRoom(const TopView& view, const TopLook& look);

}  // namespace kvstrata::cli
