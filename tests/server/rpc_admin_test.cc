// SPDX-License-Identifier: Apache-2.0
// kvstrata.v1.Admin over a real channel, and who may call it.
#include "tests/server/rpc_fixture.h"

namespace kvstrata::test {
namespace {

class RpcAdminTest : public ::testing::Test {
 protected:
  template <typename Response, typename Request>
  Result<Response> Admin(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*,
                                                                 const Request&, Response*),
                         const Request& request) {
    Response response;
    KVS_RETURN_IF_ERROR(Call(*client_.admin, method, request, &response));
    return response;
  }

  // A connection of another user of this machine, let in by the socket's mode. Needs root.
  std::shared_ptr<grpc::Channel> ConnectAsOther() {
    std::filesystem::permissions(daemon_.folder(), std::filesystem::perms(0755));
    std::filesystem::permissions(daemon_.path(), std::filesystem::perms(0666));
    UniqueFd fd = daemon_.Dial(kOther);
    EXPECT_TRUE(fd);
    return grpc::CreateInsecureChannelFromFd("other", fd.release());
  }
  // How a stream of answers ends.
  template <typename Stream, typename Response>
  static Status EndOf(Stream stream, Response* last) {
    while (stream->Read(last)) {
    }
    return FromGrpc(stream->Finish());
  }
  static Status AuditRecall(RpcClient& client, const v1::AuditRecallRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kDeadline);
    v1::AuditRecallResponse response;
    return EndOf(client.admin->AuditRecall(&context, request), &response);
  }

  static constexpr uid_t kOther = 4242;
  RpcDaemon daemon_;
  RpcClient client_{daemon_.Connect()};
  std::mt19937 random_{11};
  uint64_t model_ = client_.RegisterModel();
};

TEST_F(RpcAdminTest, StatusCountsWhatIsThere) {
  ASSERT_TRUE(client_.Open(model_, "full", Ids(20)).ok());
  const auto s = Admin(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest());
  ASSERT_TRUE(s.ok()) << s.status().ToString();
  const v1::GetStatusResponse& r = s.value();
  EXPECT_EQ(r.version(), "1.2.3");
  EXPECT_EQ(r.commit(), "abc");
  EXPECT_EQ(r.pid(), static_cast<uint64_t>(getpid()));
  EXPECT_EQ(r.backend(), "ref");
  EXPECT_EQ(r.health(), "serving");
  EXPECT_EQ(r.sessions(), 1u);
  EXPECT_EQ(r.sequences(), 1u);
  EXPECT_EQ(r.models(), 1u);
  EXPECT_EQ(r.socket(), daemon_.path());
  EXPECT_EQ(r.lookup_tokens(), 20u);
  EXPECT_GT(r.publications(), 0u);
  ASSERT_EQ(r.pools_size(), 2);
  EXPECT_EQ(r.pools(0).tier(), "device");
  EXPECT_EQ(r.pools(0).device(), "emulated");
  EXPECT_GT(r.pools(0).used_bytes(), 0u);
  EXPECT_EQ(r.pools(1).tier(), "host");
  for (const v1::Pool& pool : r.pools()) {
    EXPECT_EQ(pool.taken_bytes() > 0, pool.arenas() > 0);
    EXPECT_GE(pool.taken_bytes(), pool.used_bytes());
    EXPECT_LE(pool.taken_bytes(), pool.capacity_bytes());
  }
  const auto pools = Admin(&v1::Admin::Stub::ListPools, v1::ListPoolsRequest());
  ASSERT_TRUE(pools.ok());
  EXPECT_EQ(pools.value().pools_size(), 2);
}

