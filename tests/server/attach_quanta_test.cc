// SPDX-License-Identifier: Apache-2.0
// Requests that take long: they hold up nobody but the session that made them, and nothing of a
// session is handled out of order.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>

#include "server/attach/fair_queue.h"
#include "tests/server/attach_fixture.h"

namespace kvstrata {
namespace {

using namespace test;  // NOLINT: the client of this folder
using Length = FairQueue::Length;

constexpr uint32_t kMany = (2 << 20) - 200;  // as many tokens as a frame has room for
constexpr int kLookups = 6;

Bytes LookupOf(uint64_t model, const std::vector<int32_t>& tokens) {
  Bytes payload = PodBytes(shm::Lookup{model, 0, static_cast<uint32_t>(tokens.size()), {}});
  const auto bytes = std::as_bytes(std::span(tokens));
  payload.insert(payload.end(), bytes.begin(), bytes.end());
  return payload;
}

class AttachQuantaTest : public AttachFixture {
 protected:
  void SetUp() override { StartServer(); }
};

// How many of the long requests were answered when all of the pings were. Requests are as many as
// the ring has room for, sent again and again.
TEST_F(AttachQuantaTest, PingsDoNotWaitForLookups) {
  Client victim = Attach("victim"), noisy = Attach("noisy");
  const Bytes lookup = LookupOf(noisy.Register(), std::vector<int32_t>(kMany, 7));
  std::atomic<bool> stop{false};
  std::atomic<int> answered{0};
  std::thread attacker([&] {
    uint64_t sent = 0;
    while (!stop) {
      if (noisy.Send(shm::kLookup, 1000 + sent, lookup)) {
        ++sent;
      } else if (noisy.Read().received) {
        ++answered;
      }
    }
  });
  EXPECT_TRUE(Eventually([&] { return answered > 0; }));
  const int before = answered;
  int pings = 0;
  while (answered < before + kLookups && pings < 100'000) {
    ASSERT_TRUE(victim.Call(shm::kPing).ok());
    ++pings;
  }
  stop = true;
  attacker.join();
  // A loop that did the look-ups itself would answer one ping between two of them.
  EXPECT_GT(pings, 10 * kLookups);
}

// Events and requests behind a long one see what it did, and their answers come in their order.
TEST_F(AttachQuantaTest, ASessionsFramesKeepTheirOrder) {
  StoreOptions large = SmallStore();
  large.device_bytes = uint64_t{64} << 20;
  TearDown();
  StartServer({}, large);
  Client client = Attach();
  const uint64_t model = client.Register();
  const std::vector<int32_t> tokens = Tokens(100'000);
  const Reply open = client.Open(model, "full", tokens);
  ASSERT_TRUE(open.ok()) << open.error.message;
  const uint64_t sequence = open.As<shm::SequenceReply>().sequence;
  ASSERT_TRUE(client.Commit(sequence, 0, {tokens.begin(), tokens.begin() + 60'000}));
  ASSERT_TRUE(client.Commit(sequence, 60'000, {tokens.begin() + 60'000, tokens.end()}));
  ASSERT_TRUE(client.Send(shm::kSettle, 501, PodBytes(shm::SequenceRef{sequence})));
  ASSERT_TRUE(client.Send(shm::kLookup, 502, LookupOf(model, tokens)));
  ASSERT_TRUE(client.Send(shm::kPing, 503, {}));
  ASSERT_TRUE(client.Send(shm::kCloseSequence, 504, PodBytes(shm::SequenceRef{sequence})));
  ASSERT_TRUE(client.Send(shm::kDetach, 505, {}));
  for (uint64_t id = 501; id <= 505; ++id) {
    const Reply reply = client.Read();
    ASSERT_TRUE(reply.ok()) << id << ": " << reply.error.message;
    EXPECT_EQ(reply.header.id, id);
    if (id == 502) {
      EXPECT_EQ(reply.As<shm::LookupReply>().held_tokens, 100'000u / 16 * 16 - 16);
    }
  }
}

// A long request is the last thing of a client that hangs up, dies or breaks the format.
TEST_F(AttachQuantaTest, EndsBehindLongRequests) {
  Client other = Attach("other");
  for (int round = 0; round < 30; ++round) {
    Client client = Attach();
    const Bytes lookup = LookupOf(client.Register(), std::vector<int32_t>(200'000, round));
    ASSERT_TRUE(client.Send(shm::kLookup, 7, lookup));
    if (round % 3 == 1) {
      ASSERT_TRUE(client.Send(33333, 8, {}));
    }
    if (round % 3 == 2) {
      ASSERT_GT(send(client.socket(), "x", 1, MSG_NOSIGNAL), 0);
    }
    if (round % 3 != 0) {
      EXPECT_TRUE(SawEof(client.socket()));
    }
    client.HangUp();
    EXPECT_TRUE(other.Call(shm::kPing).ok());
  }
  EXPECT_TRUE(Eventually([this] { return server_->counters().hung_up == 30; }));
  EXPECT_TRUE(store_->inspection().Audit().findings.empty());
}

// What a commit brought counts, however long it is, if its client closes at once.
TEST_F(AttachQuantaTest, LongCommitsBeforeAHangUpCount) {
  StoreOptions large = SmallStore();
  large.device_bytes = uint64_t{64} << 20;
  TearDown();
  StartServer({}, large);
  const std::vector<int32_t> tokens = Tokens(100'000);
  {
    Client client = Attach();
    const uint64_t sequence =
        client.Open(client.Register(), "full", tokens).As<shm::SequenceReply>().sequence;
    ASSERT_TRUE(client.Commit(sequence, 0, tokens));
  }
  EXPECT_TRUE(Eventually([this] { return server_->counters().hung_up == 1; }));
  Client next = Attach();
  const Reply open = next.Open(next.Register(), "full", tokens);
  EXPECT_EQ(open.As<shm::SequenceReply>().held_tokens, 100'000u / 16 * 16 - 16);
}

// --- the queue alone -----------------------------------------------------------------------------

// Lets tasks run until it opens.
struct Gate {
  void Wait() {
    while (!open) std::this_thread::yield();
  }
  std::atomic<bool> open{false};
};

TEST(FairQueueTest, OneUserLeavesRoomForOthers) {
  FairQueue queue(3);
  ASSERT_TRUE(queue.Start().ok());
  Gate gate;
  std::atomic<int> began{0}, others{0}, shorts{0};
  for (int i = 0; i < 10; ++i) {
    queue.Post(1, Length::kLong, [&] {
      ++began;
      gate.Wait();
    });
  }
  EXPECT_TRUE(Eventually([&] { return began == 1; }));
  queue.Post(2, Length::kLong, [&] {
    ++others;
    gate.Wait();
  });
  EXPECT_TRUE(Eventually([&] { return others == 1; }));
  for (int i = 0; i < 50; ++i) queue.Post(1, Length::kShort, [&] { ++shorts; });
  for (int i = 0; i < 50; ++i) queue.Post(3, Length::kShort, [&] { ++shorts; });
  EXPECT_TRUE(Eventually([&] { return shorts == 100; }));
  EXPECT_EQ(began, 1) << "of a user one at a time, of three threads";
  EXPECT_TRUE(queue.long_pending());
  gate.open = true;
  EXPECT_TRUE(Eventually([&] { return began == 10 && !queue.long_pending(); }));
}

TEST(FairQueueTest, StopDropsWhatWaits) {
  std::atomic<int> ran{0};
  Gate gate;
  FairQueue queue(2);
  ASSERT_TRUE(queue.Start().ok());
  queue.Post(1, Length::kLong, [&] {
    ++ran;
    gate.Wait();
    ++ran;
  });
  ASSERT_TRUE(Eventually([&] { return ran == 1; }));
  for (int i = 0; i < 5; ++i) queue.Post(1, Length::kLong, [&] { ran += 100; });
  std::thread opener([&] {  // once what is posted is dropped: it stops
    const auto kept = std::make_shared<int>();
    for (long before = 0; before < kept.use_count();) {
      before = kept.use_count();
      queue.Post(1, Length::kLong, [&ran, kept] { ran += 100; });
    }
    gate.open = true;
  });
  queue.Stop();
  opener.join();
  EXPECT_EQ(ran, 2);
}

TEST(FairQueueTest, UsersAreServedInRotation) {
  FairQueue queue(2);
  ASSERT_TRUE(queue.Start().ok());
  Gate gate;
  std::vector<int> order;  // the long ones' thread's
  std::atomic<int> left{1};
  std::atomic<bool> begun{false};
  queue.Post(9, Length::kLong, [&] {
    begun = true;
    gate.Wait();
    --left;
  });
  ASSERT_TRUE(Eventually([&] { return begun.load(); })) << "else user 1 is first and 9 behind it";
  for (int user = 1; user <= 3; ++user) {
    for (int i = 0; i < 3; ++i) {
      ++left;
      queue.Post(static_cast<uint32_t>(user), Length::kLong, [&order, &left, user] {
        order.push_back(user);
        --left;
      });
    }
  }
  gate.open = true;
  ASSERT_TRUE(Eventually([&] { return left == 0; }));
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3, 1, 2, 3, 1, 2, 3}));
}

}  // namespace
}  // namespace kvstrata
