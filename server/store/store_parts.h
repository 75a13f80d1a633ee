// SPDX-License-Identifier: Apache-2.0
// StoreParts: all of a store: its books (books.h) and its owners.
//
// An owner has the functions over its own state and over the books; it is made with the parts and
// keeps references to the ones that it needs, so its header says whom it calls. What owners change
// together is one change because there is one lock.
//
// Ownership: members in the order in which they are made; no owner's constructor calls another.
// Names that end in Locked need the lock beside one of that name that takes it.
#ifndef KVSTRATA_SERVER_STORE_STORE_PARTS_H_
#define KVSTRATA_SERVER_STORE_STORE_PARTS_H_

#include <memory>
#include <vector>

#include "server/store/answers.h"
#include "server/store/artefact_ledger.h"
#include "server/store/books.h"
#include "server/store/builds.h"
#include "server/store/capacity_counter.h"
#include "server/store/codec_extents.h"
#include "server/store/devices.h"
#include "server/store/eviction.h"
#include "server/store/imports.h"
#include "server/store/inspection.h"
#include "server/store/leases.h"
#include "server/store/lookups.h"
#include "server/store/models.h"
#include "server/store/moves.h"
#include "server/store/openings.h"
#include "server/store/page_allocator.h"
#include "server/store/page_copies.h"
#include "server/store/page_holds.h"
#include "server/store/page_references.h"
#include "server/store/plans.h"
#include "server/store/prefix_catalog.h"
#include "server/store/prefix_loads.h"
#include "server/store/prefix_pins.h"
#include "server/store/raw_pages.h"
#include "server/store/recall_audits.h"
#include "server/store/recompression.h"
#include "server/store/replication.h"
#include "server/store/sealed_values.h"
#include "server/store/sequence.h"
#include "server/store/sequences.h"
#include "server/store/session_catalog.h"
#include "server/store/sessions.h"
#include "server/store/step_events.h"
#include "server/store/store_options.h"
#include "server/store/tables.h"
#include "server/store/user_limits.h"
#include "server/store/watermarks.h"
#include "server/store/work_requests.h"

namespace kvstrata {

struct StoreParts {
  StoreParts(const StoreOptions& given, Plans::Named named_plans, std::vector<StoreDevice> devices,
             std::unique_ptr<MemoryResource> host);

  // Constant, or with locks of their own.
  // With user limits, if only none. But what of them is StoreSettings changes, under the lock.
  StoreOptions options;
  Plans plans;

  Books books;

  // Owners: who is there,
  Answers answers{this};
  SessionCatalog catalog{this};
  Sessions sessions{this};
  Models models{this};
  Devices devices{this};
  Tables tables{this};
  // pages,
  PageReferences references{this};
  PageHolds holds{this};
  Watermarks watermarks{this};
  PageAllocator allocator{this};
  CapacityCounter capacity{this};
  Eviction eviction{this};
  PageCopies copies{this};
  Moves moves{this};
  // prefixes,
  PrefixCatalog prefixes{this};
  Lookups lookups{this};
  Leases leases{this};
  PrefixPins pins{this};
  SealedValues values{this};
  // sequences,
  Openings openings{this};
  PrefixLoads loads{this};
  Replication replication{this};
  Sequences sequences{this};
  StepEvents steps{this};
  Imports imports{this};
  // and what is made of them.
  Recompression recompression{this};
  CodecExtents extents{this};
  RawPages raw_pages{this};
  Builds builds{this};
  WorkRequests requests{this};
  RecallAudits recalls{this};
  Inspection inspection{this};
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_STORE_PARTS_H_
