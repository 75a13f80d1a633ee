// SPDX-License-Identifier: Apache-2.0
#include "base/unique_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <utility>

namespace kvstrata {
namespace {

int OpenNull() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }
bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

TEST(UniqueFd, ClosesAtTheEnd) {
  const int raw = OpenNull();
  {
    const UniqueFd fd(raw);
    EXPECT_TRUE(fd);
    EXPECT_EQ(fd.get(), raw);
    EXPECT_TRUE(IsOpen(raw));
  }
  EXPECT_FALSE(IsOpen(raw));
}

TEST(UniqueFd, NoneIsNone) {
  UniqueFd fd;
  EXPECT_FALSE(fd);
  EXPECT_EQ(fd.get(), -1);
}

TEST(UniqueFd, MovesOwnership) {
  const int first = OpenNull(), second = OpenNull();
  UniqueFd a(first), b(second);
  b = std::move(a);
  EXPECT_FALSE(IsOpen(second));
  EXPECT_TRUE(IsOpen(first));
  const UniqueFd c(std::move(b));
  EXPECT_EQ(c.get(), first);
  EXPECT_FALSE(b);  // NOLINT(bugprone-use-after-move): moved-from is none by contract
}

TEST(UniqueFd, AssigningToItselfKeepsIt) {
  UniqueFd fd(OpenNull());
  UniqueFd& same = fd;
  fd = std::move(same);
  EXPECT_TRUE(IsOpen(fd.get()));
}

TEST(UniqueFd, ReleaseGivesItAway) {
  UniqueFd fd(OpenNull());
  const int raw = fd.release();
  EXPECT_FALSE(fd);
  EXPECT_TRUE(IsOpen(raw));
  fd.Reset(raw);
  fd.Reset();
  EXPECT_FALSE(IsOpen(raw));
}

}  // namespace
}  // namespace kvstrata
