// SPDX-License-Identifier: Apache-2.0
#include "server/store/books/books.h"

#include <algorithm>
#include <thread>

#include "base/check.h"

namespace kvstrata {
namespace {

bool IsUnused(const Model& model) { return model.sessions == 0 && model.pages == 0; }

}  // namespace

Taker TakerOf(const Session& session, const Sequence& s) {
  std::vector<PoolId> pools = PoolsOf(session, Tier::kDevice);
  if (s.imported || s.plan.tier == Tier::kHost) std::ranges::reverse(pools);
  if (s.imported) return {session.tenant, kDaemon, nullptr, s.model->id, std::move(pools)};
  return {session.tenant, session.id, &session, s.model->id, std::move(pools)};
}

std::vector<PoolId> PoolsOf(const Session& session, Tier tier) {
  if (tier == Tier::kHost) return {PoolId::Host()};
  return {PoolId::Device(session.device), PoolId::Host()};
}

bool MayAdopt(const Taker& taker, const Arena& arena) {
  return taker.session != nullptr && !taker.session->granted.contains(arena.id);
}

LongRequest::LongRequest(SessionCatalog* catalog, Session* session)
    : catalog_(catalog), session_(session) {
  KVS_CHECK(session->long_request == std::thread::id());
  session->long_request = std::this_thread::get_id();
  session->piece_pages = 0;
}

void LongRequest::End() {
  if (session_ == nullptr) return;
  session_->long_request = {};
  session_ = nullptr;
  catalog_->NoteFree();
}

// Who is not in a long request of the session has something unfinished in hand.
void SessionCatalog::LetOthersIn(Session* session, size_t pages) const {
  if (session == nullptr || session->long_request != std::this_thread::get_id()) return;
  session->piece_pages += pages;
  if (session->piece_pages < kPiecePages) return;
  session->piece_pages = 0;
  mu_.Yield();
}

void SessionCatalog::AwaitFree() const {
  std::unique_lock<std::mutex> lock(mu_.native(), std::adopt_lock);
  session_free_.wait(lock);
  lock.release();  // the caller's still
}

bool SessionCatalog::IsFree(const Session& session) {
  return session.long_request == std::thread::id() ||
         session.long_request == std::this_thread::get_id();
}

SessionCatalog::SessionCatalog(StoreMutex& mu, const std::shared_ptr<UserLimits>& user_limits,
                               const ClusterTenants& cluster_tenants)
    : mu_(mu), user_limits_(user_limits), cluster_tenants_(cluster_tenants) {}

Result<Session*> SessionCatalog::FindSession(uint64_t id) {
  for (auto it = sessions_.find(id); it != sessions_.end() && !it->second->fenced;
       it = sessions_.find(id)) {
    if (IsFree(*it->second)) return it->second.get();
    AwaitFree();
  }
  return NotFound("SESSION_UNKNOWN",
                  "session " + std::to_string(id) + " does not exist or has ended; attach again");
}

Result<const Sequence*> SessionCatalog::PeekSequence(uint64_t id) const {
  const auto it = sequences_.find(id);
  if (it != sequences_.end()) return it->second;
  return NotFound("SEQUENCE_UNKNOWN",
                  "sequence " + std::to_string(id) + " does not exist or was closed");
}

Result<Sequence*> SessionCatalog::FindSequence(uint64_t id) {
  for (auto it = sequences_.find(id); it != sequences_.end(); it = sequences_.find(id)) {
    if (IsFree(*sessions_.at(it->second->session))) return it->second;
    AwaitFree();
  }
  return PeekSequence(id).status();
}

Result<Sequence*> SessionCatalog::FindSequence(uint64_t session, uint64_t id) {
  KVS_ASSIGN_OR_RETURN(Session * owner, FindSession(session));
  const auto it = owner->sequences.find(id);
  if (it != owner->sequences.end()) return it->second.get();
  return NotFound("SEQUENCE_UNKNOWN", "sequence " + std::to_string(id) + " is none of session " +
                                          std::to_string(session) + ", or was closed");
}

Result<Sequence*> SessionCatalog::FindSequenceFor(uint64_t session, uint64_t id) {
  return session == 0 ? FindSequence(id) : FindSequence(session, id);
}

Result<const Session::KnownModel*> FindModel(const Session& session, uint64_t id) {
  const auto it = session.models.find(id);
  if (it != session.models.end()) return &it->second;
  return NotFound("MODEL_UNKNOWN", "model " + std::to_string(id) +
                                       " was not registered by session " +
                                       std::to_string(session.id) + "; register it first");
}

Tenant* SessionCatalog::TenantOf(const std::string& name) {
  std::unique_ptr<Tenant>& tenant = tenants_[name];
  if (!tenant) {
    tenant = std::make_unique<Tenant>();
    tenant->id = static_cast<uint32_t>(tenants_by_id_.size());
    tenant->name = name;
    tenant->name_in_keys = cluster_tenants_.NameOf(name);
    tenant->user = user_limits_->For(name);
    tenants_by_id_.push_back(tenant.get());
  }
  return tenant.get();
}

Session* SessionCatalog::AwaitSession(uint64_t id) {
  for (auto it = sessions_.find(id); it != sessions_.end(); it = sessions_.find(id)) {
    if (IsFree(*it->second)) return it->second.get();
    AwaitFree();
  }
  return nullptr;
}

void SessionCatalog::Enter(std::unique_ptr<Session> session) {
  session->tenant->sessions.push_back(session.get());
  const uint64_t id = session->id;
  sessions_.emplace(id, std::move(session));
}

void SessionCatalog::Drop(Session* session) {
  std::erase(session->tenant->sessions, session);
  sessions_.erase(session->id);
}

void SessionCatalog::EnterSequence(Session* session, std::unique_ptr<Sequence> s) {
  const uint64_t id = s->id;
  sequences_.emplace(id, s.get());
  session->sequences.emplace(id, std::move(s));
}

std::unique_ptr<Sequence> SessionCatalog::TakeSequence(Session* session, Sequence* s) {
  sequences_.erase(s->id);
  return std::move(session->sequences.extract(s->id).mapped());
}

bool SessionCatalog::StepsRun() const {
  return std::ranges::any_of(sessions_, [](const auto& entry) {
    return CountReaders(*entry.second->memory->header()) > 0;
  });
}

bool SessionCatalog::Fenced(const Arena& arena) const {
  const auto it = sessions_.find(arena.writer);
  return it != sessions_.end() && it->second->fenced;
}

void ModelTable::Enter(std::shared_ptr<Model> model) {
  const uint64_t id = model->id;
  models_.emplace(id, std::move(model));
}

void ModelTable::NotePages(uint64_t model, uint64_t pages) { models_.at(model)->pages += pages; }

void ModelTable::NoteFreed(uint64_t model) {
  const auto found = models_.find(model);
  KVS_CHECK(found != models_.end());
  --found->second->pages;
  if (IsUnused(*found->second)) models_.erase(found);
}

void ModelTable::DropIfUnused(uint64_t model) {
  const auto found = models_.find(model);
  if (found != models_.end() && IsUnused(*found->second)) models_.erase(found);
}

void ModelTable::DropUnused() {
  std::erase_if(models_, [](const auto& entry) { return IsUnused(*entry.second); });
}

}  // namespace kvstrata
