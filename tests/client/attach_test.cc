// SPDX-License-Identifier: Apache-2.0
// Dialling, verifying, rings and arenas, against a daemon that can be made to misbehave.
#include "client/linked/attach.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <future>
#include <thread>

#include "base/status.h"
#include "client/linked/ring_client.h"
#include "tests/client/fake_daemon.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::client {
namespace {

using std::chrono::milliseconds;
using testing::FakeDaemon;
using ::testing::HasSubstr;
using testing::SealedMemfd;

constexpr milliseconds kTimeout(5000);

class AttachTest : public ::testing::Test {
 protected:
  Status Dial(const std::string& path, milliseconds timeout = kTimeout) {
    Result<std::unique_ptr<Connection>> c =
        Connection::Dial(path, "", "attach_test", timeout, &arenas_);
    if (c.ok()) connection_ = std::move(c).value();
    return c.status();
  }
  // Dials while `daemon` runs.
  template <typename F>
  Status DialWith(F daemon, milliseconds timeout = kTimeout) {
    std::future<void> other = std::async(std::launch::async, daemon);
    const Status status = Dial(socket_, timeout);
    other.get();
    return status;
  }
  void Attach() {
    const Status status = DialWith([&] {
      daemon_.Accept();
      daemon_.Welcome();
    });
    ASSERT_TRUE(status.ok()) << status.ToString();
  }

