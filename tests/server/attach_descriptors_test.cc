// SPDX-License-Identifier: Apache-2.0
// Descriptors that clients pass: whatever they are, closing them holds up nobody.
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>

#include <vector>

#include "server/sockets/descriptor_closer.h"
#include "server/sockets/packet.h"
#include "tests/fakes/lingering_socket.h"
#include "tests/server/attach_fixture.h"

namespace kvstrata {
namespace {

using namespace test;  // NOLINT: the client of this folder
using kvstrata::testing::LingeringSocket;

constexpr int kLingerSeconds = 40;  // longer than a test waits for anything

// Sends a packet with the descriptors, of which no copy is left here. From a child process: there
// is then one to be closed at its exit, which does not wait, if the daemon is faster than we are.
bool Pass(int socket, const Bytes& packet, std::vector<LingeringSocket>* lingering) {
  std::vector<int> fds;
  for (const LingeringSocket& l : *lingering) fds.push_back(l.fd());
  int go[2];
  if (pipe2(go, O_CLOEXEC) != 0) return false;
  const pid_t child = fork();
  if (child == 0) {
    char byte = 0;
    const bool sent = read(go[0], &byte, 1) == 1 &&
                      SendPacket(socket, std::span(packet), fds) == SendOutcome::kSent;
    _exit(sent ? 0 : 1);
  }
  for (LingeringSocket& l : *lingering) l.Forget();
  const UniqueFd reader(go[0]), writer(go[1]);
  const bool told = write(writer.get(), "", 1) == 1;
  int status = -1;
  return waitpid(child, &status, 0) == child && told && status == 0;
}

std::vector<LingeringSocket> Lingering(int n) {
  std::vector<LingeringSocket> all;
  for (int i = 0; i < n; ++i) all.emplace_back(kLingerSeconds);
  return all;
}

Bytes DescriptorPacket(uint32_t number) {
  return PodBytes(shm::Descriptor{shm::kDescriptor, number});
}

class AttachDescriptorsTest : public AttachFixture {
 protected:
  void SetUp() override { StartServer(); }
  // All that was passed is closed, long before it would by itself.
  bool NothingPends() {
    return Eventually([this] {
      const ClosingCounters c = server_->counters().closing;
      return c.pending == 0 && c.late == 0;
    });
  }
};

TEST_F(AttachDescriptorsTest, BeforeHelloTheyDelayNobody) {
  Client victim = Attach("victim");
  const Bytes packets[] = {Bytes(10), PodBytes(GoodHello()), Bytes(200)};
  // Where the daemon is faster than the end of the child, its close is not the last and does not
  // block: rounds go on until one did.
  uint64_t rounds = 0;
  while (rounds < 3 || (server_->counters().closing.interrupted == 0 && rounds < 100)) {
    std::vector<LingeringSocket> lingering = Lingering(3);
    const UniqueFd attacker = Dial(path_);
    ASSERT_TRUE(Pass(attacker.get(), packets[rounds++ % 3], &lingering));
    EXPECT_TRUE(SawEof(attacker.get()));
    EXPECT_TRUE(victim.Call(shm::kPing).ok());
    EXPECT_TRUE(NothingPends());
  }
  EXPECT_EQ(server_->counters().refused, rounds);
  EXPECT_GT(server_->counters().closing.interrupted, 0u);
}

TEST_F(AttachDescriptorsTest, BehindThePacketThatEndsTheConnection) {
  Client victim = Attach("victim");
  const UniqueFd attacker = Dial(path_);
  std::vector<LingeringSocket> lingering = Lingering(2), more = Lingering(2);
  ASSERT_EQ(SendPacket(attacker.get(), shm::Descriptor{}), SendOutcome::kSent);
  // The daemon may have hung up by now.
  (void)Pass(attacker.get(), Bytes(3), &lingering);
  (void)Pass(attacker.get(), Bytes(3), &more);
  EXPECT_TRUE(SawEof(attacker.get()));
  EXPECT_TRUE(victim.Call(shm::kPing).ok());
  EXPECT_TRUE(NothingPends());
}

TEST_F(AttachDescriptorsTest, AfterHelloTheyDelayNobody) {
  Client victim = Attach("victim");
  const struct {
    const char* what;
    Bytes packet;
    int descriptors;
  } cases[] = {
      {"a packet of another kind", Bytes(3), 1},
      {"several at once", DescriptorPacket(1), 3},
      {"another Hello", PodBytes(GoodHello()), 2},
  };
  for (const auto& c : cases) {
    Client attacker = Attach("attacker");
    std::vector<LingeringSocket> lingering = Lingering(c.descriptors);
    ASSERT_TRUE(Pass(attacker.socket(), c.packet, &lingering)) << c.what;
    EXPECT_TRUE(SawEof(attacker.socket())) << c.what;
    EXPECT_TRUE(victim.Call(shm::kPing).ok()) << c.what;
    EXPECT_TRUE(NothingPends()) << c.what;
  }
}

TEST_F(AttachDescriptorsTest, ThoseThatNoRequestHasNamed) {
  Client victim = Attach("victim");
  Client attacker = Attach("attacker");
  for (uint32_t i = 0; i < 5; ++i) {
    std::vector<LingeringSocket> lingering = Lingering(1);
    ASSERT_TRUE(Pass(attacker.socket(), DescriptorPacket(i), &lingering));
  }
  EXPECT_TRUE(attacker.Call(shm::kPing).ok());
  attacker.HangUp();
  EXPECT_TRUE(Eventually([this] { return server_->counters().hung_up == 1; }));
  EXPECT_TRUE(victim.Call(shm::kPing).ok());
  EXPECT_TRUE(NothingPends());
  EXPECT_GE(server_->counters().closing.closed, 6u) << "five, and the connection's socket";
}

TEST_F(AttachDescriptorsTest, TheEndOfTheServerWaitsForNone) {
  Client attacker = Attach("attacker");
  const UniqueFd silent = Dial(path_);
  std::vector<LingeringSocket> waiting = Lingering(1), unread = Lingering(1);
  ASSERT_TRUE(Pass(attacker.socket(), DescriptorPacket(1), &waiting));
  ASSERT_TRUE(Pass(silent.get(), DescriptorPacket(1), &unread));
  const auto began = std::chrono::steady_clock::now();
  server_.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(kLingerSeconds / 2));
}

// Nothing of a packet is lost, hence closed here, when this process has no descriptors left.
TEST(ReceivePassedTest, WithoutRoomTheyStayInTheSocket) {
  int ends[2], pipes[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd ours(ends[0]), theirs(ends[1]);
  ASSERT_EQ(pipe2(pipes, O_CLOEXEC), 0);
  const UniqueFd reader(pipes[0]);
  UniqueFd writer(pipes[1]);
  const int fd = writer.get();
  ASSERT_EQ(SendPacket(theirs.get(), shm::Descriptor{}, std::span(&fd, 1)), SendOutcome::kSent);
  writer.Reset();
  std::vector<UniqueFd> filling;
  for (int next = dup(0); next >= 0; next = dup(0)) filling.emplace_back(next);
  Bytes packet(16);
  size_t bytes = 0;
  std::vector<UniqueFd> fds;
  EXPECT_EQ(ReceivePassed(ours.get(), packet, &bytes, &fds), ReceiveOutcome::kDescriptors);
  EXPECT_TRUE(fds.empty());
  pollfd hangup{reader.get(), 0, 0};
  EXPECT_EQ(poll(&hangup, 1, 0), 0) << "the writer's end is open still";
  filling.clear();
  EXPECT_EQ(ReceivePassed(ours.get(), packet, &bytes, &fds), ReceiveOutcome::kPacket);
  EXPECT_EQ(bytes, 8u);
  EXPECT_EQ(fds.size(), 1u);
  fds.clear();
  EXPECT_EQ(poll(&hangup, 1, kDeadlineMs), 1);
  EXPECT_EQ(ReceivePassed(ours.get(), packet, &bytes, &fds), ReceiveOutcome::kNothing);
}

// --- the closer alone ----------------------------------------------------------------------------

TEST(DescriptorCloserTest, OneUsersDoNotHoldUpAnothers) {
  DescriptorCloser closer;
  std::vector<LingeringSocket> lingering = Lingering(6);
  for (LingeringSocket& l : lingering) closer.Put(l.Take(), 1);
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  const UniqueFd reader(ends[0]);
  closer.Put(UniqueFd(ends[1]), 2);
  pollfd hangup{reader.get(), 0, 0};
  EXPECT_EQ(poll(&hangup, 1, kDeadlineMs), 1);
  EXPECT_TRUE(Eventually([&] { return closer.counters().pending == 6; }));
  // Each tick interrupts two.
  EXPECT_TRUE(Eventually([&] {
    closer.Tick();
    return closer.counters().closed == 7;
  }));
}

TEST(DescriptorCloserTest, AUserIsToldToStop) {
  DescriptorCloser closer({std::chrono::milliseconds(0), std::chrono::hours(1)});
  std::vector<LingeringSocket> lingering = Lingering(2);  // as many as are closed at once
  for (LingeringSocket& l : lingering) closer.Put(l.Take(), 1);
  for (size_t i = 2; i < DescriptorCloser::kMaxWaiting; ++i) {
    EXPECT_TRUE(closer.MayTake(1));
    closer.Put(UniqueFd(dup(0)), 1);
  }
  EXPECT_TRUE(Eventually([&] { return !closer.MayTake(1); })) << "once a thread has taken one";
  EXPECT_TRUE(closer.MayTake(2));
  EXPECT_TRUE(Eventually([&] {
    closer.Tick();
    return closer.MayTake(1) && closer.counters().pending == 0;
  }));
}

TEST(DescriptorCloserTest, WhatIsLateIsCounted) {
  DescriptorCloser closer({std::chrono::hours(1), std::chrono::milliseconds(0)});
  std::vector<LingeringSocket> lingering = Lingering(1);
  closer.Put(lingering[0].Take(), 7);
  closer.Tick();
  EXPECT_EQ(closer.counters().pending, 1u);
  EXPECT_EQ(closer.counters().late, 0u) << "not over its deadline";
}

}  // namespace
}  // namespace kvstrata
