// SPDX-License-Identifier: Apache-2.0
// Models: those that sessions have registered, or that only cached pages keep.
//
// A model is there as long as a session registered it or a page is its own. Ownership: sequences
// share them. Thread-safety: methods that say so are called under the store's lock, all others from
// any thread. Errors: SESSION_UNKNOWN, MODEL_UNKNOWN, and those that a method names.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "kernels/pages/page_view.h"
#include "server/store/options/session_types.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"

namespace kvstrata {

class Models {
 public:
  Models(Books& books, const std::shared_ptr<UserLimits>& user_limits, SessionCatalog& catalog,
         PageReferences& references, Eviction& eviction)
      : books_(books),
        user_limits_(user_limits),
        catalog_(catalog),
        references_(references),
        eviction_(eviction) {}

  // The number of one that the session may open sequences of. INVALID_ARGUMENT MODEL_TEXT,
  // MODEL_BOUNDARY_TOKENS, MODEL_PAGE_TOO_LARGE, GEOMETRY_*; UNIMPLEMENTED MODEL_RANKS;
  // RESOURCE_EXHAUSTED MODEL_LIMIT.
  Result<uint64_t> RegisterModel(uint64_t session, const ModelDesc& desc) KVS_EXCLUDES(store_lock);
  Result<Geometry> ModelGeometry(uint64_t session, uint64_t model) KVS_EXCLUDES(store_lock);
  // Sequences that the session opens of this model from now on are imported (imports.h).
  Status ImportModel(uint64_t session, uint64_t model) KVS_EXCLUDES(store_lock);

  // A session that registered it has ended.
  void LeaveModel(Model* model) KVS_REQUIRES(store_lock);

 private:
  Status MakeRoomForModel() KVS_REQUIRES(store_lock);
  std::shared_ptr<Model> FindRegistered(const Tenant& tenant, const ModelDesc& desc) const
      KVS_REQUIRES(store_lock);

  Books& books_;
  const std::shared_ptr<UserLimits>& user_limits_;
  SessionCatalog& catalog_;
  PageReferences& references_;
  Eviction& eviction_;
};

}  // namespace kvstrata
