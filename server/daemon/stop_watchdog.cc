// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/stop_watchdog.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#include "base/check.h"
#include "server/daemon/daemon.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTearDown{200};

// False: `end` came first.
bool AwaitTold(int told, Clock::time_point end) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    pollfd wait{told, POLLIN, 0};
    const int ready = poll(&wait, 1, std::max(0, static_cast<int>(left.count())));
    if (ready == 0) return false;
    eventfd_t count = 0;
    if (ready > 0 && eventfd_read(told, &count) == 0) return true;
  }
}

void Watch(int told, const std::atomic<std::chrono::microseconds>& timeout) {
  eventfd_t count = 0;
  while (eventfd_read(told, &count) != 0) {
  }
  if (AwaitTold(told, Clock::now() + timeout.load())) {
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

}  // namespace

Result<StopWatchdog> StopWatchdog::Start() {
  const int told = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  if (told < 0) {
    return ResourceExhausted("DESCRIPTORS", std::string("eventfd: ") + std::strerror(errno));
  }
  const auto timeout = std::make_shared<std::atomic<std::chrono::microseconds>>();
  try {
    std::thread([told, timeout] { Watch(told, *timeout); }).detach();
  } catch (const std::system_error& error) {
    close(told);
    return ResourceExhausted("THREADS", std::string("no thread can be made: ") + error.what());
  }
  return StopWatchdog(told, timeout);
}

void StopWatchdog::Begin(std::chrono::microseconds timeout) const {
  *timeout_ = timeout;
  Tell();
}

void StopWatchdog::Tell() const { KVS_CHECK(eventfd_write(told_, 1) == 0); }

}  // namespace kvstrata