TEST(RpcAdminCgroupTest, WhatTheCgroupIsChargedIsToldWithThePools) {
  std::optional<CgroupInfo> charged;  // at the moment of a call
  RpcDaemon daemon(uint64_t{16} << 20, [&charged](Store*, GrpcOptions* options) {
    options->cgroup = [&charged] { return charged; };
  });
  const std::unique_ptr<v1::Admin::Stub> admin = v1::Admin::NewStub(daemon.Connect());
  const auto cgroups = [&] {
    grpc::ClientContext context, status_context;
    v1::ListPoolsResponse pools;
    v1::GetStatusResponse status;
    EXPECT_TRUE(admin->ListPools(&context, {}, &pools).ok());
    EXPECT_TRUE(admin->GetStatus(&status_context, {}, &status).ok());
    EXPECT_EQ(status.cgroups_size(), pools.cgroups_size());
    if (status.cgroups_size() > 0) {
      EXPECT_EQ(status.cgroups(0).SerializeAsString(), pools.cgroups(0).SerializeAsString());
    }
    return pools.cgroups();
  };
  EXPECT_EQ(cgroups().size(), 0) << "no limit";
  charged = CgroupInfo{"/sys/fs/cgroup/memory.max", 1000, 700, 300, 600};
  const auto now = cgroups();
  ASSERT_EQ(now.size(), 1);
  EXPECT_EQ(now[0].file(), "/sys/fs/cgroup/memory.max");
  EXPECT_EQ(now[0].limit_bytes(), 1000u);
  EXPECT_EQ(now[0].charged_bytes(), 700u);
  EXPECT_EQ(now[0].reclaimable_bytes(), 300u);
  EXPECT_EQ(now[0].available_bytes(), 600u);
  charged->available_bytes = 100;
  EXPECT_EQ(cgroups()[0].available_bytes(), 100u) << "read at each call";
}

TEST_F(RpcAdminTest, SessionsAndSequencesAreListed) {
  const uint64_t sequence = client_.Open(model_, "quest{min_tokens = 0}", {}).value().sequence();
  const auto idle = Admin(&v1::Admin::Stub::ListSessions, v1::ListSessionsRequest());
  ASSERT_TRUE(idle.ok());
  EXPECT_EQ(idle.value().sessions(0).last_step_us(), 0u);
  ASSERT_TRUE(client_.Run(sequence, Ids(40), &random_).ok());
  const auto sessions = Admin(&v1::Admin::Stub::ListSessions, v1::ListSessionsRequest());
  ASSERT_TRUE(sessions.ok());
  ASSERT_EQ(sessions.value().sessions_size(), 1);
  const v1::Session& s = sessions.value().sessions(0);
  EXPECT_GT(s.last_step_us(), 0u);
  EXPECT_LE(s.last_step_us(), s.age_us());
  EXPECT_EQ(s.client_name(), "test");
  EXPECT_EQ(s.transport(), "remote");
  EXPECT_EQ(s.uid(), geteuid());
  EXPECT_EQ(s.pid(), 0u);
  EXPECT_EQ(s.sequences(), 1u);
  EXPECT_EQ(s.open_steps(), 0u);

  v1::ListSequencesRequest of_session;
  of_session.set_session(client_.session());
  const auto listed = Admin(&v1::Admin::Stub::ListSequences, of_session);
  ASSERT_TRUE(listed.ok());
  ASSERT_EQ(listed.value().sequences_size(), 1);
  EXPECT_EQ(listed.value().sequences(0).tokens(), 40u);
  EXPECT_EQ(listed.value().sequences(0).plan(), "quest");

  v1::ShowSequenceRequest show;
  show.set_sequence(sequence);
  const auto shown = Admin(&v1::Admin::Stub::ShowSequence, show);
  ASSERT_TRUE(shown.ok());
  EXPECT_GE(shown.value().pages_size(), 3);
  EXPECT_TRUE(shown.value().pages(0).sealed());
  EXPECT_EQ(shown.value().pages(0).tier(), "device");
  EXPECT_GT(shown.value().pages(0).selected(), 0u);  // accesses of both layers
  EXPECT_GE(shown.value().index_blocks_size(), 1);
  show.set_sequence(sequence + 1000);
  EXPECT_EQ(Admin(&v1::Admin::Stub::ShowSequence, show).status().reason(), "SEQUENCE_UNKNOWN");
}

TEST_F(RpcAdminTest, ConfigShowsEveryKeyWithItsOrigin) {
  const auto config = Admin(&v1::Admin::Stub::GetConfig, v1::GetConfigRequest());
  ASSERT_TRUE(config.ok());
  ASSERT_EQ(config.value().entries_size(), 2);
  EXPECT_EQ(config.value().entries(0).key(), "log.level");
  EXPECT_EQ(config.value().entries(0).origin(), "default");
  EXPECT_EQ(config.value().entries(1).where(), "/k:7:1");
}

