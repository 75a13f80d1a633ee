// SPDX-License-Identifier: Apache-2.0
// Store: the memory of one daemon and who uses it. Sessions attach, register models, open sequences
// and commit what they computed; the store gives them pages, keeps those of prompts under keys so
// that the next sequence of the same prompt finds them, and publishes tables that say where pages
// lie. It is divided by what owns what; whoever calls it talks to the owner:
//
//   who is there   sessions, models, devices, plans
//   a sequence     openings begin it, steps are what it sends, sequences cut, fork and end it;
//                  imports fill one from an engine's own tensors
//   its prefix     lookups and leases say and hold what there is, pins spare it, prefixes has it,
//                  values are its bytes, for the tier below and for operators
//   its memory     capacity counts, moves and replication place, eviction and references release
//   its workers    recompression, requests (builds), recalls (audits of what a plan loses)
//   all of it      inspection
//
// Ownership: the store owns all pages and segments; sessions own sequences; sequences and the
// prefix index hold references to pages. A page goes back to its pool when nothing refers to it and
// every reader that may see it has left its epoch (epochs.h).
// Thread-safety: what an owner's header does not call "under the store's lock" may be called from
// any thread. There is one lock (store_lock.h), held for microseconds: pages are copied and tokens
// hashed outside of it. What grows with the tokens of a request (open, fork, grow, commit, close,
// the end of a session) works in pieces of some 200 us and lets others have the lock between them.
// Such a request has its session to itself: what else is asked of the session, or of its sequences,
// waits until it is done; snapshots do not.
// Errors: SESSION_UNKNOWN, MODEL_UNKNOWN, SEQUENCE_UNKNOWN (also a sequence of another session),
// POOL_EXHAUSTED (RESOURCE_EXHAUSTED; nothing was taken), the PLAN_* of kernels/plan/plan.h, and
// those that a method names. DEVICE_FAILED (UNAVAILABLE): the sequence has pages on a device that
// is lost to the daemon; close it and open it again, it is then served from host memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "server/store/books/devices.h"
#include "server/store/books/plans.h"
#include "server/store/codecs/builds.h"
#include "server/store/codecs/recompression.h"
#include "server/store/codecs/work_requests.h"
#include "server/store/lookups/lookups.h"
#include "server/store/lookups/prefix_pins.h"
#include "server/store/lookups/replication.h"
#include "server/store/openings/leases.h"
#include "server/store/openings/openings.h"
#include "server/store/options/store_options.h"
#include "server/store/prompts/prefix_catalog.h"
#include "server/store/prompts/sealed_values.h"
#include "server/store/references/eviction.h"
#include "server/store/references/models.h"
#include "server/store/references/page_references.h"
#include "server/store/sequences/imports.h"
#include "server/store/sequences/inspection.h"
#include "server/store/sequences/recall_audits.h"
#include "server/store/sequences/sequences.h"
#include "server/store/sequences/sessions.h"
#include "server/store/sequences/step_events.h"
#include "server/store/space/capacity_counter.h"
#include "server/store/space/moves.h"

namespace kvstrata {

class Store {
 public:
  // PLAN_NAMED_INVALID when a named plan does not parse; POOL_SIZE when both pools are empty.
  static Result<std::unique_ptr<Store>> Create(const StoreOptions& options);
  // With memory of the caller's choosing (a device backend; tests that inject failures): of one
  // device, or of several of one kind (1 to PoolId::kMaxDevices), with different names.
  static Result<std::unique_ptr<Store>> Create(const StoreOptions& options,
                                               std::unique_ptr<MemoryResource> device,
                                               std::unique_ptr<MemoryResource> host);
  static Result<std::unique_ptr<Store>> Create(const StoreOptions& options,
                                               std::vector<StoreDevice> devices,
                                               std::unique_ptr<MemoryResource> host);
  ~Store();

  // The owners, for as long as the store lives.
  Sessions& sessions() const;
  Models& models() const;
  Devices& devices() const;
  Plans& plans() const;
  Openings& openings() const;
  StepEvents& steps() const;
  Sequences& sequences() const;
  Imports& imports() const;
  Lookups& lookups() const;
  Leases& leases() const;
  PrefixPins& pins() const;
  PrefixCatalog& prefixes() const;
  SealedValues& values() const;
  CapacityCounter& capacity() const;
  Moves& moves() const;
  Replication& replication() const;
  Eviction& eviction() const;
  PageReferences& references() const;
  Recompression& recompression() const;
  Builds& builds() const;
  WorkRequests& requests() const;
  RecallAudits& recalls() const;
  Inspection& inspection() const;

  // The options' limits, or one without any.
  const std::shared_ptr<UserLimits>& user_limits() const;
  const ClusterTenants& cluster_tenants() const;
  // Another number in each daemon; never 0.
  uint64_t daemon_epoch() const;

  // From now on; what is held beyond a limit stays. Any thread.
  void Apply(const StoreSettings& settings);

 private:
  friend struct AuditTestPeer;
  struct Parts;
  explicit Store(std::unique_ptr<Parts> parts);

  const std::unique_ptr<Parts> parts_;
};

}  // namespace kvstrata
