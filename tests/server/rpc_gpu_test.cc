// SPDX-License-Identifier: Apache-2.0
// Sessions of a daemon whose pool is a GPU's, over a real channel, on a table of ops that is a GPU
// in host memory and computes nothing: that tensors get there and back, every wait ends, and a lost
// GPU is told. What the ops answer: tests/cuda/remote_cuda_test.cc.
#include <atomic>
#include <cstdlib>

#include "tests/fakes/fake_gpu_memory.h"
#include "tests/server/rpc_fixture.h"

namespace kvstrata::test {
namespace {

constexpr int kStickyError = 700, kOtherError = 1;
constexpr float kLse = 1.5f;

// What the fake does, and what it saw.
struct FakeGpu {
  std::atomic<bool> stuck{false};
  std::atomic<int> error{0};  // what everything answers that asks or enqueues
  std::atomic<int> streams{0}, allocations{0};
  std::vector<std::byte> appended;  // keys of the last append
  std::byte answer{};               // every byte of an output
  bool notes = false;               // an append notes that a row is not finite
};
FakeGpu gpu;

int Allocate(uint64_t bytes, void** at) {
  if (gpu.error != 0) return gpu.error;
  *at = std::calloc(bytes, 1);
  ++gpu.allocations;
  return 0;
}
int Free(void* at) {
  std::free(at);
  --gpu.allocations;
  return 0;
}

const cuda::CudaOps& FakeOps() {
  static const cuda::CudaOps ops = [] {
    cuda::CudaOps fake;
    fake.error_text = [](int) { return "on purpose"; };
    fake.is_sticky = [](int code) { return code == kStickyError; };
    fake.use_device = [](int) { return 0; };
    fake.allocate_device = fake.allocate_page_locked = Allocate;
    fake.free_device = fake.free_page_locked = Free;
    fake.copy_async = [](void* to, const void* from, uint64_t bytes, cuda::Stream) {
      if (gpu.error == 0) std::memcpy(to, from, bytes);
      return gpu.error.load();
    };
    fake.synchronize = [](cuda::Stream) { return gpu.error.load(); };
    fake.create_stream = [](cuda::Stream* stream) {
      *stream = &gpu;
      ++gpu.streams;
      return gpu.error.load();
    };
    fake.destroy_stream = [](cuda::Stream) {
      --gpu.streams;
      return 0;
    };
    fake.create_event = [](cuda::Event* event) {
      *event = &gpu;
      return gpu.error.load();
    };
    fake.destroy_event = [](cuda::Event) { return 0; };
    fake.record_event = [](cuda::Event, cuda::Stream) { return gpu.error.load(); };
    fake.await_event = [](cuda::Stream, cuda::Event) { return gpu.error.load(); };
    fake.is_event_done = [](cuda::Event, bool* done) {
      *done = !gpu.stuck;
      return gpu.error.load();
    };
    fake.is_capturing = [](cuda::Stream, bool* capturing) {
      *capturing = false;
      return 0;
    };
    fake.begin_capture = [](cuda::Stream*) { return kOtherError; };
    fake.is_device_memory = [](const void*, bool* device) {
      *device = true;
      return 0;
    };
    fake.attend_raw_workspace_bytes = [](int32_t, int32_t) { return int64_t{64}; };
    fake.append = [](const cuda::AppendBatch& w, cuda::Stream) {
      const auto* const keys = static_cast<const std::byte*>(w.k.data);
      gpu.appended.assign(keys, keys + w.rows_max * w.k.row_stride);
      if (gpu.notes) w.not_finite.words[w.not_finite.of[0]] = 1;
      return gpu.error.load();
    };
    fake.attend_raw = [](const cuda::AttendRawBatch& w, cuda::Stream) {
      const int64_t rows = int64_t{w.batch} * w.layer.kv_heads * w.group;
      std::memset(w.to.rows, static_cast<int>(gpu.answer),
                  static_cast<size_t>(rows * w.layer.head_dim * SizeOf(w.to.dtype)));
      std::fill_n(w.to.lse, rows, kLse);
      return gpu.error.load();
    };
    return fake;
  }();
  return ops;
}

class RpcGpuTest : public ::testing::Test {
 protected:
  ~RpcGpuTest() override { gpu.stuck = false; }

