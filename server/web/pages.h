// SPDX-License-Identifier: Apache-2.0
// The pages that http.listen serves, one file each; a new one gets a file and a row in pages.cc.
//
// Threads: kvs-http's alone. Cost: some ten microseconds; no lock that a step could wait for, no
// call that blocks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/sync.h"
#include "server/http/http_server.h"
#include "server/store/reports/store_info.h"
#include "server/web/daemon_numbers.h"

namespace kvstrata {

// What the status page has the daemon do: keep looking at sequences while it is open, and prove the
// books when somebody clicks. The page's thread asks, kvs-watch does it at its next look, so that
// no request waits for the store.
//
// There is no authentication at http.listen, so an audit, which holds the store's lock, is bounded:
// not again within kRest of the last one, and within a hundred times what that took.
// Thread-safety: any thread; leaf locks. Cost: a load or two.

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

// LabelCap: at most so many values of a label, for what peers name: the first ones that come keep
// their names for good, all others are "other" together. So no peer makes series without end, and
// what a counter of "other" sums never leaves it.
//
// Thread-safety: any thread. Cost: a look-up in a set under a short lock.
class LabelCap {
 public:
  static constexpr std::string_view kOther = "other";

  explicit LabelCap(size_t most) : most_(most) {}

  // `value`, or kOther.
  std::string_view Of(std::string_view value) KVS_EXCLUDES(mu_) {
    MutexLock lock(mu_);
    if (names_.contains(value)) return value;
    if (names_.size() == most_) return kOther;
    return *names_.emplace(value).first;
  }

 private:
  const size_t most_;
  Mutex mu_;
  std::set<std::string, std::less<>> names_ KVS_GUARDED_BY(mu_);
};

// What pages are made of; outlives the server.
struct PageSource {
  static constexpr size_t kMostUsers = 32;  // that have series of their own
  static constexpr size_t kMostRemoteServers = 64;

  LatestNumbers numbers;
  HttpCounts http;
  LabelCap users{kMostUsers};
  LabelCap remote_servers{kMostRemoteServers};
  std::atomic<std::chrono::microseconds> patience{};  // with a loop, until it counts as hanging
  std::string_view version, commit;
  std::chrono::steady_clock::time_point started;
  PageAudits audits;
  WatchedPage status;  // whether somebody looks at it
};

// All, in the order of HttpCounts::answered.
std::vector<HttpPath> DaemonPages(PageSource* source);
std::vector<std::string_view> PagePaths();

// The text of status.html, which the build puts into the program.
extern const std::string_view kStatusHtml;

HttpAnswer MetricsPage(PageSource* source, const HttpRequest& request);
// Kubernetes' probes; `?verbose` lists all parts.
HttpAnswer LivezPage(PageSource* source, const HttpRequest& request);
HttpAnswer ReadyzPage(PageSource* source, const HttpRequest& request);
HttpAnswer HealthzPage(PageSource* source, const HttpRequest& request);
// The status page, what it asks for once a second (`?after=N`: events behind that number only), and
// its audit.
HttpAnswer StatusPage(PageSource* source, const HttpRequest& request);
HttpAnswer StatusDataPage(PageSource* source, const HttpRequest& request);
HttpAnswer AuditPage(PageSource* source, const HttpRequest& request);

// A refusal for what a page of somebody else's in an operator's browser asked: by
// a name that leads here (DNS rebinding), or from another site. Nothing: it may be answered.
std::optional<HttpAnswer> RefuseForeign(const HttpRequest& request);

// health.cc: what these three share. "loops" is looked up now, so that a daemon whose kvs-watch
// hangs is found out; the rest is of the latest numbers.
std::vector<PartHealth> HealthNow(const PageSource& source);
HttpAnswer HealthAnswer(const std::vector<PartHealth>& parts, bool well,
                        const HttpRequest& request);

}  // namespace kvstrata
