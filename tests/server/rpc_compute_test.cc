// SPDX-License-Identifier: Apache-2.0
// kvstrata.v1.Compute over a real channel: steps that run in the daemon, and every way to misuse
// them.
#include <cmath>

#include "tests/server/rpc_fixture.h"

namespace kvstrata::test {
namespace {

std::vector<float> FloatsOf(const std::string& bytes) {
  std::vector<float> x(bytes.size() / sizeof(float));
  std::memcpy(x.data(), bytes.data(), bytes.size());
  return x;
}

class RpcComputeTest : public ::testing::Test {
 protected:
  template <typename Response, typename Request>
  Result<Response> Compute(grpc::Status (v1::Compute::Stub::*method)(grpc::ClientContext*,
                                                                     const Request&, Response*),
                           const Request& request) {
    Response response;
    KVS_RETURN_IF_ERROR(Call(*client_.compute, method, request, &response));
    return response;
  }
  v1::TensorRef Keys(int tokens) { return RandomTensor(tokens, 2, &random_); }
  v1::TensorRef Queries(int tokens) { return RandomTensor(tokens, 4, &random_); }
  uint64_t Open(const std::string& plan = "full") {
    return client_.Open(model_, plan, {}).value().sequence();
  }
  uint32_t Tokens(uint64_t sequence) {
    return Compute(&v1::Compute::Stub::GetSequence, client_.Of<v1::GetSequenceRequest>(sequence))
        .value()
        .tokens();
  }

