// The linked road on a GPU, end to end: a real daemon whose device pool is the GPU's,
// libkvstrata.so, tensors of the GPU and of the host, graphs of the caller's. Every answer is held
// to attention in double over the rows that the test wrote and the positions that kvs_selection
// names; where a codec keeps less of rows, to a daemon without a GPU.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/include/kvstrata/kvstrata.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/seed.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::cuda {
namespace {

constexpr int kLayers = 2, kHeads = 8, kKvHeads = 2, kDim = 64, kPage = 16;
constexpr int kGroup = kHeads / kKvHeads;
constexpr size_t kKeyRow = kKvHeads * kDim, kQueryRow = kHeads * kDim;
constexpr double kTolerance = 5e-3;  // issue 4: relative error in bf16

#define ASSERT_KVS(call) \
  ASSERT_EQ(call, KVS_OK) << kvs_error_reason() << ": " << kvs_error_message()
#define EXPECT_REFUSED(call, reason)                                 \
  do {                                                               \
    EXPECT_NE(call, KVS_OK);                                         \
    EXPECT_STREQ(kvs_error_reason(), reason) << kvs_error_message(); \
  } while (false)

// Rows of a token depend on its position, its id and the layer: a prefix means the same rows.
std::vector<float> RowsOf(char kind, int layer, int32_t position, int32_t id, size_t n) {
  Rng rng(TestSeed() + static_cast<uint64_t>(kind) * 7919 + static_cast<uint64_t>(layer) * 104729 +
          static_cast<uint64_t>(position) * 1000003 + static_cast<uint64_t>(id) * 10007);
  std::normal_distribution<float> normal;
  std::vector<float> row(n);
  for (float& x : row) x = RoundedTo(DType::kBF16, normal(rng));
  return row;
}

// A sequence, and what it should hold.
struct Sequence {
  kvs_sequence handle = 0;
  std::vector<int32_t> ids;  // committed
};

// Tensors of one step in all layers, on the GPU or on the host, at the same addresses each step.
class Tensors {
 public:
  Tensors(int tokens, bool on_gpu) : tokens_(tokens), on_gpu_(on_gpu) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (const char kind : {'k', 'v', 'q', 'o'}) {
        const size_t n = RowSize(kind) * static_cast<size_t>(tokens);
        host_[{kind, layer}] = std::vector<BF16>(n);
        if (on_gpu) device_[{kind, layer}] = DeviceArray<BF16>(n);
      }
    }
  }
  static size_t RowSize(char kind) { return kind == 'k' || kind == 'v' ? kKeyRow : kQueryRow; }

  // Tokens ids[i] at position first + i, of one member, at row `row`.
  void Fill(int row, int32_t first, std::span<const int32_t> ids) {
    for (auto& [key, values] : host_) {
      const auto [kind, layer] = key;
      if (kind == 'o') continue;
      const size_t n = RowSize(kind);
      for (size_t i = 0; i < ids.size(); ++i) {
        const auto r = RowsOf(kind, layer, first + static_cast<int32_t>(i), ids[i], n);
        for (size_t c = 0; c < n; ++c) values[(row + i) * n + c] = FromFloat<BF16>(r[c]);
      }
      if (on_gpu_) device_[key].Write(values);
    }
  }
  void Poison() {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (BF16& x : host_[{'o', layer}]) x = FromFloat<BF16>(std::nanf(""));
      if (on_gpu_) device_[{'o', layer}].Poison();
    }
  }
  kvs_tensor Tensor(char kind, int layer) {
    kvs_tensor t{};
    t.data = on_gpu_ ? static_cast<void*>(device_[{kind, layer}].get())
                     : static_cast<void*>(host_[{kind, layer}].data());
    t.dtype = KVS_BF16;
    t.heads = static_cast<int32_t>(RowSize(kind)) / kDim;
    t.head_dim = kDim;
    t.tokens = tokens_;
    return t;
  }
  std::vector<float> Output(int layer, int row) {
    if (on_gpu_) host_[{'o', layer}] = device_[{'o', layer}].Read();
    std::vector<float> out(kQueryRow);
    for (size_t c = 0; c < kQueryRow; ++c) {
      out[c] = ToFloat(host_[{'o', layer}][static_cast<size_t>(row) * kQueryRow + c]);
    }
    return out;
  }

 private:
  const int tokens_;
  const bool on_gpu_;
  std::map<std::pair<char, int>, std::vector<BF16>> host_;
  std::map<std::pair<char, int>, DeviceArray<BF16>> device_;
};

