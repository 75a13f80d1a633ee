// SPDX-License-Identifier: Apache-2.0
// RunDaemon: the life of the process.
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstring>
#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "server/config/pool_memory.h"
#include "server/daemon/daemon.h"
#include "server/doctor/doctor.h"
#include "server/telemetry/log.h"
#include "server/telemetry/readiness.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTearDown{200};

// Until there is something to look at, or `end`.
void AwaitTold(int told, Clock::time_point end) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
  pollfd wait{told, POLLIN, 0};
  eventfd_t count = 0;
  if (poll(&wait, 1, static_cast<int>(std::clamp<int64_t>(left, 0, INT_MAX))) == 1) {
    (void)eventfd_read(told, &count);
  }
}

// StopWatchdog: the thread that ends the process when its stop does not. Until everything is
// settled that outlives the process (disk, checkpoint, socket files) the stop has the time that it
// was given, and running out of it is a failure. After that nothing is left to lose: whatever still
// holds up the end, such as a library's thread that waits for a peer, is left behind, with exit
// code 0.
//
// Takes no lock and waits for nobody, also not for the reader of stderr. Its thread is made here,
// so that a process that gets no more threads can still be stopped; it lives as long as the
// process. Thread-safety: one thread. Constructed once.
class StopWatchdog {
 public:
  // THREADS, DESCRIPTORS (RESOURCE_EXHAUSTED).
  static Result<StopWatchdog> Start() {
    const auto state = std::make_shared<State>();
    state->told = eventfd(0, EFD_CLOEXEC);
    if (state->told < 0) {
      return ResourceExhausted("DESCRIPTORS", std::string("eventfd: ") + std::strerror(errno));
    }
    try {
      std::thread([state] { Watch(*state); }).detach();
    } catch (const std::system_error& error) {
      close(state->told);
      return ResourceExhausted("THREADS", std::string("no thread can be made: ") + error.what());
    }
    return StopWatchdog(state);
  }

  // The stop begins, and has so long.
  void Begin(std::chrono::microseconds timeout) const {
    state_->end = Clock::now() + timeout;
    Tell();
  }
  // It has so much more.
  void Extend(std::chrono::microseconds by) const {
    state_->end = state_->end.load() + by;
    Tell();
  }
  // From now on the end may be sudden.
  void Settled() const {
    state_->settled = true;
    Tell();
  }

 private:
  // The thread's too.
  struct State {
    int told = -1;  // an eventfd: look again; never closed
    std::atomic<Clock::time_point> end{Clock::time_point::max()};
    std::atomic<bool> settled = false;
  };

  explicit StopWatchdog(std::shared_ptr<State> state) : state_(std::move(state)) {}
  static void Watch(const State& state) {
    while (!state.settled && Clock::now() < state.end.load()) AwaitTold(state.told, state.end);
    if (state.settled) {
      std::this_thread::sleep_for(kTearDown);
      _exit(kExitClean);
    }
    constexpr std::string_view text = "kvstratad: shutdown.timeout passed, ending the process\n";
    pollfd log{STDERR_FILENO, POLLOUT, 0};
    if (poll(&log, 1, 0) == 1 && (log.revents & POLLOUT) != 0) {
      [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
    }
    _exit(kExitFailed);
  }
  void Tell() const { KVS_CHECK(eventfd_write(state_->told, 1) == 0); }

  std::shared_ptr<State> state_;
};

constexpr uint32_t kIgnoredLines = 10;  // a second, of signals that do nothing

std::chrono::microseconds Since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start);
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
    if (!limiter.Allow(&suppressed)) continue;
    LogEvent(LogLevel::kWarn, "signal_ignored",
             {{"signal", strsignal(signal)},
              {"why", "it means nothing here; SIGTERM ends the daemon"},
              {"suppressed", suppressed}});
  }
}

// Whether another signal to end comes within that time.
bool AskedAgain(std::chrono::milliseconds time) {
  sigset_t ends;
  sigemptyset(&ends);
  for (const int signal : {SIGTERM, SIGINT, SIGQUIT}) sigaddset(&ends, signal);
  const timespec wait{0, std::chrono::nanoseconds(time).count()};
  return sigtimedwait(&ends, nullptr, &wait) > 0;
}

// What a stop writes takes nothing of the time that all else has.
void WriteOn(Daemon* daemon, const StopWatchdog& watchdog) {
  const std::chrono::microseconds most = daemon->shutdown_write_timeout();
  const Clock::time_point began = Clock::now();
  watchdog.Extend(most);
  daemon->WriteOn(AskedAgain);
  watchdog.Extend(Since(began) - most);
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
            {"startup_us", Since(started).count()}});
  NotifyServiceManager("READY=1");
  SignalReadyFd(ready_fd);
  const int signal = AwaitEnd(signals, daemon->get());
  const Clock::time_point asked = Clock::now();
  watchdog->Begin(daemon.value()->shutdown_timeout());
  LogEvent(LogLevel::kInfo, "stopping", {{"signal", strsignal(signal)}});
  NotifyServiceManager("STOPPING=1");
  daemon.value()->EndServing();
  WriteOn(daemon->get(), *watchdog);
  daemon.value()->Settle();
  LogEvent(LogLevel::kInfo, "stopped", {{"shutdown_us", Since(asked).count()}});
  watchdog->Settled();
  daemon.value().reset();
  return kExitClean;
}

}  // namespace kvstrata
