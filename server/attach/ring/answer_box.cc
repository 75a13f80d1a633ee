// SPDX-License-Identifier: Apache-2.0
#include "server/attach/ring/answer_box.h"

namespace kvstrata {

void AnswerBox::PutSettled(uint64_t id, const Status& status) {
  {
    MutexLock lock(mu_);
    waiting_.settled.emplace_back(id, status);
  }
  Tell();
}

void AnswerBox::PutOpened(uint64_t id, const OpenRequest& request,
                          const Result<OpenedSequence>& opened) {
  {
    MutexLock lock(mu_);
    waiting_.opened.push_back({id, request, opened});
  }
  Tell();
}

void AnswerBox::PutBuilt(uint64_t id, const Result<BuildResult>& result) {
  {
    MutexLock lock(mu_);
    waiting_.built.emplace_back(id, result);
  }
  Tell();
}

void AnswerBox::PutLookedUp(uint64_t id, std::chrono::steady_clock::time_point begun,
                            const Result<PrefixHit>& hit) {
  LookupAnswer answer{id, hit.status(), {}, "", begun};
  if (hit.ok()) {
    if (hit->plan) answer.plan = FormatPlan(*hit->plan);
    answer.reply = {hit->held_tokens(),
                    hit->indexed_tokens,
                    hit->tokens_in(Tier::kDevice),
                    hit->tokens_in(Tier::kHost),
                    hit->tokens_in(Tier::kDisk),
                    static_cast<uint32_t>(answer.plan.size())};
  }
  {
    MutexLock lock(mu_);
    waiting_.looked_up.push_back(std::move(answer));
  }
  Tell();
}

LateAnswers AnswerBox::Take() {
  MutexLock lock(mu_);
  any_.store(false, std::memory_order_release);
  return std::exchange(waiting_, {});
}

void AnswerBox::Tell() {
  any_.store(true, std::memory_order_release);
  if (wake_ && std::this_thread::get_id() != serving_.load()) wake_();
}

}  // namespace kvstrata