// Attention of the query of ids.back() over `positions`, per group of heads.
std::vector<float> Attention(int layer, const std::vector<int32_t>& ids,
                             const std::vector<std::vector<int32_t>>& positions) {
  const auto last = static_cast<int32_t>(ids.size()) - 1;
  const auto q = RowsOf('q', layer, last, ids.back(), kQueryRow);
  std::vector<float> out(kQueryRow);
  for (int head = 0; head < kHeads; ++head) {
    const auto& list = positions[positions.size() * static_cast<size_t>(head) / kHeads];
    std::vector<double> o(kDim);
    double sum = 0;
    for (const int32_t t : list) {
      const auto k = RowsOf('k', layer, t, ids[static_cast<size_t>(t)], kKeyRow);
      const auto v = RowsOf('v', layer, t, ids[static_cast<size_t>(t)], kKeyRow);
      const size_t at = static_cast<size_t>(head / kGroup) * kDim;
      double dot = 0;
      for (size_t c = 0; c < kDim; ++c) {
        dot += double{q[static_cast<size_t>(head) * kDim + c]} * k[at + c];
      }
      const double weight = std::exp(dot / std::sqrt(double{kDim}));
      sum += weight;
      for (size_t c = 0; c < kDim; ++c) o[c] += weight * v[at + c];
    }
    for (size_t c = 0; c < kDim; ++c) {
      out[static_cast<size_t>(head) * kDim + c] = static_cast<float>(o[c] / sum);
    }
  }
  return out;
}

std::vector<std::vector<int32_t>> Selected(kvs_step* step, uint32_t member) {
  uint32_t groups = 0;
  EXPECT_EQ(kvs_selection_groups(step, member, &groups), KVS_OK) << kvs_error_message();
  std::vector<std::vector<int32_t>> lists(groups);
  for (uint32_t g = 0; g < groups; ++g) {
    size_t n = 0;
    EXPECT_EQ(kvs_selection(step, member, g, KVS_TOKENS, nullptr, 0, &n), KVS_OK);
    lists[g].resize(n);
    EXPECT_EQ(kvs_selection(step, member, g, KVS_TOKENS, lists[g].data(), n, &n), KVS_OK);
  }
  return lists;
}

int RegisterModel(kvs_session* session, kvs_model* model) {
  kvs_model_desc desc{};
  desc.size = sizeof(desc);
  desc.name = "toy";
  desc.digest = "linked_cuda_test";
  desc.layers = kLayers;
  desc.query_heads = kHeads;
  desc.kv_heads = kKvHeads;
  desc.head_dim = kDim;
  desc.page_tokens = kPage;
  desc.dtype = KVS_BF16;
  desc.ranks = 1;
  return kvs_model_register(session, &desc, model);
}

std::vector<int32_t> Ids(size_t n, int32_t first = 0) {
  std::vector<int32_t> ids(n);
  for (size_t i = 0; i < n; ++i) ids[i] = first + static_cast<int32_t>(i);
  return ids;
}

