// SPDX-License-Identifier: Apache-2.0
// Heartbeats: a loop that waits is healthy, one that hangs in an iteration is told.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "server/telemetry/thread_top.h"
#include "tests/server/attach_fixture.h"

namespace kvstrata {
namespace {

using namespace test;  // NOLINT: the client of this folder
using std::chrono::microseconds;

bool Hangs(std::string_view thread, microseconds limit) {
  for (const HangingLoop& loop : HangingLoops(limit)) {
    if (loop.thread == thread) return true;
  }
  return false;
}

TEST(HeartbeatTest, IterationsHangAndWaitsDoNot) {
  Heartbeat beat("test-loop"), patient("test-patient", 1'000'000'000);
  EXPECT_FALSE(Hangs("test-loop", microseconds(0)));
  {
    const LoopIteration iteration(&beat), both(&patient);
    EXPECT_TRUE(Eventually([] { return Hangs("test-loop", microseconds(1)); }));
    EXPECT_FALSE(Hangs("test-loop", std::chrono::hours(1)));
    EXPECT_FALSE(Hangs("test-patient", microseconds(1)));
    beat.Begin();
    EXPECT_FALSE(Hangs("test-loop", std::chrono::seconds(60)));
  }
  EXPECT_FALSE(Hangs("test-loop", microseconds(0)));
}

TEST(HeartbeatTest, WhoHasGoneIsForgotten) {
  {
    Heartbeat beat("test-gone");
    beat.Begin();
    EXPECT_TRUE(Eventually([] { return Hangs("test-gone", microseconds(1)); }));
  }
  EXPECT_FALSE(Hangs("test-gone", microseconds(0)));
}

// An importer that does not come back while it is asked how far it is.
class StuckImport final : public SessionImport {
 public:
  explicit StuckImport(std::atomic<bool>* open) : open_(open) {}
  Status Register(uint64_t, int32_t, const LentTensor&, const LentTensor&) override {
    return OkStatus();
  }
  void Opened(uint64_t, uint64_t, std::span<const int32_t>) override {}
  void Closed(uint64_t) override {}
  Status Seal(const SealedBlocks&) override { return OkStatus(); }
  Result<uint32_t> Acknowledged(uint64_t) override {
    while (!*open_) std::this_thread::yield();
    return 0u;
  }
  void Settle(uint64_t, SettleDone done) override { done(OkStatus()); }

 private:
  std::atomic<bool>* const open_;
};

class StuckImports final : public ImportSink {
 public:
  std::unique_ptr<SessionImport> NewSession(uint64_t, uint32_t, const PeerIdentity&) override {
    return std::make_unique<StuckImport>(&open);
  }
  std::atomic<bool> open{false};
};

class AttachHeartbeatTest : public AttachFixture {};

TEST_F(AttachHeartbeatTest, TheAttachLoopBeats) {
  StuckImports imports;
  AttachOptions options;
  options.imports = &imports;
  StartServer(options);
  Client client = Attach();
  ASSERT_TRUE(client.Send(shm::kAcknowledged, 900, PodBytes(shm::SequenceRef{1})));
  EXPECT_TRUE(Eventually([] { return Hangs("kvs-attach", microseconds(200'000)); }));
  imports.open = true;
  EXPECT_TRUE(client.Read().ok());
  EXPECT_TRUE(Eventually([] { return !Hangs("kvs-attach", microseconds(200'000)); }));
  EXPECT_TRUE(client.Call(shm::kPing).ok());
  server_.reset();
}

}  // namespace
}  // namespace kvstrata