  ScratchDir dir_;
  const std::string socket_ = dir_ / "k.sock";
  FakeDaemon daemon_{socket_};
  PageMap arenas_;
  std::unique_ptr<Connection> connection_;
};

TEST_F(AttachTest, PathsThatAreNoDaemon) {
  const Status none = Dial(dir_ / "none.sock");
  EXPECT_EQ(none.code(), Code::kUnavailable);
  EXPECT_EQ(none.reason(), "DAEMON_UNREACHABLE");
  EXPECT_THAT(none.message(), HasSubstr("kvstratad --socket"));

  std::filesystem::create_directory(dir_ / "folder");
  const Status folder = Dial(dir_ / "folder");
  EXPECT_EQ(folder.code(), Code::kInvalidArgument);
  EXPECT_EQ(folder.reason(), "SOCKET_INVALID");
  EXPECT_THAT(folder.message(), HasSubstr("is a directory"));

  std::ofstream(dir_ / "file") << "text";
  EXPECT_THAT(Dial(dir_ / "file").message(), HasSubstr("not a socket"));
  const Status too_long = Dial(dir_ / std::string(120, 'x'));
  EXPECT_EQ(too_long.reason(), "SOCKET_INVALID");
  EXPECT_THAT(too_long.message(), HasSubstr("at most 100"));
}

TEST_F(AttachTest, SaysHelloAndMapsWhatComes) {
  shm::Hello hello{};
  ASSERT_TRUE(DialWith([&] {
                hello = daemon_.Accept();
                daemon_.Welcome();
              }).ok());
  EXPECT_EQ(hello.magic, shm::kMagic);
  EXPECT_EQ(hello.version, shm::kVersion);
  EXPECT_STREQ(hello.client_name, "attach_test");
  daemon_.header()->session_id = 77;
  EXPECT_EQ(connection_->session()->session_id, 77u);  // the same memory
  EXPECT_TRUE(connection_->Poll());
}

TEST_F(AttachTest, RefusalsArePassedOn) {
  const Status status = DialWith([&] {
    daemon_.Accept();
    shm::Refused refused{shm::kRefused, static_cast<int32_t>(Code::kResourceExhausted), "SESSIONS",
                         "1024 sessions are open"};
    daemon_.Send(refused, {});
  });
  EXPECT_EQ(status.code(), Code::kResourceExhausted);
  EXPECT_EQ(status.reason(), "SESSIONS");
  EXPECT_EQ(status.message(), "1024 sessions are open");
}

// A daemon with too many of a user's connections says so unasked, and hangs up: before the hello,
// or with the hello unread. Which of both a dial meets is up to the scheduler.
TEST_F(AttachTest, ARefusalBeforeTheHelloIsPassedOn) {
  for (int i = 0; i < 200; ++i) {
    const Status status = DialWith([&] {
      daemon_.AcceptUnheard();
      shm::Refused refused{shm::kRefused, static_cast<int32_t>(Code::kResourceExhausted),
                           "TOO_MANY_HANDSHAKES", "retry"};
      daemon_.Send(refused, {});
      daemon_.HangUp();
    });
    ASSERT_EQ(status.reason(), "TOO_MANY_HANDSHAKES") << "dial " << i << ": " << status.message();
    ASSERT_EQ(status.code(), Code::kResourceExhausted);
  }
}

TEST_F(AttachTest, AnotherVersionIsRefused) {
  constexpr uint32_t kOther = shm::kVersion + 1;
  const Status status = DialWith([&] {
    daemon_.Accept();
    daemon_.welcome().version = kOther;
    daemon_.Welcome();
  });
  EXPECT_EQ(status.code(), Code::kFailedPrecondition);
  EXPECT_EQ(status.reason(), "VERSION_MISMATCH");
  EXPECT_THAT(status.message(), HasSubstr("version " + std::to_string(kOther)));
}

TEST_F(AttachTest, SegmentsAreVerified) {
  struct Case {
    std::function<void(FakeDaemon*)> spoil;
    const char* says;
  };
  const Case cases[] = {
      {[](FakeDaemon* d) { d->welcome().session_bytes += 4096; }, "announced"},
      {[](FakeDaemon* d) { d->ReplaceSession(SealedMemfd(d->welcome().session_bytes, 0)); },
       "not sealed"},
      {[](FakeDaemon* d) { d->ReplaceSession(SealedMemfd(d->welcome().session_bytes)); }, "magic"},
      {[](FakeDaemon* d) { d->header()->access_counters_offset = uint64_t{1} << 60; }, "offset"},
      {[](FakeDaemon* d) { d->header()->reply_ring_offset += 4; }, "offset"},
      {[](FakeDaemon* d) { d->tables()->magic = 0; }, "magic"},
  };
  for (const Case& c : cases) {
    const ScratchDir dir;
    FakeDaemon daemon(dir / "k.sock");
    std::future<void> other = std::async(std::launch::async, [&] {
      daemon.Accept();
      c.spoil(&daemon);
      daemon.Welcome();
    });
    const Status status = Dial(dir / "k.sock");
    other.get();
    EXPECT_EQ(status.reason(), "SEGMENT_INVALID") << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr(c.says));
  }
}

TEST_F(AttachTest, ASilentDaemonMeetsTheDeadline) {
  std::promise<void> over;
  const Status status = [&] {
    std::future<void> other = std::async(std::launch::async, [&] {
      daemon_.Accept();
      over.get_future().wait();
    });
    const Status s = Dial(socket_, milliseconds(30));
    over.set_value();
    return s;
  }();
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
  EXPECT_EQ(status.reason(), "DEADLINE");
}

TEST_F(AttachTest, AHangUpBeforeTheWelcome) {
  const Status status = DialWith([&] {
    daemon_.Accept();
    daemon_.HangUp();
  });
  EXPECT_EQ(status.reason(), "DAEMON_GONE") << status.ToString();
}