TEST_F(RpcAdminTest, DemotedPagesAnswerAsBefore) {
  const uint64_t sequence = client_.Open(model_, "full", {}).value().sequence();
  ASSERT_TRUE(client_.Run(sequence, Ids(40), &random_).ok());
  const auto attend = [&]() -> std::string {
    const uint64_t step = client_.Begin(sequence, {100}).value();
    std::mt19937 same(3);
    EXPECT_TRUE(client_.Append(step, 0, RandomTensor(1, 2, &same), RandomTensor(1, 2, &same)).ok());
    v1::AttendResponse r;
    EXPECT_TRUE(Call(*client_.compute, &v1::Compute::Stub::Attend,
                     client_.AttendOf(step, 0, RandomTensor(1, 4, &same)), &r)
                    .ok());
    EXPECT_TRUE(client_.End(step, true).ok());
    return r.out().inline_();
  };
  const std::string before = attend();
  v1::MoveRequest move;
  move.set_sequence(sequence);
  const auto demoted = Admin(&v1::Admin::Stub::Demote, move);
  ASSERT_TRUE(demoted.ok()) << demoted.status().ToString();
  EXPECT_EQ(demoted.value().pages(), 2u);
  EXPECT_GT(demoted.value().bytes(), 0u);
  EXPECT_EQ(attend(), before);
  const auto back = Admin(&v1::Admin::Stub::Prefetch, move);
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_EQ(back.value().pages(), 2u);
  EXPECT_EQ(attend(), before);
  move.set_sequence(sequence + 1000);
  EXPECT_EQ(Admin(&v1::Admin::Stub::Demote, move).status().reason(), "SEQUENCE_UNKNOWN");
}

TEST_F(RpcAdminTest, AuditIsCleanAndEvictDropsWhatIsOnlyCached) {
  const uint64_t sequence = client_.Open(model_, "full", {}).value().sequence();
  ASSERT_TRUE(client_.Run(sequence, Ids(40), &random_).ok());
  auto audit = Admin(&v1::Admin::Stub::Audit, v1::AuditRequest());
  ASSERT_TRUE(audit.ok());
  EXPECT_TRUE(audit.value().clean()) << audit.value().findings(0);
  EXPECT_EQ(audit.value().sequences(), 1u);
  client_.Cancel();
  ASSERT_TRUE(Eventually([&] { return daemon_.store().inspection().Sessions().empty(); }));
  v1::EvictRequest evict;
  evict.set_dry_run(true);
  EXPECT_EQ(Admin(&v1::Admin::Stub::Evict, evict).value().pages(), 2u);
  evict.set_dry_run(false);
  EXPECT_EQ(Admin(&v1::Admin::Stub::Evict, evict).value().pages(), 2u);
  EXPECT_EQ(Admin(&v1::Admin::Stub::Evict, evict).value().pages(), 0u);
}

