// SPDX-License-Identifier: Apache-2.0
#include "client/abi/abi_handles.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <unordered_map>
#include <utility>

namespace kvstrata::client {
namespace {

struct Registry {
  std::mutex mu;
  uintptr_t next = 0;
  std::unordered_map<uintptr_t, std::shared_ptr<SessionHandle>> sessions;
  std::unordered_map<uintptr_t, std::shared_ptr<StepHandle>> steps;
  std::unordered_map<uintptr_t, std::shared_ptr<BlockAttentionHandle>> block_attentions;
  std::unordered_map<uintptr_t, std::shared_ptr<BlockPlanesHandle>> block_planes;

  // Multiples of 16, so that a handle looks like a pointer to whoever prints or aligns it.
  uintptr_t NewHandle() { return ++next * 16; }
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

template <typename Handle>
using HandleMap = std::unordered_map<uintptr_t, std::shared_ptr<Handle>>;

// These three are for handles with an owner; the map is one of Handles().
template <typename Dressed, typename Handle>
Dressed* AddOwned(HandleMap<Handle>* map, Handle own) {
  auto handle = std::make_shared<Handle>(std::move(own));
  Registry& r = Handles();
  std::lock_guard<std::mutex> lock(r.mu);
  const uintptr_t number = r.NewHandle();
  map->emplace(number, std::move(handle));
  return reinterpret_cast<Dressed*>(number);
}

template <typename Handle>
Result<std::shared_ptr<Handle>> FindOwned(const HandleMap<Handle>& map, const void* handle,
                                          const char* kind) {
  std::lock_guard<std::mutex> lock(Handles().mu);
  const auto it = map.find(NumberOf(handle));
  if (it == map.end()) return HandleInvalid(kind);
  if (it->second->owner != getpid()) return Forked();
  return it->second;
}

template <typename Handle>
void EndOwned(HandleMap<Handle>* map, const void* handle) {
  std::lock_guard<std::mutex> lock(Handles().mu);
  map->erase(NumberOf(handle));
}

void Abandon(StepHandle* step) {
  if (step->step != nullptr) step->step->AbandonAfterFork();
}

}  // namespace

kvs_session* AddSession(std::unique_ptr<Session> session) {
  return AddOwned<kvs_session>(&Handles().sessions, SessionHandle{std::move(session), getpid()});
}

kvs_step* AddStep(std::shared_ptr<SessionHandle> session, std::unique_ptr<SessionStep> step) {
  auto handle = std::make_shared<StepHandle>();
  handle->session = std::move(session);
  handle->appended.resize(static_cast<size_t>(step->geometry().layers));
  handle->step = std::move(step);
  Registry& r = Handles();
  std::lock_guard<std::mutex> lock(r.mu);
  const uintptr_t number = r.NewHandle();
  r.steps.emplace(number, std::move(handle));
  return reinterpret_cast<kvs_step*>(number);
}

kvs_block_attention* AddBlockAttention(std::unique_ptr<BlockAttention> attention) {
  return AddOwned<kvs_block_attention>(&Handles().block_attentions,
                                       BlockAttentionHandle{std::move(attention), getpid()});
}

Result<std::shared_ptr<BlockAttentionHandle>> FindBlockAttention(
    const kvs_block_attention* handle) {
  return FindOwned(Handles().block_attentions, handle, "attention");
}

void EndBlockAttention(const kvs_block_attention* handle) {
  EndOwned(&Handles().block_attentions, handle);
}

kvs_block_planes* AddBlockPlanes(std::unique_ptr<BlockPlanes> planes) {
  return AddOwned<kvs_block_planes>(&Handles().block_planes,
                                    BlockPlanesHandle{std::move(planes), getpid()});
}

Result<std::shared_ptr<BlockPlanesHandle>> FindBlockPlanes(const kvs_block_planes* handle) {
  return FindOwned(Handles().block_planes, handle, "planes");
}

void EndBlockPlanes(const kvs_block_planes* handle) { EndOwned(&Handles().block_planes, handle); }

Result<std::shared_ptr<SessionHandle>> FindSession(const kvs_session* handle) {
  return FindOwned(Handles().sessions, handle, "session");
}

Result<std::shared_ptr<StepHandle>> FindStep(const kvs_step* handle) {
  Registry& r = Handles();
  std::lock_guard<std::mutex> lock(r.mu);
  const auto it = r.steps.find(NumberOf(handle));
  if (it == r.steps.end()) return HandleInvalid("step");
  if (it->second->session->owner != getpid()) return Forked();
  return it->second;
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
