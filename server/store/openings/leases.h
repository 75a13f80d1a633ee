// SPDX-License-Identifier: Apache-2.0
// Leases of look-ups. What an open holds is what a look-up promises: a lease is such an open, of a
// sequence that nobody is told of, and that ends by its time or with its session.
//
// A lease counts as one of its user's sequences until it is opened: the sequence of that prompt and
// plan, of any session of the user, then has the lease's place, and gives it back if it closes
// before the lease ends. So a user that asks and opens counts once, and what was promised is never
// refused for the promise's own sake. The lease itself goes on to its time: others that it was
// renewed for hold as much, whatever becomes of the first one. Each of them takes a place of its
// own.
//
// Ownership: leases are their session's. Thread-safety: all methods, from any thread. Cost: of an
// open.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/requests/opened_sequence.h"
#include "server/store/requests/prefix_hit.h"

namespace kvstrata {

class Leases {
 public:
  Leases(StoreMutex& mu, SessionCatalog& catalog, Devices& devices, Lookups& lookups,
         Openings& openings, Sequences& sequences)
      : mu_(mu),
        catalog_(catalog),
        devices_(devices),
        lookups_(lookups),
        openings_(openings),
        sequences_(sequences) {}

  // As Lookups::Lookup. What is answered stays held for the lease (0: not at all), or until the
  // session ends: the daemon opens the plan for the session, as OpenSequence does, on what is held
  // alone, and closes it then. `done` may come in the tier's thread, too. The same prompt and plan
  // again renew the lease. INVALID_ARGUMENT LEASE_TIME, LEASE_PLAN, LEASE_DEVICE;
  // RESOURCE_EXHAUSTED SEQUENCE_LIMIT, TABLES_FULL: nothing is answered then.
  void LookupLeased(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
                    const LookupPlan& open, std::chrono::milliseconds lease, LookupDone done)
      KVS_EXCLUDES(store_lock);
  // Ends the leases whose time is over. For housekeeping; no I/O.
  void ExpireLeases(std::chrono::steady_clock::time_point now) KVS_EXCLUDES(store_lock);

 private:
  // A look-up on its way to its lease.
  struct Leasing {
    uint64_t session = 0, model = 0;
    std::vector<int32_t> tokens;
    LookupPlan open;
    std::chrono::milliseconds lease{0};
    LookupDone done;
  };
  // Renews the lease of what was found, or opens it.
  void HoldHit(const std::shared_ptr<const Leasing>& leasing, const PrefixHit& hit)
      KVS_EXCLUDES(store_lock);
  void AnswerLeased(const Leasing& leasing, const LeasedPrompt& prompt,
                    const Result<OpenedSequence>& opened) KVS_EXCLUDES(store_lock);
  Status CheckLease(uint64_t session, uint64_t model, const LookupPlan& open,
                    std::chrono::milliseconds lease) KVS_EXCLUDES(store_lock);
  // Whether the prompt's lease, if there is one, holds all of `hit`; it then ends anew.
  bool RenewLease(uint64_t session, const LeasedPrompt& prompt, const PrefixHit& hit,
                  std::chrono::milliseconds lease) KVS_EXCLUDES(store_lock);
  void EnterLease(uint64_t session, const LeasedPrompt& prompt, uint64_t sequence,
                  std::chrono::milliseconds lease) KVS_EXCLUDES(store_lock);

  StoreMutex& mu_;
  SessionCatalog& catalog_;
  Devices& devices_;
  Lookups& lookups_;
  Openings& openings_;
  Sequences& sequences_;
};

}  // namespace kvstrata
