// SPDX-License-Identifier: Apache-2.0
// The remote tier in the configuration: the keys remote.*. Thread-safety: functions without state.
#ifndef KVSTRATA_SERVER_CONFIG_REMOTE_H_
#define KVSTRATA_SERVER_CONFIG_REMOTE_H_

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "server/config_keys.h"

namespace kvstrata {

std::span<const ConfigKey> RemoteKeys();

// "HOST:PORT[,HOST:PORT...]", a host perhaps an IPv6 address in brackets, which are left out of
// what is returned; the text of each is a name or an address, and none twice. Empty: it is not so.
std::vector<std::pair<std::string, uint16_t>> ParseServers(std::string_view text);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_CONFIG_REMOTE_H_
