// SPDX-License-Identifier: Apache-2.0
// Admin's calls of the users' limits, and that every call of every service is there.
#include <google/protobuf/descriptor.h>
#include <grpcpp/support/sync_stream.h>

#include "server/store/options/user_limits.h"
#include "tests/server/rpc_fixture.h"

namespace kvstrata::test {
namespace {

std::shared_ptr<UserLimits> SomeLimits() {
  UserLimitsOptions options;
  options.defaults[Limit::kSessions] = 3;
  options.defaults[Limit::kDeviceBytes] = 1000;
  options.users["uid:100"] = {{Limit::kSessions, 5}};
  options.users["uid:20"] = {{Limit::kModels, 1}};
  options.operators = {"uid:0", "uid:" + std::to_string(geteuid())};
  return std::make_shared<UserLimits>(options);
}

class RpcQuotaTest : public ::testing::Test {
 protected:
  Result<v1::UserQuota> Set(const std::string& user, const std::string& limit, uint64_t value,
                            bool reset = false) {
    v1::SetQuotaRequest request;
    request.set_user(user);
    request.set_limit(limit);
    request.set_value(value);
    request.set_reset(reset);
    v1::SetQuotaResponse response;
    KVS_RETURN_IF_ERROR(Call(*admin_, &v1::Admin::Stub::SetQuota, request, &response));
    return response.quota();
  }
  v1::ListQuotasResponse List() {
    v1::ListQuotasResponse response;
    const Status status =
        Call(*admin_, &v1::Admin::Stub::ListQuotas, v1::ListQuotasRequest(), &response);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return response;
  }
  v1::UserQuota Of(const std::string& user) {
    const v1::ListQuotasResponse list = List();
    for (const v1::UserQuota& quota : list.users()) {
      if (quota.user() == user) return quota;
    }
    ADD_FAILURE() << user << " is not listed";
    return {};
  }

