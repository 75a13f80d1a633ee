// SPDX-License-Identifier: Apache-2.0
// How many descriptors are left, and that the last ones are kept.
#include "base/descriptors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <vector>

#include "base/unique_fd.h"

namespace kvstrata {
namespace {

class DescriptorsTest : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0); }
  void TearDown() override { setrlimit(RLIMIT_NOFILE, &before_); }
  void Limit(rlim_t n) {
    const rlimit limit{n, before_.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  }
  rlimit before_{};
};

TEST_F(DescriptorsTest, CountsWhatIsOpen) {
  Limit(200);
  const DescriptorUse use = CountDescriptors();
  EXPECT_EQ(use.limit, 200u);
  std::vector<UniqueFd> files;
  for (int i = 0; i < 10; ++i) files.emplace_back(open("/dev/null", O_RDONLY | O_CLOEXEC));
  EXPECT_EQ(CountDescriptors().open, use.open + 10);
  EXPECT_EQ(CountDescriptors().left(), 200 - use.open - 10);
  files.clear();
  EXPECT_EQ(CountDescriptors().open, use.open);
}

TEST_F(DescriptorsTest, TheLastOnesAreKept) {
  const uint64_t open_now = CountDescriptors().open;
  Limit(open_now + kDescriptorReserve + 2);
  EXPECT_TRUE(CheckDescriptors(2).ok());
  const Status refused = CheckDescriptors(3);
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_EQ(refused.reason(), "DESCRIPTORS");
  EXPECT_NE(refused.message().find("LimitNOFILE"), std::string::npos) << refused.ToString();
  Limit(open_now > 4 ? open_now - 2 : 2);
  EXPECT_EQ(CountDescriptors().left(), 0u) << "a limit below what is open";
}

}  // namespace
}  // namespace kvstrata