class LinkedCuda : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(Attach(daemon_));
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  }
  void TearDown() override {
    kvs_detach(session_);
    cudaStreamDestroy(stream_);
  }
  void Attach(const testing::DaemonProcess& daemon) {
    ASSERT_KVS(kvs_attach(daemon.socket().c_str(), nullptr, &session_));
    ASSERT_KVS(RegisterModel(session_, &model_));
  }

  void Open(const char* plan, const std::vector<int32_t>& prompt, Sequence* s,
            uint32_t* held = nullptr) {
    uint32_t n = 0;
    ASSERT_KVS(
        kvs_sequence_open(session_, model_, plan, prompt.data(), prompt.size(), &s->handle, &n));
    s->ids.assign(prompt.begin(), prompt.begin() + n);
    if (held != nullptr) *held = n;
  }
  // The prompt's rest in chunks of 48, then prefill_done. The last rows are checked.
  void Prefill(Sequence* s, const std::vector<int32_t>& prompt, bool on_gpu) {
    ASSERT_NO_FATAL_FAILURE(RunPrompt(s, prompt, on_gpu));
    ASSERT_KVS(kvs_prefill_done(session_, s->handle));
  }
  // With surprisals, and until the spans are there.
  void PrefillSpans(Sequence* s, const std::vector<int32_t>& prompt, bool on_gpu) {
    ASSERT_NO_FATAL_FAILURE(RunPrompt(s, prompt, on_gpu));
    std::vector<float> nats(prompt.size());  // exponential: one in 20 is an anchor at alpha = 2
    for (size_t t = 0; t < nats.size(); ++t) {
      nats[t] = -std::log((static_cast<float>(t * 37 % 101) + 0.5f) / 101);
    }
    ASSERT_KVS(kvs_report(session_, s->handle, 0, static_cast<uint32_t>(nats.size()), nats.data(),
                          nullptr, nullptr));
    ASSERT_KVS(kvs_prefill_done(session_, s->handle));
    ASSERT_KVS(kvs_settle(session_, s->handle));
  }
  void RunPrompt(Sequence* s, const std::vector<int32_t>& prompt, bool on_gpu) {
    while (s->ids.size() < prompt.size()) {
      const size_t n = std::min<size_t>(48, prompt.size() - s->ids.size());
      Tensors tensors(static_cast<int>(n), on_gpu);
      const auto first = prompt.begin() + static_cast<std::ptrdiff_t>(s->ids.size());
      ASSERT_NO_FATAL_FAILURE(Step(
          {s}, {std::vector<int32_t>(first, first + static_cast<std::ptrdiff_t>(n))}, &tensors));
    }
  }
  // One step with the calls of every layer.
  void Step(const std::vector<Sequence*>& members, const std::vector<std::vector<int32_t>>& tokens,
            Tensors* tensors) {
    kvs_step* step = nullptr;
    ASSERT_NO_FATAL_FAILURE(Begin(members, tokens, tensors, &step));
    for (int layer = 0; layer < kLayers; ++layer) {
      ASSERT_NO_FATAL_FAILURE(Layer(step, layer, tensors));
      ASSERT_NO_FATAL_FAILURE(Verify(step, layer, members, tensors));
    }
    ASSERT_KVS(kvs_step_end(step, stream_));
  }
  void Begin(const std::vector<Sequence*>& members, const std::vector<std::vector<int32_t>>& tokens,
             Tensors* tensors, kvs_step** step) {
    std::vector<kvs_step_member> batch;
    int row = 0;
    tensors->Poison();
    first_new_.clear();
    for (size_t i = 0; i < members.size(); ++i) {
      batch.push_back(
          {members[i]->handle, tokens[i].data(), static_cast<uint32_t>(tokens[i].size())});
      tensors->Fill(row, static_cast<int32_t>(members[i]->ids.size()), tokens[i]);
      row += static_cast<int>(tokens[i].size());
      first_new_.push_back(members[i]->ids.size());
      members[i]->ids.insert(members[i]->ids.end(), tokens[i].begin(), tokens[i].end());
    }
    rows_.clear();
    for (const auto& t : tokens)
      rows_.push_back((rows_.empty() ? -1 : rows_.back()) + static_cast<int>(t.size()));
    ASSERT_KVS(kvs_step_begin(session_, batch.data(), batch.size(), stream_, step, nullptr));
  }
  void Layer(kvs_step* step, int layer, Tensors* tensors) {
    const kvs_tensor k = tensors->Tensor('k', layer), v = tensors->Tensor('v', layer);
    const kvs_tensor q = tensors->Tensor('q', layer), o = tensors->Tensor('o', layer);
    ASSERT_KVS(kvs_append(step, layer, &k, &v));
    ASSERT_KVS(kvs_select(step, layer, &q));
    ASSERT_KVS(kvs_attend(step, layer, &q, &o, nullptr));
  }
  // The output of each member's last new token.
  void Verify(kvs_step* step, int layer, const std::vector<Sequence*>& members, Tensors* tensors) {
    for (size_t i = 0; i < members.size(); ++i) {
      // What the first new token attends, or what a prompt's last chunk attends before itself; the
      // others see the new tokens before them, too.
      auto lists = Selected(step, static_cast<uint32_t>(i));
      ASSERT_FALSE(lists.empty());
      for (auto& list : lists) {
        for (auto t = list.back() + 1; t < static_cast<int32_t>(members[i]->ids.size()); ++t) {
          list.push_back(t);
        }
      }
      const auto want = Attention(layer, members[i]->ids, lists);
      const auto got = tensors->Output(layer, rows_[i]);
      ASSERT_LE(RelativeError(got, want), kTolerance)
          << "seed " << TestSeed() << ", layer " << layer << ", member " << i << " of "
          << members[i]->ids.size() << " tokens";
      attended_ = lists[0].size();
      lists_.push_back(std::move(lists[0]));
    }
  }
  // Every eleventh token ends a sentence.
  void Report(const Sequence& s) {
    std::vector<uint8_t> ends(s.ids.size());
    for (size_t t = 10; t < ends.size(); t += 11) ends[t] = 1;
    ASSERT_KVS(kvs_report(session_, s.handle, 0, ends.size(), nullptr, nullptr, ends.data()));
  }
  std::vector<int32_t> InspectInts(const Sequence& s, const char* name) {
    kvs_array array{};
    EXPECT_EQ(kvs_inspect(session_, s.handle, name, &array), KVS_OK) << kvs_error_message();
    const auto* const values = static_cast<const int32_t*>(array.data);
    std::vector<int32_t> copy(values, values + array.bytes / sizeof(int32_t));
    kvs_array_free(&array);
    return copy;
  }
  void Decode(Sequence* s, int steps, bool on_gpu) {
    Tensors tensors(1, on_gpu);
    for (int i = 0; i < steps; ++i) {
      ASSERT_NO_FATAL_FAILURE(Step({s}, {{1000 + i}}, &tensors));
    }
  }

  testing::DaemonProcess daemon_{{"--set", "pool.device=cuda", "--set", "pool.device_bytes=256MiB",
                                  "--set", "pool.host_bytes=16MiB"}};
  kvs_session* session_ = nullptr;
  kvs_model model_ = 0;
  cudaStream_t stream_ = nullptr;
  std::vector<int> rows_;          // of each member's last new token
  std::vector<size_t> first_new_;  // position of its first
  size_t attended_ = 0;
  std::vector<std::vector<int32_t>> lists_;  // of every verified member, its first group's
};

