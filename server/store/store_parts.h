// SPDX-License-Identifier: Apache-2.0
// Store::Parts: all of a store: its books (books.h) and its owners, for store.cc and tests alone.
//
// An owner has the functions over its own state and over the books. It is made with those that it
// calls, which stand before it here, so none reaches itself. What owners change together is one
// change because there is one lock.
//
// Ownership: members in the order in which they are made; no owner's constructor calls another.
// Names that end in Locked need the lock beside one of that name that takes it.
#pragma once

#include <memory>
#include <vector>

#include "server/store/books/books.h"
#include "server/store/books/devices.h"
#include "server/store/books/plans.h"
#include "server/store/codecs/build_pages.h"
#include "server/store/codecs/builds.h"
#include "server/store/codecs/codec_extents.h"
#include "server/store/codecs/recompression.h"
#include "server/store/codecs/work_requests.h"
#include "server/store/lookups/lookups.h"
#include "server/store/lookups/prefix_loads.h"
#include "server/store/lookups/prefix_pins.h"
#include "server/store/lookups/replication.h"
#include "server/store/openings/leases.h"
#include "server/store/openings/opening_ends.h"
#include "server/store/openings/openings.h"
#include "server/store/options/store_options.h"
#include "server/store/prompts/prefix_catalog.h"
#include "server/store/prompts/sealed_values.h"
#include "server/store/references/eviction.h"
#include "server/store/references/models.h"
#include "server/store/references/page_references.h"
#include "server/store/references/tables.h"
#include "server/store/references/watermarks.h"
#include "server/store/requests/answers.h"
#include "server/store/sequences/imports.h"
#include "server/store/sequences/inspection.h"
#include "server/store/sequences/recall_audits.h"
#include "server/store/sequences/sequence_entry.h"
#include "server/store/sequences/sequences.h"
#include "server/store/sequences/sessions.h"
#include "server/store/sequences/step_events.h"
#include "server/store/space/capacity_counter.h"
#include "server/store/space/moves.h"
#include "server/store/space/page_allocator.h"
#include "server/store/space/page_copies.h"
#include "server/store/space/raw_pages.h"
#include "server/store/space/relief.h"
#include "server/store/store.h"

namespace kvstrata {

struct Store::Parts {
  Parts(const StoreOptions& given, Plans::Named named_plans, std::vector<StoreDevice> devices,
        std::unique_ptr<MemoryResource> host);

  // Constant, or with locks of their own.
  // With user limits, if only none. But what of them is StoreSettings changes, under the lock.
  StoreOptions options;
  Plans plans;

  Books books;

  // Owners: who is there,
  Answers answers{books.mu};
  SessionCatalog catalog{books.mu, options.user_limits, options.cluster_tenants};
  Devices devices{books, catalog};
  // pages,
  PageReferences references{books, catalog};
  Tables tables{books, catalog, references};
  PageHolds holds{books.mu, references};
  Watermarks watermarks{options, books};
  Eviction eviction{books, catalog, references};
  Models models{books, options.user_limits, catalog, references, eviction};
  CapacityCounter capacity{books, options, catalog, references, eviction, plans};
  PageAllocator allocator{options.user_limits, books, catalog, references, capacity, eviction,
                          watermarks};
  PageCopies copies{books, catalog, tables, references, holds, allocator, options.promote_rate};
  Relief relief{books, catalog, references, holds, allocator, eviction, copies, watermarks};
  Moves moves{books, catalog, devices, copies, watermarks, relief};
  // prefixes and what codecs make of them,
  PrefixCatalog prefixes{books, catalog, references};
  SealedValues values{books, prefixes.ledger(), holds};
  RawPages raw_pages{books, catalog, tables, references, allocator, copies};
  CodecExtents extents{books, catalog, tables, references, holds, allocator, prefixes, raw_pages};
  PrefixLoads loads{books, prefixes.ledger(), catalog,  references,
                    holds, allocator,         prefixes, extents};
  Replication replication{books, catalog, references, allocator, copies, prefixes, loads};
  Lookups lookups{books, options.cluster_tenants, plans, catalog, devices, prefixes, replication};
  PrefixPins pins{books, options, catalog, prefixes, lookups};
  Inspection inspection{books, catalog, eviction, plans, references, holds, pins};
  // workers,
  Recompression recompression{books, options, answers, catalog, holds, extents, raw_pages};
  BuildPages build_pages{books, catalog, tables, references, holds, prefixes, extents};
  Builds builds{books,   options.user_limits, plans,      answers, catalog,
                devices, recompression,       build_pages};
  WorkRequests requests{books.mu, answers, catalog, devices, recompression, builds};
  RecallAudits recalls{books.mu, options, answers, catalog, inspection};
  // and sequences.
  SequenceEntry entry{books, options, catalog, tables, references, allocator, raw_pages};
  OpeningEnds ends{books, catalog, references, prefixes, loads, moves, recompression, entry};
  Openings openings{books, plans, catalog, prefixes, loads, replication, recompression, ends};
  Sequences sequences{books,      options,  answers, catalog,       devices,   tables,  references,
                      watermarks, prefixes, entry,   recompression, raw_pages, recalls, builds};
  Sessions sessions{books, options, answers, catalog, models, references, watermarks, sequences};
  Leases leases{books.mu, catalog, devices, lookups, openings, sequences};
  StepEvents steps{books,     options, catalog,  devices,       tables,  references,
                   allocator, copies,  prefixes, recompression, extents, recalls};
  Imports imports{books, catalog, devices, holds, steps};
};

}  // namespace kvstrata
