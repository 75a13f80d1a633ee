// SPDX-License-Identifier: Apache-2.0
// libkvstrata.so against a daemon with two emulated devices: a session works on the one that it
// names, and finds what sessions of the other one have computed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <thread>

#include "kvstrata/client.h"
#include "tests/client/toy_engine.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::client::testing {
namespace {

using ::testing::HasSubstr;

constexpr int kPrompt = 200, kSteps = 40;

class LinkedDevices : public ::testing::Test {
 protected:
  kvs::Result<kvs::Session> Attach(const std::string& device) const {
    const std::string socket = daemon_.socket();
    return kvs::Session::Attach(
        {.socket = socket.c_str(), .client_name = "devices", .device_uuid = device, .threads = 2});
  }
  // Attaches to `device`, prefills what is not held, and decodes; held to the oracle. Returns what
  // was held.
  uint32_t Run(const std::string& device, uint64_t seed) const {
    kvs::Result<kvs::Session> session = Attach(device);
    EXPECT_TRUE(session) << session.error().ToString();
    if (!session) return 0;
    const auto model = session->Register(ToyModel());
    auto sequence = session->Open(*model, "full", Ids(seed, 0, kPrompt));
    EXPECT_TRUE(sequence) << sequence.error().ToString();
    if (!sequence) return 0;
    const auto held = static_cast<int>(sequence->held());
    const Answer prompt = RunStep(*session, *sequence, seed, held, kPrompt - held);
    ExpectOracle(prompt, seed, held, kPrompt - held);
    for (int i = 0; i < kSteps; ++i) {
      ExpectOracle(RunStep(*session, *sequence, seed, kPrompt + i, 1), seed, kPrompt + i, 1);
    }
    return sequence->held();
  }

  kvstrata::testing::DaemonProcess daemon_{{"--set", "pool.device=emulated:2", "--set",
                                            "pool.device_bytes=32MiB", "--set",
                                            "pool.host_bytes=16MiB"}};
};

TEST_F(LinkedDevices, APrefixIsFoundFromTheOtherDevice) {
  constexpr uint64_t kSeed = 20261122;
  EXPECT_EQ(Run("emulated", kSeed), 0u);
  EXPECT_EQ(Run("emulated-1", kSeed), 192u);
  EXPECT_EQ(Run("", kSeed), 192u) << "the first device";
}

TEST_F(LinkedDevices, BothWorkAtTheSameTime) {
  std::thread other([this] { Run("emulated-1", 1); });
  Run("emulated", 2);
  other.join();
}

TEST_F(LinkedDevices, AnUnknownOneIsRefused) {
  const kvs::Result<kvs::Session> session = Attach("emulated-2");
  ASSERT_FALSE(session);
  EXPECT_EQ(session.error().reason, "DEVICE_UNKNOWN");
  EXPECT_THAT(session.error().message, HasSubstr("there are 'emulated', 'emulated-1'"));
}

}  // namespace
}  // namespace kvstrata::client::testing
