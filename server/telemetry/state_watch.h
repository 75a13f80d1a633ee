// SPDX-License-Identifier: Apache-2.0
// StateWatch: tells the log what changed in the daemon as a whole: from serving to degraded and why
// ("state_changed"), how much was evicted ("evicted", one event a burst, however many pages), and
// which servers of the remote tier are left alone ("remote_left_alone", then "remote_back" or
// "remote_unlisted"). A thread ("kvs-watch") looks once a second, so that nothing on the way of a
// request does.
//
// StateChanges is the same without the thread. Thread-safety: one thread each. Cost: what `look`
// costs, a second.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>

#include "base/sync.h"

namespace kvstrata {

struct DaemonState {
  std::string health;     // "serving", "degraded: why"
  bool draining = false;  // the disk
  // Since the start.
  uint64_t evicted_pages = 0, evicted_stored_pages = 0, disk_evicted = 0, evicted_chunks = 0;
  uint32_t fullest_percent = 0;  // use of the fullest pool
  // Servers of the remote tier, and those that are left alone now, each with why.
  std::set<std::string> servers;
  std::map<std::string, std::string> left_alone;
};

class StateChanges {
 public:
  static constexpr int kLongestBurst = 10;  // looks; then what there is so far is told

  explicit StateChanges(DaemonState first) : last_(first), burst_(std::move(first)) {}
  void Note(const DaemonState& now);
  // Tells of a burst that goes on.
  void End();

 private:
  void TellBurst();
  void TellServers(const DaemonState& now) const;

  DaemonState last_;
  DaemonState burst_;  // before it
  int looks_ = 0;      // looks at the burst; 0: there is none
};

class StateWatch {
 public:
  explicit StateWatch(std::function<DaemonState()> look);
  ~StateWatch();

 private:
  void Run();
  // False: the end.
  bool AwaitNext() KVS_EXCLUDES(mu_);

  const std::function<DaemonState()> look_;
  Mutex mu_;
  std::condition_variable wake_;
  bool stopping_ KVS_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace kvstrata