TEST_F(RpcAdminTest, ARecallAuditEndsInTimeAndRefusesOneOfDays) {
  v1::AuditRecallRequest request;
  request.set_sequence(client_.Open(model_, "full", Ids(20)).value().sequence());
  request.set_timeout_us(1000);  // nothing decodes meanwhile
  EXPECT_EQ(AuditRecall(client_, request).reason(), "RECALL_TIMEOUT");
  request.set_timeout_us(3'600'000'001);
  const Status long_one = AuditRecall(client_, request);
  EXPECT_EQ(long_one.reason(), "RECALL_OPTION");
  EXPECT_TRUE(long_one.message().starts_with("timeout_us")) << long_one.message();
}

// Every method: each asks for itself.
TEST_F(RpcAdminTest, AnotherUserMayCallNothingOfAdmin) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to connect as another user";
  RpcClient other(ConnectAsOther());
  ASSERT_TRUE(other.failure.ok()) << other.failure.ToString();
  const uint64_t sequence = client_.Open(model_, "full", Ids(20)).value().sequence();
  const auto refused =
      [&]<typename Request, typename Response>(
          grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
          const Request& request, const char* name) {
        Response response;
        EXPECT_EQ(Call(*other.admin, method, request, &response).reason(), "ADMIN_ONLY") << name;
      };
  v1::ShowSequenceRequest show;
  show.set_sequence(sequence);
  v1::MoveRequest move;
  move.set_sequence(sequence);
  refused(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), "GetStatus");
  refused(&v1::Admin::Stub::ListSessions, v1::ListSessionsRequest(), "ListSessions");
  refused(&v1::Admin::Stub::ListSequences, v1::ListSequencesRequest(), "ListSequences");
  refused(&v1::Admin::Stub::ShowSequence, show, "ShowSequence");
  v1::SampleSelectionsRequest sample;
  sample.set_sequence(sequence);
  refused(&v1::Admin::Stub::SampleSelections, sample, "SampleSelections");
  refused(&v1::Admin::Stub::ListEngineRecalls, v1::ListEngineRecallsRequest(), "ListEngineRecalls");
  refused(&v1::Admin::Stub::ListPools, v1::ListPoolsRequest(), "ListPools");
  refused(&v1::Admin::Stub::ListWork, v1::ListWorkRequest(), "ListWork");
  refused(&v1::Admin::Stub::GetConfig, v1::GetConfigRequest(), "GetConfig");
  refused(&v1::Admin::Stub::ReloadConfig, v1::ReloadConfigRequest(), "ReloadConfig");
  refused(&v1::Admin::Stub::SetLogLevel, v1::SetLogLevelRequest(), "SetLogLevel");
  refused(&v1::Admin::Stub::GetMetrics, v1::GetMetricsRequest(), "GetMetrics");
  refused(&v1::Admin::Stub::Audit, v1::AuditRequest(), "Audit");
  refused(&v1::Admin::Stub::Demote, move, "Demote");
  refused(&v1::Admin::Stub::Prefetch, move, "Prefetch");
  refused(&v1::Admin::Stub::Evict, v1::EvictRequest(), "Evict");
  refused(&v1::Admin::Stub::Pin, v1::PinRequest(), "Pin");
  refused(&v1::Admin::Stub::ListQuotas, v1::ListQuotasRequest(), "ListQuotas");
  refused(&v1::Admin::Stub::SetQuota, v1::SetQuotaRequest(), "SetQuota");
  refused(&v1::Admin::Stub::Drain, v1::DrainRequest(), "Drain");
  refused(&v1::Admin::Stub::Verify, v1::VerifyRequest(), "Verify");
  v1::AuditRecallRequest recall;
  recall.set_sequence(sequence);
  recall.set_timeout_us(1000);
  EXPECT_EQ(AuditRecall(other, recall).reason(), "ADMIN_ONLY");
}

// Another user of this machine has sessions of its own, sees nobody else's, and is no operator.
TEST_F(RpcAdminTest, AnotherUserIsNoOperatorAndSeesNoSessionButItsOwn) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to connect as another user";
  RpcClient other(ConnectAsOther());
  ASSERT_TRUE(other.failure.ok()) << other.failure.ToString();
  EXPECT_EQ(daemon_.store().inspection().Sessions().back().peer.tenant, "uid:4242");
  v1::ListModelsResponse models;
  EXPECT_EQ(Call(*other.control, &v1::Control::Stub::ListModels, v1::ListModelsRequest(), &models)
                .reason(),
            "ADMIN_ONLY");
  v1::PingRequest ping;
  ping.set_session(client_.session());
  v1::PingResponse pong;
  EXPECT_EQ(Call(*other.control, &v1::Control::Stub::Ping, ping, &pong).reason(),
            "SESSION_UNKNOWN");
  // Equal content of another tenant is not shared.
  ASSERT_TRUE(
      client_.Run(client_.Open(model_, "full", {}).value().sequence(), Ids(40), &random_).ok());
  EXPECT_EQ(other.Open(other.RegisterModel(), "full", Ids(40)).value().held_tokens(), 0u);
  EXPECT_EQ(client_.Open(model_, "full", Ids(40)).value().held_tokens(), 32u);
}

}  // namespace
}  // namespace kvstrata::test
