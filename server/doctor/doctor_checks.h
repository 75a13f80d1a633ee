// SPDX-License-Identifier: Apache-2.0
// The checks of the machine that doctor.h runs, by file. Each returns one finding.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/doctor/doctor.h"

namespace kvstrata::doctor {

// doctor_limits.cc: of the process and its cgroup.
Finding CheckMemlock(const Config& config);
Finding CheckDescriptorLimit(const Config& config);
Finding CheckThreadLimit(const Config& config);
Finding CheckMemory(const Config& config);
Finding CheckOvercommit(const Config& config);
Finding CheckMappings(const Config& config);
Finding CheckCpus(const Config& config);
Finding CheckNuma(const Config& config);

// doctor_disk.cc
Finding CheckIoUring(const Config& config);
Finding CheckDirectIo(const Config& config);
Finding CheckFreeDisk(const Config& config);

// doctor_peers.cc: what the daemon and its clients meet at.
Finding CheckSocket(const Config& config);
Finding CheckBacklog(const Config& config);
Finding CheckProcessNamespaces(const Config& config);
Finding CheckSharedMemory(const Config& config);
Finding CheckPassedDescriptors(const Config& config);
Finding CheckGpu(const Config& config);
Finding CheckMps(const Config& config);
Finding CheckClocks(const Config& config);

// doctor_http.cc
Finding CheckHttp(const Config& config);

// doctor_remote.cc: OK without a remote tier.
Finding CheckRemoteFiles(const Config& config);
Finding CheckRemoteServers(const Config& config);
Finding CheckAnnounce(const Config& config);

// For the checks of several files.
Finding Ok(std::string check, std::string what);
Finding Warn(std::string check, std::string what, std::string fix);
Finding Fail(std::string check, const Status& why, std::string fix = "");
std::string MiBText(uint64_t bytes);
// The first word of a file; nothing if it cannot be read.
std::optional<std::string> FirstWordOf(const std::string& path);

// What a running daemon says of itself to the checks of doctor: what it holds is free for nobody
// else, and no fault where it is the one that would be started again. Waits for an answer 5 s at
// most. Any thread.

// Nothing: there is no daemon at the socket, or it does not answer. `*denied`: it tells its own
// user and root alone.
std::optional<v1::GetStatusResponse> DaemonsStatus(const std::string& socket, bool* denied);
// The same, of the value that it has for a key.
std::optional<std::string> DaemonsKey(const std::string& socket, std::string_view key,
                                      bool* denied);

}  // namespace kvstrata::doctor
