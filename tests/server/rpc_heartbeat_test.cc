// SPDX-License-Identifier: Apache-2.0
// Heartbeats of gRPC's loops: the one that accepts connections, and the threads that run steps.
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>

#include "server/rpc/steps/work_queue.h"
#include "server/telemetry/thread_top.h"
#include "tests/server/rpc_fixture.h"

namespace kvstrata::test {
namespace {

using std::chrono::microseconds;

bool Hangs(std::string_view thread, microseconds limit) {
  for (const HangingLoop& loop : HangingLoops(limit)) {
    if (loop.thread == thread) return true;
  }
  return false;
}

// Who passes waits while it is shut; for kDeadline at most.
class Gate {
 public:
  void Shut() { Set(false); }
  void Open() { Set(true); }
  void Pass() {
    std::unique_lock lock(mu_);
    changed_.wait_for(lock, kDeadline, [this] { return open_; });
  }

 private:
  void Set(bool open) {
    {
      std::lock_guard lock(mu_);
      open_ = open;
    }
    changed_.notify_all();
  }

  std::mutex mu_;
  std::condition_variable changed_;
  bool open_ = true;
};

TEST(RpcHeartbeat, TheAcceptLoopBeats) {
  Gate gate;
  RpcDaemon daemon(uint64_t{64} << 20, [&](Store*, GrpcOptions* options) {
    options->health = [&gate] {  // the loop asks each second, to tell grpc.health.v1
      gate.Pass();
      return std::string("serving");
    };
  });
  EXPECT_FALSE(Hangs("kvs-grpc-accept", kDeadline));
  gate.Shut();
  EXPECT_TRUE(Eventually([] { return Hangs("kvs-grpc-accept", microseconds(200'000)); }));
  gate.Open();
  EXPECT_TRUE(Eventually([] { return !Hangs("kvs-grpc-accept", microseconds(200'000)); }));
}

TEST(RpcHeartbeat, AThreadThatRunsStepsBeats) {
  Gate gate;
  WorkQueue queue(2, "test-work", 1);
  EXPECT_FALSE(Hangs("test-work", microseconds(0))) << "it waits for work";
  gate.Shut();
  queue.Post([&gate] { gate.Pass(); });
  EXPECT_TRUE(Eventually([] { return Hangs("test-work", microseconds(1)); }));
  EXPECT_FALSE(Hangs("test-work", std::chrono::hours(1)));
  gate.Open();
  EXPECT_TRUE(Eventually([] { return !Hangs("test-work", microseconds(0)); }));
}

TEST(RpcHeartbeat, TheDaemonsQueueIsPatient) {
  Gate gate;
  WorkQueue queue(1);
  gate.Shut();
  queue.Post([&gate] { gate.Pass(); });
  EXPECT_TRUE(Eventually([] { return Hangs("kvs-grpc-work", microseconds(1)); }));
  EXPECT_FALSE(Hangs("kvs-grpc-work", std::chrono::seconds(10))) << "of steps";
  gate.Open();
}

}  // namespace
}  // namespace kvstrata::test
