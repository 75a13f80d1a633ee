// SPDX-License-Identifier: Apache-2.0
// RunDaemon: the life of the process.
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>

#include "server/config/pool_memory.h"
#include "server/daemon/daemon.h"
#include "server/daemon/stop_watchdog.h"
#include "server/doctor/machine_check.h"
#include "server/telemetry/log.h"
#include "server/telemetry/readiness.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kIgnoredLines = 10;  // a second, of signals that do nothing

int64_t MicrosSince(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count();
}

// Users' caches are plaintext: no core dumps, no debugger of the same user.
void Harden(const Config& config) {
  prctl(PR_SET_DUMPABLE, config.coredump ? 1 : 0);
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;  // five descriptors a session
    setrlimit(RLIMIT_NOFILE, &files);
  }
}

// Blocks the signals that end a process by default, are sent by somebody or the kernel, and are no
// crash.
sigset_t BlockSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGQUIT, SIGHUP, SIGUSR1, SIGUSR2, SIGALRM, SIGVTALRM,
                           SIGPROF, SIGIO, SIGPWR, SIGSTKFLT}) {
    sigaddset(&set, signal);
  }
  for (int signal = SIGRTMIN; signal <= SIGRTMAX; ++signal) sigaddset(&set, signal);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  // A write then fails with EPIPE or EFBIG.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
  return set;
}

// What systemd's Type=notify-reload waits for.
void Reload(Daemon* daemon) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  NotifyServiceManager("RELOADING=1\nMONOTONIC_USEC=" +
                       std::to_string(now.tv_sec * 1000000 + now.tv_nsec / 1000));
  daemon->Reload("SIGHUP");
  NotifyServiceManager("READY=1");
}

// Blocks until the process is asked to end.
int AwaitEnd(const sigset_t& signals, Daemon* daemon) {
  LogLimiter limiter(kIgnoredLines);
  for (;;) {
    int signal = 0;
    if (sigwait(&signals, &signal) != 0) continue;
    if (signal == SIGTERM || signal == SIGINT || signal == SIGQUIT) return signal;
    if (signal == SIGHUP) {
      Reload(daemon);
      continue;
    }
    uint64_t suppressed = 0;
    const auto now = Clock::now().time_since_epoch();
    if (!limiter.Allow(std::chrono::duration_cast<std::chrono::seconds>(now).count(),
                       &suppressed)) {
      continue;
    }
    LogEvent(LogLevel::kWarn, "signal_ignored",
             {{"signal", strsignal(signal)},
              {"why", "it means nothing here; SIGTERM ends the daemon"},
              {"suppressed", suppressed}});
  }
}

int StartFailed(const Status& why) {
  LogEvent(LogLevel::kError, "start_failed", {{"reason", why.reason()}, {"why", why.message()}});
  return ExitCodeOf(why);
}

}  // namespace

int RunDaemon(const Config& config, int ready_fd) {
  const Clock::time_point started = Clock::now();
  InitLog(config.log_level, config.log_format);
  Harden(config);
  const sigset_t signals = BlockSignals();
  for (const std::string& warning : config.warnings) {
    LogEvent(LogLevel::kWarn, "configuration", {{"why", warning}});
  }
  if (std::vector<Status> mistakes = CheckMachine(config); !mistakes.empty()) {
    if (Status gpus = CheckGpus(config); !gpus.ok()) mistakes.push_back(std::move(gpus));
    for (const Status& mistake : mistakes) StartFailed(Located(mistake, config));
    return ExitCodeOf(mistakes.front());
  }
  if (const Status chunks = CheckChunkMemory(config); !chunks.ok()) {
    LogEvent(LogLevel::kWarn, "configuration",
             {{"key", "chunks.bytes"}, {"why", chunks.message()}});
  }
  const Result<StopWatchdog> watchdog = StopWatchdog::Start();
  if (!watchdog.ok()) return StartFailed(watchdog.status());
  Result<std::unique_ptr<Daemon>> daemon = Daemon::Start(config);
  if (!daemon.ok()) return StartFailed(daemon.status());
  LogEvent(LogLevel::kInfo, "ready",
           {{"socket", config.socket},
            {"pid", getpid()},
            {"version", DaemonVersion()},
            {"backend", config.backend},
            {"device", config.device},
            {"devices", daemon.value()->devices()},
            {"device_bytes", daemon.value()->PoolBytes(Tier::kDevice)},
            {"host_bytes", daemon.value()->PoolBytes(Tier::kHost)},
            {"startup_us", MicrosSince(started)}});
  NotifyServiceManager("READY=1");
  SignalReadyFd(ready_fd);
  const int signal = AwaitEnd(signals, daemon->get());
  const Clock::time_point asked = Clock::now();
  watchdog->Begin(daemon.value()->shutdown_timeout());
  LogEvent(LogLevel::kInfo, "stopping", {{"signal", strsignal(signal)}});
  NotifyServiceManager("STOPPING=1");
  daemon.value()->Settle();
  LogEvent(LogLevel::kInfo, "stopped", {{"shutdown_us", MicrosSince(asked)}});
  watchdog->Settled();
  daemon.value().reset();
  return kExitClean;
}

}  // namespace kvstrata
