// SPDX-License-Identifier: Apache-2.0
// Lookups: where the longest held prefix of a prompt lies, page by page. Nothing is taken, no disk
// is read.
//
// Thread-safety: all methods, from any thread. Cost: hashing (prefix_key.h) and a hash look-up or
// two a page; the lock is held for 256 pages at a time. Errors: SESSION_UNKNOWN, MODEL_UNKNOWN, and
// those that a method names.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "server/store/options/parameters.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/requests/prefix_hit.h"

namespace kvstrata {

class Lookups {
 public:
  Lookups(Books& books, const ClusterTenants& cluster_tenants, Plans& plans,
          SessionCatalog& catalog, Devices& devices, PrefixCatalog& prefixes,
          Replication& replication)
      : books_(books),
        cluster_tenants_(cluster_tenants),
        plans_(plans),
        catalog_(catalog),
        devices_(devices),
        prefixes_(prefixes),
        replication_(replication) {}

  // The longest prefix that memory and the tier below hold together. With a plan: what an open of
  // it, without options, on that device ("": the session's) would answer now, by the same rule
  // (held_prefix.h); it may fail as that open would (PLAN_*, PARAMETERS_*), or by DEVICE_UNKNOWN.
  // Without: raw pages of any device, of at most tokens - 1.
  // It says what is held, not what there is room for: an open that finds no memory for copies, or a
  // value damaged, or the disk late, holds less. What it knows of an artefact that lies on
  // disk alone is in ArtefactLedger, which after a start is filled in the background.
  // Idempotent. May read a plan's parameters, once, if `files` says so.
  Result<PrefixHit> Lookup(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
                           const LookupPlan& open = {}, Files files = Files::kRead)
      KVS_EXCLUDES(store_lock);
  // The same, never waiting for a file: calls `done` once, at once in this thread, or later in the
  // replication queue's.
  void Lookup(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
              const LookupPlan& open, LookupDone done) KVS_EXCLUDES(store_lock);
  // Raw pages whose keys are known. In memory another tenant's keys are a miss; the tier below
  // knows no tenants: there the key, which nobody else can compute, is the permission.
  Result<PrefixHit> Lookup(uint64_t session, uint64_t model, std::span<const PageKey> keys)
      KVS_EXCLUDES(store_lock);
  // An operator's: of any tenant, attached or not, as this node or the cluster calls it
  // (cluster_tenants.h); its device "" is the first.
  Result<PrefixHit> LookupFor(std::string_view tenant, uint64_t model,
                              std::span<const int32_t> tokens, const LookupPlan& open = {})
      KVS_EXCLUDES(store_lock);
  Result<PrefixHit> LookupFor(std::string_view tenant, uint64_t model,
                              std::span<const PageKey> keys) KVS_EXCLUDES(store_lock);

  Result<PageOwner> OwnerOf(uint64_t session, uint64_t model) KVS_EXCLUDES(store_lock);
  Result<PageOwner> OwnerOf(std::string_view tenant, uint64_t model) KVS_EXCLUDES(store_lock);
  // Raw pages.
  PrefixHit LookupOf(const PageOwner& owner, std::vector<PageKey> keys) KVS_EXCLUDES(store_lock);

 private:
  Result<PrefixHit> LookupOf(const PageOwner& owner, std::span<const int32_t> tokens,
                             const LookupPlan& open, Files files) KVS_EXCLUDES(store_lock);
  // What an open of a plan would find.
  Result<PrefixHit> LookupAsOpened(const PageOwner& owner, std::span<const int32_t> tokens,
                                   const LookupPlan& open, Files files) KVS_EXCLUDES(store_lock);

  Books& books_;
  const ClusterTenants& cluster_tenants_;
  Plans& plans_;
  SessionCatalog& catalog_;
  Devices& devices_;
  PrefixCatalog& prefixes_;
  Replication& replication_;
};

}  // namespace kvstrata
