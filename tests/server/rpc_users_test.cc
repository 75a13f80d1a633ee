// SPDX-License-Identifier: Apache-2.0
// Connections of many users to one gRPC server: how many one may have, how many users there are at
// a time, and what who is refused hears.
#include <poll.h>

#include "server/rpc/calls/refused_connections.h"
#include "server/store/options/user_limits.h"
#include "server/store/options/user_name.h"
#include "tests/server/rpc_fixture.h"

namespace kvstrata::test {
namespace {

std::shared_ptr<UserLimits> Connections(uint64_t most, std::set<std::string> operators = {}) {
  UserLimitsOptions options;
  options.defaults[Limit::kConnections] = most;
  options.operators = std::move(operators);
  return std::make_shared<UserLimits>(options);
}

// What a client hears to its first call. Control's, which everybody may call.
Status Hears(const std::shared_ptr<grpc::Channel>& channel) {
  const auto control = v1::Control::NewStub(channel);
  v1::ListPlansResponse response;
  return Call(*control, &v1::Control::Stub::ListPlans, v1::ListPlansRequest(), &response);
}

class RpcUsersTest : public ::testing::Test {
 protected:
  void Serve(std::shared_ptr<UserLimits> limits) {
    limits_ = std::move(limits);
    daemon_ = std::make_unique<RpcDaemon>(uint64_t{16} << 20, nullptr, NewEmulatedDevice(), nullptr,
                                          limits_);
    std::filesystem::permissions(daemon_->folder(), std::filesystem::perms(0755));
    std::filesystem::permissions(daemon_->path(), std::filesystem::perms(0666));
  }
  std::shared_ptr<grpc::Channel> ChannelOf(uid_t uid) {
    UniqueFd fd = daemon_->Dial(uid);
    EXPECT_TRUE(fd) << "user " << uid;
    return grpc::CreateInsecureChannelFromFd("user", fd.release());
  }
  uint64_t Used() { return limits_->Used(limits_->For(UserName(geteuid())), Limit::kConnections); }

  std::shared_ptr<UserLimits> limits_;
  std::unique_ptr<RpcDaemon> daemon_;
};

TEST_F(RpcUsersTest, AUserHasSoManyConnectionsAndGetsThemBack) {
  Serve(Connections(3));
  std::vector<std::shared_ptr<grpc::Channel>> held;
  for (int i = 0; i < 3; ++i) {
    held.push_back(daemon_->Connect());
    ASSERT_TRUE(Hears(held.back()).ok());
  }
  const Status refused = Hears(daemon_->Connect());
  EXPECT_EQ(refused.code(), Code::kResourceExhausted) << refused.ToString();
  EXPECT_EQ(refused.reason(), "CONNECTIONS");
  EXPECT_NE(refused.message().find("has 3 connections; its limit is 3"), std::string::npos)
      << refused.ToString();
  EXPECT_TRUE(Hears(held.front()).ok()) << "who is in stays in";
  held.clear();
  EXPECT_TRUE(Eventually([&] { return Used() == 0; }));
  EXPECT_TRUE(Hears(daemon_->Connect()).ok());
}

TEST_F(RpcUsersTest, ARefusedConnectionAnswersEachCallAndEnds) {
  Serve(Connections(1));
  const auto held = daemon_->Connect();
  ASSERT_TRUE(Hears(held).ok());
  UniqueFd fd = daemon_->Dial();
  const UniqueFd watched(dup(fd.get()));
  const auto refused = grpc::CreateInsecureChannelFromFd("refused", fd.release());
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Hears(refused).reason(), "CONNECTIONS") << i;
  pollfd hangup{watched.get(), POLLRDHUP, 0};
  EXPECT_EQ(poll(&hangup, 1, 20'000), 1) << "it is closed in time";
}

TEST_F(RpcUsersTest, RefusedConnectionsThatSayNothingOrNonsenseHoldNobodyUp) {
  Serve(Connections(1));
  const auto held = daemon_->Connect();
  ASSERT_TRUE(Hears(held).ok());
  std::vector<UniqueFd> silent;
  for (size_t i = 0; i < 200; ++i) {
    silent.push_back(daemon_->Dial());
    const std::string nonsense(i * 40, static_cast<char>(0xFF));
    (void)send(silent.back().get(), nonsense.data(), nonsense.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  EXPECT_TRUE(Hears(held).ok());
  EXPECT_TRUE(Eventually([&] {
    return std::ranges::all_of(silent, [](const UniqueFd& fd) {
      pollfd hangup{fd.get(), POLLRDHUP, 0};
      return poll(&hangup, 1, 0) == 1;
    });
  }));
  EXPECT_EQ(Hears(daemon_->Connect()).reason(), "CONNECTIONS") << "there is room to hear it again";
}

TEST_F(RpcUsersTest, UsersComeAndGoBeyondTheNumberOfServers) {
  if (geteuid() != 0) GTEST_SKIP() << "dials as other users, which root alone may";
  Serve(Connections(0, {"uid:0"}));
  for (uid_t uid = 10'000; uid < 10'070; ++uid) {
    const auto channel = ChannelOf(uid);
    ASSERT_TRUE(Hears(channel).ok()) << "user " << uid << ": " << Hears(channel).ToString();
  }
  RpcClient root(daemon_->Connect());
  v1::GetStatusResponse status;
  EXPECT_TRUE(Call(*root.admin, &v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), &status).ok());
}

TEST_F(RpcUsersTest, NobodysServerGoesWhileHeIsConnected) {
  if (geteuid() != 0) GTEST_SKIP() << "dials as other users, which root alone may";
  Serve(Connections(0, {"uid:0"}));
  std::vector<std::shared_ptr<grpc::Channel>> held;
  for (uid_t uid = 20'001; uid < 20'000 + GrpcServer::kMaxUsers; ++uid) {
    held.push_back(ChannelOf(uid));
    ASSERT_TRUE(Hears(held.back()).ok()) << "user " << uid;
  }
  const Status refused = Hears(ChannelOf(30'000));
  EXPECT_EQ(refused.code(), Code::kResourceExhausted) << refused.ToString();
  EXPECT_EQ(refused.reason(), "USERS");
  EXPECT_TRUE(Hears(held.front()).ok());
  EXPECT_TRUE(Hears(daemon_->Connect()).ok()) << "root has a server of its own";
  held.erase(held.begin());
  EXPECT_TRUE(Eventually([&] { return Hears(ChannelOf(30'000)).ok(); }));
  for (const auto& channel : held) EXPECT_TRUE(Hears(channel).ok());
}

TEST_F(RpcUsersTest, ASessionKeepsItsUsersServer) {
  if (geteuid() != 0) GTEST_SKIP() << "dials as other users, which root alone may";
  Serve(Connections(0, {"uid:0"}));
  RpcClient session(ChannelOf(40'000));
  ASSERT_TRUE(session.failure.ok()) << session.failure.ToString();
  for (uid_t uid = 40'001; uid < 40'100; ++uid) ASSERT_TRUE(Hears(ChannelOf(uid)).ok()) << uid;
  EXPECT_NE(session.RegisterModel(), 0u);
}

}  // namespace
}  // namespace kvstrata::test
