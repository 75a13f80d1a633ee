// SPDX-License-Identifier: Apache-2.0
// Daemon: the composition root. Owns the path's lock, the store, both sockets and their servers,
// and knows the order in which they start and end (docs/operations.md).
//
// Thread-safety: one thread makes and ends it; what it starts has threads of its own.
// Errors: those of the parts; ExitCodeOf turns them into the documented exit codes.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string_view>

#include "base/status.h"
#include "server/attach/attach_server.h"
#include "server/config/config.h"
#include "server/store/store.h"

namespace kvstrata {

enum ExitCode : int {
  kExitClean = 0,
  kExitFailed = 1,
  kExitUsage = 2,       // a flag, a key, a plan, a path, sizes that cannot be had here
  kExitInUse = 3,       // another daemon, or another program, serves the path or has the disk tier
  kExitPermission = 4,  // a path, its directory or a file may not be used by this user
};
int ExitCodeOf(const Status& status);

std::string_view DaemonVersion();  // "1.2.3"
std::string_view DaemonCommit();   // the source tree's at build time; "unknown"

class Daemon {
 public:
  // Serves on both sockets when it returns.
  static Result<std::unique_ptr<Daemon>> Start(const Config& config);
  // The end has three steps; one that is left out is made by a later one, but WriteOn.
  // Clients see EOF or UNAVAILABLE, calls under way get a short grace, all sockets are unlinked.
  // Peers cannot make it last.
  void EndServing();
  // Waits while what engines have computed is written to the tiers below: for
  // shutdown.write_timeout, as long as some of it is written within each shutdown.timeout
  // (last_writes.h). `ends` sleeps for as long as it is told; true: the wait is over.
  // REQUIRES: EndServing.
  void WriteOn(const std::function<bool(std::chrono::milliseconds)>& ends);
  // Ends all that outlives the process: what still waits is dropped, and the disk gets a
  // checkpoint, for a quarter of shutdown.timeout.
  void Settle();
  // Settle; then everything goes, gRPC too, which gives no bound on how long that takes. The lock
  // falls last.
  ~Daemon();

  size_t devices() const;  // with a pool each
  // All pools of a tier together: what a cgroup and the GPUs allow of what was asked for.
  uint64_t PoolBytes(Tier tier) const;
  // Reads the configuration's files again (config_reload.h). What came of it is in the log.
  void Reload(std::string_view by);
  std::chrono::microseconds shutdown_timeout() const;  // as it is now
  std::chrono::microseconds shutdown_write_timeout() const;
  Store& store();
  AttachServer& attach();

 private:
  struct Parts;
  explicit Daemon(std::unique_ptr<Parts> parts);
  std::unique_ptr<Parts> parts_;
};

// The life of the process, from a checked configuration to the exit code: hardens the process,
// starts, tells `ready_fd` (-1: nobody) and the service manager, waits for SIGTERM, SIGINT or
// SIGQUIT, ends. A shutdown that hangs is cut off (run_daemon.cc). REQUIRES: no thread was
// started yet.
int RunDaemon(const Config& config, int ready_fd);

}  // namespace kvstrata
