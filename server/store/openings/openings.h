// SPDX-License-Identifier: Apache-2.0
// Openings: how a sequence comes to be: its plan, what the tiers and other devices have of its
// prompt, then its end (opening_ends.h), which enters it. One whose plan can wait for the second of
// every two extents of an artefact (Opening::upper) is open before a tier has brought them.
//
// Thread-safety: all methods, from any thread. Cost: hashing the tokens, never under the lock; an
// open works in pieces (books.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/status.h"
#include "server/store/options/parameters.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/prompts/opening.h"

namespace kvstrata {

class Openings {
 public:
  Openings(Books& books, Plans& plans, SessionCatalog& catalog, PrefixCatalog& prefixes,
           PrefixLoads& loads, Replication& replication, Recompression& recompression,
           OpeningEnds& ends)
      : books_(books),
        plans_(plans),
        catalog_(catalog),
        prefixes_(prefixes),
        loads_(loads),
        replication_(replication),
        recompression_(recompression),
        ends_(ends) {}

  // Attaches to the longest held prefix (at most tokens - 1), reserves pages for the rest,
  // publishes the first table. SEQUENCE_LIMIT, TABLES_FULL (RESOURCE_EXHAUSTED), SEQUENCE_TOO_LONG,
  // POOL_EXHAUSTED, PARAMETERS_* (parameters.h), PLAN_COMBINATION of a plan that cannot serve the
  // model.
  Result<OpenedSequence> OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                                      std::span<const int32_t> tokens,
                                      const OpenOptions& options = {}) KVS_EXCLUDES(store_lock);
  // The same, after what the tier below has of the prefix beyond memory was read, what lies on
  // another device copied, and the plan's parameters read: never waits for any of it, calls `done`
  // once, at once in this thread or later in the tier's or the replication queue's. A page that is
  // lost, corrupt or late ends the prefix, and is no error.
  void OpenSequence(uint64_t session, uint64_t model, std::string_view plan,
                    std::span<const int32_t> tokens, OpenDone done, const OpenOptions& options = {})
      KVS_EXCLUDES(store_lock);

 private:
  // What needs no lock: checks, the codec, the keys.
  Result<Opening> PrepareOpen(uint64_t session, uint64_t model, std::string_view plan,
                              std::span<const int32_t> tokens, const OpenOptions& options,
                              Files files) KVS_EXCLUDES(store_lock);
  void GoOnOpening(Result<Opening> prepared, const OpenDone& done) KVS_EXCLUDES(store_lock);
  // Reads what of it the tier has, then finishes it.
  void LoadAndFinish(const std::shared_ptr<Opening>& o, PageTier* tier, const OpenDone& done)
      KVS_EXCLUDES(store_lock);
  // Reads what it opened without, and has its sequences get it (rest_loads.cc). REQUIRES:
  // o->awaits_rest.
  void LoadRest(const std::shared_ptr<Opening>& o) KVS_EXCLUDES(store_lock);
  // `stored`: the local tier has it.
  void EndRest(Opening* o, bool stored) KVS_EXCLUDES(store_lock);
  void ReplicateAndFinish(const std::shared_ptr<Opening>& o, const OpenDone& done)
      KVS_EXCLUDES(store_lock);

  Books& books_;
  Plans& plans_;
  SessionCatalog& catalog_;
  PrefixCatalog& prefixes_;
  PrefixLoads& loads_;
  Replication& replication_;
  Recompression& recompression_;
  OpeningEnds& ends_;
};

}  // namespace kvstrata
