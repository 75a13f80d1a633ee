// SPDX-License-Identifier: Apache-2.0
// AnswerBox: where the store's late answers to one session arrive, from whatever thread (a
// worker's; the disk tier's), until whoever serves the session takes them; the loop is woken.
//
// Ownership: shared with the callbacks that the store holds, so it may outlive the session.
// Thread-safety: all methods, from any thread; Take and Serving are for who serves the session.
// Locks: its own, a leaf.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "proto/ring_messages.h"
#include "server/store/requests/build_job.h"
#include "server/store/store.h"

namespace kvstrata {

// What is kept of an open until its answer; `tokens` only where the engine lends the model's
// tensors.
struct OpenRequest {
  uint64_t model = 0;
  std::vector<int32_t> tokens;
  uint32_t asked = 0;  // tokens that pages were taken for
  std::chrono::steady_clock::time_point begun;
};
struct OpenAnswer {
  uint64_t id = 0;
  OpenRequest request;
  Result<OpenedSequence> opened;
};
struct LookupAnswer {
  uint64_t id = 0;
  Status status;
  shm::LookupReply reply{};
  std::string plan;  // in text form; "": of raw pages
  std::chrono::steady_clock::time_point begun;
};
struct LateAnswers {
  std::vector<std::pair<uint64_t, Status>> settled;
  std::vector<OpenAnswer> opened;
  std::vector<std::pair<uint64_t, Result<BuildResult>>> built;
  std::vector<LookupAnswer> looked_up;
};

class AnswerBox {
 public:
  // `wake`: the loop, from any thread; null: it polls.
  explicit AnswerBox(std::function<void()> wake) : wake_(std::move(wake)) {}

  void PutSettled(uint64_t id, const Status& status) KVS_EXCLUDES(mu_);
  void PutOpened(uint64_t id, const OpenRequest& request, const Result<OpenedSequence>& opened)
      KVS_EXCLUDES(mu_);
  void PutBuilt(uint64_t id, const Result<BuildResult>& result) KVS_EXCLUDES(mu_);
  void PutLookedUp(uint64_t id, std::chrono::steady_clock::time_point begun,
                   const Result<PrefixHit>& hit) KVS_EXCLUDES(mu_);

  // Without a lock.
  bool any() const { return any_.load(std::memory_order_acquire); }
  LateAnswers Take() KVS_EXCLUDES(mu_);

  // While it lives, what its thread puts wakes nobody: that thread will look.
  class Serving {
   public:
    explicit Serving(AnswerBox* box) : box_(box) {
      box_->serving_.store(std::this_thread::get_id());
    }
    ~Serving() { box_->serving_.store({}); }
    Serving(const Serving&) = delete;
    Serving& operator=(const Serving&) = delete;

   private:
    AnswerBox* const box_;
  };

 private:
  void Tell();

  const std::function<void()> wake_;
  std::atomic<std::thread::id> serving_{};
  std::atomic<bool> any_{false};
  Mutex mu_;
  LateAnswers waiting_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata
