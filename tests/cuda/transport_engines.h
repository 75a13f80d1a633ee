// SPDX-License-Identifier: Apache-2.0
// Two engines with the same deterministic model, one on each transport, for tests that hold what
// they answer to each other: LinkedEngine calls kvs_* on tensors of the host or of the GPU,
// RemoteEngine the daemon's Compute service. Rows are functions of layer, position and token id.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/include/kvstrata/kvstrata.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"
#include "tests/cuda/seed.h"
#include "tests/fakes/model_desc.h"
#include "tests/fakes/remote_client.h"

namespace kvstrata::cuda {

struct TransportModel {
  static constexpr int kLayers = 2, kHeads = 8, kKvHeads = 2, kDim = 64, kPage = 16;

  // kind: k, v or q.
  static std::vector<BF16> Rows(char kind, int layer, uint32_t first,
                                const std::vector<int32_t>& ids) {
    std::vector<BF16> rows;
    const int n = (kind == 'q' ? kHeads : kKvHeads) * kDim;
    for (size_t i = 0; i < ids.size(); ++i) {
      Rng rng(TestSeed() + static_cast<uint64_t>(kind) * 7919 +
              static_cast<uint64_t>(layer) * 104729 + (first + i) * 1000003 +
              static_cast<uint64_t>(ids[i]) * 10007);
      std::normal_distribution<float> normal;
      for (int c = 0; c < n; ++c) rows.push_back(FromFloat<BF16>(normal(rng)));
    }
    return rows;
  }
};

// Sentence ends and surprisals of `n` tokens, for plans that need them.
struct TransportSeries {
  explicit TransportSeries(uint32_t n) : ends(n), nats(n) {
    for (uint32_t t = 10; t < n; t += 11) ends[t] = 1;
    // Exponential: one in 20 is an anchor at alpha = 2.
    for (uint32_t t = 0; t < n; ++t) {
      nats[t] = -std::log((static_cast<float>(t * 37 % 101) + 0.5f) / 101);
    }
  }
  std::vector<uint8_t> ends;
  std::vector<float> nats;
};

// What one layer of a step of one sequence answered.
struct LayerAnswer {
  std::vector<BF16> out;
  std::vector<float> lse;
  std::vector<std::vector<int32_t>> tokens, units;  // selected, by group
};

inline void ExpectSameBits(const std::vector<LayerAnswer>& a, const std::vector<LayerAnswer>& b) {
  ASSERT_FALSE(a.empty());
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].tokens, b[i].tokens) << "seed " << TestSeed() << ", layer of a step " << i;
    ASSERT_EQ(a[i].units, b[i].units) << i;
    ASSERT_EQ(a[i].out.size(), b[i].out.size());
    ASSERT_EQ(std::memcmp(a[i].out.data(), b[i].out.data(), a[i].out.size() * sizeof(BF16)), 0)
        << "seed " << TestSeed() << ", layer of a step " << i;
    ASSERT_EQ(std::memcmp(a[i].lse.data(), b[i].lse.data(), a[i].lse.size() * sizeof(float)), 0)
        << i;
  }
}

