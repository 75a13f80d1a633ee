// RunDaemon: the life of the process.
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <memory>
#include <string_view>
#include <thread>

#include "server/daemon.h"
#include "server/telemetry/log.h"
#include "server/telemetry/readiness.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

int64_t MicrosSince(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count();
}

// Users' caches are plaintext: no core dumps, no debugger of the same user.
void Harden(const Config& config) {
  prctl(PR_SET_DUMPABLE, config.coredump ? 1 : 0);
  std::signal(SIGPIPE, SIG_IGN);
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
    files.rlim_cur = files.rlim_max;  // five descriptors a session
    setrlimit(RLIMIT_NOFILE, &files);
  }
}

sigset_t BlockSignals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&set, signal);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  return set;
}

// Blocks until the process is asked to end.
int AwaitEnd(const sigset_t& signals) {
  for (;;) {
    int signal = 0;
    if (sigwait(&signals, &signal) != 0) continue;
    if (signal != SIGHUP) return signal;
    LogEvent(LogLevel::kWarn, "not_reloadable",
             {{"signal", "SIGHUP"}, {"why", "no key can change at run time; restart instead"}});
  }
}

// Ends the process when its shutdown does not. Takes no lock and waits for nobody, also not for the
// reader of stderr.
void StartWatchdog(std::chrono::microseconds timeout) {
  std::thread([timeout] {
    std::this_thread::sleep_for(timeout);
    constexpr std::string_view text = "kvstratad: shutdown.timeout passed, ending the process\n";
    pollfd log{STDERR_FILENO, POLLOUT, 0};
    if (poll(&log, 1, 0) == 1 && (log.revents & POLLOUT) != 0) {
      [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
    }
    _exit(kExitFailed);
  }).detach();
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
  Result<std::unique_ptr<Daemon>> daemon = Daemon::Start(config);
  if (!daemon.ok()) {
    const Status status = daemon.status();
    LogEvent(LogLevel::kError, "start_failed",
             {{"reason", status.reason()}, {"why", status.message()}});
    return ExitCodeOf(status);
  }
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
  const int signal = AwaitEnd(signals);
  const Clock::time_point asked = Clock::now();
  StartWatchdog(config.shutdown_timeout);
  LogEvent(LogLevel::kInfo, "stopping", {{"signal", strsignal(signal)}});
  NotifyServiceManager("STOPPING=1");
  daemon.value().reset();
  LogEvent(LogLevel::kInfo, "stopped", {{"shutdown_us", MicrosSince(asked)}});
  return kExitClean;
}

}  // namespace kvstrata
