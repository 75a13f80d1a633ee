#include "base/descriptors.h"

#include <sys/resource.h>

#include <algorithm>
#include <string>

namespace kvstrata {

Status CheckReserve(int fd) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return OkStatus();
  const rlim_t reserved = std::min<rlim_t>(kReservedDescriptors, limit.rlim_cur / 2);
  if (static_cast<rlim_t>(fd) < limit.rlim_cur - reserved) return OkStatus();
  return ResourceExhausted("DESCRIPTORS",
                           "the daemon has no file descriptors left but those that it keeps for "
                           "operators and for work under way (" +
                               std::to_string(reserved) + " of " + std::to_string(limit.rlim_cur) +
                               "); close connections or sessions, or raise LimitNOFILE");
}

}  // namespace kvstrata