TEST_F(AttachTest, ArenasArriveAndAreMappedOnce) {
  Attach();
  const UniqueFd memory = SealedMemfd(1 << 20);
  daemon_.Send(shm::Arena{shm::kArena, 5, 1 << 20, 0, 1, 0}, {memory.get()});
  const shm::PageEntry entry{5, 0, 0, 4096};
  EXPECT_EQ(arenas_.Resolve(entry, 64).status().reason(), "ARENA_UNKNOWN");
  ASSERT_TRUE(connection_->Poll());
  Result<std::byte*> at = arenas_.Resolve(entry, 64);
  ASSERT_TRUE(at.ok()) << at.status().ToString();
  **at = std::byte{9};
  std::byte seen{};
  ASSERT_EQ(pread(memory.get(), &seen, 1, 4096), 1);
  EXPECT_EQ(seen, std::byte{9});
  EXPECT_TRUE(arenas_.Writable(entry));
  EXPECT_FALSE(arenas_.Writable({5, shm::kPageShared, 0, 4096}));
  EXPECT_FALSE(arenas_.Writable({5, shm::kPageSealed, 0, 4096}));
  EXPECT_FALSE(arenas_.Writable({6, 0, 0, 4096}));
  EXPECT_EQ(arenas_.Resolve({5, 0, 0, (1 << 20) - 32}, 64).status().reason(), "TABLE_INVALID");
  EXPECT_EQ(arenas_.Resolve({5, 0, 0, ~uint64_t{0}}, 64).status().reason(), "TABLE_INVALID");
  // The same arena again changes nothing.
  daemon_.Send(shm::Arena{shm::kArena, 5, 1 << 20, 0, 0, 0}, {memory.get()});
  ASSERT_TRUE(connection_->Poll());
  EXPECT_EQ(*arenas_.Resolve(entry, 64), *at);
}

TEST_F(AttachTest, ReadOnlyArenasAndFalseOnes) {
  Attach();
  const UniqueFd memory = SealedMemfd(1 << 16);
  const UniqueFd small = SealedMemfd(4096), unsealed = SealedMemfd(1 << 16, 0);
  daemon_.Send(shm::Arena{shm::kArena, 1, 1 << 16, 0, 0, 0}, {memory.get()});
  daemon_.Send(shm::Arena{shm::kArena, 2, 1 << 16, 0, 0, 0}, {small.get()});
  daemon_.Send(shm::Arena{shm::kArena, 3, 1 << 16, 0, 0, 0}, {unsealed.get()});
  ASSERT_TRUE(connection_->Poll());
  EXPECT_TRUE(arenas_.Resolve({1, 0, 0, 0}, 64).ok());
  EXPECT_FALSE(arenas_.Writable({1, 0, 0, 0}));
  EXPECT_EQ(arenas_.Resolve({2, 0, 0, 0}, 64).status().reason(), "SEGMENT_INVALID");
  EXPECT_EQ(arenas_.Resolve({3, 0, 0, 0}, 64).status().reason(), "SEGMENT_INVALID");
}

class RingTest : public AttachTest {
 protected:
  void SetUp() override {
    Attach();
    ring_ = std::make_unique<RingClient>(connection_.get(), kTimeout);
  }
  std::unique_ptr<RingClient> ring_;
};

TEST_F(RingTest, RepliesComeById) {
  std::future<void> other = std::async(std::launch::async, [&] {
    const shm::FrameHeader ping = daemon_.Take();
    EXPECT_EQ(ping.type, shm::kPing);
    daemon_.Reply(ping.id + 1000, uint32_t{1});  // nobody waits for it
    daemon_.Reply(ping.id, uint32_t{42});
    daemon_.Reply(daemon_.Take().id, uint32_t{0}, Code::kNotFound);
  });
  std::vector<std::byte> payload;
  ASSERT_TRUE(ring_->Call(shm::kPing, {}, &payload).ok());
  ASSERT_EQ(payload.size(), 4u);
  EXPECT_EQ(payload[0], std::byte{42});
  const Status status = ring_->Call(shm::kSettle, {BytesOf(uint64_t{1})}, &payload);
  EXPECT_EQ(status.code(), Code::kNotFound);
  EXPECT_EQ(status.reason(), "FAKE_REASON");
  EXPECT_EQ(status.message(), "what the daemon said");
  other.get();
}

