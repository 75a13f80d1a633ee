// SPDX-License-Identifier: Apache-2.0
// The remote transport of a daemon on a GPU, end to end: Compute's steps run on the daemon's own
// GPU and answer the bits of the linked transport.
#include <thread>

#include "tests/cuda/transport_engines.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::cuda {
namespace {

constexpr char kQuest[] = "quest{budget = 64, min_tokens = 0}";
constexpr char kTokens[] =
    "tokenselect{k = 64, n_init = 4, n_local = 64, theta = 0, chunk = 128, min_tokens = 0}";
// Nothing is packed while 24 tokens are decoded, here and below.
constexpr char kMosaic[] =
    "mosaickv{max_loss = 1, segment = 128, buffer = 64, share = 0.25, min_tokens = 0}";
constexpr char kPlanes[] = "strata{sample = 2, recent = 20, min_tokens = 0}";
constexpr char kHostPlanes[] =
    "strata{lower = \"host\", hot = 4, sample = 2, recent = 20, min_tokens = 0}";
constexpr int kSteps = 24;

class RemoteCuda : public ::testing::Test {
 protected:
  const testing::DaemonProcess daemon_{{"--set", "pool.device=cuda", "--set",
                                        "pool.device_bytes=256MiB", "--set",
                                        "pool.host_bytes=64MiB"}};
  testing::Operator admin_{daemon_.socket()};
};

class RemoteCudaPlan : public RemoteCuda, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(
    Plans, RemoteCudaPlan,
    ::testing::Values("full", kQuest, kTokens, kMosaic, kPlanes, kHostPlanes,
                      "window{n_sink = 4, n_recent = 64, min_tokens = 0}",
                      "bits{unit = 32, budget = 64, recent = 48, min_tokens = 0}",
                      "sentencekv{tau = 64, n_obs = 16, start = 4, recent = 16, min_tokens = 0}",
                      "sekv{max_loss = 1, r_max = 8, d_route = 16, local = 30, min_tokens = 0}",
                      "chess{page = 16, pages_per_chunk = 2, chunks_per_grid = 4, window = 2, "
                      "trigger = \"every\", every = 1, min_tokens = 0}"));

// Models of two digests share no prefix: each transport computes for itself.
TEST_P(RemoteCudaPlan, GivesTheBitsOfTheLinkedTransport) {
  LinkedEngine linked(daemon_.socket(), "linked", true);
  RemoteEngine remote(daemon_.socket(), "remote");
  EXPECT_EQ(remote.client().opened().backend(), "cuda");
  Decoding a(&linked, GetParam(), 0);
  Decoding b(&remote, GetParam(), 0);
  a.Decode(kSteps);
  b.Decode(kSteps);
  ASSERT_NO_FATAL_FAILURE(ExpectSameBits(a.answers(), b.answers()));
  EXPECT_EQ(admin_.Audit(), "");
}

// Pages in the host's memory are read there by the daemon's GPU, too.
TEST_P(RemoteCudaPlan, GivesThemWithPagesOnTheHost) {
  LinkedEngine linked(daemon_.socket(), "linked", true);
  RemoteEngine remote(daemon_.socket(), "remote");
  Decoding a(&linked, GetParam(), 0);
  Decoding b(&remote, GetParam(), 0);
  admin_.Demote(a.sequence());
  admin_.Demote(b.sequence());
  a.Decode(kSteps);
  b.Decode(kSteps);
  admin_.Prefetch(b.sequence());
  admin_.Prefetch(a.sequence());
  a.Decode(3);
  b.Decode(3);
  ASSERT_NO_FATAL_FAILURE(ExpectSameBits(a.answers(), b.answers()));
  EXPECT_EQ(admin_.Audit(), "");
}

// Two remote sessions and a linked one at the same time answer what each answers alone.
TEST_F(RemoteCuda, SessionsDoNotDisturbEachOther) {
  std::vector<LayerAnswer> alone[3], together[3];
  const auto run = [this](int who, const char* digest, std::vector<LayerAnswer>* answers) {
    constexpr const char* kPlans[] = {kQuest, kTokens, "full"};
    if (who == 0) {
      LinkedEngine engine(daemon_.socket(), digest, true);
      Decoding d(&engine, kPlans[who], 0);
      d.Decode(kSteps);
      *answers = d.answers();
    } else {
      RemoteEngine engine(daemon_.socket(), digest);
      Decoding d(&engine, kPlans[who], 0);
      d.Decode(kSteps);
      *answers = d.answers();
    }
  };
  const char* const first[] = {"a0", "a1", "a2"};
  const char* const second[] = {"b0", "b1", "b2"};
  for (int who = 0; who < 3; ++who) run(who, first[who], &alone[who]);
  std::vector<std::thread> threads;
  for (int who = 0; who < 3; ++who) {
    threads.emplace_back([&, who] { run(who, second[who], &together[who]); });
  }
  for (std::thread& t : threads) t.join();
  for (int who = 0; who < 3; ++who) {
    SCOPED_TRACE(who);
    ASSERT_NO_FATAL_FAILURE(ExpectSameBits(alone[who], together[who]));
  }
}

TEST_F(RemoteCuda, SelectNamesWhatAttendReads) {
  RemoteEngine remote(daemon_.socket(), "remote");
  Decoding d(&remote, kQuest, 0);
  const std::vector<int32_t> id = {7};
  const Result<uint64_t> step = remote.client().Begin(d.sequence(), id);
  ASSERT_TRUE(step.ok()) << step.status().ToString();
  const v1::TensorRef q = remote.Tensor('q', 0, d.tokens(), id);
  ASSERT_TRUE(remote.client()
                  .Append(*step, 0, remote.Tensor('k', 0, d.tokens(), id),
                          remote.Tensor('v', 0, d.tokens(), id))
                  .ok());
  const auto selected = remote.client().Select(*step, 0, q);
  const auto attended = remote.client().Attend(*step, 0, q, true);
  ASSERT_TRUE(selected.ok()) << selected.status().ToString();
  ASSERT_TRUE(attended.ok()) << attended.status().ToString();
  const v1::MemberSelection& a = selected->members(0);
  const v1::MemberSelection& b = attended->selection().members(0);
  ASSERT_EQ(a.groups_size(), TransportModel::kKvHeads);
  uint64_t rows = 0;
  for (int g = 0; g < a.groups_size(); ++g) {
    EXPECT_EQ(a.groups(g).SerializeAsString(), b.groups(g).SerializeAsString());
    EXPECT_LT(a.groups(g).tokens_size(), 200);
    rows += static_cast<uint64_t>(a.groups(g).tokens_size());
  }
  EXPECT_EQ(b.cost().rows(), rows);
  EXPECT_GT(b.cost().select_bytes(), 0u);
  EXPECT_EQ(remote.client().End(*step).reason(), "LAYER_NOT_APPENDED");
}

TEST_F(RemoteCuda, AnAbortedStepAndAForkLeaveNothing) {
  RemoteEngine remote(daemon_.socket(), "remote");
  Decoding d(&remote, kQuest, 0);
  d.Decode(3);
  const std::vector<int32_t> id = {9};
  LayerAnswer dropped;
  Result<uint64_t> step = remote.client().Begin(d.sequence(), id);
  ASSERT_TRUE(step.ok()) << step.status().ToString();
  remote.Layer(*step, 0, d.tokens(), id, &dropped);
  ASSERT_TRUE(remote.client().End(*step, true).ok());

  v1::ForkSequenceRequest request;
  request.set_sequence(d.sequence());
  v1::OpenSequenceResponse child;
  ASSERT_TRUE(
      remote.client().Call(&v1::Control::Stub::ForkSequence, std::move(request), &child).ok());
  std::vector<LayerAnswer> of_parent, of_child;
  for (uint32_t i = 0; i < 20; ++i) {
    remote.Step(child.sequence(), d.tokens() + i, {100 + static_cast<int32_t>(i)}, &of_child);
  }
  for (uint32_t i = 0; i < 20; ++i) {
    remote.Step(d.sequence(), d.tokens() + i, {100 + static_cast<int32_t>(i)}, &of_parent);
  }
  ASSERT_NO_FATAL_FAILURE(ExpectSameBits(of_parent, of_child));
  EXPECT_EQ(admin_.Audit(), "");
}

TEST_F(RemoteCuda, WhatAGpuDoesNotServeIsRefused) {
  RemoteEngine remote(daemon_.socket(), "remote");
  uint32_t held = 0;
  const std::vector<int32_t> none;
  EXPECT_EQ(remote.client()
                .Open(remote.model(), "mosaickv{strategy = \"search\"}", none, &held)
                .status()
                .reason(),
            "CUDA_PLAN");
  EXPECT_EQ(testing::RemoteClient(daemon_.socket(), "simd").failure().reason(), "BACKEND_UNKNOWN");
  EXPECT_TRUE(testing::RemoteClient(daemon_.socket(), "cuda").failure().ok());

  std::vector<uint64_t> sequences;
  for (int i = 0; i < 5; ++i) sequences.push_back(remote.Open("full", {i}, &held));
  const std::vector<int32_t> id = {1};
  std::vector<uint64_t> steps;
  for (int i = 0; i < 4; ++i) {
    const Result<uint64_t> step = remote.client().Begin(sequences[static_cast<size_t>(i)], id);
    ASSERT_TRUE(step.ok()) << step.status().ToString();
    steps.push_back(*step);
  }
  const Status fifth = remote.client().Begin(sequences[4], id).status();
  EXPECT_EQ(fifth.reason(), "STEPS_OPEN") << fifth.ToString();
  EXPECT_TRUE(remote.client().End(steps[0], true).ok());
  EXPECT_TRUE(remote.client().Begin(sequences[4], id).ok());
}

// The session ends with steps open: its pages come back.
TEST_F(RemoteCuda, ACancelledSessionLeavesNothing) {
  const uint64_t before = admin_.UsedBytes();
  {
    RemoteEngine remote(daemon_.socket(), "remote");
    Decoding d(&remote, kTokens, 0);
    d.Decode(2);
    LayerAnswer answer;
    const std::vector<int32_t> id = {9};
    const Result<uint64_t> step = remote.client().Begin(d.sequence(), id);
    ASSERT_TRUE(step.ok()) << step.status().ToString();
    remote.Layer(*step, 0, d.tokens(), id, &answer);
    EXPECT_GT(admin_.UsedBytes(), before);
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (admin_.UsedBytes() != before && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ(admin_.UsedBytes(), before);
  EXPECT_EQ(admin_.Audit(), "");
}

}  // namespace
}  // namespace kvstrata::cuda