  std::shared_ptr<UserLimits> limits_ = SomeLimits();
  RpcDaemon daemon_{uint64_t{16} << 20, nullptr, NewEmulatedDevice(), nullptr, limits_};
  std::unique_ptr<v1::Admin::Stub> admin_ = v1::Admin::NewStub(daemon_.Connect());
};

TEST_F(RpcQuotaTest, UsersAreListedByNumberWithWhatTheyHold) {
  UserLimits::User* const user = limits_->For("uid:100");
  ASSERT_TRUE(limits_->Take(user, Limit::kSessions, 5).ok());
  EXPECT_EQ(limits_->Take(user, Limit::kSessions).reason(), "SESSION_LIMIT");
  const v1::ListQuotasResponse list = List();
  EXPECT_EQ(list.defaults().sessions(), 3u);
  EXPECT_EQ(list.defaults().device_bytes(), 1000u);
  std::vector<std::string> names;
  for (const v1::UserQuota& quota : list.users()) names.push_back(quota.user());
  const auto at = [&names](const char* name) { return std::ranges::find(names, name); };
  EXPECT_LT(at("uid:20"), at("uid:100")) << "20 is before 100";
  const v1::UserQuota quota = Of("uid:100");
  EXPECT_EQ(quota.limits().sessions(), 5u);
  EXPECT_EQ(quota.limits().device_bytes(), 1000u);
  EXPECT_EQ(quota.used().sessions(), 5u);
  EXPECT_EQ(quota.refused(), 1u);
  ASSERT_EQ(quota.changed_size(), 1);
  EXPECT_EQ(quota.changed(0), "sessions");
}

TEST_F(RpcQuotaTest, ALimitIsSetAndGoesBackToTheConfiguration) {
  const auto set = Set("uid:100", "sessions", 9);
  ASSERT_TRUE(set.ok()) << set.status().ToString();
  EXPECT_EQ(set->limits().sessions(), 9u);
  EXPECT_EQ(limits_->Room(limits_->For("uid:100"), Limit::kSessions), 9u);
  EXPECT_EQ(Set("uid:100", "sessions", 0, true)->limits().sessions(), 5u);
  EXPECT_EQ(limits_->Room(limits_->For("uid:100"), Limit::kSessions), 5u);
}

TEST_F(RpcQuotaTest, EveryLimitHasItsName) {
  for (size_t i = 0; i < kLimits; ++i) {
    const auto limit = static_cast<Limit>(i);
    ASSERT_TRUE(Set("uid:7", std::string(NameOf(limit)), 10 + i).ok()) << NameOf(limit);
  }
  const v1::UserNumbers limits = Of("uid:7").limits();
  const auto* descriptor = v1::UserNumbers::descriptor();
  ASSERT_EQ(static_cast<size_t>(descriptor->field_count()), kLimits);
  for (size_t i = 0; i < kLimits; ++i) {
    const auto* field = descriptor->FindFieldByName(std::string(NameOf(static_cast<Limit>(i))));
    ASSERT_NE(field, nullptr) << NameOf(static_cast<Limit>(i));
    EXPECT_EQ(limits.GetReflection()->GetUInt64(limits, field), 10 + i) << field->name();
  }
}

TEST_F(RpcQuotaTest, TheDefaultIsOfWhoHasNoneOfItsOwn) {
  EXPECT_EQ(Set("default", "sessions", 1)->limits().sessions(), 1u);
  EXPECT_EQ(List().defaults().sessions(), 1u);
  EXPECT_EQ(Of("uid:20").limits().sessions(), 1u);
  EXPECT_EQ(Of("uid:100").limits().sessions(), 5u);
  const v1::UserQuota other = Of("uid:20");
  EXPECT_EQ(std::ranges::count(other.changed(), "sessions"), 0) << "it is the default";
  ASSERT_TRUE(Set("default", "sessions", 0, true).ok());
  EXPECT_EQ(List().defaults().sessions(), 3u);
}

TEST_F(RpcQuotaTest, NobodyAndNothingHaveNoLimit) {
  for (const char* user : {"", "root", "1000", "uid:", "uid:07", "uid:4294967295", "uid:-1"}) {
    const Status status = Set(user, "sessions", 1).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << user;
    EXPECT_EQ(status.reason(), "QUOTA_USER") << user;
    EXPECT_NE(status.message().find("uid:N"), std::string::npos);
  }
  const Status limit = Set("uid:1", "session", 1).status();
  EXPECT_EQ(limit.reason(), "QUOTA_LIMIT");
  EXPECT_NE(limit.message().find("sessions, attaches_per_second"), std::string::npos);
  EXPECT_EQ(Set("uid:1", "sessions", 1'000'000'001).status().reason(), "QUOTA_VALUE");
  EXPECT_EQ(Set("uid:1", "sessions", 3, true).status().reason(), "QUOTA_VALUE");
  EXPECT_TRUE(Set("uid:1", "host_bytes", uint64_t{1} << 50).ok());
}

TEST_F(RpcQuotaTest, TheStatusShowsWhoHoldsOrWasRefused) {
  UserLimits::User* const user = limits_->For("uid:20");
  limits_->CountRefused(user);
  v1::GetStatusResponse status;
  ASSERT_TRUE(Call(*admin_, &v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), &status).ok());
  std::vector<std::string> names;
  for (const v1::UserQuota& quota : status.users()) names.push_back(quota.user());
  EXPECT_EQ(std::ranges::count(names, "uid:20"), 1);
  EXPECT_EQ(std::ranges::count(names, "uid:100"), 0) << "it holds nothing";
}

// How a call with an empty request answers, or that it answers: a stream that begins is one.
Status AnswerTo(const std::shared_ptr<grpc::Channel>& channel,
                const google::protobuf::MethodDescriptor& method) {
  const std::string name =
      "/" + std::string(method.service()->full_name()) + "/" + std::string(method.name());
  const grpc::internal::RpcMethod rpc(name.c_str(), grpc::internal::RpcMethod::SERVER_STREAMING,
                                      channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  grpc::Slice nothing("");
  const grpc::ByteBuffer request(&nothing, 1);
  const std::unique_ptr<grpc::ClientReader<grpc::ByteBuffer>> reader(
      grpc::internal::ClientReaderFactory<grpc::ByteBuffer>::Create(channel.get(), rpc, &context,
                                                                    request));
  grpc::ByteBuffer answer;
  const bool answered = reader->Read(&answer);
  if (answered) context.TryCancel();
  const Status end = FromGrpc(reader->Finish());
  return answered ? OkStatus() : end;
}

TEST_F(RpcQuotaTest, EveryCallOfEveryServiceIsThere) {
  const auto channel = daemon_.Connect();
  for (const char* name : {"kvstrata.v1.Control", "kvstrata.v1.Compute", "kvstrata.v1.Admin"}) {
    const auto* service =
        google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
    ASSERT_NE(service, nullptr) << name;
    for (int i = 0; i < service->method_count(); ++i) {
      const google::protobuf::MethodDescriptor& method = *service->method(i);
      const Status answer = AnswerTo(channel, method);
      EXPECT_NE(answer.reason(), "REQUEST_MALFORMED") << method.full_name();
      EXPECT_NE(answer.reason(), "RPC_UNIMPLEMENTED") << method.full_name();
      EXPECT_NE(answer.code(), Code::kDeadlineExceeded) << method.full_name();
    }
  }
}

}  // namespace
}  // namespace kvstrata::test
