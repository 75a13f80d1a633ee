// SPDX-License-Identifier: Apache-2.0
// What the status page has the daemon do: keep looking at sequences while it is open, and prove the
// books when somebody clicks. The page's thread asks, kvs-watch does it at its next look, so that
// no request waits for the store.
//
// There is no authentication at http.listen, so an audit, which holds the store's lock, is bounded:
// not again within kRest of the last one, and within a hundred times what that took.
// Thread-safety: any thread; leaf locks. Cost: a load or two.
#ifndef KVSTRATA_SERVER_WEB_PAGE_REQUESTS_H_
#define KVSTRATA_SERVER_WEB_PAGE_REQUESTS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>

#include "base/sync.h"
#include "server/store/reports/store_info.h"

namespace kvstrata {

// Whether a page was asked for a short while ago.
class WatchedPage {
 public:
  static constexpr std::chrono::seconds kLasts{5};

  void Note() {
    last_.store(std::chrono::steady_clock::now().time_since_epoch().count(),
                std::memory_order_relaxed);
  }
  bool watched() const {
    const std::chrono::steady_clock::duration last(last_.load(std::memory_order_relaxed));
    return last.count() != 0 && std::chrono::steady_clock::now().time_since_epoch() - last < kLasts;
  }

 private:
  std::atomic<std::chrono::steady_clock::rep> last_{0};
};

class PageAudits {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kRest{10};
  static constexpr int kShare = 100;  // audits take at most one part in so many of the time

  struct Report {
    AuditReport audit;
    int64_t time_us = 0;  // since 1970, UTC
  };

  // Has one made; else how long to wait until one may be.
  std::optional<std::chrono::seconds> Ask() KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    const auto now = Clock::now();
    if (now < next_) return std::chrono::ceil<std::chrono::seconds>(next_ - now);
    wanted_ = true;
    next_ = now + kRest;
    return std::nullopt;
  }
  // Makes the one that was asked for, if any.
  void MakeWanted(const std::function<AuditReport()>& audit) KVS_EXCLUDES(mu_) {
    {
      MutexLock lock(mu_);
      if (!wanted_) return;
      wanted_ = false;
    }
    const auto begin = Clock::now();
    Report report{audit(), 0};
    const auto end = Clock::now();
    report.time_us = std::chrono::duration_cast<std::chrono::microseconds>(
                         std::chrono::system_clock::now().time_since_epoch())
                         .count();
    MutexLock lock(mu_);
    last_ = std::move(report);
    next_ = std::max(next_, end + kShare * (end - begin));
  }
  std::optional<Report> last() const KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    return last_;
  }

 private:
  mutable Mutex mu_;
  bool wanted_ KVS_GUARDED_BY(mu_) = false;
  Clock::time_point next_ KVS_GUARDED_BY(mu_);
  std::optional<Report> last_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_WEB_PAGE_REQUESTS_H_
