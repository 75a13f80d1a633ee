// SPDX-License-Identifier: Apache-2.0
// AwaitedRequests: the requests of one session that the store answers later (answer_box.h).
//
// A settle, a build and a recompression have a deadline here: then the answer is DEADLINE_EXCEEDED
// SETTLE_TIMEOUT, and the work goes on. An open and a look-up have the tier's, and are only
// counted. While kMost wait the session takes no more requests. Thread-safety: whoever serves the
// session.
#ifndef KVSTRATA_SERVER_ATTACH_RING_AWAITED_REQUESTS_H_
#define KVSTRATA_SERVER_ATTACH_RING_AWAITED_REQUESTS_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>

#include "server/attach/ring/reply_ring.h"

namespace kvstrata {

class AwaitedRequests {
 public:
  static constexpr size_t kMost = 256;

  explicit AwaitedRequests(std::chrono::microseconds timeout) : timeout_(timeout) {}

  bool full() const { return deadlines_.size() + opening_ >= kMost; }

  // False: a request of that id waits already.
  bool Await(uint64_t id) {
    return deadlines_.emplace(id, std::chrono::steady_clock::now() + timeout_).second;
  }
  // It waits no more; whether it did.
  bool Answered(uint64_t id) { return deadlines_.erase(id) != 0; }
  // Answers those that have waited too long.
  void Expire(ReplyRing* replies);

  // Opens and look-ups that were not answered yet.
  size_t opening() const { return opening_; }
  void BeginOpening() { ++opening_; }
  void EndOpenings(size_t n) { opening_ -= n; }
  // Those begun since there were `before` failed, and will not be answered.
  void DropOpenings(size_t before) { opening_ = std::min(before, opening_); }

 private:
  const std::chrono::microseconds timeout_;
  std::map<uint64_t, std::chrono::steady_clock::time_point> deadlines_;  // by request
  size_t opening_ = 0;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_RING_AWAITED_REQUESTS_H_
