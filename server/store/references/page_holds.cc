// SPDX-License-Identifier: Apache-2.0
#include "server/store/references/page_holds.h"

#include <algorithm>

#include "base/check.h"
#include "server/store/books/long_request.h"
#include "server/store/books/sequence.h"
#include "server/store/references/page_references.h"

namespace kvstrata {

PageHolds::PageHolds(StoreMutex& mu, PageReferences& references)
    : mu_(mu), references_(references) {}

uint64_t PageHolds::Begin() {
  const uint64_t hold = next_++;
  holds_[hold];
  return hold;
}

void PageHolds::Keep(uint64_t hold, Page* page) {
  references_.Keep(page);
  holds_.at(hold).kept.push_back(page);
}

uint64_t PageHolds::Keep(Page* page) {
  const uint64_t hold = Begin();
  Keep(hold, page);
  return hold;
}

void PageHolds::Refer(uint64_t hold, Page* page) {
  references_.RefPage(page);
  TakeOver(hold, page);
}

void PageHolds::TakeOver(uint64_t hold, Page* page) { holds_.at(hold).referred.push_back(page); }

void PageHolds::HandOver(uint64_t hold, Page* page) {
  std::vector<Page*>& referred = holds_.at(hold).referred;
  const auto at = std::ranges::find(referred, page);
  KVS_CHECK(at != referred.end());
  referred.erase(at);
}

void PageHolds::End(uint64_t id, Session* session) {
  const auto found = holds_.find(id);
  if (id == 0) return;
  KVS_CHECK(found != holds_.end());
  Hold& hold = found->second;  // stays where it is, while others are let in
  references_.ReleaseAll(session, &hold.referred);
  for (size_t ended = 1; !hold.kept.empty(); ++ended) {
    Page* const page = hold.kept.back();
    hold.kept.pop_back();
    references_.EndKeep(page);
    if (ended % kPiecePages == 0) mu_.Yield();
  }
  holds_.erase(id);
}

}  // namespace kvstrata
