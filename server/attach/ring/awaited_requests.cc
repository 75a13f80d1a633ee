// SPDX-License-Identifier: Apache-2.0
#include "server/attach/ring/awaited_requests.h"

namespace kvstrata {

void AwaitedRequests::Expire(ReplyRing* replies) {
  const auto now = std::chrono::steady_clock::now();
  for (auto it = deadlines_.begin(); it != deadlines_.end();) {
    if (now < it->second) {
      ++it;
      continue;
    }
    replies->Answer(
        it->first,
        Status(Code::kDeadlineExceeded, "SETTLE_TIMEOUT",
               "workers are still busy with the sequence; `kvstrata work ls` shows the queue"));
    it = deadlines_.erase(it);
  }
}

}  // namespace kvstrata
