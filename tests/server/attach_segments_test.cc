// SPDX-License-Identifier: Apache-2.0
// What a client of the daemon's own user can do to memory that it is to read only.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "tests/server/attach_fixture.h"

namespace kvstrata {
namespace {

using namespace test;  // NOLINT: the client of this folder

class AttachSegmentsTest : public AttachFixture {
 protected:
  void SetUp() override { StartServer(); }
};

// Opened anew through /proc, as the owner of the file may.
TEST_F(AttachSegmentsTest, NobodyElseWritesTables) {
  Client client = Attach();
  const uint64_t model = client.Register();
  ASSERT_TRUE(client.Open(model, "full", Tokens(64)).ok());
  const std::string self = "/proc/self/fd/" + std::to_string(client.table_fd());
  const UniqueFd again(open(self.c_str(), O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(again) << "this process is of the daemon's user";
  const uint64_t bytes = client.welcome().table_bytes;
  for (const int fd : {again.get(), client.table_fd()}) {
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    EXPECT_EQ(at, MAP_FAILED);
    // For the case that it could be had: the daemon's books, behind the slots.
    if (at != MAP_FAILED) std::memset(static_cast<std::byte*>(at) + 266'240, 0x41, 320'000);
    void* const reading = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
    ASSERT_NE(reading, MAP_FAILED);
    EXPECT_NE(mprotect(reading, bytes, PROT_READ | PROT_WRITE), 0);
    munmap(reading, bytes);
    char byte = 0x41;
    EXPECT_LT(pwrite(fd, &byte, 1, 300'000), 0);
    EXPECT_NE(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 266'240, 320'000), 0);
    EXPECT_NE(ftruncate(fd, 0), 0);
    EXPECT_NE(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
  }
  for (int i = 0; i < 30; ++i) EXPECT_TRUE(client.Open(model, "full", Tokens(64, 1000 * i)).ok());
  EXPECT_TRUE(store_->inspection().Audit().findings.empty());
}

}  // namespace
}  // namespace kvstrata