TEST_F(RingTest, ManyThreadsAndEvents) {
  constexpr int kThreads = 4, kCalls = 200;
  std::future<int> other = std::async(std::launch::async, [&] {
    int events = 0;
    for (int calls = 0; calls < kThreads * kCalls;) {
      std::vector<std::byte> payload;
      const shm::FrameHeader frame = daemon_.Take(&payload);
      if (frame.id == 0) {
        ++events;
        continue;
      }
      ++calls;
      uint64_t sent = 0;
      std::memcpy(&sent, payload.data(), sizeof(sent));
      daemon_.Reply(frame.id, sent);
    }
    return events;
  });
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (uint64_t i = 0; i < kCalls; ++i) {
        const uint64_t mine = t << 32 | i;
        EXPECT_TRUE(ring_->Post(shm::kPrefillDone, {BytesOf(mine)}).ok());
        std::vector<std::byte> payload;
        ASSERT_TRUE(ring_->Call(shm::kSettle, {BytesOf(mine)}, &payload).ok());
        ASSERT_EQ(payload.size(), sizeof(mine));
        EXPECT_EQ(std::memcmp(payload.data(), &mine, sizeof(mine)), 0);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(other.get(), kThreads * kCalls);
}

// A call may wait for the daemon's workers for seconds; nobody else's does.
TEST_F(RingTest, ACallThatWaitsHoldsUpNoOther) {
  std::atomic<bool> settled = false;
  std::thread slow([&] {
    EXPECT_TRUE(ring_->Call(shm::kSettle, {}, nullptr).ok());
    settled = true;
  });
  const shm::FrameHeader settle = daemon_.Take();
  for (int i = 0; i < 100; ++i) {
    Status pinged = Internal("NOT_CALLED", "");
    std::thread quick([&] { pinged = ring_->Call(shm::kPing, {}, nullptr); });
    const shm::FrameHeader ping = daemon_.Take();
    EXPECT_EQ(ping.type, shm::kPing);
    daemon_.Reply(ping.id, uint32_t{0});
    quick.join();
    ASSERT_TRUE(pinged.ok()) << pinged.ToString();
  }
  EXPECT_FALSE(settled);
  daemon_.Reply(settle.id, uint32_t{0});
  slow.join();
}

// Whoever's reply has come leaves the reading to those who still wait.
TEST_F(RingTest, AReaderThatLeavesPassesOnTheReading) {
  const auto call = [&] { EXPECT_TRUE(ring_->Call(shm::kPing, {}, nullptr).ok()); };
  for (int i = 0; i < 20; ++i) {
    std::thread first(call);
    const shm::FrameHeader one = daemon_.Take();
    std::thread second(call);
    const shm::FrameHeader two = daemon_.Take();
    daemon_.Reply(one.id, uint32_t{0});
    first.join();
    daemon_.Reply(two.id, uint32_t{0});
    second.join();
  }
}

TEST_F(RingTest, DeathIsToldToAllWhoWait) {
  std::vector<std::thread> waiting;
  for (int i = 0; i < 4; ++i) {
    waiting.emplace_back(
        [&] { EXPECT_EQ(ring_->Call(shm::kSettle, {}, nullptr).reason(), "DAEMON_GONE"); });
  }
  for (int i = 0; i < 4; ++i) daemon_.Take();
  daemon_.HangUp();
  for (std::thread& t : waiting) t.join();
}

TEST_F(RingTest, ASequenceOpenedTooLateIsClosedAgain) {
  ring_ = std::make_unique<RingClient>(connection_.get(), milliseconds(20));
  EXPECT_EQ(ring_->Call(shm::kOpenSequence, {}, nullptr).reason(), "DEADLINE");
  const shm::FrameHeader open = daemon_.Take();
  EXPECT_EQ(open.type, shm::kOpenSequence);
  daemon_.Reply(open.id, shm::SequenceReply{4711, 0, 0, 0, 0});
  EXPECT_EQ(ring_->Call(shm::kPing, {}, nullptr).reason(), "DEADLINE");  // finds the late reply
  EXPECT_EQ(daemon_.Take().type, shm::kPing);
  std::vector<std::byte> payload;
  EXPECT_EQ(daemon_.Take(&payload).type, shm::kCloseSequence);
  shm::SequenceRef ref{};
  ASSERT_EQ(payload.size(), sizeof(ref));
  std::memcpy(&ref, payload.data(), sizeof(ref));
  EXPECT_EQ(ref.sequence, 4711u);
}

TEST_F(RingTest, DeathWhileWaitingAndAfter) {
  std::future<void> other = std::async(std::launch::async, [&] {
    daemon_.Take();
    daemon_.HangUp();
  });
  const Status waiting = ring_->Call(shm::kPing, {}, nullptr);
  EXPECT_EQ(waiting.code(), Code::kUnavailable);
  EXPECT_EQ(waiting.reason(), "DAEMON_GONE");
  other.get();
  EXPECT_FALSE(connection_->Poll());
  EXPECT_EQ(ring_->Call(shm::kPing, {}, nullptr).reason(), "DAEMON_GONE");
  EXPECT_EQ(ring_->Post(shm::kPrefillDone, {}).reason(), "DAEMON_GONE");
}

TEST_F(RingTest, AReplyBeforeTheHangUpStillCounts) {
  std::future<void> other = std::async(std::launch::async, [&] {
    const shm::FrameHeader detach = daemon_.Take();
    daemon_.Reply(detach.id, uint32_t{0});
    daemon_.HangUp();
  });
  EXPECT_TRUE(ring_->Call(shm::kDetach, {}, nullptr).ok());
  other.get();
}

TEST_F(RingTest, AFullRingMeetsTheDeadline) {
  ring_ = std::make_unique<RingClient>(connection_.get(), milliseconds(20));
  const std::vector<std::byte> big(4 << 20);
  Status status;
  for (int i = 0; i < 5 && status.ok(); ++i) status = ring_->Post(shm::kCommit, {std::span(big)});
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(daemon_.Take().type, shm::kCommit);  // room again
  EXPECT_TRUE(ring_->Post(shm::kCommit, {std::span(big)}).ok());
}

TEST_F(RingTest, WhatMayBeLostLeavesRoomForWhatMayNot) {
  const std::vector<std::byte> sample(64 << 10);
  int taken = 0;
  while (ring_->Offer(shm::kRecall, {sample})) ++taken;
  EXPECT_EQ(taken, 127);  // frames are a little more than 64 KiB
  // The half that is left is for events that must arrive, without a wait.
  EXPECT_TRUE(ring_->Post(shm::kCommit, {std::vector<std::byte>(7 << 20)}).ok());
  EXPECT_FALSE(ring_->Offer(shm::kRecall, {}));
  for (int i = 0; i < taken + 1; ++i) daemon_.Take();
  EXPECT_TRUE(ring_->Offer(shm::kRecall, {sample}));
}

TEST_F(RingTest, ACorruptReplyEndsTheSession) {
  std::future<void> other = std::async(std::launch::async, [&] {
    daemon_.Take();
    shm::RingControl& reply = daemon_.header()->reply;
    auto* data =
        reinterpret_cast<std::byte*>(daemon_.header()) + daemon_.header()->reply_ring_offset;
    const shm::FrameHeader lie{1 << 30, shm::kReply, 1};
    std::memcpy(data, &lie, sizeof(lie));
    reply.tail.store(64, std::memory_order_release);
  });
  EXPECT_EQ(ring_->Call(shm::kPing, {}, nullptr).reason(), "DAEMON_GONE");
  other.get();
  EXPECT_TRUE(connection_->gone());
}

}  // namespace
}  // namespace kvstrata::client
