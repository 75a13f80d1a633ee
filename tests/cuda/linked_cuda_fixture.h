// SPDX-License-Identifier: Apache-2.0
// The linked transport on a GPU, end to end: a real daemon whose device pool is the GPU's,
// libkvstrata.so, tensors of the GPU and of the host, graphs of the caller's. Every answer is held
// to attention in double over the rows that the test wrote and the positions that kvs_selection
// names; where a codec keeps less of rows, to a daemon without a GPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/include/kvstrata/kvstrata.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"
#include "tests/cuda/relative_error.h"
#include "tests/cuda/seed.h"
#include "tests/fakes/daemon_process.h"
#include "tests/fakes/model_desc.h"

namespace kvstrata::cuda {

inline constexpr int kLayers = 2, kHeads = 8, kKvHeads = 2, kDim = 64, kPage = 16;
inline constexpr int kGroup = kHeads / kKvHeads;
inline constexpr size_t kKeyRow = kKvHeads * kDim, kQueryRow = kHeads * kDim;
inline constexpr double kTolerance = 5e-3;  // relative error in bf16

#define ASSERT_KVS(call) \
  ASSERT_EQ(call, KVS_OK) << kvs_error_reason() << ": " << kvs_error_message()
#define EXPECT_REFUSED(call, reason)                                 \
  do {                                                               \
    EXPECT_NE(call, KVS_OK);                                         \
    EXPECT_STREQ(kvs_error_reason(), reason) << kvs_error_message(); \
  } while (false)

// Rows of a token depend on its position, its id and the layer: a prefix means the same rows.
inline std::vector<float> RowsOf(char kind, int layer, int32_t position, int32_t id, size_t n) {
  Rng rng(TestSeed() + static_cast<uint64_t>(kind) * 7919 + static_cast<uint64_t>(layer) * 104729 +
          static_cast<uint64_t>(position) * 1000003 + static_cast<uint64_t>(id) * 10007);
  std::normal_distribution<float> normal;
  std::vector<float> row(n);
  for (float& x : row) x = RoundedTo(DType::kBF16, normal(rng));
  return row;
}

// A sequence, and what it should hold.
struct LinkedSequence {
  kvs_sequence handle = 0;
  std::vector<int32_t> ids;  // committed
};

// LinkedTensors of one step in all layers, on the GPU or on the host, at the same addresses each
// step.
class LinkedTensors {
 public:
  LinkedTensors(int tokens, bool on_gpu) : tokens_(tokens), on_gpu_(on_gpu) {
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
inline std::vector<float> Attention(int layer, const std::vector<int32_t>& ids,
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

inline std::vector<std::vector<int32_t>> Selected(kvs_step* step, uint32_t member) {
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

inline int RegisterModel(kvs_session* session, kvs_model* model) {
  const kvs_model_desc desc =
      testing::DescOf({kLayers, kHeads, kKvHeads, kDim, kPage}, "toy", "linked_cuda_test");
  return kvs_model_register(session, &desc, model);
}

inline std::vector<int32_t> Ids(size_t n, int32_t first = 0) {
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

  void Open(const char* plan, const std::vector<int32_t>& prompt, LinkedSequence* s,
            uint32_t* held = nullptr) {
    uint32_t n = 0;
    ASSERT_KVS(
        kvs_sequence_open(session_, model_, plan, prompt.data(), prompt.size(), &s->handle, &n));
    s->ids.assign(prompt.begin(), prompt.begin() + n);
    if (held != nullptr) *held = n;
  }
  // The prompt's rest in chunks of 48, then prefill_done. The last rows are checked.
  void Prefill(LinkedSequence* s, const std::vector<int32_t>& prompt, bool on_gpu) {
    ASSERT_NO_FATAL_FAILURE(RunPrompt(s, prompt, on_gpu));
    ASSERT_KVS(kvs_prefill_done(session_, s->handle));
  }
  // As Prefill, with surprisals, until the spans are there.
  void PrefillSpans(LinkedSequence* s, const std::vector<int32_t>& prompt, bool on_gpu) {
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
  void RunPrompt(LinkedSequence* s, const std::vector<int32_t>& prompt, bool on_gpu) {
    while (s->ids.size() < prompt.size()) {
      const size_t n = std::min<size_t>(48, prompt.size() - s->ids.size());
      LinkedTensors tensors(static_cast<int>(n), on_gpu);
      const auto first = prompt.begin() + static_cast<std::ptrdiff_t>(s->ids.size());
      ASSERT_NO_FATAL_FAILURE(Step(
          {s}, {std::vector<int32_t>(first, first + static_cast<std::ptrdiff_t>(n))}, &tensors));
    }
  }
  // One step with the calls of every layer.
  void Step(const std::vector<LinkedSequence*>& members,
            const std::vector<std::vector<int32_t>>& tokens, LinkedTensors* tensors) {
    kvs_step* step = nullptr;
    ASSERT_NO_FATAL_FAILURE(Begin(members, tokens, tensors, &step));
    for (int layer = 0; layer < kLayers; ++layer) {
      ASSERT_NO_FATAL_FAILURE(Layer(step, layer, tensors));
      ASSERT_NO_FATAL_FAILURE(Verify(step, layer, members, tensors));
    }
    ASSERT_KVS(kvs_step_end(step, stream_));
  }
  void Begin(const std::vector<LinkedSequence*>& members,
             const std::vector<std::vector<int32_t>>& tokens, LinkedTensors* tensors,
             kvs_step** step) {
    std::vector<kvs_step_member> batch;
    int row = 0;
    tensors->Poison();
    first_new_.clear();
    for (size_t i = 0; i < members.size(); ++i) {
      batch.push_back({members[i]->handle, late_ ? nullptr : tokens[i].data(),
                       static_cast<uint32_t>(tokens[i].size())});
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
  void Layer(kvs_step* step, int layer, LinkedTensors* tensors) {
    const kvs_tensor k = tensors->Tensor('k', layer), v = tensors->Tensor('v', layer);
    const kvs_tensor q = tensors->Tensor('q', layer), o = tensors->Tensor('o', layer);
    ASSERT_KVS(kvs_append(step, layer, &k, &v));
    ASSERT_KVS(kvs_select(step, layer, &q));
    ASSERT_KVS(kvs_attend(step, layer, &q, &o, nullptr));
  }
  // A graph of all layers, which nothing has run of yet.
  std::unique_ptr<CapturedGraph> Captured(kvs_step* step, LinkedTensors* tensors) {
    return std::make_unique<CapturedGraph>(stream_, [&](cudaStream_t) {
      for (int layer = 0; layer < kLayers; ++layer) Layer(step, layer, tensors);
      return 0;
    });
  }
  // A step that launches the graph. The last layer is checked.
  void Replay(CapturedGraph* graph, const std::vector<LinkedSequence*>& members,
              const std::vector<std::vector<int32_t>>& tokens, LinkedTensors* tensors) {
    kvs_step* step = nullptr;
    ASSERT_NO_FATAL_FAILURE(Begin(members, tokens, tensors, &step));
    ASSERT_KVS(kvs_step_replay(step));
    ASSERT_NO_FATAL_FAILURE(Launch(graph, step, members, tensors));
  }
  // As Replay, for a step that has begun.
  void Launch(CapturedGraph* graph, kvs_step* step, const std::vector<LinkedSequence*>& members,
              LinkedTensors* tensors) {
    graph->Launch();
    ASSERT_NO_FATAL_FAILURE(Verify(step, kLayers - 1, members, tensors));
    ASSERT_KVS(kvs_step_end(step, stream_));
  }
  // The output of each member's last new token.
  void Verify(kvs_step* step, int layer, const std::vector<LinkedSequence*>& members,
              LinkedTensors* tensors) {
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
      ASSERT_LE(RelativeError(got, want), tolerance_)
          << "seed " << TestSeed() << ", layer " << layer << ", member " << i << " of "
          << members[i]->ids.size() << " tokens";
      attended_ = lists[0].size();
      lists_.push_back(std::move(lists[0]));
    }
  }
  // Every eleventh token ends a sentence.
  void Report(const LinkedSequence& s) {
    std::vector<uint8_t> ends(s.ids.size());
    for (size_t t = 10; t < ends.size(); t += 11) ends[t] = 1;
    ASSERT_KVS(kvs_report(session_, s.handle, 0, ends.size(), nullptr, nullptr, ends.data()));
  }
  std::vector<int32_t> InspectInts(const LinkedSequence& s, const char* name) {
    kvs_array array{};
    EXPECT_EQ(kvs_inspect(session_, s.handle, name, &array), KVS_OK) << kvs_error_message();
    const auto* const values = static_cast<const int32_t*>(array.data);
    std::vector<int32_t> copy(values, values + array.bytes / sizeof(int32_t));
    kvs_array_free(&array);
    return copy;
  }
  void Decode(LinkedSequence* s, int steps, bool on_gpu) {
    LinkedTensors tensors(1, on_gpu);
    for (int i = 0; i < steps; ++i) {
      ASSERT_NO_FATAL_FAILURE(Step({s}, {{1000 + i}}, &tensors));
    }
  }

  testing::DaemonProcess daemon_{{"--set", "pool.device=cuda", "--set", "pool.device_bytes=256MiB",
                                  "--set", "pool.host_bytes=16MiB"}};
  kvs_session* session_ = nullptr;
  kvs_model model_ = 0;
  cudaStream_t stream_ = nullptr;
  std::vector<int> rows_;          // where each member's last new token is
  std::vector<size_t> first_new_;  // position of its first
  size_t attended_ = 0;
  bool late_ = false;                        // steps begin without ids
  double tolerance_ = kTolerance;            // that an answer may be off by
  std::vector<std::vector<int32_t>> lists_;  // every verified member's, its first group's
};

// Half of all pairs of random queries count as alike.
inline constexpr char kTokens[] =
    "tokenselect{k = 64, n_init = 4, n_local = 64, theta = 0, chunk = 128, min_tokens = 0}";
// Boundaries are those of the prompt: generated sentences are as long as they may be.
inline constexpr char kSentences[] =
    "sentencekv{tau = 64, n_obs = 16, start = 4, recent = 16, max_length = 24, min_tokens = 0}";
inline constexpr char kQuest[] = "quest{budget = 64, min_tokens = 0}";
inline constexpr char kChess[] =
    "chess{page = 16, pages_per_chunk = 2, chunks_per_grid = 4, window = 2, rho = [0.6, 0.6, 0.5], "
    "trigger = \"every\", every = 1, min_tokens = 0}";
// Packed rows are those that were written, but for rounding: the prompt's, then every 16 tokens.
inline constexpr char kMosaic[] =
    "mosaickv{keep = 64, truncate = false, segment = 128, buffer = 16, share = 0.25, "
    "min_tokens = 0}";

}  // namespace kvstrata::cuda
