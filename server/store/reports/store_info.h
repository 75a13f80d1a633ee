// SPDX-License-Identifier: Apache-2.0
// What operators and tests are told of a store: snapshots, results of what they ask, counters.
// Plain values.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/codec/extent.h"
#include "kernels/pages/page_view.h"
#include "kernels/plan/plan.h"
#include "server/store/options/session_types.h"
#include "server/store/reports/recall_audit.h"
#include "server/store/reports/selection_totals.h"

namespace kvstrata {

// Snapshots for the admin service: plain values, ordered by id.
struct PoolInfo {
  Tier tier = Tier::kDevice;
  std::string device;  // its name; of host ""
  uint64_t capacity_bytes = 0, used_bytes = 0, cached_bytes = 0, arena_bytes = 0, retired_bytes = 0;
  uint64_t pinned_bytes = 0;  // that only pins keep
  uint64_t taken_bytes = 0;   // its arenas whole: a session takes one, however little it uses
  uint32_t arenas = 0;
  std::string failure;  // why its device is lost; "": it is not
};
struct SessionInfo {
  uint64_t session = 0;
  std::string client_name;
  PeerIdentity peer;
  Transport transport = Transport::kLinked;
  std::string device;   // whose memory it gets
  bool fenced = false;  // ended, but its process lives and may still read its arenas
  uint32_t sequences = 0, open_steps = 0;
  uint64_t used_bytes = 0, age_us = 0;
  uint64_t last_step_us = 0;  // since a step last committed tokens; 0: none did
};
struct ModelInfo {
  uint64_t model = 0;
  ModelDesc desc;
  uint64_t sequences = 0, cached_pages = 0;
};
struct SequenceInfo {
  uint64_t sequence = 0, session = 0, model = 0;
  std::string model_name;
  Plan plan;
  uint32_t tokens = 0, capacity_tokens = 0, pages = 0, shared_pages = 0, index_blocks = 0;
  uint64_t version = 0, device_bytes = 0, host_bytes = 0, age_us = 0;
  uint32_t prompt_tokens = 0, held_tokens = 0;
  uint64_t steps = 0;  // that committed tokens
  // Extents of its codec; their bytes are in device_bytes and host_bytes too.
  uint32_t extents = 0, absent_pages = 0;
  uint64_t extent_device_bytes = 0, extent_host_bytes = 0;
  std::string work_error;  // why its last recompression failed; "" if it published
  std::string arriving;    // what of it a tier still brings, or why that is lost; "": nothing
  std::string key;         // that its engine gave it; "": none
  std::string in_full;     // why its steps attend everything, as far as is known; "": they choose
  uint32_t break_even_tokens = 0;  // Plans::BreakEven
  bool private_pages = false;      // MakePrivate
};
// A sequence with what its steps selected since it opened.
struct LiveSequence {
  SequenceInfo info;
  std::string client;  // its session's name
  SelectionSample sample;
};
struct PageInfo {
  uint32_t arena = 0;
  uint64_t offset = 0;
  Tier tier = Tier::kDevice;
  bool absent = false;  // released: all else is zero but `selected`
  bool sealed = false, shared = false;
  uint32_t references = 0, selected = 0;
};
struct ExtentInfo {
  uint32_t arena = 0;
  uint64_t offset = 0, bytes = 0;
  Tier tier = Tier::kDevice;
  ExtentKind kind = ExtentKind::kPackedSegment;
  Run tokens;
  uint32_t references = 0;
};
struct SequenceDetail {
  SequenceInfo info;
  std::vector<PageInfo> pages, index_blocks;
  std::vector<ExtentInfo> extents;
};
struct AuditReport {
  std::vector<std::string> findings;  // empty: clean
  uint64_t pages = 0, bytes = 0, sequences = 0, sessions = 0;
};
struct StoreCounters {
  uint64_t publications = 0, retired_bytes = 0, prefix_pages = 0;
  uint64_t lookup_tokens = 0, lookup_hit_tokens = 0;
  uint64_t recompressions = 0, recompress_failures = 0;  // published; not
  uint64_t recompressed_bytes = 0, released_bytes = 0;   // extents written; raw pages given up
  uint64_t artefacts = 0, artefact_hits = 0;             // held; prompts that needed no work
  uint64_t loaded_pages = 0;                             // from the tier below, index blocks too
  uint64_t loaded_artefacts = 0;                         // from there
  uint64_t evicted_pages = 0, evicted_stored_pages = 0;  // from memory; of these, in the tier below
  uint64_t promoted_pages = 0, demoted_pages = 0;        // by MoveSome
  uint64_t replicated_pages = 0;  // from one device to another, because a sequence opened on them
  // What was copied by moves, an operator's too, and for replicas.
  uint64_t promoted_bytes = 0, demoted_bytes = 0, replicated_bytes = 0;
  uint64_t sessions = 0, sequences = 0, models = 0;  // now
};
// A pool, or all of a tier, after the capacity was changed.
struct ResizedPool {
  uint64_t capacity_bytes = 0;
  uint64_t taken_bytes = 0;  // by arenas; those beyond the capacity go back when they are empty
  uint64_t evicted_pages = 0;
};
struct RecallStart {
  std::shared_ptr<RecallAudit> audit;
  SequenceInfo sequence;  // as it is now
  Transport transport = Transport::kLinked;
};
// What an eviction drops, or would, of one tier.
struct EvictedTier {
  Tier tier = Tier::kDevice;
  uint64_t pages = 0, bytes = 0;  // recompressed prompts' extents too
  uint64_t stored_pages = 0;      // those in the tier below, hence no loss
  uint64_t artefact_pages = 0;    // those that are extents of recompressed prompts
  uint64_t pinned_bytes = 0;      // kept, because pinned
};
struct EvictResult {
  std::vector<EvictedTier> tiers;  // device, host
  uint64_t pages() const;
  uint64_t bytes() const;
};
struct PinLimits {
  uint64_t used_bytes = 0, limit_bytes = 0;
};
struct MoveResult {
  uint64_t pages = 0, bytes = 0, version = 0;
};

}  // namespace kvstrata
