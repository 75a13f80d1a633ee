// Which values a limit may have, in the configuration and over Admin.SetQuota. Constant.
#ifndef KVSTRATA_SERVER_STORE_LIMIT_VALUES_H_
#define KVSTRATA_SERVER_STORE_LIMIT_VALUES_H_

#include <cstdint>
#include <string>

#include "server/store/user_limits.h"

namespace kvstrata {

inline bool CountsBytes(Limit limit) {
  return limit == Limit::kDeviceBytes || limit == Limit::kHostBytes;
}
// 0, which is no limit, to this.
inline uint64_t MostOf(Limit limit) {
  return CountsBytes(limit) ? uint64_t{1} << 50 : uint64_t{1'000'000'000};
}
// "sessions, attaches_per_second, ..."
inline std::string LimitNames() {
  std::string names;
  for (size_t i = 0; i < kLimits; ++i) {
    names += (i == 0 ? "" : ", ") + std::string(NameOf(static_cast<Limit>(i)));
  }
  return names;
}

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_LIMIT_VALUES_H_
