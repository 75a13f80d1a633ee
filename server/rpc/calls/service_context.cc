// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/calls/service_context.h"

#include <string>

namespace kvstrata {

void CallsUnderWay::Begin() {
  if (all_ != nullptr) all_->Begin();
  MutexLock lock(mu_);
  ++calls_;
}

void CallsUnderWay::End() {
  CallsUnderWay* const all = all_;
  {
    MutexLock lock(mu_);
    if (--calls_ == 0) none_.notify_all();  // under the lock: the waiter may end this object
  }
  if (all != nullptr) all->End();
}

size_t CallsUnderWay::calls() const {
  MutexLock lock(mu_);
  return calls_;
}

bool CallsUnderWay::AwaitNone(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mu_.native());
  return none_.wait_until(lock, deadline,
                          [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return calls_ == 0; });
}

Status ServiceContext::CheckAdmin() const {
  if (admin_) return OkStatus();
  return {Code::kPermissionDenied, "ADMIN_ONLY",
          "user " + std::to_string(user_.uid) +
              " may not call this; only root and the daemon's own "
              "user may"};
}

Status ServiceContext::NoDisk() {
  return NotFound("TIER_UNKNOWN", "the daemon has no disk tier: disk.path is not set");
}

Status ServiceContext::NoRemote() const {
  return NotFound("TIER_UNKNOWN",
                  "the daemon has no remote tier, which nodes share: set " + options_.remote_keys);
}

Status ServiceContext::NoMemory() {
  return ResourceExhausted(
      "MEMORY",
      "the daemon had no memory for this call; ask for less at a time, or give "
      "the daemon more");
}

void ServiceContext::AddSession(std::shared_ptr<RemoteSession> session) {
  MutexLock lock(mu_);
  const uint64_t id = session->id();
  sessions_.emplace(id, std::move(session));
}

bool ServiceContext::HasSessions() const {
  MutexLock lock(mu_);
  return !sessions_.empty();
}

std::shared_ptr<RemoteSession> ServiceContext::TakeSession(uint64_t session) {
  MutexLock lock(mu_);
  auto node = sessions_.extract(session);
  return node.empty() ? nullptr : std::move(node.mapped());
}

Result<std::shared_ptr<RemoteSession>> ServiceContext::FindSession(uint64_t session) const {
  if (stopping_) return Stopping();
  MutexLock lock(mu_);
  const auto found = sessions_.find(session);
  if (found != sessions_.end()) return found->second;
  return NotFound("SESSION_UNKNOWN",
                  "session " + std::to_string(session) +
                      " does not exist, or is not yours; a session lives as long as its "
                      "OpenSession stream");
}

}  // namespace kvstrata
