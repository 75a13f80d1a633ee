// SPDX-License-Identifier: Apache-2.0
// A real daemon that runs out of memory or may write no files: who asked for too much hears it, and
// the daemon goes on.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <fstream>
#include <string>

#include "tests/fakes/daemon_process.h"
#include "tests/server/attach_client.h"

namespace kvstrata {
namespace {

using namespace test;  // NOLINT: the client of this folder
using kvstrata::testing::DaemonProcess;

class DaemonLimitsTest : public ::testing::Test {
 protected:
  std::string path() const { return daemon_.socket() + ".attach"; }
  bool Limit(__rlimit_resource what, rlim_t soft) const {
    rlimit limit{};
    if (prlimit(daemon_.pid(), what, nullptr, &limit) != 0) return false;
    limit.rlim_cur = std::min(soft, limit.rlim_max);
    return prlimit(daemon_.pid(), what, &limit, nullptr) == 0;
  }
  rlim_t AddressSpace() const {
    std::ifstream statm("/proc/" + std::to_string(daemon_.pid()) + "/statm");
    rlim_t pages = 0;
    statm >> pages;
    return pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
  }
  bool Lives() const { return waitpid(daemon_.pid(), nullptr, WNOHANG) == 0; }

  DaemonProcess daemon_{{"--set", "pool.device_bytes=8MiB", "--set", "pool.host_bytes=8MiB"}};
};

TEST_F(DaemonLimitsTest, WithoutFilesNobodyAttaches) {
  std::optional<Client> before = Client::Attach(path());
  ASSERT_TRUE(before.has_value());
  ASSERT_TRUE(Limit(RLIMIT_FSIZE, 64 << 10));
  const UniqueFd refused = Dial(path());
  const shm::Hello hello = GoodHello();
  ASSERT_GT(send(refused.get(), &hello, sizeof(hello), MSG_NOSIGNAL), 0);
  const Packet packet = Receive(refused.get());
  ASSERT_EQ(packet.type(), shm::kRefused);
  EXPECT_STREQ(packet.As<shm::Refused>().reason, "MEMORY_EXHAUSTED");
  EXPECT_TRUE(before->Call(shm::kPing).ok());
  ASSERT_TRUE(Limit(RLIMIT_FSIZE, RLIM_INFINITY));
  EXPECT_TRUE(Client::Attach(path()).has_value());
  EXPECT_TRUE(Lives());
}

TEST_F(DaemonLimitsTest, WithoutMemoryTheRequestFails) {
  std::optional<Client> client = Client::Attach(path());
  ASSERT_TRUE(client.has_value());
  const uint64_t model = client->Register();
  const uint64_t sequence =
      client->Open(model, "full", Tokens(4)).As<shm::SequenceReply>().sequence;
  constexpr uint32_t many = 2'000'000;
  constexpr rlim_t kLeft = 5 << 20;
  static_assert(kLeft < many * sizeof(int32_t));
  Bytes lookup = PodBytes(shm::Lookup{model, 0, many, {}});
  lookup.resize(lookup.size() + many * sizeof(int32_t));
  Bytes report = PodBytes(shm::Report{sequence, 0, many, shm::Report::kSurprisal, 0});
  report.resize(report.size() + many * sizeof(float));

  // A little is left: an answer takes a few KiB, in the arena of whichever thread gives it.
  ASSERT_TRUE(Limit(RLIMIT_AS, AddressSpace() + kLeft));
  const Reply refused = client->Call(shm::kLookup, lookup);
  ASSERT_TRUE(refused.received);
  EXPECT_STREQ(refused.error.reason, "MEMORY");
  ASSERT_TRUE(client->Send(shm::kReport, 0, report));
  EXPECT_STREQ(client->Settle(sequence).error.reason, "MEMORY") << "an event's is told later";
  const Reply open = client->Open(model, "full", Tokens(static_cast<int>(many)));
  ASSERT_TRUE(open.received);
  EXPECT_STREQ(open.error.reason, "MEMORY");
  EXPECT_FALSE(Client::Attach(path()).has_value());

  ASSERT_TRUE(Limit(RLIMIT_AS, RLIM_INFINITY));
  EXPECT_TRUE(client->Call(shm::kLookup, lookup).ok());
  EXPECT_TRUE(client->Settle(sequence).ok());
  EXPECT_TRUE(Client::Attach(path()).has_value());
  EXPECT_TRUE(Lives());
}

}  // namespace
}  // namespace kvstrata