  uint64_t RegisterModel() {
    v1::RegisterModelRequest request = RpcClient::ModelOf(client_.session());
    request.mutable_geometry()->set_dtype(v1::DTYPE_BF16);
    v1::RegisterModelResponse response;
    const Status s = Call(*client_.control, &v1::Control::Stub::RegisterModel, request, &response);
    EXPECT_TRUE(s.ok()) << s.ToString();
    return response.model();
  }
  uint64_t Open() { return client_.Open(model_, "full", {}).value().sequence(); }
  v1::TensorRef Tensor(int heads) {
    v1::TensorRef t;
    t.set_dtype(v1::DTYPE_BF16);
    t.set_tokens(1);
    t.set_heads(heads);
    t.set_head_dim(64);
    for (int i = 0; i < heads * 128; ++i) {
      t.mutable_inline_()->push_back(static_cast<char>(random_()));
    }
    return t;
  }
  Result<v1::AttendResponse> Attend(uint64_t step) {
    v1::AttendRequest request = client_.AttendOf(step, 0, Tensor(4));
    v1::AttendResponse response;
    KVS_RETURN_IF_ERROR(Call(*client_.compute, &v1::Compute::Stub::Attend, request, &response));
    return response;
  }
  // A step whose first layer is appended.
  uint64_t Appended(uint64_t sequence) {
    const uint64_t step = client_.Begin(sequence, {1}).value();
    EXPECT_TRUE(client_.Append(step, 0, Tensor(2), Tensor(2)).ok());
    return step;
  }

