// SPDX-License-Identifier: Apache-2.0
#include "server/store/prompts/artefact_ledger.h"

#include <iterator>

namespace kvstrata {
namespace {

size_t BytesOf(const ArtefactRecord& record) {
  constexpr size_t kEntry = 256;  // the record, the list's and the map's nodes
  return kEntry + record.extents.size() * sizeof(ArtefactRecord::Stored) +
         record.released.size() * sizeof(Run);
}

}  // namespace

void ArtefactLedger::Forget(std::list<Entry>::iterator at) {
  bytes_ -= BytesOf(*at->second);
  by_key_.erase(at->first);
  by_age_.erase(at);
}

void ArtefactLedger::Note(const PageKey& artefact, ArtefactRecord record) {
  record.series = {};
  MutexLock lock(mu_);
  if (const auto old = by_key_.find(artefact); old != by_key_.end()) Forget(old->second);
  if (record.released.empty()) return;
  bytes_ += BytesOf(record);
  by_age_.emplace_back(artefact, std::make_shared<const ArtefactRecord>(std::move(record)));
  by_key_.emplace(artefact, std::prev(by_age_.end()));
  while (bytes_ > kMaxBytes) Forget(by_age_.begin());
}

std::shared_ptr<const ArtefactRecord> ArtefactLedger::Find(const PageKey& artefact) const {
  MutexLock lock(mu_);
  const auto found = by_key_.find(artefact);
  return found == by_key_.end() ? nullptr : found->second->second;
}

}  // namespace kvstrata
