// SPDX-License-Identifier: Apache-2.0
// Recall audits of sequences whose steps run on a GPU, on both transports: near what a daemon
// without a GPU measures on the same data, exact where nothing is lost, and no bit of the answers
// changes.
#include "tests/cuda/transport_engines.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::cuda {
namespace {

constexpr int kAudited = 6;

const testing::DaemonProcess& GpuDaemon() {
  static const testing::DaemonProcess daemon({"--set", "pool.device=cuda", "--set",
                                              "pool.device_bytes=256MiB", "--set",
                                              "pool.host_bytes=64MiB"});
  return daemon;
}

// Decodes under an audit of the next steps; its report.
template <typename Engine>
v1::AuditRecallResponse Audited(const std::string& socket, Engine* engine,
                                Decoding<Engine>* decoding) {
  testing::Operator admin(socket);
  const auto call = admin.Recall(decoding->sequence(), 1, kAudited);
  EXPECT_TRUE(call->Next());
  decoding->Decode(kAudited);
  engine->Settle(decoding->sequence());  // the last sample is told
  const Status ended = call->Await();
  EXPECT_TRUE(ended.ok()) << ended.ToString();
  EXPECT_EQ(call->last().steps(), static_cast<uint32_t>(kAudited));
  EXPECT_EQ(call->last().dropped_steps(), 0u);
  EXPECT_EQ(admin.Audit(), "");
  return call->last();
}

// A model of its own for each test: no prefix in common.
std::string Digest(const char* what) {
  static int models = 0;
  return what + std::to_string(models++);
}

// All is attended, most of it by few bits.
constexpr char kPlanes[] = "strata{recent = 20, min_tokens = 0, keep_raw = \"host\"}";

class RecallCuda : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(
    Plans, RecallCuda,
    ::testing::Values(
        "full", "quest{budget = 64, min_tokens = 0}",
        "tokenselect{k = 64, n_init = 4, n_local = 64, theta = 0.9, chunk = 128, "
        "min_tokens = 0}",
        "window{n_sink = 4, n_recent = 64, min_tokens = 0}",
        "sentencekv{tau = 64, n_obs = 16, start = 4, recent = 16, min_tokens = 0}",
        "mosaickv{max_loss = 1, segment = 128, buffer = 64, share = 0.25, min_tokens = 0, "
        "keep_raw = \"host\"}",
        "sekv{max_loss = 1, r_max = 8, d_route = 16, local = 30, min_tokens = 0, "
        "keep_raw = \"host\"}",
        kPlanes));

TEST_P(RecallCuda, IsNearWhatCpusMeasure) {
  LinkedEngine gpu(GpuDaemon().socket(), Digest("near"), true, true);
  Decoding on_gpu(&gpu, GetParam(), 0);
  const v1::AuditRecallResponse got = Audited(GpuDaemon().socket(), &gpu, &on_gpu);

  const testing::DaemonProcess cpus;
  LinkedEngine cpu(cpus.socket(), "cpu", false);
  Decoding on_cpu(&cpu, GetParam(), 0);
  const v1::AuditRecallResponse want = Audited(cpus.socket(), &cpu, &on_cpu);

  EXPECT_EQ(got.transport(), "linked");
  EXPECT_EQ(got.first_position(), want.first_position());
  ASSERT_EQ(got.layers_size(), want.layers_size());
  ASSERT_EQ(got.all().recall().samples(), want.all().recall().samples());
  std::printf("%-12.12s recall %.4f of CPUs' %.4f, error %.4f of %.4f\n", GetParam(),
              got.all().recall().mean(), want.all().recall().mean(), got.all().error().mean(),
              want.all().error().mean());
  for (int layer = 0; layer < got.layers_size(); ++layer) {
    const v1::RecallRow &g = got.layers(layer), &w = want.layers(layer);
    EXPECT_EQ(g.layer(), w.layer());
    EXPECT_NEAR(g.recall().mean(), w.recall().mean(), 0.02) << "seed " << TestSeed();
    EXPECT_NEAR(g.error().mean(), w.error().mean(), 0.02 + 0.05 * w.error().mean())
        << "seed " << TestSeed();
  }
  if (GetParam() == std::string("full")) {
    EXPECT_EQ(got.all().recall().min(), 1.0);
    EXPECT_EQ(got.all().error().max(), 0.0);
  } else {
    if (GetParam() != std::string(kPlanes)) {
      EXPECT_LT(got.all().recall().mean(), 0.999) << "nothing was left out";
    }
    EXPECT_GT(got.all().error().mean(), 1e-3);
  }
}

TEST_P(RecallCuda, IsTheSameOnBothTransports) {
  const std::string& socket = GpuDaemon().socket();
  LinkedEngine linked(socket, Digest("linked"), true);
  RemoteEngine remote(socket, Digest("remote"));
  Decoding a(&linked, GetParam(), 0);
  Decoding b(&remote, GetParam(), 0);
  const v1::AuditRecallResponse of_linked = Audited(socket, &linked, &a);
  v1::AuditRecallResponse of_remote = Audited(socket, &remote, &b);
  EXPECT_EQ(of_remote.transport(), "remote");
  EXPECT_EQ(of_linked.all().SerializeAsString(), of_remote.all().SerializeAsString());
}

TEST_P(RecallCuda, ChangesNoBitOfTheAnswers) {
  const std::string& socket = GpuDaemon().socket();
  LinkedEngine engine(socket, Digest("with"), true);
  LinkedEngine other(socket, Digest("without"), true);
  Decoding with(&engine, GetParam(), 0);
  Decoding without(&other, GetParam(), 0);
  (void)Audited(socket, &engine, &with);
  without.Decode(kAudited);
  with.Decode(8);
  without.Decode(8);
  ASSERT_NO_FATAL_FAILURE(ExpectSameBits(with.answers(), without.answers()));
}

// Nothing can be added to a graph of the engine's: the audit says so, and the steps go on.
TEST(RecallCudaGraph, OfTheEnginesIsNotMeasured) {
  LinkedEngine engine(GpuDaemon().socket(), Digest("graph"), true, true);
  Decoding d(&engine, "quest{budget = 64, min_tokens = 0}", 0);
  d.Decode(3);
  const auto fill = [&] {
    for (int layer = 0; layer < TransportModel::kLayers; ++layer) {
      engine.FillLayer(layer, d.tokens(), {7});
    }
  };
  fill();
  kvs_step* step = engine.Begin(d.sequence(), {7});
  ASSERT_NE(step, nullptr) << kvs_error_message();
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t graph = nullptr;
  Check(cudaStreamBeginCapture(engine.stream(), cudaStreamCaptureModeThreadLocal), "BeginCapture");
  for (int layer = 0; layer < TransportModel::kLayers; ++layer) {
    engine.CallLayer(step, layer, 1, nullptr);
  }
  Check(cudaStreamEndCapture(engine.stream(), &captured), "EndCapture");
  Check(cudaGraphInstantiate(&graph, captured, 0), "Instantiate");
  Check(cudaGraphLaunch(graph, engine.stream()), "cudaGraphLaunch");
  ASSERT_EQ(kvs_step_end(step, engine.stream()), KVS_OK) << kvs_error_message();
  Check(cudaStreamSynchronize(engine.stream()), "a step");
  d.Skip(1);

  testing::Operator admin(GpuDaemon().socket());
  const auto call = admin.Recall(d.sequence(), 1, kAudited);
  ASSERT_TRUE(call->Next());
  for (int i = 0; i < 3; ++i) {
    fill();
    step = engine.Begin(d.sequence(), {7});
    ASSERT_NE(step, nullptr) << kvs_error_message();
    ASSERT_EQ(kvs_step_replay(step), KVS_OK) << kvs_error_message();
    Check(cudaGraphLaunch(graph, engine.stream()), "cudaGraphLaunch");
    ASSERT_EQ(kvs_step_end(step, engine.stream()), KVS_OK) << kvs_error_message();
    Check(cudaStreamSynchronize(engine.stream()), "a step");
    d.Skip(1);
  }
  const Status ended = call->Await();
  EXPECT_EQ(ended.code(), Code::kFailedPrecondition);
  EXPECT_EQ(ended.reason(), "RECALL_CAPTURED") << ended.ToString();
  EXPECT_NE(ended.message().find("position 604"), std::string::npos) << ended.message();
  // Without its graph the same sequence is measured.
  (void)Audited(GpuDaemon().socket(), &engine, &d);
  cudaGraphExecDestroy(graph);
  cudaGraphDestroy(captured);
}

}  // namespace
}  // namespace kvstrata::cuda