class LinkedEngine : public TransportModel {
 public:
  // on_gpu: tensors, and a stream to run on. Without: of the host, for a daemon without a GPU too.
  LinkedEngine(const std::string& socket, const std::string& digest, bool with_stream,
               bool on_gpu = false)
      : on_gpu_(on_gpu) {
    EXPECT_EQ(kvs_attach(socket.c_str(), nullptr, &session_), KVS_OK) << kvs_error_message();
    const kvs_model_desc desc =
        testing::DescOf({kLayers, kHeads, kKvHeads, kDim, kPage}, "transport", digest.c_str());
    EXPECT_EQ(kvs_model_register(session_, &desc, &model_), KVS_OK) << kvs_error_message();
    if (with_stream) {
      EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    }
  }
  LinkedEngine(const LinkedEngine&) = delete;
  LinkedEngine& operator=(const LinkedEngine&) = delete;
  ~LinkedEngine() {
    kvs_detach(session_);
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  kvs_session* session() const { return session_; }
  cudaStream_t stream() const { return stream_; }

  kvs_sequence Open(const char* plan, const std::vector<int32_t>& prompt, uint32_t* held) {
    kvs_sequence s = 0;
    EXPECT_EQ(kvs_sequence_open(session_, model_, plan, prompt.data(), prompt.size(), &s, held),
              KVS_OK)
        << kvs_error_message();
    return s;
  }
  void PrefillDone(kvs_sequence s) {
    EXPECT_EQ(kvs_prefill_done(session_, s), KVS_OK) << kvs_error_message();
  }
  void Report(kvs_sequence s, uint32_t tokens) {
    const TransportSeries series(tokens);
    EXPECT_EQ(kvs_report(session_, s, 0, tokens, series.nats.data(), nullptr, series.ends.data()),
              KVS_OK)
        << kvs_error_message();
  }
  void Settle(kvs_sequence s) { EXPECT_EQ(kvs_settle(session_, s), KVS_OK) << kvs_error_message(); }
  void Step(kvs_sequence s, uint32_t first, const std::vector<int32_t>& ids,
            std::vector<LayerAnswer>* answers) {
    kvs_step* step = Begin(s, ids);
    ASSERT_NE(step, nullptr) << kvs_error_message();
    for (int layer = 0; layer < kLayers; ++layer) {
      answers->push_back({});
      ASSERT_NO_FATAL_FAILURE(Layer(step, layer, first, ids, &answers->back()));
    }
    ASSERT_EQ(kvs_step_end(step, stream_), KVS_OK) << kvs_error_message();
    ASSERT_EQ(stream_ == nullptr ? cudaSuccess : cudaStreamSynchronize(stream_), cudaSuccess);
  }
  // Null when refused.
  kvs_step* Begin(kvs_sequence s, const std::vector<int32_t>& ids) {
    const kvs_step_member member{s, ids.data(), static_cast<uint32_t>(ids.size())};
    kvs_step* step = nullptr;
    if (kvs_step_begin(session_, &member, 1, stream_, &step, nullptr) != KVS_OK) return nullptr;
    return step;
  }
  void Layer(kvs_step* step, int layer, uint32_t first, const std::vector<int32_t>& ids,
             LayerAnswer* answer) {
    FillLayer(layer, first, ids);
    answer->lse.assign(ids.size() * kHeads, NAN);
    ASSERT_NO_FATAL_FAILURE(
        CallLayer(step, layer, static_cast<int>(ids.size()), answer->lse.data()));
    answer->out = on_gpu_ ? device_[Slot('o', layer)].Read() : host_[Slot('o', layer)];
    uint32_t groups = 0;
    ASSERT_EQ(kvs_selection_groups(step, 0, &groups), KVS_OK) << kvs_error_message();
    for (uint32_t g = 0; g < groups; ++g) {
      answer->tokens.push_back(Selected(step, g, KVS_TOKENS));
      answer->units.push_back(Selected(step, g, KVS_UNITS));
    }
  }
  // A layer's tensors; its calls, which may be captured.
  void FillLayer(int layer, uint32_t first, const std::vector<int32_t>& ids) {
    for (const char kind : {'k', 'v', 'q'}) Fill(kind, layer, Rows(kind, layer, first, ids));
    Fill('o', layer, std::vector<BF16>(ids.size() * kHeads * kDim, FromFloat<BF16>(NAN)));
  }
  void CallLayer(kvs_step* step, int layer, int n, float* lse) {
    const kvs_tensor k = Tensor('k', layer, n, kKvHeads), v = Tensor('v', layer, n, kKvHeads);
    const kvs_tensor q = Tensor('q', layer, n, kHeads), o = Tensor('o', layer, n, kHeads);
    ASSERT_EQ(kvs_append(step, layer, &k, &v), KVS_OK) << kvs_error_message();
    ASSERT_EQ(kvs_attend(step, layer, &q, &o, lse), KVS_OK) << kvs_error_message();
  }

 private:
  static size_t Slot(char kind, int layer) {
    return static_cast<size_t>(layer) * 4 + std::string("kvqo").find(kind);
  }
  void Fill(char kind, int layer, std::vector<BF16> rows) {
    if (on_gpu_) {
      DeviceArray<BF16>& to = device_[Slot(kind, layer)];
      if (to.size() != rows.size()) to = DeviceArray<BF16>(rows.size());
      to.Write(rows);
    }
    host_[Slot(kind, layer)] = std::move(rows);
  }
  kvs_tensor Tensor(char kind, int layer, int n, int heads) {
    void* const data = on_gpu_ ? static_cast<void*>(device_[Slot(kind, layer)].get())
                               : static_cast<void*>(host_[Slot(kind, layer)].data());
    return {data, KVS_BF16, heads, kDim, n, 0, 0};
  }
  static std::vector<int32_t> Selected(kvs_step* step, uint32_t group, int what) {
    size_t n = 0;
    EXPECT_EQ(kvs_selection(step, 0, group, what, nullptr, 0, &n), KVS_OK) << kvs_error_message();
    std::vector<int32_t> ids(n);
    EXPECT_EQ(kvs_selection(step, 0, group, what, ids.data(), n, &n), KVS_OK);
    return ids;
  }

  const bool on_gpu_;
  kvs_session* session_ = nullptr;
  kvs_model model_ = 0;
  cudaStream_t stream_ = nullptr;
  std::vector<BF16> host_[kLayers * 4];
  DeviceArray<BF16> device_[kLayers * 4];
};

class RemoteEngine : public TransportModel {
 public:
  RemoteEngine(const std::string& socket, const std::string& digest) : client_(socket) {
    EXPECT_TRUE(client_.failure().ok()) << client_.failure().ToString();
    v1::RegisterModelRequest request;
    request.set_name("transport");
    request.set_digest(digest);
    v1::Geometry* const g = request.mutable_geometry();
    g->set_layers(kLayers);
    g->set_query_heads(kHeads);
    g->set_kv_heads(kKvHeads);
    g->set_head_dim(kDim);
    g->set_page_tokens(kPage);
    g->set_dtype(v1::DTYPE_BF16);
    v1::RegisterModelResponse response;
    Check(client_.Call(&v1::Control::Stub::RegisterModel, std::move(request), &response));
    model_ = response.model();
  }
  testing::RemoteClient& client() { return client_; }
  uint64_t model() const { return model_; }

