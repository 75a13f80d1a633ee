// SPDX-License-Identifier: Apache-2.0
// Books: the store's one lock and what it guards: which page lies where, what it is known by, what
// was counted. Data and no rule: owners change them together, under the lock.
//
// Ownership: the store's, for as long as it lives; owners keep a reference. Thread-safety: `memory`
// has locks of its own; all else is guarded by `mu` (store_lock.h).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "server/store/books/sequence.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/options/store_options.h"
#include "server/store/options/user_limits.h"
#include "server/store/pages/artefacts.h"
#include "server/store/pages/page.h"
#include "server/store/pages/page_memory.h"
#include "server/store/pages/prefix_index.h"
#include "server/store/reports/store_info.h"

namespace kvstrata {

// ModelTable: the models by number, and how many pages each has.
//
// A model is there as long as a session registered it or a page is its own (models.h). Ownership:
// sequences share models. Thread-safety: all methods under the store's lock. Cost: a look-up.
class ModelTable {
 public:
  const std::map<uint64_t, std::shared_ptr<Model>>& all() const { return models_; }
  void Enter(std::shared_ptr<Model> model);
  // So many more pages are the model's.
  void NotePages(uint64_t model, uint64_t pages);
  // One of its pages is no more; the last takes along a model that nobody registered.
  void NoteFreed(uint64_t model);
  // Forgets the model, or all of them, if it is there, nobody registered it and it has no pages.
  void DropIfUnused(uint64_t model);
  void DropUnused();

 private:
  std::map<uint64_t, std::shared_ptr<Model>> models_;
};

struct Books {
  Books(const StoreOptions& options, std::vector<StoreDevice> devices,
        std::unique_ptr<MemoryResource> host)
      : memory(std::move(devices), options.device_bytes, std::move(host), options.host_bytes),
        pools(&memory, options.arena_bytes) {
    memory.on_failure = options.on_pool_failure;
  }

  PageMemory memory;
  StoreMutex mu;
  PagePools pools KVS_GUARDED_BY(store_lock);
  PrefixIndex prefix KVS_GUARDED_BY(store_lock);
  Artefacts artefacts KVS_GUARDED_BY(store_lock);
  ModelTable models KVS_GUARDED_BY(store_lock);
  StoreCounters counters KVS_GUARDED_BY(store_lock);
};

// SessionCatalog: who is there. Tenants, their sessions, the sequences of those by number, and who
// has a session to itself.
//
// Ownership: owns tenants, sessions, and by these their sequences. Thread-safety: all methods under
// the store's lock. What FindSession and FindSequence answer is valid until the lock is given up,
// also by their next call: they wait for the session's long request (LongRequest).
// Errors: SESSION_UNKNOWN, MODEL_UNKNOWN, SEQUENCE_UNKNOWN (also a sequence of another session).
class SessionCatalog {
 public:
  SessionCatalog(StoreMutex& mu, const std::shared_ptr<UserLimits>& user_limits,
                 const ClusterTenants& cluster_tenants);

  Result<Session*> FindSession(uint64_t id) KVS_REQUIRES(store_lock);
  Result<Sequence*> FindSequence(uint64_t session, uint64_t id) KVS_REQUIRES(store_lock);
  Result<Sequence*> FindSequence(uint64_t id) KVS_REQUIRES(store_lock);
  // `session` 0: an operator asks, for any sequence.
  Result<Sequence*> FindSequenceFor(uint64_t session, uint64_t id) KVS_REQUIRES(store_lock);
  // The sequence as it is now, without waiting.
  Result<const Sequence*> PeekSequence(uint64_t id) const KVS_REQUIRES(store_lock);
  // One that ended but for its readers, too; null if there is none.
  Session* AwaitSession(uint64_t id) KVS_REQUIRES(store_lock);
  // REQUIRES: it is there.
  Session* SessionOf(uint64_t id) const KVS_REQUIRES(store_lock) { return sessions_.at(id).get(); }
  Sequence* SequenceOf(uint64_t id) const KVS_REQUIRES(store_lock) { return sequences_.at(id); }

  const std::map<uint64_t, std::unique_ptr<Session>>& sessions() const KVS_REQUIRES(store_lock) {
    return sessions_;
  }
  // In no order.
  const std::unordered_map<uint64_t, Sequence*>& sequences() const KVS_REQUIRES(store_lock) {
    return sequences_;
  }
  void Enter(std::unique_ptr<Session> session) KVS_REQUIRES(store_lock);
  void Drop(Session* session) KVS_REQUIRES(store_lock);
  void EnterSequence(Session* session, std::unique_ptr<Sequence> s) KVS_REQUIRES(store_lock);
  // Nobody finds it any more.
  std::unique_ptr<Sequence> TakeSequence(Session* session, Sequence* s) KVS_REQUIRES(store_lock);

