// SPDX-License-Identifier: Apache-2.0
// Values of memory and disk as messages, and the way back. Pure functions.
#ifndef KVSTRATA_SERVER_RPC_ADMIN_VALUE_MESSAGES_H_
#define KVSTRATA_SERVER_RPC_ADMIN_VALUE_MESSAGES_H_

#include <string>

#include "base/status.h"
#include "kvstrata/v1/admin.pb.h"
#include "server/store/reports/value_info.h"

namespace kvstrata {

inline constexpr uint32_t kMaxListed = 4096;  // values of one list
inline constexpr int kMaxVerified = 64;       // keys of one call

// INVALID_ARGUMENT VALUE_KEY: neither 32 bytes nor the name of a pin's record.
Status CheckValueKey(const std::string& key);
// INVALID_ARGUMENT VALUE_FILTER.
Status CheckFilter(const v1::ListValuesRequest& request);

void Write(const ValueInfo& value, v1::Value* out);
void Write(const std::string& key, const ValueVerdict& verdict, v1::ValueVerdict* out);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_ADMIN_VALUE_MESSAGES_H_
