// SPDX-License-Identifier: Apache-2.0
// ArtefactLedger: what the records of artefacts in the tier below say, kept in memory, so that a
// look-up need not read them. A record is noted when it is written, when an open reads it, and when
// the daemon starts (server/work/tiers/tier_records.h); it may have left the tier since.
//
// Records that make no page redundant are not kept: they change no look-up. Thread-safety: all
// methods, from any thread. Cost: 40 bytes an extent, kMaxBytes in all; what was noted first is
// forgotten first.
#ifndef KVSTRATA_SERVER_STORE_PROMPTS_ARTEFACT_LEDGER_H_
#define KVSTRATA_SERVER_STORE_PROMPTS_ARTEFACT_LEDGER_H_

#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <utility>

#include "base/sync.h"
#include "server/store/prompts/artefact_record.h"

namespace kvstrata {

class ArtefactLedger {
 public:
  static constexpr size_t kMaxBytes = size_t{64} << 20;

  // Takes the place of what was noted of that artefact.
  void Note(const PageKey& artefact, ArtefactRecord record) KVS_EXCLUDES(mu_);
  // Without its series. Null: it is not known.
  std::shared_ptr<const ArtefactRecord> Find(const PageKey& artefact) const KVS_EXCLUDES(mu_);

 private:
  using Entry = std::pair<PageKey, std::shared_ptr<const ArtefactRecord>>;
  void Forget(std::list<Entry>::iterator at) KVS_REQUIRES(mu_);

  mutable Mutex mu_;
  std::list<Entry> by_age_ KVS_GUARDED_BY(mu_);  // the oldest first
  std::map<PageKey, std::list<Entry>::iterator> by_key_ KVS_GUARDED_BY(mu_);
  size_t bytes_ KVS_GUARDED_BY(mu_) = 0;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_PROMPTS_ARTEFACT_LEDGER_H_