  // Made when it is first seen.
  Tenant* TenantOf(const std::string& name) KVS_REQUIRES(store_lock);
  Tenant* tenant(uint32_t id) const KVS_REQUIRES(store_lock) { return tenants_by_id_[id]; }
  std::span<Tenant* const> tenants() const KVS_REQUIRES(store_lock) { return tenants_by_id_; }

  // The session that writes the arena has ended, and its process may live.
  bool Fenced(const Arena& arena) const KVS_REQUIRES(store_lock);
  // Whether a step of any session runs.
  bool StepsRun() const KVS_REQUIRES(store_lock);

  // In a long request of `session`, after work on that many pages: if it was enough for a piece,
  // whoever waits for the lock has it first. In anything else: nothing.
  void LetOthersIn(Session* session, size_t pages) const KVS_REQUIRES(store_lock);
  // A long request has ended.
  void NoteFree() const { session_free_.notify_all(); }

 private:
  // Gives up the lock until some long request has ended.
  void AwaitFree() const KVS_NO_THREAD_SAFETY_ANALYSIS;
  // Nobody else's long request has it.
  static bool IsFree(const Session& session);

  StoreMutex& mu_;
  const std::shared_ptr<UserLimits>& user_limits_;
  const ClusterTenants& cluster_tenants_;
  mutable std::condition_variable session_free_;
  std::map<std::string, std::unique_ptr<Tenant>> tenants_ KVS_GUARDED_BY(store_lock);
  std::vector<Tenant*> tenants_by_id_ KVS_GUARDED_BY(store_lock);
  std::map<uint64_t, std::unique_ptr<Session>> sessions_ KVS_GUARDED_BY(store_lock);
  std::unordered_map<uint64_t, Sequence*> sequences_ KVS_GUARDED_BY(store_lock);
};

// MODEL_UNKNOWN unless the session registered it.
Result<const Session::KnownModel*> FindModel(const Session& session, uint64_t id);

// LongRequest: what grows with a request's tokens works in pieces.
//
// A request that takes, publishes or releases a page for every few tokens would keep the store's
// lock for as long as its peer likes. It makes a LongRequest, and calls LetOthersIn for the pages
// that it has been through: whoever waits for the lock has it after some kPiecePages of them. Until
// it ends, its session is its alone: FindSession and FindSequence wait in other threads, so nothing
// that it has found goes, and nothing of its sequences changes, while others have the lock.
// Snapshots and the audit do not wait: in between, references and pages are in order, and tables
// may be behind the sequence. What a table still names keeps its reference until it is published
// anew: others free what is retired.
//
// Ownership: borrows the catalog and the session. Thread-safety: made and destroyed under the
// store's lock, in one thread. Cost: what waits for the session is woken at its end.

// Some 200 us of taking, publishing or releasing.
inline constexpr uint32_t kPiecePages = 256;

class LongRequest {
 public:
  // REQUIRES: `session` was just found, hence no other request has it.
  LongRequest(SessionCatalog* catalog, Session* session) KVS_REQUIRES(store_lock);
  ~LongRequest() { End(); }
  LongRequest(const LongRequest&) = delete;
  LongRequest& operator=(const LongRequest&) = delete;

  // Called before the session goes. Idempotent.
  void End();

 private:
  SessionCatalog* const catalog_;
  Session* session_;
};

// A sequence that a long request has in no map, because it is about to enter (Enter ends it then)
// or has left: its references count all the same.
class Outside {
 public:
  Outside(Session* session, const Sequence* s) : session_(session) { session_->outside = s; }
  ~Outside() { session_->outside = nullptr; }
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;

 private:
  Session* const session_;
};

// Taker: who pages are taken for, where from, and what of others it may have.
//
// Ownership: borrows tenant and session. Thread-safety: all of it under the store's lock. Cost:
// constant.

// Who pages are taken for and where from, first choice first.
struct Taker {
  Tenant* tenant;
  uint64_t writer;         // a session or kDaemon
  const Session* session;  // null: the daemon
  uint64_t model;
  std::vector<PoolId> pools;
  bool evicts = true;  // else only what is free is taken
  uint64_t ahead = 0;  // bytes that are taken next: what is evicted makes room for them too
};

// Where memory for a session's sequence comes from: of its device, else of host; or of host only.
std::vector<PoolId> PoolsOf(const Session& session, Tier tier);
Taker TakerOf(const Session& session, const Sequence& s);
// The limit that a pool's arenas count against.
inline Limit LimitOf(PoolId pool) {
  return pool.tier() == Tier::kHost ? Limit::kHostBytes : Limit::kDeviceBytes;
}
// Whether the taker may become the writer of an orphan arena. A client that mapped it read-only
// keeps that mapping, so its session may not.
bool MayAdopt(const Taker& taker, const Arena& arena);

}  // namespace kvstrata
