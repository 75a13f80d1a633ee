// SPDX-License-Identifier: Apache-2.0
// What a sequence lacks that opened before all of its prompt's artefact was here (Opening::upper):
// the second of every two extents. It is read behind everything that the open itself waited for.
// Until it is here steps attend what is (ExtentView::rest_due), nothing is packed, and kvs_settle
// waits. When all of it came and was verified, the sequence and its forks get it, and the artefact
// is entered. When it did not, for whatever reason, they are lost, and steps answer REST_LOST: so
// nobody stays without it for longer than the tier may take.
#include <new>

#include "server/store/books/books.h"
#include "server/store/codecs/recompression.h"
#include "server/store/lookups/prefix_loads.h"
#include "server/store/openings/openings.h"
#include "server/store/pages/page_tier.h"

namespace kvstrata {
namespace {

// Every extent of a prompt, in order.
Artefact WholeOf(const Opening& o) {
  Artefact whole = *o.upper;
  whole.extents.clear();
  for (size_t i = 0; i < o.extents.size(); ++i) {
    whole.extents.push_back(o.upper->extents[i]);
    whole.extents.push_back(o.extents[i]);
  }
  return whole;
}

}  // namespace

void Openings::LoadRest(const std::shared_ptr<Opening>& o) {
  PageTier* tier = nullptr;
  {
    StoreLock lock(books_.mu);
    tier = prefixes_.tier();
  }
  bool reads = false;
  try {
    const auto end = [this, o, tier] { EndRest(o.get(), tier->Holds(o->artefact)); };
    reads = tier != nullptr && loads_.LoadRest(o, tier, end);
  } catch (const std::bad_alloc&) {
    // As if the tier had refused it.
  }
  if (!reads) EndRest(o.get(), false);
}

void Openings::EndRest(Opening* o, bool stored) {
  const bool came = o->extents.size() == o->later.size();
  const Artefact whole = came ? WholeOf(*o) : Artefact();
  if (came) {
    StoreLock lock(books_.mu);
    loads_.EnterLoaded(whole, stored);
  }
  recompression_.EndRest(o->session, o->load, came ? &whole : nullptr);
  StoreLock lock(books_.mu);
  loads_.EndLoad(nullptr, o);
}

}  // namespace kvstrata
