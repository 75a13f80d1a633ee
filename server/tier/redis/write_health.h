// SPDX-License-Identifier: Apache-2.0
// WriteHealth: which servers of the remote tier fail writes, by how the last ones ended.
//
// A server is ill from when kMany of the last 32 writes to it failed (a full one takes some now and
// then), until kMany in a row succeeded, or none has failed for kForgotten: then nothing is written
// there, and nobody knows. That a server is left alone, or none answers, its client tells; such
// ends say nothing here.
// Thread-safety: any thread. Cost: a map of servers under a lock of its own.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "base/status.h"
#include "base/sync.h"

namespace kvstrata {

class WriteHealth {
 public:
  using Time = std::chrono::steady_clock::time_point;
  static constexpr int kMany = 8;
  static constexpr std::chrono::minutes kForgotten{10};

  // How a write to "host:port" ended.
  void Note(const std::string& server, const Status& status, Time now) KVS_EXCLUDES(mu_);
  // "": well; else the first ill server of those that `counts`, and the last error.
  std::string Illness(const std::function<bool(const std::string& server)>& counts, Time now) const
      KVS_EXCLUDES(mu_);

 private:
  struct Failures {
    uint32_t last_writes = 0;  // a bit each, the last one's lowest; 1: it failed
    bool ill = false;
    Time last{};
    Status why;
  };

  mutable Mutex mu_;
  std::map<std::string, Failures> failing_ KVS_GUARDED_BY(mu_);  // those with a failure in them
};

}  // namespace kvstrata