  RpcDaemon daemon_;
  RpcClient client_{daemon_.Connect()};
  uint64_t model_ = client_.RegisterModel();
  std::mt19937 random_{5};
};

// Three tokens in one chunk: causal attention in double precision by hand.
TEST_F(RpcComputeTest, AttendsCausallyInsideAChunk) {
  const uint64_t step = client_.Begin(Open(), {1, 2, 3}).value();
  const v1::TensorRef k = Keys(3), v = Keys(3), q = Queries(3);
  ASSERT_TRUE(client_.Append(step, 0, k, v).ok());
  const auto attended = Compute(&v1::Compute::Stub::Attend, client_.AttendOf(step, 0, q));
  ASSERT_TRUE(attended.ok()) << attended.status().ToString();
  const auto K = FloatsOf(k.inline_()), V = FloatsOf(v.inline_()), Q = FloatsOf(q.inline_());
  const auto out = FloatsOf(attended.value().out().inline_());
  const auto lse = FloatsOf(attended.value().lse());
  ASSERT_EQ(out.size(), 3u * 4 * 64);
  ASSERT_EQ(lse.size(), 3u * 4);
  for (int t = 0; t < 3; ++t) {
    for (int h = 0; h < 4; ++h) {
      const int kv = h / 2;
      double p[3], sum = 0;
      for (int i = 0; i <= t; ++i) {
        double s = 0;
        for (int c = 0; c < 64; ++c) {
          s += double{Q[(t * 4 + h) * 64 + c]} * K[(i * 2 + kv) * 64 + c];
        }
        sum += p[i] = std::exp(s / 8);
      }
      EXPECT_NEAR(lse[t * 4 + h], std::log(sum), 1e-4);
      for (int c = 0; c < 64; ++c) {
        double want = 0;
        for (int i = 0; i <= t; ++i) want += p[i] / sum * V[(i * 2 + kv) * 64 + c];
        ASSERT_NEAR(out[(t * 4 + h) * 64 + c], want, 1e-4) << t << " " << h << " " << c;
      }
    }
  }
  ASSERT_EQ(attended.value().selection().members_size(), 1);
  // A chunk's selection is that of its first token.
  const auto& tokens = attended.value().selection().members(0).groups(0).tokens();
  EXPECT_EQ((std::vector<int32_t>(tokens.begin(), tokens.end())), (std::vector<int32_t>{0}));
}

TEST_F(RpcComputeTest, CommitAdvancesAndAbortDoesNot) {
  const uint64_t sequence = Open();
  ASSERT_TRUE(client_.Run(sequence, Ids(33), &random_).ok());
  EXPECT_EQ(Tokens(sequence), 33u);
  const uint64_t step = client_.Begin(sequence, {9}).value();
  ASSERT_TRUE(client_.Append(step, 0, Keys(1), Keys(1)).ok());
  ASSERT_TRUE(client_.End(step, true).ok());
  EXPECT_EQ(Tokens(sequence), 33u);
  EXPECT_EQ(client_.End(step).reason(), "STEP_UNKNOWN");
  EXPECT_EQ(daemon_.store().inspection().Sequences(0)[0].tokens, 33u);
  EXPECT_EQ(daemon_.store().inspection().Sessions()[0].open_steps, 0u);
}

TEST_F(RpcComputeTest, AStepThatMissesALayerIsDropped) {
  const uint64_t sequence = Open();
  const uint64_t step = client_.Begin(sequence, {9}).value();
  ASSERT_TRUE(client_.Append(step, 0, Keys(1), Keys(1)).ok());
  const Status s = client_.End(step);
  EXPECT_EQ(s.reason(), "LAYER_NOT_APPENDED");
  EXPECT_NE(s.message().find("layer 1"), std::string::npos) << s.message();
  EXPECT_EQ(Tokens(sequence), 0u);
  EXPECT_TRUE(client_.Run(sequence, {9}, &random_).ok());  // the sequence is free again
}

TEST_F(RpcComputeTest, AttendNeedsTheLayersAppend) {
  const uint64_t step = client_.Begin(Open(), {9}).value();
  EXPECT_EQ(
      Compute(&v1::Compute::Stub::Attend, client_.AttendOf(step, 1, Queries(1))).status().reason(),
      "LAYER_NOT_APPENDED");
}

TEST_F(RpcComputeTest, WrongTensorsNameTheField) {
  const uint64_t step = client_.Begin(Open(), {8, 9}).value();
  const auto refuse = [&](const std::function<void(v1::TensorRef*)>& spoil) {
    v1::TensorRef v = Keys(2);
    spoil(&v);
    return client_.Append(step, 0, Keys(2), v);
  };
  const Status heads = refuse([](auto* t) { t->set_heads(4); });
  EXPECT_EQ(heads.reason(), "TENSOR_HEADS");
  EXPECT_NE(heads.message().find("v.heads 4; expected 2"), std::string::npos) << heads.message();
  EXPECT_EQ(refuse([](auto* t) { t->set_tokens(3); }).reason(), "TENSOR_TOKENS");
  EXPECT_EQ(refuse([](auto* t) { t->set_head_dim(128); }).reason(), "TENSOR_HEAD_DIM");
  EXPECT_EQ(refuse([](auto* t) { t->set_dtype(v1::DTYPE_UNSPECIFIED); }).reason(), "TENSOR_DTYPE");
  EXPECT_EQ(refuse([](auto* t) { t->mutable_inline_()->pop_back(); }).reason(), "TENSOR_DATA");
  EXPECT_EQ(refuse([](auto* t) { t->mutable_inline_()->push_back(0); }).reason(), "TENSOR_DATA");
  EXPECT_EQ(refuse([](auto* t) { t->clear_inline_(); }).reason(), "TENSOR_DATA");
  for (const int layer : {-1, 2}) {
    EXPECT_EQ(client_.Append(step, layer, Keys(2), Keys(2)).reason(), "ARGUMENT_RANGE");
  }
  const Status k = client_.Append(step, 0, Queries(2), Keys(2));
  EXPECT_NE(k.message().find("k.heads 4; expected 2"), std::string::npos) << k.message();
  v1::AttendRequest attend = client_.AttendOf(step, 0, Queries(2));
  ASSERT_TRUE(client_.Append(step, 0, Keys(2), Keys(2)).ok());
  attend.set_out_dtype(static_cast<v1::DType>(9));
  EXPECT_EQ(Compute(&v1::Compute::Stub::Attend, attend).status().reason(), "TENSOR_DTYPE");
  attend.set_out_dtype(v1::DTYPE_BF16);
  const auto narrow = Compute(&v1::Compute::Stub::Attend, attend);
  ASSERT_TRUE(narrow.ok());
  EXPECT_EQ(narrow.value().out().inline_().size(), 2u * 4 * 64 * 2);
}

TEST_F(RpcComputeTest, SelectAndAttendNameWhatIsWrong) {
  const uint64_t step = client_.Begin(Open("quest{min_tokens = 0}"), {8, 9}).value();
  ASSERT_TRUE(client_.Append(step, 0, Keys(2), Keys(2)).ok());
  const auto both = [&](int layer, const v1::TensorRef& q) {
    v1::SelectRequest select;
    select.set_session(client_.session());
    select.set_step(step);
    select.set_layer(layer);
    *select.mutable_q() = q;
    return std::vector<Status>{
        Compute(&v1::Compute::Stub::Select, select).status(),
        Compute(&v1::Compute::Stub::Attend, client_.AttendOf(step, layer, q)).status()};
  };
  for (const int layer : {-1, 2}) {
    for (const Status& s : both(layer, Queries(2))) EXPECT_EQ(s.reason(), "ARGUMENT_RANGE");
  }
  for (const Status& s : both(0, Keys(2))) {
    EXPECT_EQ(s.reason(), "TENSOR_HEADS");
    EXPECT_NE(s.message().find("q.heads 2; expected 4"), std::string::npos) << s.message();
  }
  for (const Status& s : both(0, Queries(2))) EXPECT_TRUE(s.ok()) << s.ToString();
}

TEST_F(RpcComputeTest, OtherDtypesAreConverted) {
  const uint64_t sequence = Open();
  const uint64_t step = client_.Begin(sequence, {8}).value();
  v1::TensorRef k;
  k.set_dtype(v1::DTYPE_BF16);
  k.set_tokens(1);
  k.set_heads(2);
  k.set_head_dim(64);
  const uint16_t one = 0x3F80;
  for (int i = 0; i < 2 * 64; ++i)
    k.mutable_inline_()->append(reinterpret_cast<const char*>(&one), 2);
  ASSERT_TRUE(client_.Append(step, 0, k, k).ok());
  const auto r = Compute(&v1::Compute::Stub::Attend, client_.AttendOf(step, 0, Queries(1)));
  ASSERT_TRUE(r.ok());
  for (const float x : FloatsOf(r.value().out().inline_())) EXPECT_FLOAT_EQ(x, 1.0f);
}

TEST_F(RpcComputeTest, ABatchWithABadMemberSaysWhichOne) {
  const uint64_t good = Open(), busy = Open();
  const uint64_t step = client_.Begin(busy, {1}).value();
  v1::StepBeginRequest request;
  request.set_session(client_.session());
  for (const uint64_t s : {good, busy, uint64_t{999}, good}) {
    v1::StepMember* m = request.add_members();
    m->set_sequence(s);
    m->add_tokens(5);
  }
  v1::StepBeginResponse response;
  grpc::Status raw;
  const Status failed =
      Call(*client_.compute, &v1::Compute::Stub::StepBegin, request, &response, &raw);
  EXPECT_EQ(failed.reason(), "SEQUENCE_BUSY");
  v1::StepBeginResponse detail;
  ASSERT_TRUE(detail.ParseFromString(DetailOf(raw, "kvstrata.v1.StepBeginResponse")));
  EXPECT_EQ((std::vector<int32_t>(detail.codes().begin(), detail.codes().end())),
            (std::vector<int32_t>{0, 9, 5, 9}));
  // Nothing has begun.
  ASSERT_TRUE(client_.End(step, true).ok());
  EXPECT_TRUE(client_.Run(good, {5}, &random_).ok());
}

TEST_F(RpcComputeTest, BatchesAreRaggedAndOfOneModel) {
  const uint64_t a = Open(), b = Open("window");
  v1::StepBeginRequest request;
  request.set_session(client_.session());
  for (const uint64_t s : {a, b}) {
    v1::StepMember* m = request.add_members();
    m->set_sequence(s);
    for (int i = 0; i < (s == a ? 3 : 1); ++i) m->add_tokens(i);
  }
  const auto begun = Compute(&v1::Compute::Stub::StepBegin, request);
  ASSERT_TRUE(begun.ok());
  for (int layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(client_.Append(begun.value().step(), layer, Keys(4), Keys(4)).ok());
  }
  ASSERT_TRUE(client_.End(begun.value().step()).ok());
  EXPECT_EQ(Tokens(a), 3u);
  EXPECT_EQ(Tokens(b), 1u);

  v1::RegisterModelRequest model = RpcClient::ModelOf(client_.session());
  model.set_digest("another");
  v1::RegisterModelResponse registered;
  ASSERT_TRUE(Call(*client_.control, &v1::Control::Stub::RegisterModel, model, &registered).ok());
  request.mutable_members(1)->set_sequence(
      client_.Open(registered.model(), "full", {}).value().sequence());
  EXPECT_EQ(Compute(&v1::Compute::Stub::StepBegin, request).status().reason(), "MODELS_MIXED");
  request.clear_members();
  EXPECT_EQ(Compute(&v1::Compute::Stub::StepBegin, request).status().reason(), "ARGUMENT_RANGE");
  request.add_members()->set_sequence(a);
  EXPECT_EQ(Compute(&v1::Compute::Stub::StepBegin, request).status().reason(), "ARGUMENT_RANGE");
}

TEST_F(RpcComputeTest, ForeignHandlesDoNotExist) {
  const uint64_t mine = Open();
  const uint64_t step = client_.Begin(mine, {1}).value();
  RpcClient other(daemon_.Connect());
  EXPECT_EQ(other.Begin(mine, {1}).status().reason(), "SEQUENCE_UNKNOWN");
  EXPECT_EQ(other.End(step).reason(), "STEP_UNKNOWN");
  EXPECT_EQ(other.Append(step, 0, Keys(1), Keys(1)).reason(), "STEP_UNKNOWN");
  v1::SettleResponse settled;
  EXPECT_EQ(
      Call(*other.compute, &v1::Compute::Stub::Settle, other.Of<v1::SettleRequest>(mine), &settled)
          .reason(),
      "SEQUENCE_UNKNOWN");
  EXPECT_TRUE(client_.Append(step, 0, Keys(1), Keys(1)).ok());
}

TEST_F(RpcComputeTest, StepsHaveALimitAndABusySequenceSaysSo) {
  std::vector<uint64_t> sequences, steps;
  for (int i = 0; i < 65; ++i) sequences.push_back(Open());
  for (int i = 0; i < 64; ++i) steps.push_back(client_.Begin(sequences[i], {1}).value());
  EXPECT_EQ(client_.Begin(sequences[64], {1}).status().reason(), "STEPS_OPEN");
  EXPECT_EQ(client_.Begin(sequences[0], {1}).status().reason(), "SEQUENCE_BUSY");
  EXPECT_EQ(Compute(&v1::Compute::Stub::Settle, client_.Of<v1::SettleRequest>(sequences[0]))
                .status()
                .reason(),
            "SEQUENCE_BUSY");
  EXPECT_EQ(
      Compute(&v1::Compute::Stub::PrefillDone, client_.Of<v1::PrefillDoneRequest>(sequences[0]))
          .status()
          .reason(),
      "SEQUENCE_BUSY");
  v1::OpenSequenceResponse fork;
  EXPECT_EQ(Call(*client_.control, &v1::Control::Stub::ForkSequence,
                 client_.Of<v1::ForkSequenceRequest>(sequences[0]), &fork)
                .reason(),
            "SEQUENCE_BUSY");
  for (const uint64_t s : steps) EXPECT_TRUE(client_.End(s, true).ok());
  EXPECT_TRUE(client_.Run(sequences[64], {1}, &random_).ok());
}

// Who was not answered when a step began does not know its number.
TEST_F(RpcComputeTest, ClosingAbortsTheStepThatASequenceIsInWhereItIsAskedTo) {
  const uint64_t lost = Open(), other = Open();
  v1::StepBeginRequest both;
  both.set_session(client_.session());
  for (const uint64_t s : {lost, other}) {
    v1::StepMember* m = both.add_members();
    m->set_sequence(s);
    m->add_tokens(1);
  }
  v1::StepBeginResponse begun;
  ASSERT_TRUE(Call(*client_.compute, &v1::Compute::Stub::StepBegin, both, &begun).ok());
  auto request = client_.Of<v1::CloseSequenceRequest>(lost);
  const auto close = [&] {
    v1::CloseSequenceResponse closed;
    return Call(*client_.control, &v1::Control::Stub::CloseSequence, request, &closed);
  };
  EXPECT_EQ(close().reason(), "SEQUENCE_BUSY");
  request.set_abort_step(true);
  EXPECT_TRUE(close().ok());
  EXPECT_EQ(client_.End(begun.step()).reason(), "STEP_UNKNOWN");
  EXPECT_EQ(close().reason(), "SEQUENCE_UNKNOWN");
  EXPECT_TRUE(client_.Run(other, {1}, &random_).ok());
}

TEST_F(RpcComputeTest, QuestSelectsAndShowsItsArrays) {
  const uint64_t sequence = Open("quest{min_tokens = 0, budget = 32, page = 16}");
  ASSERT_TRUE(client_.Run(sequence, Ids(200), &random_).ok());
  ASSERT_TRUE(
      Compute(&v1::Compute::Stub::PrefillDone, client_.Of<v1::PrefillDoneRequest>(sequence)).ok());
  EXPECT_EQ(Compute(&v1::Compute::Stub::PrefillDone, client_.Of<v1::PrefillDoneRequest>(sequence))
                .status()
                .code(),
            Code::kFailedPrecondition);
  ASSERT_TRUE(Compute(&v1::Compute::Stub::Settle, client_.Of<v1::SettleRequest>(sequence)).ok());

  const uint64_t step = client_.Begin(sequence, {300}).value();
  const v1::TensorRef q = Queries(1);
  ASSERT_TRUE(client_.Append(step, 0, Keys(1), Keys(1)).ok());
  v1::SelectRequest select;
  select.set_session(client_.session());
  select.set_step(step);
  *select.mutable_q() = q;
  const auto selected = Compute(&v1::Compute::Stub::Select, select);
  ASSERT_TRUE(selected.ok()) << selected.status().ToString();
  ASSERT_EQ(selected.value().members_size(), 1);
  ASSERT_EQ(selected.value().members(0).groups_size(), 2);  // per KV head
  for (const v1::SelectionGroup& g : selected.value().members(0).groups()) {
    EXPECT_EQ(g.units_size(), 2);
    EXPECT_EQ(g.tokens(g.tokens_size() - 1), 200);
    EXPECT_LT(g.tokens_size(), 60);
  }
  const auto attended = Compute(&v1::Compute::Stub::Attend, client_.AttendOf(step, 0, q));
  ASSERT_TRUE(attended.ok());
  v1::SelectResponse again = attended.value().selection();
  EXPECT_EQ(again.members(0).cost().rows(), 2u * 41);  // sixteen twice, and the current page's nine
  again.mutable_members(0)->clear_cost();
  v1::SelectResponse before = selected.value();
  EXPECT_EQ(before.members(0).cost().rows(), 0u) << "nothing was attended yet";
  before.mutable_members(0)->clear_cost();
  EXPECT_EQ(again.SerializeAsString(), before.SerializeAsString());
  ASSERT_TRUE(client_.End(step, true).ok());

  v1::InspectRequest inspect = client_.Of<v1::InspectRequest>(sequence);
  inspect.set_name("no such array");
  const Status unknown = Compute(&v1::Compute::Stub::Inspect, inspect).status();
  EXPECT_EQ(unknown.reason(), "INSPECT_UNKNOWN");
}

TEST_F(RpcComputeTest, InspectReturnsTypeShapeAndData) {
  const uint64_t sequence = Open("chess{min_tokens = 0, page = 16}");
  ASSERT_TRUE(client_.Run(sequence, Ids(64), &random_).ok());
  ASSERT_TRUE(Compute(&v1::Compute::Stub::Settle, client_.Of<v1::SettleRequest>(sequence)).ok());
  v1::InspectRequest inspect = client_.Of<v1::InspectRequest>(sequence);
  inspect.set_name("page_vectors_bf16");
  const auto array = Compute(&v1::Compute::Stub::Inspect, inspect);
  ASSERT_TRUE(array.ok()) << array.status().ToString();
  EXPECT_EQ(array.value().type(), v1::InspectResponse::TYPE_U16);
  int64_t elements = 1;
  for (const int64_t n : array.value().shape()) elements *= n;
  EXPECT_GT(elements, 0);
  EXPECT_EQ(array.value().data().size(), static_cast<size_t>(elements) * 2);
}

TEST_F(RpcComputeTest, ReportsMustFit) {
  const uint64_t sequence = Open("chess{min_tokens = 0, page = 16}");
  ASSERT_TRUE(client_.Run(sequence, Ids(32), &random_).ok());
  v1::ReportRequest report = client_.Of<v1::ReportRequest>(sequence);
  for (int i = 0; i < 32; ++i) report.add_entropy(1.5f);
  EXPECT_TRUE(Compute(&v1::Compute::Stub::Report, report).ok());
  report.add_surprisal(1.0f);
  EXPECT_EQ(Compute(&v1::Compute::Stub::Report, report).status().reason(), "SERIES_LENGTH");
  report.clear_surprisal();
  report.set_boundary(std::string(31, 0));
  EXPECT_EQ(Compute(&v1::Compute::Stub::Report, report).status().reason(), "SERIES_LENGTH");
  report.clear_boundary();
  report.set_first(90);
  EXPECT_EQ(Compute(&v1::Compute::Stub::Report, report).status().code(), Code::kInvalidArgument);
  for (const uint32_t first : {0xFFFFFFFFu, 0x7FFFFFFFu - 31}) {
    report.set_first(first);
    EXPECT_EQ(Compute(&v1::Compute::Stub::Report, report).status().reason(), "ARGUMENT_RANGE");
  }
  const auto s =
      Compute(&v1::Compute::Stub::GetSequence, client_.Of<v1::GetSequenceRequest>(sequence));
  ASSERT_TRUE(s.ok());
  EXPECT_FALSE(s.value().status().empty());
  EXPECT_TRUE(s.value().plan().starts_with("chess")) << s.value().plan();
}

TEST_F(RpcComputeTest, PageTableShowsWherePagesLie) {
  const uint64_t sequence = Open();
  ASSERT_TRUE(client_.Run(sequence, Ids(20), &random_).ok());
  const auto table = [&] {
    return Compute(&v1::Compute::Stub::GetPageTable, client_.Of<v1::GetPageTableRequest>(sequence))
        .value();
  };
  const v1::GetPageTableResponse before = table();
  ASSERT_EQ(before.pages_size(), 2);
  EXPECT_EQ(before.pages(0).tier(), 0u);
  EXPECT_NE(before.pages(0).arena(), 0u);
  EXPECT_EQ(before.pages(0).flags(), uint32_t{shm::kPageSealed}) << "full pages are sealed";
  EXPECT_EQ(before.pages(1).flags(), 0u);
  // A fork shares both pages; the next token needs a private tail.
  v1::OpenSequenceResponse fork;
  ASSERT_TRUE(Call(*client_.control, &v1::Control::Stub::ForkSequence,
                   client_.Of<v1::ForkSequenceRequest>(sequence), &fork)
                  .ok());
  EXPECT_NE(table().pages(1).flags() & shm::kPageShared, 0u);
  ASSERT_TRUE(client_.Run(sequence, {99}, &random_).ok());
  const v1::GetPageTableResponse after = table();
  EXPECT_EQ(after.pages(1).flags() & shm::kPageShared, 0u);
  EXPECT_EQ(after.pages(0).offset(), before.pages(0).offset());
  EXPECT_GT(after.version(), before.version());
}

// Here are no workers: what needs none is answered, the rest refused with its reason.
TEST_F(RpcComputeTest, WorkOnRequestIsCheckedFirst) {
  EXPECT_EQ(Compute(&v1::Compute::Stub::Build, v1::BuildRequest()).status().reason(),
            "SESSION_UNKNOWN");
  const uint64_t sequence = Open();
  ASSERT_TRUE(client_.Run(sequence, Ids(600), &random_).ok());
  auto build = client_.Of<v1::BuildRequest>(sequence);
  const auto built = Compute(&v1::Compute::Stub::Build, build);
  ASSERT_TRUE(built.ok()) << built.status().ToString();
  EXPECT_TRUE(built->done());
  EXPECT_EQ(built->built_blocks(), 0u);
  EXPECT_NE(built->plan().find("full"), std::string::npos);
  build.set_plan("quest");
  EXPECT_EQ(Compute(&v1::Compute::Stub::Build, build).status().reason(), "WORK_STOPPED");
  build.set_plan("sentencekv");
  EXPECT_EQ(Compute(&v1::Compute::Stub::Build, build).status().reason(), "BUILD_INPUT");
  EXPECT_EQ(Compute(&v1::Compute::Stub::Recompress, client_.Of<v1::RecompressRequest>(sequence))
                .status()
                .reason(),
            "RECOMPRESS_RAW");
  const auto stopped =
      Compute(&v1::Compute::Stub::StopWork, client_.Of<v1::StopWorkRequest>(sequence));
  ASSERT_TRUE(stopped.ok()) << stopped.status().ToString();
  EXPECT_FALSE(stopped->was_running());
}

// A decode that grows over many pages, beside another session that does the same: each keeps its
// own bytes (the attention over constant values is that constant).
TEST_F(RpcComputeTest, SessionsDoNotDisturbEachOther) {
  RpcClient other(daemon_.Connect());
  const uint64_t model = other.RegisterModel();
  std::string failed[2];
  const auto decode = [&](RpcClient* c, uint64_t m, float value, std::string* why) {
    const uint64_t sequence = c->Open(m, "full", {}).value().sequence();
    std::mt19937 random(static_cast<unsigned>(value));
    for (int t = 0; t < 100; ++t) {
      const uint64_t step = c->Begin(sequence, {t}).value();
      v1::TensorRef v = RandomTensor(1, 2, &random);
      std::vector<float> constant(2 * 64, value);
      v.set_inline_(constant.data(), constant.size() * sizeof(float));
      for (int layer = 0; layer < 2; ++layer) {
        if (!c->Append(step, layer, RandomTensor(1, 2, &random), v).ok()) *why = "append";
        v1::AttendResponse r;
        const v1::AttendRequest q = c->AttendOf(step, layer, RandomTensor(1, 4, &random));
        if (!Call(*c->compute, &v1::Compute::Stub::Attend, q, &r).ok()) *why = "attend";
        for (const float x : FloatsOf(r.out().inline_())) {
          if (std::abs(x - value) > 1e-5) *why = "a value of " + std::to_string(x);
        }
      }
      if (!c->End(step).ok()) *why = "end";
    }
  };
  std::thread second([&] { decode(&other, model, 7, &failed[1]); });
  decode(&client_, model_, 3, &failed[0]);
  second.join();
  EXPECT_EQ(failed[0], "");
  EXPECT_EQ(failed[1], "");
}

}  // namespace
}  // namespace kvstrata::test
