// SPDX-License-Identifier: Apache-2.0
// Telling whoever started the daemon that it serves: systemd's NOTIFY_SOCKET (one datagram, no
// libsystemd) and a descriptor given by --ready-fd.
//
// Nobody listening is no error. Thread-safety: any thread. Cost: three system calls.
#pragma once

#include <string_view>

#include "base/status.h"

namespace kvstrata {

// `state` is in sd_notify's form: "READY=1", "STOPPING=1".
void NotifyServiceManager(std::string_view state);

// OK when `fd` is open and a pipe, socket or file that we did not open ourselves.
Status CheckReadyFd(int fd);

// Writes one byte to `fd` and closes it. -1: does nothing.
void SignalReadyFd(int fd);

}  // namespace kvstrata