// Of two random queries one in two is alike.
constexpr char kTokens[] =
    "tokenselect{k = 64, n_init = 4, n_local = 64, theta = 0, chunk = 128, min_tokens = 0}";
// Boundaries are those of the prompt: generated sentences are as long as they may be.
constexpr char kSentences[] =
    "sentencekv{tau = 64, n_obs = 16, start = 4, recent = 16, max_length = 24, min_tokens = 0}";
constexpr char kQuest[] = "quest{budget = 64, min_tokens = 0}";
constexpr char kChess[] =
    "chess{page = 16, pages_per_chunk = 2, chunks_per_grid = 4, window = 2, rho = [0.6, 0.6, 0.5], "
    "trigger = \"every\", every = 1, min_tokens = 0}";

TEST_F(LinkedCuda, DecodesAsDenseAttentionDoes) {
  for (const bool on_gpu : {true, false}) {
    Sequence s;
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
  for (const char* plan : {kSentences, kQuest, kTokens, "strata{budget = 64, min_tokens = 0}",
                           "window{n_sink = 4, n_recent = 64, min_tokens = 0}", kChess}) {
    SCOPED_TRACE(plan);
    Sequence s;
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
  for (const char* plan : {kSentences, "full", kQuest, kTokens, kChess}) {
    SCOPED_TRACE(plan);
    Sequence s;
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

// All values of a row are kept, so that packed rows are those that were written, but for a
// rounding of their rotation. A worker of the daemon packs the prompt, then every 16 tokens.
constexpr char kMosaic[] =
    "mosaickv{keep = 64, truncate = false, segment = 128, buffer = 16, share = 0.25, "
    "min_tokens = 0}";

TEST_F(LinkedCuda, PackedRowsAreAttended) {
  Sequence s;
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
  Sequence second, child;
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

// Ranks as large as spans are long: rows are kept as they were written, and all are read.
constexpr char kAllSpans[] = "sekv{r_max = 64, rows = 0, local = 30, min_tokens = 0}";
constexpr char kSpans[] =
    "sekv{r_max = 8, d_route = 16, rows_share = 0.5, local = 30, min_tokens = 0}";

TEST_F(LinkedCuda, SpansAreAttended) {
  Sequence s;
  Open(kAllSpans, Ids(304), &s);
  ASSERT_NO_FATAL_FAILURE(PrefillSpans(&s, Ids(304), true));
  ASSERT_NO_FATAL_FAILURE(Decode(&s, 20, true));
  EXPECT_EQ(attended_, 324u);
  EXPECT_GT(InspectInts(s, "spans").size(), 20u);
  for (const int32_t rank : InspectInts(s, "k_rank")) ASSERT_EQ(rank, -1);
  kvs_array array{};
  EXPECT_REFUSED(kvs_inspect(session_, s.handle, "k_mean", &array), "CUDA_PLAN");
  // A fork goes on with the spans.
  Sequence child = s;
  ASSERT_KVS(kvs_sequence_fork(session_, s.handle, &child.handle));
  ASSERT_NO_FATAL_FAILURE(Decode(&child, 10, false));
}

// Decoded tokens over coarse rows and factors of 8 ranks.
struct SpanOutputs {
  std::vector<std::vector<std::vector<int32_t>>> selected;  // of each step and layer, by head
  std::vector<std::vector<float>> rows;                     // the same
  std::vector<int32_t> ranks;
};

class LinkedCudaSpans : public LinkedCuda {
 protected:
  void Run(SpanOutputs* out) {
    Sequence s;
    Open(kSpans, Ids(400), &s);
    ASSERT_NO_FATAL_FAILURE(PrefillSpans(&s, Ids(400), false));
    Tensors tensors(1, false);
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
      ++ties;  // of relevance: the head is left out
      std::fill_n(got.rows[i].begin() + static_cast<std::ptrdiff_t>(head * kDim), kDim, 0.0f);
      std::fill_n(want.rows[i].begin() + static_cast<std::ptrdiff_t>(head * kDim), kDim, 0.0f);
    }
    ASSERT_LE(RelativeError(got.rows[i], want.rows[i]), kTolerance)
        << "seed " << TestSeed() << ", step and layer " << i;
  }
  EXPECT_LE(ties * 50, heads);
}

class LinkedCudaGraph : public LinkedCuda, public ::testing::WithParamInterface<const char*> {};
INSTANTIATE_TEST_SUITE_P(Plans, LinkedCudaGraph,
                         ::testing::Values(kQuest, kChess, kMosaic, kSentences));

TEST_P(LinkedCudaGraph, OfTheCallersServesLaterSteps) {
  Sequence a, b;
  Open(GetParam(), Ids(300), &a);
  Open(GetParam(), Ids(150, 5000), &b);
  ASSERT_NO_FATAL_FAILURE(Prefill(&a, Ids(300), true));
  ASSERT_NO_FATAL_FAILURE(Prefill(&b, Ids(150, 5000), true));
  ASSERT_NO_FATAL_FAILURE(Report(a));
  ASSERT_NO_FATAL_FAILURE(Report(b));
  Tensors tensors(2, true);
  ASSERT_NO_FATAL_FAILURE(Step({&a, &b}, {{7}, {8}}, &tensors));  // buffers get their size
  kvs_step* step = nullptr;
  ASSERT_NO_FATAL_FAILURE(Begin({&a, &b}, {{9}, {10}}, &tensors, &step));
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t graph = nullptr;
  Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "BeginCapture");
  for (int layer = 0; layer < kLayers; ++layer) {
    ASSERT_NO_FATAL_FAILURE(Layer(step, layer, &tensors));
  }
  Check(cudaStreamEndCapture(stream_, &captured), "EndCapture");
  Check(cudaGraphInstantiate(&graph, captured, 0), "Instantiate");
  Check(cudaGraphLaunch(graph, stream_), "cudaGraphLaunch");
  ASSERT_NO_FATAL_FAILURE(Verify(step, kLayers - 1, {&a, &b}, &tensors));
  ASSERT_KVS(kvs_step_end(step, stream_));
  for (int i = 0; i < 40; ++i) {  // over the ends of pages and of index units
    ASSERT_NO_FATAL_FAILURE(Begin({&a, &b}, {{100 + i}, {200 + i}}, &tensors, &step));
    ASSERT_KVS(kvs_step_replay(step));
    Check(cudaGraphLaunch(graph, stream_), "cudaGraphLaunch");
    ASSERT_NO_FATAL_FAILURE(Verify(step, kLayers - 1, {&a, &b}, &tensors)) << "replay " << i;
    ASSERT_KVS(kvs_step_end(step, stream_));
  }
  ASSERT_NO_FATAL_FAILURE(Begin({&a}, {{1}}, &tensors, &step));
  EXPECT_REFUSED(kvs_step_replay(step), "GRAPH_STALE");
  kvs_step_abort(step);
  a.ids.pop_back();
  Tensors one(1, true);
  ASSERT_NO_FATAL_FAILURE(Step({&a}, {{2}}, &one));  // nothing of the aborted step is left
  cudaGraphExecDestroy(graph);
  cudaGraphDestroy(captured);
}

// Slices of demoted pages are promoted by a graph that is captured when its predecessor is stale;
// it goes on when the pages come back.
TEST_F(LinkedCuda, AGraphPromotesWhatItSelects) {
  testing::Operator admin(daemon_.socket());
  Sequence s;
  Open(kQuest, Ids(600), &s);
  ASSERT_NO_FATAL_FAILURE(Prefill(&s, Ids(600), true));
  Tensors tensors(1, true);
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t graph = nullptr;
  kvs_step* step = nullptr;
  const auto decode = [&](int steps, const char* refused) {
    for (int i = 0; i < steps; ++i) {
      ASSERT_NO_FATAL_FAILURE(Begin({&s}, {{100 + i}}, &tensors, &step));
      if (i > 0 || refused == nullptr) {
        ASSERT_KVS(kvs_step_replay(step));
      } else {
        EXPECT_REFUSED(kvs_step_replay(step), refused);
        cudaGraphExecDestroy(std::exchange(graph, nullptr));
        cudaGraphDestroy(std::exchange(captured, nullptr));
        Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "BeginCapture");
        for (int layer = 0; layer < kLayers; ++layer) {
          ASSERT_NO_FATAL_FAILURE(Layer(step, layer, &tensors));
        }
        Check(cudaStreamEndCapture(stream_, &captured), "EndCapture");
        Check(cudaGraphInstantiate(&graph, captured, 0), "Instantiate");
      }
      Check(cudaGraphLaunch(graph, stream_), "cudaGraphLaunch");
      ASSERT_NO_FATAL_FAILURE(Verify(step, kLayers - 1, {&s}, &tensors)) << "step " << i;
      ASSERT_KVS(kvs_step_end(step, stream_));
    }
  };
  ASSERT_NO_FATAL_FAILURE(decode(3, "GRAPH_STALE"));
  for (int turn = 0; turn < 3; ++turn) {
    EXPECT_GT(admin.Demote(s.handle).pages(), 0u);
    ASSERT_NO_FATAL_FAILURE(decode(30, turn == 0 ? "GRAPH_STALE" : nullptr));
    EXPECT_GT(admin.Prefetch(s.handle).pages(), 0u);
    ASSERT_NO_FATAL_FAILURE(decode(3, nullptr));
  }
  EXPECT_EQ(admin.Audit(), "");
  cudaGraphExecDestroy(graph);
  cudaGraphDestroy(captured);
}

// TokenSelect: a graph of the caller's, whose steps the GPU finds to be hits or misses; a fork goes
// on with the cache.
TEST_F(LinkedCuda, AGraphServesHitsAndMissesOfTheSelectionCache) {
  Sequence a, b;
  Open(kTokens, Ids(400), &a);
  ASSERT_NO_FATAL_FAILURE(Prefill(&a, Ids(400), true));
  ASSERT_NO_FATAL_FAILURE(Decode(&a, 3, true));
  b = a;
  ASSERT_KVS(kvs_sequence_fork(session_, a.handle, &b.handle));
  Tensors tensors(2, true);
  ASSERT_NO_FATAL_FAILURE(Step({&a, &b}, {{7}, {8}}, &tensors));
  kvs_step* step = nullptr;
  ASSERT_NO_FATAL_FAILURE(Begin({&a, &b}, {{9}, {10}}, &tensors, &step));
  cudaGraph_t captured = nullptr;
  cudaGraphExec_t graph = nullptr;
  Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "BeginCapture");
  for (int layer = 0; layer < kLayers; ++layer) {
    ASSERT_NO_FATAL_FAILURE(Layer(step, layer, &tensors));
  }
  Check(cudaStreamEndCapture(stream_, &captured), "EndCapture");
  Check(cudaGraphInstantiate(&graph, captured, 0), "Instantiate");
  Check(cudaGraphLaunch(graph, stream_), "cudaGraphLaunch");
  ASSERT_KVS(kvs_step_end(step, stream_));
  Check(cudaStreamSynchronize(stream_), "a step, whose tensors are written again");
  lists_.clear();
  for (int i = 0; i < 40; ++i) {
    ASSERT_NO_FATAL_FAILURE(Begin({&a, &b}, {{100 + i}, {200 + i}}, &tensors, &step));
    ASSERT_KVS(kvs_step_replay(step));
    Check(cudaGraphLaunch(graph, stream_), "cudaGraphLaunch");
    ASSERT_NO_FATAL_FAILURE(Verify(step, kLayers - 1, {&a, &b}, &tensors)) << "replay " << i;
    ASSERT_KVS(kvs_step_end(step, stream_));
  }
  // The picked tokens stay on a hit, and change on a miss.
  int hits = 0, misses = 0;
  for (size_t i = 2; i < lists_.size(); ++i) {
    const bool same = std::equal(lists_[i].begin(), lists_[i].begin() + 68, lists_[i - 2].begin());
    ++(same ? hits : misses);
  }
  EXPECT_GT(hits, 8);
  EXPECT_GT(misses, 8);
  cudaGraphExecDestroy(graph);
  cudaGraphDestroy(captured);
}

TEST_F(LinkedCuda, APrefixIsSharedAndAForkIsNot) {
  Sequence first;
  Open(kQuest, Ids(320), &first);
  ASSERT_NO_FATAL_FAILURE(Prefill(&first, Ids(320), true));
  ASSERT_NO_FATAL_FAILURE(Decode(&first, 3, true));
  Sequence child = first;
  ASSERT_KVS(kvs_sequence_fork(session_, first.handle, &child.handle));
  Tensors tensors(2, true);
  for (int i = 0; i < 20; ++i) {
    ASSERT_NO_FATAL_FAILURE(Step({&first, &child}, {{50 + i}, {90 + i}}, &tensors));
  }
  ASSERT_KVS(kvs_settle(session_, first.handle));
  Sequence second;
  uint32_t held = 0;
  Open(kQuest, Ids(320), &second, &held);
  EXPECT_GE(held, 288u);
  ASSERT_NO_FATAL_FAILURE(Prefill(&second, Ids(320), true));
  ASSERT_NO_FATAL_FAILURE(Decode(&second, 20, true));
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
  Sequence s;
  Open("full", Ids(20), &s);
  Tensors tensors(20, true);
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
  Tensors tensors(48, true);
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
  Sequence mine;
  Open(kQuest, Ids(100), &mine);
  ASSERT_NO_FATAL_FAILURE(Prefill(&mine, Ids(100), true));
  setenv("KVSTRATA_SOCKET", daemon_.socket().c_str(), 1);
  for (int round = 0; round < 5; ++round) {
    int ends[2];
    ASSERT_EQ(pipe(ends), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    const char* const argv[] = {"/proc/self/exe", "--gtest_filter=DISABLED_Client.*",
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
  Sequence big;
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
