// SPDX-License-Identifier: Apache-2.0
// What a running daemon says of itself to the checks of doctor: what it holds is free for nobody
// else, and no fault where it is the one that would be started again. Waits for an answer 5 s at
// most. Any thread.
#ifndef KVSTRATA_SERVER_DOCTOR_DOCTOR_DAEMON_H_
#define KVSTRATA_SERVER_DOCTOR_DOCTOR_DAEMON_H_

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "kvstrata/v1/admin.grpc.pb.h"

namespace kvstrata::doctor {

// Nothing: there is no daemon at the socket, or it does not answer. `*denied`: it tells its own
// user and root alone.
std::optional<v1::GetStatusResponse> DaemonsStatus(const std::string& socket, bool* denied);
// The same, of the value that it has for a key.
std::optional<std::string> DaemonsKey(const std::string& socket, std::string_view key,
                                      bool* denied);

}  // namespace kvstrata::doctor

#endif  // KVSTRATA_SERVER_DOCTOR_DOCTOR_DAEMON_H_
