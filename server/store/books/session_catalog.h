// SPDX-License-Identifier: Apache-2.0
// SessionCatalog: who is there. Tenants, their sessions, the sequences of those by number, and who
// has a session to itself.
//
// Ownership: owns tenants, sessions, and by these their sequences. Thread-safety: all methods under
// the store's lock. What FindSession and FindSequence answer is valid until the lock is given up,
// also by their next call: they wait for the session's long request (long_request.h).
// Errors: SESSION_UNKNOWN, MODEL_UNKNOWN, SEQUENCE_UNKNOWN (also a sequence of another session).
#ifndef KVSTRATA_SERVER_STORE_BOOKS_SESSION_CATALOG_H_
#define KVSTRATA_SERVER_STORE_BOOKS_SESSION_CATALOG_H_

#include <condition_variable>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "server/store/books/sequence.h"
#include "server/store/options/store_lock.h"

namespace kvstrata {

class ClusterTenants;

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

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_BOOKS_SESSION_CATALOG_H_
