// SPDX-License-Identifier: Apache-2.0
// What an open asks a remote tier for: the rest of its prompt, behind what memory and the local
// tier hold, in one search.
#include <algorithm>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/lookups/prefix_loads.h"
#include "server/store/prompts/opening.h"

namespace kvstrata {
namespace {

// Pages from the first that nobody here has on, each with the index block that ends with it.
std::vector<TierSearch::Key> MissingOf(const Opening& o, const HeldPrefix& held,
                                       const PrefixShape& shape) {
  std::vector<TierSearch::Key> keys;
  const size_t pages = held.pages.size();
  const size_t first =
      std::min(pages, shape.block_pages == 0 ? pages : held.blocks * shape.block_pages);
  for (size_t i = first; i < o.keys.size(); ++i) {
    const PageKey& place = o.keys[GroupBegin(i)];
    if (i >= pages) keys.push_back({o.keys[i], place, true});
    if (shape.block_pages == 0 || (i + 1) % shape.block_pages != 0) continue;
    keys.push_back({IndexBlockKey(o.keys[i], o.sequence->index), place, false});
  }
  return keys;
}

}  // namespace

void PrefixLoads::SearchRemote(const std::shared_ptr<Opening>& o, PageTier* tier,
                               std::function<void()> then) {
  const Sequence& s = *o->sequence;
  TierSearch search;
  search.tenant = o->tenant;
  std::optional<uint32_t> min_tokens;
  {
    StoreLock lock(books_.mu);
    min_tokens = prefixes_.remote_min_tokens();
    search.prefill_rate = s.model->prefill_rate;
  }
  const auto worth = [&](size_t missing) {
    return min_tokens && missing != 0 && missing * s.page_tokens() >= *min_tokens;
  };
  if (!worth(o->keys.size()) || s.model->OfOneSession()) return then();
  std::optional<RawFree> artefact;
  if (s.codec) artefact = prefixes_.RawFreeAnywhere(s.plan, o->artefact, o->device, o->tokens);
  const HeldPrefix held = prefixes_.FindAnywhere(o->question(), artefact);
  const size_t missing = o->keys.size() - held.pages.size();
  if (!worth(missing)) return then();
  search.artefact = s.codec && o->artefact != PageKey{};
  if (search.artefact) search.keys.push_back({o->artefact, o->artefact, false});
  std::ranges::copy(MissingOf(*o, held, PrefixShape(o->keys.size(), s.page_tokens(), s.index)),
                    std::back_inserter(search.keys));
  search.tokens = static_cast<uint32_t>(missing) * s.page_tokens();
  search.bytes = missing * static_cast<uint64_t>(s.model->desc.geometry.page_bytes());
  search.asked = o->asked;
  search.done = [o, then](TierFinds finds) {
    o->remote = std::make_shared<TierFinds>(std::move(finds));
    o->asked = Clock::now();  // the local tier's time counts from here
    then();
  };
  if (!tier->Search(std::move(search))) then();
}

}  // namespace kvstrata
