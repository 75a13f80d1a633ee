// SPDX-License-Identifier: Apache-2.0
// Opening: a sequence on its way to be opened, while whoever opens it (openings.h) looks for what
// is held of its prompt, reads it and copies it.
//
// Ownership: its caller's; what its load holds is released when it is finished. Thread-safety:
// none; one thread at a time has it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/store/books/sequence.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/prompts/prefix_catalog.h"
#include "server/store/requests/opened_sequence.h"

namespace kvstrata {

// A sequence on its way to be opened.
struct Opening {
  uint64_t session = 0;
  std::string tenant;   // tenant of the session
  uint32_t device = 0;  // device of the session
  std::unique_ptr<Sequence> sequence;
  std::vector<PageKey> keys;  // for the pages that it may be held for
  LeasedPrompt prompt;        // what a lease of it is of, but for the plan's text
  size_t tokens = 0;
  HoldLimits limits;
  uint32_t reserve_tokens = 0;
  std::vector<int32_t> rest;  // tokens behind the pages of `keys`
  PageKey artefact{};         // key for the whole prompt; zeros: the plan has no codec
  Clock::time_point asked;
  OpenTimes times;
  std::shared_ptr<TierFinds> remote;  // what a remote tier says it has of it; null: not asked
  uint64_t load = 0;                  // a hold of what is on its way here; 0: none
  std::vector<bool> loads_index;      // per key of the load: it is an index block's
  // The artefact on its way here: its record, and of its extents those that have come.
  std::optional<ArtefactRecord> record;
  std::vector<Extent> extents;
  // Where the second of every two extents comes later (rest_loads.cc): the artefact as it is until
  // then, and pages for those. `awaits_rest`: the sequence has opened on it.
  std::optional<Artefact> upper;
  std::vector<Page*> later;
  bool awaits_rest = false;
  std::shared_ptr<Model> model;
  PrefixQuestion question() const {
    return {tenant, sequence->plan, sequence->index, sequence->page_tokens(), keys};
  }
};

// A new sequence of that model and plan for a session, which does not own it yet. Takes `mu`. Cost:
// a look-up. SESSION_UNKNOWN, MODEL_UNKNOWN, PLAN_*.
Result<Opening> BeginOpening(StoreMutex* mu, SessionCatalog* catalog, const Plans& plans,
                             uint64_t session, uint64_t model, std::string_view plan)
    KVS_EXCLUDES(store_lock);

}  // namespace kvstrata