  const int allocations_ = (gpu.error = 0, gpu.allocations.load());
  RpcDaemon daemon_{
      uint64_t{64} << 20,
      [](Store*, GrpcOptions* options) {
        options->cuda = &FakeOps();
        options->cuda_patience = std::chrono::milliseconds(30);
        options->cuda_devices = {0};
      },
      std::make_unique<testing::FakeGpuMemory>(std::make_shared<std::atomic<bool>>(false))};
  RpcClient client_{daemon_.Connect()};
  std::mt19937 random_{7};
  uint64_t model_ = RegisterModel();
};

TEST_F(RpcGpuTest, TensorsGetThereAndBack) {
  EXPECT_EQ(client_.opened.backend(), "cuda");
  const uint64_t sequence = Open();
  const uint64_t step = client_.Begin(sequence, {1}).value();
  for (int layer = 0; layer < 2; ++layer) {
    const v1::TensorRef k = Tensor(2);
    ASSERT_TRUE(client_.Append(step, layer, k, Tensor(2)).ok());
    EXPECT_EQ(std::memcmp(gpu.appended.data(), k.inline_().data(), k.inline_().size()), 0);
    EXPECT_EQ(gpu.appended.size(), k.inline_().size());
  }
  gpu.answer = std::byte{0x3F};
  const auto attended = Attend(step);
  ASSERT_TRUE(attended.ok()) << attended.status().ToString();
  EXPECT_EQ(attended->out().inline_(), std::string(size_t{4} * 64 * 2, '\x3F'));
  std::vector<float> lse(4);
  ASSERT_EQ(attended->lse().size(), lse.size() * sizeof(float));
  std::memcpy(lse.data(), attended->lse().data(), attended->lse().size());
  EXPECT_EQ(lse, std::vector<float>(4, kLse));
  ASSERT_EQ(attended->selection().members_size(), 1);
  EXPECT_EQ(attended->selection().members(0).groups(0).tokens_size(), 1);
  ASSERT_TRUE(client_.End(step).ok());
  EXPECT_EQ(daemon_.store().inspection().Show(sequence)->info.tokens, 1u);
}

// The kernel says that something is not finite, and the daemon finds what. The layer lacks its rows
// then, even if an earlier call brought some.
TEST_F(RpcGpuTest, WhatIsNotFiniteIsRefusedByName) {
  const uint64_t sequence = Open();
  const uint64_t step = client_.Begin(sequence, {1}).value();
  const auto ones = [&](size_t bad) {
    v1::TensorRef t = Tensor(2);
    std::string rows;
    for (size_t i = 0; i < 128; ++i) rows += i == bad ? "\xC0\x7F" : "\x80\x3F";
    *t.mutable_inline_() = rows;
    return t;
  };
  for (int layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(client_.Append(step, layer, ones(128), ones(128)).ok());
  }
  gpu.notes = true;
  const Status refused = client_.Append(step, 1, ones(128), ones(64 + 7));
  gpu.notes = false;
  EXPECT_EQ(refused.reason(), "TENSOR_NOT_FINITE");
  EXPECT_NE(refused.message().find("v[0][1][7] is nan"), std::string::npos) << refused.ToString();
  EXPECT_EQ(Attend(step).status().reason(), "");
  EXPECT_EQ(client_.End(step).reason(), "LAYER_NOT_APPENDED");
  EXPECT_EQ(daemon_.store().inspection().Show(sequence)->info.tokens, 0u);
}

TEST_F(RpcGpuTest, AStuckGpuIsADeadlineAndTheCallCanBeMadeAgain) {
  const uint64_t step = Appended(Open());
  gpu.stuck = true;
  const Status stuck = Attend(step).status();
  EXPECT_EQ(stuck.code(), Code::kDeadlineExceeded);
  EXPECT_EQ(stuck.reason(), "GPU_STUCK") << stuck.ToString();
  EXPECT_NE(stuck.message().find("30 ms"), std::string::npos) << stuck.message();
  gpu.stuck = false;
  EXPECT_TRUE(Attend(step).ok());
  EXPECT_TRUE(client_.End(step, true).ok());
  EXPECT_EQ(daemon_.store().inspection().Pools()[0].failure, "");
}

// Its rows may not be there: nobody may go on from them.
TEST_F(RpcGpuTest, AStepThatDoesNotEndLosesItsSequence) {
  const uint64_t sequence = Open();
  const uint64_t step = Appended(sequence);
  ASSERT_TRUE(client_.Append(step, 1, Tensor(2), Tensor(2)).ok());
  gpu.stuck = true;
  EXPECT_EQ(client_.End(step).reason(), "GPU_STUCK");
  gpu.stuck = false;
  EXPECT_EQ(client_.Begin(sequence, {2}).status().reason(), "GPU_STUCK");
  EXPECT_EQ(daemon_.store().inspection().Show(sequence)->info.tokens, 0u);
}

// Its pages may still be read: none may be given out again.
TEST_F(RpcGpuTest, AGpuThatDoesNotLeaveADroppedStepIsLost) {
  const uint64_t step = Appended(Open());
  EXPECT_EQ(daemon_.store().inspection().Pools()[0].failure, "");
  gpu.stuck = true;
  EXPECT_TRUE(client_.End(step, true).ok());
  gpu.stuck = false;
  const std::string failure = daemon_.store().inspection().Pools()[0].failure;
  EXPECT_NE(failure.find("has not finished a step that is over"), std::string::npos) << failure;
}

TEST_F(RpcGpuTest, AStickyErrorLosesTheDevice) {
  const uint64_t step = Appended(Open());
  gpu.error = kOtherError;
  EXPECT_EQ(Attend(step).status().reason(), "CUDA_ERROR");
  EXPECT_EQ(daemon_.store().inspection().Pools()[0].failure, "");
  gpu.error = kStickyError;
  const Status lost = Attend(step).status();
  EXPECT_EQ(lost.code(), Code::kUnavailable);
  EXPECT_EQ(lost.reason(), "DEVICE_FAILED") << lost.ToString();
  EXPECT_NE(lost.message().find("restart kvstratad"), std::string::npos) << lost.message();
  EXPECT_NE(daemon_.store().inspection().Pools()[0].failure, "");
  EXPECT_TRUE(client_.End(step, true).ok());
}

TEST_F(RpcGpuTest, StepsThatAreOpenHaveALimit) {
  std::vector<uint64_t> steps;
  for (int i = 0; i < 4; ++i) steps.push_back(client_.Begin(Open(), {1}).value());
  const Status fifth = client_.Begin(Open(), {1}).status();
  EXPECT_EQ(fifth.code(), Code::kResourceExhausted);
  EXPECT_EQ(fifth.reason(), "STEPS_OPEN");
  ASSERT_TRUE(client_.End(steps[2], true).ok());
  EXPECT_TRUE(client_.Begin(Open(), {1}).ok());
}

TEST_F(RpcGpuTest, AnotherBackendIsRefused) {
  EXPECT_EQ(RpcClient(daemon_.Connect(), "ref").failure.reason(), "BACKEND_UNKNOWN");
  EXPECT_TRUE(RpcClient(daemon_.Connect(), "cuda").failure.ok());
}

TEST_F(RpcGpuTest, ASessionThatEndsGivesAllBack) {
  (void)Appended(Open());
  EXPECT_EQ(gpu.streams, 1);
  EXPECT_GT(gpu.allocations, allocations_);
  client_.Cancel();
  EXPECT_TRUE(Eventually([&] { return gpu.streams == 0; }));
  EXPECT_TRUE(Eventually([&] { return daemon_.UsedBytes() == 0; }));
  EXPECT_EQ(gpu.allocations, allocations_);
}

TEST(RpcGpuPool, WithoutOpsIsRefused) {
  RpcDaemon daemon(
      uint64_t{64} << 20, nullptr,
      std::make_unique<testing::FakeGpuMemory>(std::make_shared<std::atomic<bool>>(false)));
  const Status refused = RpcClient(daemon.Connect()).failure;
  EXPECT_EQ(refused.code(), Code::kUnimplemented);
  EXPECT_EQ(refused.reason(), "TRANSPORT_UNAVAILABLE");
}

}  // namespace
}  // namespace kvstrata::test
