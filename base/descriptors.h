// Descriptors that a daemon keeps free for operators and for work under way.
//
// The kernel gives the lowest free number, so the number that a new descriptor got says how many
// there are, as nearly as a refusal needs. Any thread. Cost: a system call.
#ifndef KVSTRATA_BASE_DESCRIPTORS_H_
#define KVSTRATA_BASE_DESCRIPTORS_H_

#include "base/status.h"

namespace kvstrata {

inline constexpr int kReservedDescriptors = 64;

// DESCRIPTORS (RESOURCE_EXHAUSTED): `fd`, just opened for somebody else, is among the last
// kReservedDescriptors that RLIMIT_NOFILE allows, or among the last half where it allows fewer than
// twice as many.
Status CheckReserve(int fd);

}  // namespace kvstrata

#endif  // KVSTRATA_BASE_DESCRIPTORS_H_
