// SPDX-License-Identifier: Apache-2.0
// KVS_CHECK: an invariant whose failure is a bug of ours. Prints the place and aborts, in every
// build. Never used on input: bad input is a Status.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace kvstrata {

[[noreturn]] inline void CheckFailed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "%s:%d: broken invariant: %s\n", file, line, condition);
  std::abort();
}

}  // namespace kvstrata

#define KVS_CHECK(condition)                         \
  (__builtin_expect(static_cast<bool>(condition), 1) \
       ? static_cast<void>(0)                        \
       : ::kvstrata::CheckFailed(#condition, __FILE__, __LINE__))
