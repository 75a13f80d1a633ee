// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <unordered_map>
#include <utility>

#include "client/abi/abi_call.h"

namespace kvstrata::client {
namespace {

template <typename Handle>
using ByNumber = std::unordered_map<uintptr_t, std::shared_ptr<Handle>>;

struct Registry {
  std::mutex mu;
  uintptr_t next = 0;
  ByNumber<SessionHandle> sessions;
  ByNumber<StepHandle> steps;
  ByNumber<BlocksHandle<BlockAttention>> block_attentions;
  ByNumber<BlocksHandle<BlockPlanes>> block_planes;
};

// Never destroyed: calls may come while the process exits.
Registry& Handles() {
  static Registry* registry = [] {
    auto* r = new Registry;
    // Without these, a child forked while another thread looks a handle up would hang.
    pthread_atfork([] { Handles().mu.lock(); }, [] { Handles().mu.unlock(); },
                   [] { Handles().mu.unlock(); });
    return r;
  }();
  return *registry;
}

uintptr_t NumberOf(const void* handle) { return reinterpret_cast<uintptr_t>(handle); }

Status HandleInvalid(const char* kind) {
  return InvalidArgument("HANDLE_INVALID", std::string(kind) +
                                               " is not a live handle: it was ended, or never "
                                               "came from this library");
}

Status Forked() {
  return FailedPrecondition("FORKED",
                            "this handle belongs to the parent process; make another after "
                            "fork()");
}

// Multiples of 16, so that a handle looks like a pointer to whoever prints or aligns it.
template <typename Handle>
uintptr_t Add(ByNumber<Handle> Registry::*handles, std::shared_ptr<Handle> handle) {
  Registry& r = Handles();
  std::lock_guard<std::mutex> lock(r.mu);
  const uintptr_t number = ++r.next * 16;
  (r.*handles).emplace(number, std::move(handle));
  return number;
}

template <typename Dressed, typename Handle>
Dressed* AddOwned(ByNumber<Handle> Registry::*handles, Handle own) {
  return reinterpret_cast<Dressed*>(Add(handles, std::make_shared<Handle>(std::move(own))));
}

template <typename Handle>
void End(ByNumber<Handle> Registry::*handles, const void* handle) {
  Registry& r = Handles();
  std::lock_guard<std::mutex> lock(r.mu);
  (r.*handles).erase(NumberOf(handle));
}

pid_t OwnerOf(const StepHandle& step) { return step.session->owner; }
template <typename Handle>
pid_t OwnerOf(const Handle& handle) {
  return handle.owner;
}

template <typename Handle>
Result<std::shared_ptr<Handle>> Find(ByNumber<Handle> Registry::*handles, const void* handle,
                                     const char* kind) {
  Registry& r = Handles();
  std::lock_guard<std::mutex> lock(r.mu);
  const auto it = (r.*handles).find(NumberOf(handle));
  if (it == (r.*handles).end()) return HandleInvalid(kind);
  if (OwnerOf(*it->second) != getpid()) return Forked();
  return it->second;
}

void Abandon(StepHandle* step) {
  if (step->step != nullptr) step->step->AbandonAfterFork();
}

}  // namespace

kvs_session* AddSession(std::unique_ptr<Session> session) {
  return AddOwned<kvs_session>(&Registry::sessions, SessionHandle{std::move(session), getpid()});
}

kvs_step* AddStep(std::shared_ptr<SessionHandle> session, std::unique_ptr<SessionStep> step) {
  auto handle = std::make_shared<StepHandle>();
  handle->session = std::move(session);
  handle->appended.resize(static_cast<size_t>(step->geometry().layers));
  handle->step = std::move(step);
  return reinterpret_cast<kvs_step*>(Add(&Registry::steps, std::move(handle)));
}

kvs_block_attention* AddBlocks(std::unique_ptr<BlockAttention> attention) {
  return AddOwned<kvs_block_attention>(
      &Registry::block_attentions, BlocksHandle<BlockAttention>{std::move(attention), getpid()});
}

kvs_block_planes* AddBlocks(std::unique_ptr<BlockPlanes> attention) {
  return AddOwned<kvs_block_planes>(&Registry::block_planes,
                                    BlocksHandle<BlockPlanes>{std::move(attention), getpid()});
}

Result<std::shared_ptr<BlocksHandle<BlockAttention>>> FindBlocks(
    const kvs_block_attention* handle) {
  return Find(&Registry::block_attentions, handle, "attention");
}

Result<std::shared_ptr<BlocksHandle<BlockPlanes>>> FindBlocks(const kvs_block_planes* handle) {
  return Find(&Registry::block_planes, handle, "planes");
}

void EndBlocks(const kvs_block_attention* handle) { End(&Registry::block_attentions, handle); }
void EndBlocks(const kvs_block_planes* handle) { End(&Registry::block_planes, handle); }

Result<std::shared_ptr<SessionHandle>> FindSession(const kvs_session* handle) {
  return Find(&Registry::sessions, handle, "session");
}

Result<std::shared_ptr<StepHandle>> FindStep(const kvs_step* handle) {
  return Find(&Registry::steps, handle, "step");
}

std::shared_ptr<StepHandle> TakeStep(const kvs_step* handle) {
  Registry& r = Handles();
  std::lock_guard<std::mutex> lock(r.mu);
  const auto it = r.steps.find(NumberOf(handle));
  if (it == r.steps.end()) return nullptr;
  std::shared_ptr<StepHandle> step = std::move(it->second);
  r.steps.erase(it);
  if (step->session->owner != getpid()) Abandon(step.get());
  return step;
}

void EndSession(const kvs_session* handle) {
  std::shared_ptr<SessionHandle> session;
  std::vector<std::shared_ptr<StepHandle>> steps;
  {
    Registry& r = Handles();
    std::lock_guard<std::mutex> lock(r.mu);
    const auto it = r.sessions.find(NumberOf(handle));
    if (it == r.sessions.end()) return;
    session = std::move(it->second);
    r.sessions.erase(it);
    for (auto s = r.steps.begin(); s != r.steps.end();) {
      if (s->second->session == session) {
        steps.push_back(std::move(s->second));
        s = r.steps.erase(s);
      } else {
        ++s;
      }
    }
  }
  if (session->owner != getpid()) {
    for (const auto& step : steps) Abandon(step.get());
    session->session->AbandonAfterFork();
  }
  steps.clear();  // before the session goes
}

}  // namespace kvstrata::client
