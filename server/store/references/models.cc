// SPDX-License-Identifier: Apache-2.0
#include "server/store/references/models.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/references/eviction.h"
#include "server/store/references/page_references.h"

namespace kvstrata {
namespace {

constexpr size_t kMaxModels = 1024;
constexpr size_t kMaxText = 256;
constexpr size_t kMaxBoundaryTokens = 1 << 16;

Status CheckText(std::string_view field, const std::string& value, bool required) {
  if (value.size() <= kMaxText && !(required && value.empty())) return OkStatus();
  return InvalidArgument("MODEL_TEXT", std::string(field) + " has " + std::to_string(value.size()) +
                                           " bytes; allowed: " + (required ? "1" : "0") + " to " +
                                           std::to_string(kMaxText));
}

Status Validate(const ModelDesc& desc, uint64_t largest_pool) {
  KVS_RETURN_IF_ERROR(CheckText("name", desc.name, true));
  // Pages are shared by digest: without one, different weights would be taken for the same.
  KVS_RETURN_IF_ERROR(CheckText("digest", desc.digest, true));
  KVS_RETURN_IF_ERROR(CheckText("layout", desc.layout, false));
  KVS_RETURN_IF_ERROR(CheckText("adapter", desc.adapter, false));
  KVS_RETURN_IF_ERROR(Validate(desc.geometry));
  if (desc.ranks != 1 || desc.rank != 0) {
    return Unimplemented("MODEL_RANKS", "rank is " + std::to_string(desc.rank) + " of " +
                                            std::to_string(desc.ranks) +
                                            "; this build serves rank 0 of 1");
  }
  if (desc.boundary_tokens.size() > kMaxBoundaryTokens) {
    return InvalidArgument("MODEL_BOUNDARY_TOKENS",
                           "boundary_tokens has " + std::to_string(desc.boundary_tokens.size()) +
                               " entries; allowed: at most 65536");
  }
  if (static_cast<uint64_t>(desc.geometry.page_bytes()) > largest_pool) {
    return InvalidArgument("MODEL_PAGE_TOO_LARGE", "a page of this geometry has " +
                                                       std::to_string(desc.geometry.page_bytes()) +
                                                       " bytes; allowed: at most a pool's " +
                                                       std::to_string(largest_pool));
  }
  return OkStatus();
}

}  // namespace

void Models::LeaveModel(Model* model) {
  if (--model->sessions != 0) return;
  model->place = {};
  if (model->OfOneSession() && model->pages != 0) eviction_.DropUnusedPagesOf(*model);
  books_.models.DropIfUnused(model->id);
}

Status Models::MakeRoomForModel() {
  const auto& models = books_.models.all();
  if (models.size() < kMaxModels) return OkStatus();
  books_.models.DropUnused();
  // Then one that only cached pages keep, the oldest of whoever has most of those.
  std::map<uint32_t, std::vector<Model*>> left;
  for (const auto& [id, model] : models) {
    if (model->sessions == 0) left[model->tenant].push_back(model.get());
  }
  const auto most = std::ranges::max_element(
      left, {}, [](const auto& of_tenant) { return of_tenant.second.size(); });
  if (models.size() >= kMaxModels && most != left.end()) {
    eviction_.DropUnusedPagesOf(**std::ranges::min_element(most->second, {}, &Model::id));
    for (Tenant* tenant : catalog_.tenants()) references_.Advance(tenant);
    references_.ReclaimLocked();
  }
  if (models.size() < kMaxModels) return OkStatus();
  return ResourceExhausted("MODEL_LIMIT", "the daemon has all the " + std::to_string(kMaxModels) +
                                              " models that it may have; try again later");
}

// Others' models of that description are others'.
std::shared_ptr<Model> Models::FindRegistered(const Tenant& tenant, const ModelDesc& desc) const {
  for (const auto& [id, known] : books_.models.all()) {
    if (known->tenant == tenant.id && known->desc == desc) return known;
  }
  return nullptr;
}

Result<uint64_t> Models::RegisterModel(uint64_t session_id, const ModelDesc& desc) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Session * session, catalog_.FindSession(session_id));
  const uint64_t largest = std::max(books_.memory.capacity(PoolId::Device(session->device)),
                                    books_.memory.capacity(PoolId::Host()));
  KVS_RETURN_IF_ERROR(Validate(desc, largest));
  Tenant* const tenant = session->tenant;
  std::shared_ptr<Model> model = FindRegistered(*tenant, desc);
  UserPlace place;
  if (!model || model->sessions == 0) {
    KVS_ASSIGN_OR_RETURN(place, UserPlace::Take(user_limits_, tenant->name, Limit::kModels));
  }
  if (!model) {
    KVS_RETURN_IF_ERROR(MakeRoomForModel());
    model = std::make_shared<Model>();
    model->id = tenant->NextId(&tenant->models_made);
    model->tenant = tenant->id;
    model->desc = desc;
    books_.models.Enter(model);
  }
  if (model->sessions == 0) model->place = std::move(place);
  const auto [it, added] = session->models.try_emplace(
      model->id, std::make_pair(model, KeyChain(tenant->name_in_keys, desc)));
  if (added) ++model->sessions;
  return it->first;
}

Result<Geometry> Models::ModelGeometry(uint64_t session_id, uint64_t model) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(const Session* session, catalog_.FindSession(session_id));
  KVS_ASSIGN_OR_RETURN(const Session::KnownModel* known, FindModel(*session, model));
  return known->first->desc.geometry;
}

Status Models::ImportModel(uint64_t session_id, uint64_t model) {
  StoreLock lock(books_.mu);
  KVS_ASSIGN_OR_RETURN(Session * session, catalog_.FindSession(session_id));
  KVS_RETURN_IF_ERROR(FindModel(*session, model).status());
  session->imports.insert(model);
  return OkStatus();
}

}  // namespace kvstrata
