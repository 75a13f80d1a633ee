// SPDX-License-Identifier: Apache-2.0
#include "base/spare_threads.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace kvstrata {
namespace {

TEST(SpareThreads, ThereAreSome) { EXPECT_TRUE(CheckSpareThreads(8).ok()); }

// In a child of a user that nobody else has, so that its limit counts this process alone.
TEST(SpareThreads, TheLimitOfAUserIsSeen) {
  if (geteuid() != 0) GTEST_SKIP() << "takes another user, which root alone may";
  const pid_t child = fork();
  if (child == 0) {
    const rlimit few{10, 10};
    if (setrlimit(RLIMIT_NPROC, &few) != 0 || setuid(61234) != 0) _exit(9);
    const bool refused = CheckSpareThreads(64).reason() == "THREADS";
    _exit(refused && CheckSpareThreads(2).ok() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace kvstrata
