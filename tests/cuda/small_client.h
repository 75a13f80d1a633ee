// SPDX-License-Identifier: Apache-2.0
// SmallClient: an engine with a model of 512 KiB a thousand tokens, on tensors of the host, for
// tests of a daemon with a GPU that need pages and copies, and little of what lies in them. What
// fails is an error of the test.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "client/include/kvstrata/kvstrata.h"
#include "tests/cuda/elements.h"
#include "tests/fakes/model_desc.h"

namespace kvstrata::cuda {

class SmallClient {
 public:
  static constexpr int kLayers = 2, kHeads = 4, kKvHeads = 1, kDim = 64;

  // Attaches to the current device, whose UUID `device_uuid` is; null: to the daemon's first.
  explicit SmallClient(const std::string& socket, const char* device_uuid = nullptr) {
    kvs_attach_options options{};
    options.size = sizeof(options);
    options.device_uuid = device_uuid;
    EXPECT_EQ(kvs_attach(socket.c_str(), &options, &session_), KVS_OK) << kvs_error_message();
    const kvs_model_desc desc =
        testing::DescOf({kLayers, kHeads, kKvHeads, kDim, 16}, "small_client", "small_client");
    EXPECT_EQ(kvs_model_register(session_, &desc, &model_), KVS_OK) << kvs_error_message();
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  SmallClient(const SmallClient&) = delete;
  SmallClient& operator=(const SmallClient&) = delete;
  ~SmallClient() {
    kvs_detach(session_);
    cudaStreamDestroy(stream_);
  }
  kvs_session* session() const { return session_; }
  kvs_model model() const { return model_; }
  cudaStream_t stream() const { return stream_; }

  kvs_sequence Open(const std::vector<int32_t>& prompt, uint32_t* held, const char* plan = "full") {
    kvs_sequence sequence = 0;
    EXPECT_EQ(
        kvs_sequence_open(session_, model_, plan, prompt.data(), prompt.size(), &sequence, held),
        KVS_OK)
        << kvs_error_message();
    return sequence;
  }
  kvs_sequence Fork(kvs_sequence parent) {
    kvs_sequence child = 0;
    EXPECT_EQ(kvs_sequence_fork(session_, parent, &child), KVS_OK) << kvs_error_message();
    return child;
  }
  // New tokens at `first`; the output of the last one, of layer 0. Rows are functions of a token's
  // id and position. Empty when the step was refused: kvs_error_reason says why.
  std::vector<float> Step(kvs_sequence sequence, uint32_t first, const std::vector<int32_t>& ids) {
    const kvs_step_member member{sequence, ids.data(), static_cast<uint32_t>(ids.size())};
    kvs_step* step = nullptr;
    if (kvs_step_begin(session_, &member, 1, stream_, &step, nullptr) != KVS_OK) return {};
    std::vector<BF16> rows = Rows(first, ids, kKvHeads), queries = Rows(first, ids, kHeads);
    std::vector<BF16> out(queries.size());
    const auto tensor = [&ids](std::vector<BF16>* data, int heads) {
      return kvs_tensor{
          data->data(), KVS_BF16, heads, kDim, static_cast<int32_t>(ids.size()), 0, 0};
    };
    const kvs_tensor k = tensor(&rows, kKvHeads), q = tensor(&queries, kHeads),
                     o = tensor(&out, kHeads);
    std::vector<float> last;
    for (int layer = kLayers; layer-- > 0;) {
      EXPECT_EQ(kvs_append(step, layer, &k, &k), KVS_OK) << kvs_error_message();
      EXPECT_EQ(kvs_attend(step, layer, &q, &o, nullptr), KVS_OK) << kvs_error_message();
    }
    EXPECT_EQ(kvs_step_end(step, stream_), KVS_OK) << kvs_error_message();
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    for (size_t c = out.size() - kHeads * kDim; c < out.size(); ++c) {
      last.push_back(ToFloat(out[c]));
    }
    return last;
  }

  // What the rows of `ids` at `first` are: keys and values kKvHeads, queries kHeads.
  static std::vector<BF16> Rows(uint32_t first, const std::vector<int32_t>& ids, int heads) {
    std::vector<BF16> rows;
    for (size_t i = 0; i < ids.size(); ++i) {
      for (int c = 0; c < heads * kDim; ++c) {
        const auto at = static_cast<float>(first + i);
        rows.push_back(FromFloat<BF16>(
            std::sin(at * 0.37f + static_cast<float>(ids[i]) + static_cast<float>(c) * 1.7f)));
      }
    }
    return rows;
  }

 private:
  kvs_session* session_ = nullptr;
  kvs_model model_ = 0;
  cudaStream_t stream_ = nullptr;
};

}  // namespace kvstrata::cuda