  uint64_t Open(const char* plan, const std::vector<int32_t>& prompt, uint32_t* held) {
    const Result<uint64_t> s = client_.Open(model_, plan, prompt, held);
    Check(s.status());
    return s.ok() ? *s : 0;
  }
  void PrefillDone(uint64_t s) {
    Check(client_.CallOf<v1::PrefillDoneRequest, v1::PrefillDoneResponse>(
        &v1::Compute::Stub::PrefillDone, s));
  }
  void Report(uint64_t s, uint32_t tokens) {
    const TransportSeries series(tokens);
    v1::ReportRequest request;
    request.set_sequence(s);
    request.mutable_surprisal()->Add(series.nats.begin(), series.nats.end());
    request.set_boundary(series.ends.data(), series.ends.size());
    v1::ReportResponse response;
    Check(client_.Call(&v1::Compute::Stub::Report, std::move(request), &response));
  }
  void Settle(uint64_t s) {
    Check(client_.CallOf<v1::SettleRequest, v1::SettleResponse>(&v1::Compute::Stub::Settle, s));
  }
  void Step(uint64_t s, uint32_t first, const std::vector<int32_t>& ids,
            std::vector<LayerAnswer>* answers) {
    const Result<uint64_t> step = client_.Begin(s, ids);
    ASSERT_TRUE(step.ok()) << step.status().ToString();
    for (int layer = 0; layer < kLayers; ++layer) {
      answers->push_back({});
      ASSERT_NO_FATAL_FAILURE(Layer(*step, layer, first, ids, &answers->back()));
    }
    Check(client_.End(*step));
  }
  void Layer(uint64_t step, int layer, uint32_t first, const std::vector<int32_t>& ids,
             LayerAnswer* answer) {
    Check(client_.Append(step, layer, Tensor('k', layer, first, ids),
                         Tensor('v', layer, first, ids)));
    const auto attended = client_.Attend(step, layer, Tensor('q', layer, first, ids), true);
    ASSERT_TRUE(attended.ok()) << attended.status().ToString();
    const std::string& out = attended->out().inline_();
    answer->out.resize(out.size() / sizeof(BF16));
    std::memcpy(answer->out.data(), out.data(), out.size());
    answer->lse.resize(attended->lse().size() / sizeof(float));
    std::memcpy(answer->lse.data(), attended->lse().data(), attended->lse().size());
    for (const v1::SelectionGroup& g : attended->selection().members(0).groups()) {
      answer->tokens.emplace_back(g.tokens().begin(), g.tokens().end());
      answer->units.emplace_back(g.units().begin(), g.units().end());
    }
  }
  v1::TensorRef Tensor(char kind, int layer, uint32_t first, const std::vector<int32_t>& ids) {
    const std::vector<BF16> rows = Rows(kind, layer, first, ids);
    return testing::RemoteClient::Tensor<BF16>(v1::DTYPE_BF16, static_cast<int>(ids.size()),
                                               kind == 'q' ? kHeads : kKvHeads, kDim, rows);
  }

 private:
  static void Check(const Status& status) { EXPECT_TRUE(status.ok()) << status.ToString(); }

  testing::RemoteClient client_;
  uint64_t model_ = 0;
};

// A sequence that is decoded: its prompt of 600 tokens in chunks of 48, whose end is every
// eleventh token's sentence, then tokens one by one.
template <typename Engine>
class Decoding {
 public:
  Decoding(Engine* engine, const char* plan, int32_t first_id) : engine_(*engine) {
    std::vector<int32_t> prompt(600);
    for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = first_id + static_cast<int32_t>(i);
    sequence_ = engine_.Open(plan, prompt, &at_);
    while (at_ < prompt.size() && !::testing::Test::HasFailure()) {
      const size_t n = std::min<size_t>(48, prompt.size() - at_);
      const auto first = prompt.begin() + at_;
      engine_.Step(sequence_, at_, {first, first + static_cast<int>(n)}, &answers_);
      at_ += static_cast<uint32_t>(n);
    }
    engine_.Report(sequence_, at_);
    engine_.PrefillDone(sequence_);
    engine_.Settle(sequence_);  // where a codec packs, all of the prompt is packed now
  }
  void Decode(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i, ++at_) {
      engine_.Step(sequence_, at_, {5000 + static_cast<int32_t>(at_)}, &answers_);
    }
  }
  auto sequence() const { return sequence_; }
  uint32_t tokens() const { return at_; }
  void Skip(uint32_t tokens) { at_ += tokens; }  // decoded by somebody else
  // The answers of every step and layer so far.
  const std::vector<LayerAnswer>& answers() const { return answers_; }

 private:
  Engine& engine_;
  decltype(std::declval<Engine>().Open("", {}, nullptr)) sequence_ = 0;
  uint32_t at_ = 0;
  std::vector<LayerAnswer> answers_;
};

}  // namespace kvstrata::cuda
