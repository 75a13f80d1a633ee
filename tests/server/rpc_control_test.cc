// SPDX-License-Identifier: Apache-2.0
// kvstrata.v1.Control over a real channel: sessions, models, sequences, plans, prefix look-up.
#include "gmock/gmock.h"
#include "tests/server/rpc_fixture.h"

namespace kvstrata::test {
namespace {

using ::testing::HasSubstr, ::testing::Not, ::testing::StartsWith;

class RpcControlTest : public ::testing::Test {
 protected:
  template <typename Response, typename Request>
  Result<Response> Control(grpc::Status (v1::Control::Stub::*method)(grpc::ClientContext*,
                                                                     const Request&, Response*),
                           const Request& request) {
    Response response;
    KVS_RETURN_IF_ERROR(Call(*client_.control, method, request, &response));
    return response;
  }
  Status Ping(uint64_t session) {
    v1::PingRequest request;
    request.set_session(session);
    return Control(&v1::Control::Stub::Ping, request).status();
  }

  RpcDaemon daemon_;
  RpcClient client_{daemon_.Connect()};
  std::mt19937 random_{7};
};

TEST_F(RpcControlTest, OpenSessionSaysWhatIsThere) {
  EXPECT_NE(client_.session(), 0u);
  EXPECT_EQ(client_.opened.daemon_epoch(), daemon_.store().daemon_epoch());
  EXPECT_EQ(client_.opened.backend(), "ref");
  EXPECT_EQ(client_.opened.version(), "1.2.3");
  EXPECT_TRUE(Ping(client_.session()).ok());
  const auto sessions = daemon_.store().inspection().Sessions();
  ASSERT_EQ(sessions.size(), 1u);
  EXPECT_EQ(sessions[0].client_name, "test");
  EXPECT_EQ(sessions[0].transport, Transport::kRemote);
  EXPECT_EQ(sessions[0].peer.uid, geteuid());
}

TEST_F(RpcControlTest, AClientsNameIsMadePrintable) {
  v1::OpenSessionRequest request;
  request.set_client_name("two\nlines");
  grpc::ClientContext context;
  v1::OpenSessionResponse response;
  auto stream = client_.control->OpenSession(&context, request);
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_EQ(daemon_.store().inspection().Sessions().back().client_name, "two?lines");
  context.TryCancel();
  (void)stream->Finish();
}

TEST_F(RpcControlTest, OpenSessionRefusesWhatItCannotGive) {
  const RpcClient wrong(daemon_.Connect(), "abacus");
  EXPECT_EQ(wrong.failure.code(), Code::kInvalidArgument);
  EXPECT_EQ(wrong.failure.reason(), "BACKEND_UNKNOWN");
  for (const bool device : {false, true}) {
    v1::OpenSessionRequest request;
    if (device) {
      request.set_device_uuid("GPU-1");
    } else {
      request.set_client_name(std::string(64, 'x'));
    }
    grpc::ClientContext context;
    v1::OpenSessionResponse response;
    auto stream = client_.control->OpenSession(&context, request);
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_EQ(FromGrpc(stream->Finish()).reason(), device ? "DEVICE_UNKNOWN" : "TEXT_INVALID");
  }
  EXPECT_EQ(daemon_.store().inspection().Sessions().size(), 1u);
}

TEST_F(RpcControlTest, UnknownSessionsAreRefusedEverywhere) {
  EXPECT_EQ(Ping(client_.session() + 1).reason(), "SESSION_UNKNOWN");
  EXPECT_EQ(Ping(0).code(), Code::kNotFound);
  v1::CloseSessionRequest close;
  close.set_session(99);
  EXPECT_EQ(Control(&v1::Control::Stub::CloseSession, close).status().reason(), "SESSION_UNKNOWN");
  EXPECT_EQ(Control(&v1::Control::Stub::RegisterModel, RpcClient::ModelOf(99)).status().reason(),
            "SESSION_UNKNOWN");
}

// A session of the ring belongs to its ring: knowing its number is not enough.
TEST_F(RpcControlTest, ALinkedSessionIsNotReachedOverGrpc) {
  PeerIdentity peer;
  peer.uid = geteuid();
  peer.tenant = "uid:" + std::to_string(geteuid());
  const auto linked = daemon_.store().sessions().OpenSession(peer, Transport::kLinked, "engine",
                                                             [](const ArenaGrant&) {});
  ASSERT_TRUE(linked.ok());
  EXPECT_EQ(Ping(linked.value().session).reason(), "SESSION_UNKNOWN");
}

TEST_F(RpcControlTest, CancellingTheStreamReturnsThePages) {
  const uint64_t model = client_.RegisterModel();
  const auto opened = client_.Open(model, "full", Ids(40));
  ASSERT_TRUE(opened.ok()) << opened.status().ToString();
  ASSERT_TRUE(client_.Run(opened.value().sequence(), Ids(40), &random_).ok());
  ASSERT_TRUE(client_.Begin(opened.value().sequence(), {7}).ok());  // a step is open
  EXPECT_GT(daemon_.UsedBytes(), 0u);
  const uint64_t session = client_.session();
  client_.Cancel();
  EXPECT_TRUE(Eventually([&] { return daemon_.store().inspection().Sessions().empty(); }));
  EXPECT_EQ(daemon_.UsedBytes(), 0u);
  EXPECT_EQ(Ping(session).reason(), "SESSION_UNKNOWN");
  const AuditReport audit = daemon_.store().inspection().Audit();
  EXPECT_TRUE(audit.findings.empty()) << audit.findings.front();
}

TEST_F(RpcControlTest, CloseSessionAnswersWhenThePagesAreBack) {
  const uint64_t model = client_.RegisterModel();
  ASSERT_TRUE(client_.Open(model, "full", Ids(40)).ok());
  v1::CloseSessionRequest request;
  request.set_session(client_.session());
  EXPECT_TRUE(Control(&v1::Control::Stub::CloseSession, request).ok());
  EXPECT_TRUE(daemon_.store().inspection().Sessions().empty());
  EXPECT_EQ(daemon_.UsedBytes(), 0u);
  EXPECT_TRUE(client_.AwaitEnd().ok());
}

TEST_F(RpcControlTest, RegisterModelIsIdempotentAndListed) {
  const uint64_t model = client_.RegisterModel();
  EXPECT_NE(model, 0u);
  EXPECT_EQ(client_.RegisterModel(), model);
  const auto listed = Control(&v1::Control::Stub::ListModels, v1::ListModelsRequest());
  ASSERT_TRUE(listed.ok());
  ASSERT_EQ(listed.value().models_size(), 1);
  const v1::Model& m = listed.value().models(0);
  EXPECT_EQ(m.model(), model);
  EXPECT_EQ(m.name(), "toy");
  EXPECT_EQ(m.geometry().head_dim(), 64);
  EXPECT_EQ(m.page_bytes(), 2 * 2 * 2 * 16 * 64 * 4);
  EXPECT_EQ(m.token_bytes(), m.page_bytes() / 16);
}

TEST_F(RpcControlTest, RegisterModelNamesTheFieldThatIsWrong) {
  const auto refuse = [&](const std::function<void(v1::RegisterModelRequest*)>& spoil) {
    v1::RegisterModelRequest request = RpcClient::ModelOf(client_.session());
    spoil(&request);
    return Control(&v1::Control::Stub::RegisterModel, request).status();
  };
  const Status dim = refuse([](auto* r) { r->mutable_geometry()->set_head_dim(65); });
  EXPECT_EQ(dim.code(), Code::kInvalidArgument);
  EXPECT_NE(dim.message().find("65"), std::string::npos) << dim.message();
  EXPECT_EQ(
      refuse([](auto* r) { r->mutable_geometry()->set_dtype(v1::DTYPE_UNSPECIFIED); }).reason(),
      "MODEL_DTYPE");
  EXPECT_EQ(refuse([](auto* r) { r->set_name(std::string(64, 'n')); }).reason(), "TEXT_INVALID");
  EXPECT_EQ(refuse([](auto* r) { r->set_digest("a\nb"); }).reason(), "TEXT_INVALID");
  EXPECT_EQ(refuse([](auto* r) { r->set_layout(std::string(32, 'l')); }).reason(), "TEXT_INVALID");
  const Status adapter = refuse([](auto* r) { r->set_adapter(std::string(64, 'a')); });
  EXPECT_EQ(adapter.reason(), "TEXT_INVALID");
  EXPECT_TRUE(adapter.message().starts_with("adapter has 64 bytes")) << adapter.message();
  const Status boundaries =
      refuse([](auto* r) { r->mutable_boundary_tokens()->Resize((1 << 16) + 1, 7); });
  EXPECT_EQ(boundaries.reason(), "ARGUMENT_RANGE");
  EXPECT_TRUE(boundaries.message().starts_with("boundary_tokens")) << boundaries.message();
  EXPECT_EQ(refuse([](auto* r) { r->set_keys_pre_rope(true); }).reason(), "MODEL_ROPE");
  EXPECT_EQ(refuse([](auto* r) { r->mutable_rope()->set_theta(1e4); }).reason(), "MODEL_ROPE");
  EXPECT_EQ(refuse([](auto* r) { r->set_ranks(2); }).code(), Code::kUnimplemented);
}

TEST_F(RpcControlTest, RotaryParametersAreListedAndPartOfTheIdentity) {
  const auto registered = [&](double theta, int dim, bool interleaved) {
    v1::RegisterModelRequest request = RpcClient::ModelOf(client_.session());
    if (theta > 0) {
      request.set_keys_pre_rope(true);
      request.mutable_rope()->set_theta(theta);
      request.mutable_rope()->set_dim(dim);
      request.mutable_rope()->set_interleaved(interleaved);
    }
    return Control(&v1::Control::Stub::RegisterModel, request).value().model();
  };
  const uint64_t plain = registered(0, 0, false), whole = registered(1e4, 0, false);
  EXPECT_NE(whole, plain);
  EXPECT_EQ(registered(1e4, 64, false), whole);  // 0 is the head's 64
  EXPECT_NE(registered(1e4, 32, false), whole);
  EXPECT_NE(registered(1e4, 64, true), whole);
  EXPECT_NE(registered(5e5, 64, false), whole);
  const auto models = Control(&v1::Control::Stub::ListModels, v1::ListModelsRequest()).value();
  for (const v1::Model& m : models.models()) {
    EXPECT_EQ(m.has_rope(), m.keys_pre_rope());
    EXPECT_EQ(m.keys_pre_rope(), m.model() != plain);
    if (m.model() != whole) continue;
    EXPECT_EQ(m.rope().theta(), 1e4);
    EXPECT_EQ(m.rope().dim(), 64);
    EXPECT_FALSE(m.rope().interleaved());
  }
}

TEST_F(RpcControlTest, SequencesShareTheirPrefix) {
  const uint64_t model = client_.RegisterModel();
  const auto first = client_.Open(model, "", Ids(40));
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  EXPECT_EQ(first.value().held_tokens(), 0u);
  EXPECT_TRUE(first.value().plan().starts_with("full")) << first.value().plan();
  ASSERT_TRUE(client_.Run(first.value().sequence(), Ids(40), &random_).ok());

  v1::LookupRequest lookup;
  lookup.set_session(client_.session());
  lookup.set_model(model);
  const std::vector<int32_t> ids = Ids(50);
  lookup.mutable_tokens()->Add(ids.begin(), ids.end());
  const auto held = Control(&v1::Control::Stub::Lookup, lookup);
  ASSERT_TRUE(held.ok());
  EXPECT_EQ(held.value().held_tokens(), 32u);
  EXPECT_EQ(held.value().plan(), "") << "raw pages";
  lookup.set_plan("sentencekv{n_obs = 20}");
  const auto planned = Control(&v1::Control::Stub::Lookup, lookup);
  ASSERT_TRUE(planned.ok()) << planned.status().ToString();
  EXPECT_EQ(planned.value().held_tokens(), 16u);
  EXPECT_TRUE(planned.value().plan().starts_with("sentencekv{")) << planned.value().plan();
  EXPECT_EQ(client_.Open(model, lookup.plan(), ids)->held_tokens(), 16u);
  lookup.set_device_uuid("GPU-9");
  EXPECT_EQ(Control(&v1::Control::Stub::Lookup, lookup).status().reason(), "DEVICE_UNKNOWN");
  lookup.clear_device_uuid();
  lookup.set_lease_ms(60000);
  const size_t before = daemon_.store().inspection().Sequences(0).size();
  EXPECT_EQ(Control(&v1::Control::Stub::Lookup, lookup)->held_tokens(), 16u);
  EXPECT_EQ(daemon_.store().inspection().Sequences(0).size(), before + 1);
  lookup.clear_plan();
  EXPECT_EQ(Control(&v1::Control::Stub::Lookup, lookup).status().reason(), "LEASE_PLAN");
  lookup.clear_tokens();
  lookup.add_page_keys(std::string(32, 'k'));
  EXPECT_EQ(Control(&v1::Control::Stub::Lookup, lookup).status().reason(), "LEASE_PLAN");
  const auto second = client_.Open(model, "full", ids);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ(second.value().held_tokens(), 32u);
}

TEST_F(RpcControlTest, ForkAndClose) {
  const uint64_t model = client_.RegisterModel();
  const auto opened = client_.Open(model, "full", {});
  ASSERT_TRUE(opened.ok());
  const uint64_t sequence = opened.value().sequence();
  ASSERT_TRUE(client_.Run(sequence, Ids(20), &random_).ok());
  const auto fork =
      Control(&v1::Control::Stub::ForkSequence, client_.Of<v1::ForkSequenceRequest>(sequence));
  ASSERT_TRUE(fork.ok()) << fork.status().ToString();
  EXPECT_NE(fork.value().sequence(), sequence);
  EXPECT_EQ(fork.value().held_tokens(), 20u);
  // Both go on, on pages of their own.
  EXPECT_TRUE(client_.Run(sequence, {100}, &random_).ok());
  EXPECT_TRUE(client_.Run(fork.value().sequence(), {200}, &random_).ok());

  const auto close = [&](uint64_t s) {
    return Control(&v1::Control::Stub::CloseSequence, client_.Of<v1::CloseSequenceRequest>(s))
        .status();
  };
  const uint64_t step = client_.Begin(sequence, {101}).value();
  EXPECT_EQ(close(sequence).reason(), "SEQUENCE_BUSY");
  ASSERT_TRUE(client_.End(step, true).ok());
  EXPECT_TRUE(close(sequence).ok());
  EXPECT_EQ(close(sequence).reason(), "SEQUENCE_UNKNOWN");
  EXPECT_TRUE(close(fork.value().sequence()).ok());
  EXPECT_EQ(daemon_.UsedBytes(), 0u);
}

TEST_F(RpcControlTest, WhatDoesNotExistCannotBeOpened) {
  EXPECT_EQ(client_.Open(77, "full", {}).status().reason(), "MODEL_UNKNOWN");
  const uint64_t model = client_.RegisterModel();
  const Status plan = client_.Open(model, "ches", {}).status();
  EXPECT_EQ(plan.reason(), "PLAN_UNKNOWN");
  EXPECT_NE(plan.message().find("chess"), std::string::npos) << plan.message();
  EXPECT_EQ(client_.Open(model, "quest{codec = \"fp8\"}", {}).status().reason(),
            "PLAN_OPTION_INVALID");
}

TEST_F(RpcControlTest, AFullPoolRefusesAndTakesNothing) {
  RpcDaemon small(uint64_t{4} << 20);
  RpcClient client(small.Connect());
  const uint64_t model = client.RegisterModel();
  const Status full = client.Open(model, "full", Ids(100000)).status();
  EXPECT_EQ(full.code(), Code::kResourceExhausted);
  EXPECT_EQ(full.reason(), "POOL_EXHAUSTED");
  EXPECT_EQ(small.UsedBytes(), 0u);
  EXPECT_TRUE(client.Open(model, "full", Ids(16)).ok());
}

TEST_F(RpcControlTest, PlansAreListedAndExplained) {
  const auto listed = Control(&v1::Control::Stub::ListPlans, v1::ListPlansRequest());
  ASSERT_TRUE(listed.ok()) << listed.status().ToString();
  std::vector<std::string> names;
  for (const v1::Plan& p : listed.value().plans()) {
    names.push_back(p.name() + "/" + p.origin());
    EXPECT_FALSE(p.text().empty());
    EXPECT_FALSE(p.selector().empty());
  }
  EXPECT_EQ(names, (std::vector<std::string>{
                       "full/preset", "window/preset", "quest/preset", "chess/preset",
                       "tokenselect/preset", "sentencekv/preset", "sekv/preset", "mosaickv/preset",
                       "bits/preset", "strata/preset", "mine/configuration"}));
  const auto show = [&](const char* text) {
    v1::ShowPlanRequest request;
    request.set_plan(text);
    return Control(&v1::Control::Stub::ShowPlan, request);
  };
  const auto quest = show("quest{budget = 1024}");
  ASSERT_TRUE(quest.ok());
  EXPECT_EQ(quest.value().origin(), "text");
  EXPECT_EQ(quest.value().selector(), "minmax");
  EXPECT_NE(quest.value().text().find("1024"), std::string::npos);
  EXPECT_THAT(show("bits").value().description(), HasSubstr("; index: 7.8 % of keys"));
  EXPECT_THAT(show("bits{bits = 4, unit = 32}").value().description(), HasSubstr("15.6 %"));
  EXPECT_THAT(show("{selector = \"minmax\", page = 32}").value().description(),
              StartsWith("index: 3.1 %"));
  EXPECT_THAT(show("tokenselect").value().description(), Not(HasSubstr("index")));
  EXPECT_EQ(show("mine").value().origin(), "configuration");
  EXPECT_EQ(show("quest{budgett = 1}").status().reason(), "PLAN_OPTION_UNKNOWN");
}

}  // namespace
}  // namespace kvstrata::test
