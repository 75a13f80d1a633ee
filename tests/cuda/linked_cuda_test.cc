// SPDX-License-Identifier: Apache-2.0
// Decode steps, prefixes, forks, moved pages and killed clients of the linked transport on a GPU
// (linked_cuda_fixture.h); graphs of the caller's are in linked_graph_cuda_test.cc.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "tests/cuda/linked_cuda_fixture.h"
#include "tests/e2e/operator.h"

namespace kvstrata::cuda {
namespace {

constexpr char kBits[] = "bits{unit = 32, budget = 64, recent = 48, min_tokens = 0}";

TEST_F(LinkedCuda, DecodesAsDenseAttentionDoes) {
  for (const bool on_gpu : {true, false}) {
    LinkedSequence s;
    const auto prompt = Ids(200, on_gpu ? 0 : 500);
    Open("full", prompt, &s);
    ASSERT_NO_FATAL_FAILURE(Prefill(&s, prompt, on_gpu));
    ASSERT_NO_FATAL_FAILURE(Decode(&s, 40, on_gpu));
    EXPECT_EQ(attended_, 240u);
    ASSERT_KVS(kvs_sequence_close(session_, s.handle));
  }
}

TEST_F(LinkedCuda, PlansSelect) {
  // SentenceKV first: it asks for queries of the prompt that a held prefix has not.
  for (const char* plan : {kSentences, kQuest, kTokens,
                           "quest{page = 32, n_sink = 4, n_recent = 64, group = \"softmax\", "
                           "budget = 64, min_tokens = 0}",
                           "window{n_sink = 4, n_recent = 64, min_tokens = 0}", kChess, kBits}) {
    SCOPED_TRACE(plan);
    LinkedSequence s;
    Open(plan, Ids(600), &s);
    ASSERT_NO_FATAL_FAILURE(Prefill(&s, Ids(600), true));
    ASSERT_NO_FATAL_FAILURE(Report(s));
    ASSERT_NO_FATAL_FAILURE(Decode(&s, 40, true));
    EXPECT_LT(attended_, 640u);
    ASSERT_KVS(kvs_sequence_close(session_, s.handle));
  }
}

TEST_F(LinkedCuda, PagesOnTheHostAreAttendedInPlace) {
  testing::Operator admin(daemon_.socket());
  for (const char* plan : {kSentences, "full", kQuest, kTokens, kChess, kBits}) {
    SCOPED_TRACE(plan);
    LinkedSequence s;
    Open(plan, Ids(600), &s);
    ASSERT_NO_FATAL_FAILURE(Prefill(&s, Ids(600), true));
    ASSERT_NO_FATAL_FAILURE(Report(s));
    ASSERT_NO_FATAL_FAILURE(Decode(&s, 3, true));
    EXPECT_GE(admin.Demote(s.handle).pages(), 600u / kPage);
    ASSERT_NO_FATAL_FAILURE(Decode(&s, 20, true));
    EXPECT_GE(admin.Prefetch(s.handle).pages(), 600u / kPage);
    ASSERT_NO_FATAL_FAILURE(Decode(&s, 3, true));
    EXPECT_EQ(admin.Audit(), "");
    ASSERT_KVS(kvs_sequence_close(session_, s.handle));
  }
}

TEST_F(LinkedCuda, WhatIsTakenBackIsNotAttended) {
  testing::Operator admin(daemon_.socket());
  for (const char* plan : {kSentences, "full", kQuest, kTokens, kChess, kBits}) {
    for (const uint32_t left : {630u, 612u, 600u}) {
      SCOPED_TRACE(std::string(plan) + ", " + std::to_string(left));
      LinkedSequence s;
      Open(plan, Ids(600), &s);
      ASSERT_NO_FATAL_FAILURE(Prefill(&s, Ids(600), true));
      ASSERT_NO_FATAL_FAILURE(Report(s));
      ASSERT_NO_FATAL_FAILURE(Decode(&s, 40, true));
      ASSERT_KVS(kvs_sequence_truncate(session_, s.handle, left));
      s.ids.resize(left);
      LinkedTensors tensors(1, true);
      for (int i = 0; i < 20; ++i) {
        ASSERT_NO_FATAL_FAILURE(Step({&s}, {{5000 + i}}, &tensors));
      }
      EXPECT_EQ(admin.Audit(), "");
      ASSERT_KVS(kvs_sequence_close(session_, s.handle));
    }
  }
}

TEST_F(LinkedCuda, IdsComeLaterFromTheGpu) {
  testing::Operator admin(daemon_.socket());
  for (const char* plan : {"full", kQuest, kTokens}) {
    SCOPED_TRACE(plan);
    LinkedSequence s;
    Open(plan, Ids(600), &s);
    ASSERT_NO_FATAL_FAILURE(Prefill(&s, Ids(600), true));
    late_ = true;
    ASSERT_NO_FATAL_FAILURE(Decode(&s, 40, true));
    late_ = false;
    EXPECT_EQ(kvs_settle(session_, s.handle), KVS_FAILED_PRECONDITION);
    EXPECT_STREQ(kvs_error_reason(), "LATE_TOKENS");
    const DeviceArray<int32_t> ids(std::vector<int32_t>(s.ids.end() - 40, s.ids.end()));
    const kvs_step_member late{s.handle, ids.get(), 40};
    ASSERT_KVS(kvs_late_tokens(session_, &late, 1, 1));
    ASSERT_KVS(kvs_settle(session_, s.handle));
    ASSERT_NO_FATAL_FAILURE(Decode(&s, 5, true));
    LinkedSequence again;
    uint32_t held = 0;
    Open("full", s.ids, &again, &held);
    EXPECT_EQ(held, 640u);
    EXPECT_EQ(admin.Audit(), "");
    for (const auto& opened : {s, again}) ASSERT_KVS(kvs_sequence_close(session_, opened.handle));
  }
}

TEST_F(LinkedCuda, AReservationGoesOnInHostMemory) {
  testing::Operator admin(daemon_.socket());
  for (const char* plan : {"full", kQuest}) {
    SCOPED_TRACE(plan);
    kvs_capacity_result room{};
    room.size = sizeof(room);
    ASSERT_KVS(kvs_capacity(session_, model_, plan, &room));
    const auto reserve = [&](uint64_t tokens, const std::vector<int32_t>& prompt) {
      const kvs_open_options options{sizeof(options), 0, 0, static_cast<uint32_t>(tokens), 0,
                                     nullptr};
      kvs_opened opened{};
      opened.size = sizeof(opened);
      EXPECT_EQ(kvs_sequence_open_with(session_, model_, plan, prompt.data(), prompt.size(),
                                       &options, &opened),
                KVS_OK)
          << kvs_error_message();
      return LinkedSequence{opened.sequence, {}};
    };
    const auto prompt = Ids(600, plan == kQuest ? 50'000 : 0);
    std::vector<kvs_sequence> others = {
        reserve(room.device.after_eviction.tokens - 320, {}).handle};
    LinkedSequence s = reserve(640, prompt);
    kvs_sequence other = 0;
    while (kvs_sequence_open(session_, model_, "full", nullptr, 0, &other, nullptr) == KVS_OK) {
      others.push_back(other);
    }
    EXPECT_STREQ(kvs_error_reason(), "POOL_EXHAUSTED");
    ASSERT_NO_FATAL_FAILURE(Prefill(&s, prompt, true));
    ASSERT_NO_FATAL_FAILURE(Decode(&s, 40, true));
    std::vector<kvs_page> pages(40);
    size_t n = 0;
    ASSERT_KVS(kvs_page_table(session_, s.handle, pages.data(), pages.size(), &n, nullptr));
    EXPECT_EQ(n, pages.size());
    EXPECT_EQ(pages.front().tier, 0u);
    EXPECT_EQ(pages.back().tier, 1u);
    EXPECT_EQ(admin.Audit(), "");
    for (const kvs_sequence opened : others) ASSERT_KVS(kvs_sequence_close(session_, opened));
    ASSERT_KVS(kvs_sequence_close(session_, s.handle));
  }
}

TEST_F(LinkedCuda, PackedRowsAreAttended) {
  LinkedSequence s;
  Open(kMosaic, Ids(304), &s);
  ASSERT_NO_FATAL_FAILURE(Prefill(&s, Ids(304), true));
  ASSERT_KVS(kvs_settle(session_, s.handle));
  ASSERT_NO_FATAL_FAILURE(Decode(&s, 1, true));
  EXPECT_LT(attended_, 150u) << "nothing was packed";
  for (int i = 0; i < 6; ++i) {
    ASSERT_NO_FATAL_FAILURE(Decode(&s, 9, true));
    ASSERT_KVS(kvs_settle(session_, s.handle));
    EXPECT_LT(attended_, 150u);
  }
  // A second sequence finds the prompt and what is packed of it, and a fork goes on from there.
  LinkedSequence second, child;
  uint32_t held = 0;
  Open(kMosaic, Ids(304), &second, &held);
  EXPECT_GT(held, 0u);
  ASSERT_NO_FATAL_FAILURE(Prefill(&second, Ids(304), true));
  ASSERT_KVS(kvs_settle(session_, second.handle));
  ASSERT_NO_FATAL_FAILURE(Decode(&second, 20, true));
  ASSERT_KVS(kvs_sequence_fork(session_, second.handle, &child.handle));
  child.ids = second.ids;
  ASSERT_NO_FATAL_FAILURE(Decode(&child, 20, false));
  EXPECT_LT(attended_, 180u);
}

// All is read by all planes: off by the rounding of eight bits. Raw rows of what is packed are
// gone. Of the last plan by the rule, with copies of half of what lies on the host.
class LinkedCudaPlanes : public LinkedCuda, public ::testing::WithParamInterface<const char*> {};

INSTANTIATE_TEST_SUITE_P(
    , LinkedCudaPlanes,
    ::testing::Values("strata{recent = 4096, min_tokens = 0, keep_raw = \"no\"}",
                      "strata{lower = \"host\", recent = 4096, min_tokens = 0, keep_raw = \"no\"}",
                      "strata{lower = \"host\", hot = 32, fine_above = 0.001, skip_below = 0, "
                      "min_tokens = 0, keep_raw = \"no\"}"));

TEST_P(LinkedCudaPlanes, AreAttended) {
  const char* const kPlanes = GetParam();
  testing::Operator admin(daemon_.socket());
  tolerance_ = 2e-2;
  LinkedSequence s;
  Open(kPlanes, Ids(304), &s);
  ASSERT_NO_FATAL_FAILURE(Prefill(&s, Ids(304), true));
  for (int i = 0; i < 5; ++i) {
    ASSERT_KVS(kvs_settle(session_, s.handle));
    ASSERT_NO_FATAL_FAILURE(Decode(&s, 9, true));
    EXPECT_EQ(attended_, s.ids.size());
  }
  ASSERT_KVS(kvs_settle(session_, s.handle));
  // 349 tokens, of which 320 are packed. Tokens of the group that fills can be taken back.
  EXPECT_REFUSED(kvs_sequence_truncate(session_, s.handle, 319), "TRUNCATE_PACKED");
  ASSERT_KVS(kvs_sequence_truncate(session_, s.handle, 339));
  s.ids.resize(339);
  ASSERT_NO_FATAL_FAILURE(Decode(&s, 50, true));
  ASSERT_KVS(kvs_settle(session_, s.handle));
  ASSERT_NO_FATAL_FAILURE(Decode(&s, 5, false));
  // A second sequence finds the prompt and what is packed of it, and a fork goes on from there.
  LinkedSequence second, child;
  Open(kPlanes, Ids(304), &second);
  ASSERT_NO_FATAL_FAILURE(Prefill(&second, Ids(304), true));
  ASSERT_KVS(kvs_settle(session_, second.handle));
  ASSERT_NO_FATAL_FAILURE(Decode(&second, 20, true));
  ASSERT_KVS(kvs_sequence_fork(session_, second.handle, &child.handle));
  child.ids = second.ids;
  ASSERT_NO_FATAL_FAILURE(Decode(&child, 30, false));
  ASSERT_NO_FATAL_FAILURE(Decode(&second, 30, true));
  EXPECT_EQ(admin.Audit(), "");
}

// Ranks as large as spans are long: rows are kept as they were written, and all are read.
constexpr char kAllSpans[] = "sekv{r_max = 64, rows = 0, local = 30, min_tokens = 0}";
constexpr char kSpans[] =
    "sekv{max_loss = 1, r_max = 8, d_route = 16, rows_share = 0.5, local = 30, min_tokens = 0}";

TEST_F(LinkedCuda, SpansAreAttended) {
  LinkedSequence s;
  Open(kAllSpans, Ids(304), &s);
  ASSERT_NO_FATAL_FAILURE(PrefillSpans(&s, Ids(304), true));
  ASSERT_NO_FATAL_FAILURE(Decode(&s, 20, true));
  EXPECT_EQ(attended_, 324u);
  EXPECT_GT(InspectInts(s, "spans").size(), 20u);
  for (const int32_t rank : InspectInts(s, "k_rank")) ASSERT_EQ(rank, -1);
  kvs_array array{};
  EXPECT_REFUSED(kvs_inspect(session_, s.handle, "k_mean", &array), "CUDA_PLAN");
  // A fork goes on with the spans.
  LinkedSequence child = s;
  ASSERT_KVS(kvs_sequence_fork(session_, s.handle, &child.handle));
  ASSERT_NO_FATAL_FAILURE(Decode(&child, 10, false));
}

// Decoded tokens over coarse rows and factors of 8 ranks.
struct SpanOutputs {
  std::vector<std::vector<std::vector<int32_t>>> selected;  // by step and layer, then by head
  std::vector<std::vector<float>> rows;                     // the same
  std::vector<int32_t> ranks;
};

class LinkedCudaSpans : public LinkedCuda {
 protected:
  void Run(SpanOutputs* out) {
    LinkedSequence s;
    Open(kSpans, Ids(400), &s);
    ASSERT_NO_FATAL_FAILURE(PrefillSpans(&s, Ids(400), false));
    LinkedTensors tensors(1, false);
    for (int i = 0; i < 20; ++i) {
      kvs_step* step = nullptr;
      ASSERT_NO_FATAL_FAILURE(Begin({&s}, {{1000 + i}}, &tensors, &step));
      for (int layer = 0; layer < kLayers; ++layer) {
        ASSERT_NO_FATAL_FAILURE(Layer(step, layer, &tensors));
        out->selected.push_back(Selected(step, 0));
        out->rows.push_back(tensors.Output(layer, 0));
      }
      ASSERT_KVS(kvs_step_end(step, stream_));
    }
    out->ranks = InspectInts(s, "k_rank");
  }
};

TEST_F(LinkedCudaSpans, AsOnCpus) {
  SpanOutputs got, want;
  ASSERT_NO_FATAL_FAILURE(Run(&got));
  kvs_detach(session_);
  testing::DaemonProcess cpus;
  ASSERT_NO_FATAL_FAILURE(Attach(cpus));
  const cudaStream_t stream = std::exchange(stream_, nullptr);  // CPUs take none
  ASSERT_NO_FATAL_FAILURE(Run(&want));
  kvs_detach(std::exchange(session_, nullptr));
  stream_ = stream;

  EXPECT_EQ(got.ranks, want.ranks);
  EXPECT_NE(std::ranges::count(got.ranks, 8), 0) << "nothing was factored";
  ASSERT_EQ(got.rows.size(), want.rows.size());
  int heads = 0, ties = 0;
  for (size_t i = 0; i < want.rows.size(); ++i) {
    ASSERT_EQ(want.selected[i].size(), size_t{kHeads});
    ASSERT_EQ(got.selected[i].size(), size_t{kHeads});
    for (size_t head = 0; head < kHeads; ++head) {
      ++heads;
      EXPECT_LT(want.selected[i][head].size(), 350u) << "nothing was coarse";
      if (got.selected[i][head] == want.selected[i][head]) continue;
      ++ties;  // a tie in relevance: the head is left out
      std::fill_n(got.rows[i].begin() + static_cast<std::ptrdiff_t>(head * kDim), kDim, 0.0f);
      std::fill_n(want.rows[i].begin() + static_cast<std::ptrdiff_t>(head * kDim), kDim, 0.0f);
    }
    ASSERT_LE(RelativeError(got.rows[i], want.rows[i]), kTolerance)
        << "seed " << TestSeed() << ", step and layer " << i;
  }
  EXPECT_LE(ties * 50, heads);
}

TEST_F(LinkedCuda, APrefixIsSharedAndAForkIsNot) {
  LinkedSequence first;
  Open(kQuest, Ids(320), &first);
  ASSERT_NO_FATAL_FAILURE(Prefill(&first, Ids(320), true));
  ASSERT_NO_FATAL_FAILURE(Decode(&first, 3, true));
  LinkedSequence child = first;
  ASSERT_KVS(kvs_sequence_fork(session_, first.handle, &child.handle));
  LinkedTensors tensors(2, true);
  for (int i = 0; i < 20; ++i) {
    ASSERT_NO_FATAL_FAILURE(Step({&first, &child}, {{50 + i}, {90 + i}}, &tensors));
  }
  ASSERT_KVS(kvs_settle(session_, first.handle));
  LinkedSequence second;
  uint32_t held = 0;
  Open(kQuest, Ids(320), &second, &held);
  EXPECT_GE(held, 288u);
  ASSERT_NO_FATAL_FAILURE(Prefill(&second, Ids(320), true));
  ASSERT_NO_FATAL_FAILURE(Decode(&second, 20, true));
}

// A fork in an open step takes what was committed: it decodes on a stream of its own while the
// parent's layers are not all enqueued, and the parent keeps the row that it writes meanwhile.
TEST_F(LinkedCuda, AForkInAnOpenStepTakesWhatWasCommitted) {
  for (const char* plan : {"full", kQuest, kChess, kTokens, kSentences, kMosaic, kBits}) {
    for (const int length : {300, 304}) {  // the open step begins no page, or one
      SCOPED_TRACE(std::string(plan) + " after " + std::to_string(length));
      LinkedSequence s, child;
      const auto prompt = Ids(static_cast<size_t>(length), length);
      Open(plan, prompt, &s);
      ASSERT_NO_FATAL_FAILURE(Prefill(&s, prompt, true));
      ASSERT_NO_FATAL_FAILURE(Report(s));
      LinkedTensors tensors(1, true);
      kvs_step* step = nullptr;
      ASSERT_NO_FATAL_FAILURE(Begin({&s}, {{70}}, &tensors, &step));
      ASSERT_NO_FATAL_FAILURE(Layer(step, 0, &tensors));
      ASSERT_KVS(kvs_sequence_fork(session_, s.handle, &child.handle));
      child.ids = s.ids;
      child.ids.pop_back();
      cudaStream_t other = nullptr;
      Check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
      std::swap(stream_, other);
      ASSERT_NO_FATAL_FAILURE(Decode(&child, 3, true));
      std::swap(stream_, other);
      ASSERT_NO_FATAL_FAILURE(Layer(step, 1, &tensors));
      ASSERT_NO_FATAL_FAILURE(Verify(step, 1, {&s}, &tensors));
      ASSERT_KVS(kvs_step_end(step, stream_));
      LinkedTensors both(2, true);
      for (int i = 0; i < 20; ++i) {
        ASSERT_NO_FATAL_FAILURE(Step({&s, &child}, {{400 + i}, {500 + i}}, &both)) << "step " << i;
      }
      // A step that is given up leaves nothing, in a fork either.
      ASSERT_NO_FATAL_FAILURE(Begin({&s}, {{71}}, &tensors, &step));
      ASSERT_NO_FATAL_FAILURE(Layer(step, 0, &tensors));
      s.ids.pop_back();
      LinkedSequence second = s;
      ASSERT_KVS(kvs_sequence_fork(session_, s.handle, &second.handle));
      kvs_step_abort(step);
      for (int i = 0; i < 5; ++i) {
        ASSERT_NO_FATAL_FAILURE(Step({&second, &s}, {{600 + i}, {700 + i}}, &both));
      }
      for (const LinkedSequence* each : {&s, &child, &second}) {
        ASSERT_KVS(kvs_sequence_close(session_, each->handle));
      }
      Check(cudaStreamSynchronize(other), "the child's stream");
      Check(cudaStreamDestroy(other), "cudaStreamDestroy");
    }
  }
}

// Short sequences of a small model are attended in full.
TEST_F(LinkedCuda, AutomaticMinTokens) {
  LinkedSequence s;
  Open("quest{budget = 64, min_tokens = \"auto\"}", Ids(300), &s);
  ASSERT_NO_FATAL_FAILURE(Prefill(&s, Ids(300), true));
  ASSERT_NO_FATAL_FAILURE(Decode(&s, 5, true));
  EXPECT_EQ(attended_, 305u);
}

TEST_F(LinkedCuda, WhatAGpuDoesNotServeIsRefused) {
  kvs_sequence sequence = 0;
  uint32_t held = 0;
  EXPECT_REFUSED(kvs_sequence_open(session_, model_, "mosaickv{strategy = \"search\"}", nullptr, 0,
                                   &sequence, &held),
                 "CUDA_PLAN");
  kvs_attach_options options{};
  options.size = sizeof(options);
  options.backend = "simd";
  kvs_session* other = nullptr;
  EXPECT_REFUSED(kvs_attach(daemon_.socket().c_str(), &options, &other), "BACKEND_UNKNOWN");
  // Queries of a prompt that are kept lie where those of the open step are written.
  LinkedSequence s;
  Open(kSentences, Ids(20), &s);
  LinkedTensors tensors(20, true);
  kvs_step* step = nullptr;
  ASSERT_NO_FATAL_FAILURE(Begin({&s}, {Ids(20)}, &tensors, &step));
  kvs_sequence child = 0;
  EXPECT_REFUSED(kvs_sequence_fork(session_, s.handle, &child), "SEQUENCE_BUSY");
  kvs_step_abort(step);
}

// Disabled: runs in a process of its own, which the next test kills.
TEST(DISABLED_Client, HoldsMemory) {
  kvs_session* session = nullptr;
  kvs_model model = 0;
  ASSERT_KVS(kvs_attach(std::getenv("KVSTRATA_SOCKET"), nullptr, &session));
  ASSERT_KVS(RegisterModel(session, &model));
  kvs_sequence sequence = 0;
  uint32_t held = 0;
  const auto prompt = Ids(120000);  // 118 of 256 MiB
  ASSERT_KVS(
      kvs_sequence_open(session, model, "full", prompt.data(), prompt.size(), &sequence, &held));
  LinkedTensors tensors(48, true);
  tensors.Fill(0, 0, Ids(48));
  const kvs_step_member member{sequence, prompt.data(), 48};
  kvs_step* step = nullptr;
  ASSERT_KVS(kvs_step_begin(session, &member, 1, nullptr, &step, nullptr));
  const kvs_tensor k = tensors.Tensor('k', 0), v = tensors.Tensor('v', 0);
  ASSERT_KVS(kvs_append(step, 0, &k, &v));
  ASSERT_EQ(write(STDOUT_FILENO, "!", 1), 1);
  pause();
}

TEST_F(LinkedCuda, AKilledClientLeavesNothingBehind) {
  LinkedSequence mine;
  Open(kQuest, Ids(100), &mine);
  ASSERT_NO_FATAL_FAILURE(Prefill(&mine, Ids(100), true));
  setenv("KVSTRATA_SOCKET", daemon_.socket().c_str(), 1);
  for (int round = 0; round < 5; ++round) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    const char* const argv[] = {"/proc/self/exe", "--gtest_filter=DISABLED_Client.HoldsMemory",
                                "--gtest_also_run_disabled_tests", nullptr};
    pid_t child = 0;
    ASSERT_EQ(
        posix_spawn(&child, argv[0], &actions, nullptr, const_cast<char* const*>(argv), environ),
        0);
    close(ends[1]);
    char byte = 0;
    while (byte != '!' && read(ends[0], &byte, 1) == 1) {
    }
    EXPECT_EQ(byte, '!') << "the child did not get there";
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    close(ends[0]);
    posix_spawn_file_actions_destroy(&actions);
  }
  // Five times 118 of 256 MiB were taken: the sixth fits only if they came back.
  const auto prompt = Ids(120000, 7);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  LinkedSequence big;
  uint32_t held = 0;
  while (kvs_sequence_open(session_, model_, "full", prompt.data(), prompt.size(), &big.handle,
                           &held) != KVS_OK) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline) << kvs_error_message();
    std::this_thread::yield();
  }
  ASSERT_NO_FATAL_FAILURE(Decode(&mine, 20, true));  // nobody else was disturbed
}

}  // namespace
}  // namespace kvstrata::cuda
