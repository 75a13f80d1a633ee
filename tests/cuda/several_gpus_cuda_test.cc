// SPDX-License-Identifier: Apache-2.0
// A daemon with a pool on each of several GPUs, and sessions on each: captured steps at the same
// time, a prefix that another GPU computed, an engine that has made another GPU current, packing,
// and a sticky error on one. Skipped with fewer than two.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <numeric>
#include <thread>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/captured_graph.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/small_client.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::cuda {
namespace {

using Client = SmallClient;
using Seconds = std::chrono::duration<double>;

constexpr size_t kRow = Client::kHeads * Client::kDim;
constexpr int kGpus = 2;  // that the tests use, of those that are visible

const CudaOps& Ops() { return *kvs_cuda_ops(); }

std::string UuidOf(int gpu) {
  DeviceName name;
  EXPECT_EQ(Ops().name_device(gpu, &name), 0);
  return name.uuid;
}

// Attention of the last of `ids` over all of them, in double; keys are values, heads have one of
// them.
std::vector<double> Attention(const std::vector<int32_t>& ids) {
  const auto last = static_cast<uint32_t>(ids.size()) - 1;
  const auto keys = Client::Rows(0, ids, Client::kKvHeads);
  const auto query = Client::Rows(last, {ids.back()}, Client::kHeads);
  std::vector<double> out;
  for (int head = 0; head < Client::kHeads; ++head) {
    std::vector<double> sums(Client::kDim);
    double weights = 0;
    for (size_t t = 0; t < ids.size(); ++t) {
      const BF16* const key = &keys[t * Client::kDim];
      double dot = 0;
      for (int c = 0; c < Client::kDim; ++c) {
        dot +=
            double{ToFloat(query[static_cast<size_t>(head * Client::kDim + c)])} * ToFloat(key[c]);
      }
      const double weight = std::exp(dot / std::sqrt(double{Client::kDim}));
      weights += weight;
      for (int c = 0; c < Client::kDim; ++c)
        sums[static_cast<size_t>(c)] += weight * ToFloat(key[c]);
    }
    for (const double sum : sums) out.push_back(sum / weights);
  }
  return out;
}

void ExpectAttention(const std::vector<float>& got, const std::vector<int32_t>& ids,
                     double tolerance = 1e-2) {
  const std::vector<double> want = Attention(ids);
  ASSERT_EQ(got.size(), want.size()) << kvs_error_message();
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], tolerance) << "column " << i << ", " << ids.size() << " tokens";
  }
}

// Decodes one sequence by a graph that it captures with the first step. On the current GPU.
class CapturedDecode {
 public:
  explicit CapturedDecode(Client* client) : client_(client) {}

  std::vector<float> Step(kvs_sequence sequence, uint32_t position, int32_t id) {
    const kvs_step_member member{sequence, &id, 1};
    kvs_step* step = nullptr;
    EXPECT_EQ(kvs_step_begin(client_->session(), &member, 1, client_->stream(), &step, nullptr),
              KVS_OK)
        << kvs_error_message();
    rows_.Write(Client::Rows(position, {id}, Client::kKvHeads));
    queries_.Write(Client::Rows(position, {id}, Client::kHeads));
    out_.Poison();
    if (graph_ == nullptr) {
      graph_ = std::make_unique<CapturedGraph>(client_->stream(),
                                               [&](cudaStream_t) { return Layers(step); });
    } else {
      EXPECT_EQ(kvs_step_replay(step), KVS_OK) << kvs_error_message();
    }
    graph_->Launch();
    EXPECT_EQ(kvs_step_end(step, client_->stream()), KVS_OK) << kvs_error_message();
    Check(cudaStreamSynchronize(client_->stream()), "a step");
    std::vector<float> out;
    for (const BF16 x : out_.Read()) out.push_back(ToFloat(x));
    return out;
  }

 private:
  int Layers(kvs_step* step) {
    const auto tensor = [](DeviceArray<BF16>& data, int heads) {
      return kvs_tensor{data.get(), KVS_BF16, heads, Client::kDim, 1, 0, 0};
    };
    const kvs_tensor k = tensor(rows_, Client::kKvHeads), q = tensor(queries_, Client::kHeads),
                     o = tensor(out_, Client::kHeads);
    int code = 0;
    for (int layer = Client::kLayers; layer-- > 0 && code == 0;) {
      code = kvs_append(step, layer, &k, &k);
      if (code == 0) code = kvs_attend(step, layer, &q, &o, nullptr);
    }
    EXPECT_EQ(code, 0) << kvs_error_message();
    return code;
  }

  Client* const client_;
  DeviceArray<BF16> rows_{Client::kKvHeads * Client::kDim}, queries_{kRow}, out_{kRow};
  std::unique_ptr<CapturedGraph> graph_;
};

std::vector<int32_t> Ids(int32_t n, int32_t first) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  std::iota(ids.begin(), ids.end(), first);
  return ids;
}

class SeveralGpus : public ::testing::Test {
 protected:
  void SetUp() override {
    if (Ops().device_count() < kGpus) {
      GTEST_SKIP() << "SKIPPED: " << Ops().device_count() << " GPU is visible, this needs "
                   << kGpus;
    }
    Start({});
  }
  void TearDown() override {
    if (admin_ != nullptr) {
      EXPECT_EQ(admin_->Audit(), "");
    }
    (void)cudaSetDevice(0);
  }
  void Start(const std::vector<std::string>& more) {
    std::vector<std::string> flags = {"--set", "pool.device=" + UuidOf(0) + "," + UuidOf(1),
                                      "--set", "pool.device_bytes=512MiB",
                                      "--set", "pool.host_bytes=256MiB"};
    flags.insert(flags.end(), more.begin(), more.end());
    admin_.reset();
    daemon_.reset();
    daemon_ = std::make_unique<testing::DaemonProcess>(flags);
    admin_ = std::make_unique<testing::Operator>(daemon_->socket());
  }
  // Leaves the GPU the calling thread's current one.
  std::unique_ptr<Client> Attach(int gpu) const {
    Check(cudaSetDevice(gpu), "cudaSetDevice");
    return std::make_unique<Client>(daemon_->socket(), UuidOf(gpu).c_str());
  }
  // Prefills what is not held and decodes `steps` tokens by a graph, each held to the oracle.
  void Run(int gpu, std::vector<int32_t> ids, int steps) const {
    const std::unique_ptr<Client> client = Attach(gpu);
    uint32_t held = 0;
    const kvs_sequence s = client->Open(ids, &held);
    ASSERT_NO_FATAL_FAILURE(
        ExpectAttention(client->Step(s, held, {ids.begin() + held, ids.end()}), ids));
    CapturedDecode decode(client.get());
    for (int i = 0; i < steps; ++i) {
      ids.push_back(1000 * (gpu + 1) + i);
      const auto out = decode.Step(s, static_cast<uint32_t>(ids.size()) - 1, ids.back());
      ASSERT_NO_FATAL_FAILURE(ExpectAttention(out, ids)) << "GPU " << gpu << ", step " << i;
    }
  }

  std::unique_ptr<testing::DaemonProcess> daemon_;
  std::unique_ptr<testing::Operator> admin_;
};

TEST_F(SeveralGpus, PoolsAreListedByUuid) {
  const v1::GetStatusResponse status = admin_->Status();
  ASSERT_EQ(status.pools_size(), kGpus + 1);
  for (int gpu = 0; gpu < kGpus; ++gpu) EXPECT_EQ(status.pools(gpu).device(), UuidOf(gpu));
  EXPECT_EQ(status.pools(kGpus).tier(), "host");
}

TEST_F(SeveralGpus, DecodeCapturedStepsAtTheSameTime) {
  std::vector<std::thread> engines;
  for (int gpu = 0; gpu < kGpus; ++gpu) {
    engines.emplace_back([this, gpu] { Run(gpu, Ids(300, 50 * gpu), 60); });
  }
  for (std::thread& engine : engines) engine.join();
  const v1::GetStatusResponse status = admin_->Status();
  for (int gpu = 0; gpu < kGpus; ++gpu) EXPECT_GT(status.pools(gpu).used_bytes(), 0u);
}

TEST_F(SeveralGpus, APrefixOfTheOtherGpuIsHeld) {
  const auto ids = Ids(4000, 7);
  const std::unique_ptr<Client> first = Attach(0);
  uint32_t held = 0;
  const kvs_sequence s = first->Open(ids, &held);
  const std::vector<float> want = first->Step(s, 0, ids);
  ASSERT_NO_FATAL_FAILURE(ExpectAttention(want, ids));
  ASSERT_EQ(kvs_settle(first->session(), s), KVS_OK) << kvs_error_message();
  const std::unique_ptr<Client> second = Attach(1);
  const auto begin = std::chrono::steady_clock::now();
  const kvs_sequence t = second->Open(ids, &held);
  const Seconds open = std::chrono::steady_clock::now() - begin;
  EXPECT_EQ(held, 3984u);
  EXPECT_EQ(admin_->Status().replicated_pages(), 249u);
  std::printf("opening on 249 pages of the other GPU: %.0f us\n", open.count() * 1e6);
  ASSERT_NO_FATAL_FAILURE(
      ExpectAttention(second->Step(t, held, {ids.begin() + held, ids.end()}), ids));
  ASSERT_NO_FATAL_FAILURE(Run(1, ids, 20));  // shares what the first one there got
  EXPECT_EQ(admin_->Status().replicated_pages(), 249u);
}

// The thread's current device is GPU 0 in all calls of a session on GPU 1, and stays that.
TEST_F(SeveralGpus, AnEngineMayHaveMadeAnotherGpuCurrent) {
  auto ids = Ids(200, 3);
  const std::unique_ptr<Client> client = Attach(1);
  Check(cudaSetDevice(0), "cudaSetDevice");
  uint32_t held = 0;
  const kvs_sequence s = client->Open(ids, &held);
  ASSERT_NO_FATAL_FAILURE(ExpectAttention(client->Step(s, 0, ids), ids));
  for (int i = 0; i < 20; ++i) {
    ids.push_back(i);
    const auto at = static_cast<uint32_t>(ids.size()) - 1;
    ASSERT_NO_FATAL_FAILURE(ExpectAttention(client->Step(s, at, {i}), ids)) << "step " << i;
    int current = -1;
    Check(cudaGetDevice(&current), "cudaGetDevice");
    ASSERT_EQ(current, 0);
  }
}

// A worker packs on the GPU where the sequence lies; all of a row is kept, all rows are attended.
TEST_F(SeveralGpus, SegmentsArePackedWhereTheyLie) {
  constexpr char kPlan[] =
      "mosaickv{keep = 64, truncate = false, segment = 128, buffer = 16, share = 1, "
      "min_tokens = 0}";
  for (int gpu = 0; gpu < kGpus; ++gpu) {
    SCOPED_TRACE("GPU " + std::to_string(gpu));
    auto ids = Ids(304, 1000 * gpu);  // ids of its own: nothing of it lies on the other one
    const std::unique_ptr<Client> client = Attach(gpu);
    uint32_t held = 0;
    const kvs_sequence s = client->Open(ids, &held, kPlan);
    ASSERT_FALSE(client->Step(s, held, {ids.begin() + held, ids.end()}).empty());
    ASSERT_EQ(kvs_prefill_done(client->session(), s), KVS_OK) << kvs_error_message();
    ASSERT_EQ(kvs_settle(client->session(), s), KVS_OK) << kvs_error_message();
    const v1::GetStatusResponse status = admin_->Status();
    EXPECT_GT(status.recompressions(), static_cast<uint64_t>(gpu));
    EXPECT_EQ(status.recompress_failures(), 0u);
    for (int i = 0; i < 20; ++i) {
      ids.push_back(i);
      const auto at = static_cast<uint32_t>(ids.size()) - 1;
      ASSERT_NO_FATAL_FAILURE(ExpectAttention(client->Step(s, at, {i}), ids, 3e-2)) << i;
    }
  }
}

// A sticky error on GPU 0: a kernel of the daemon's process writes to nowhere. CUDA ends the work
// of the process on all of its GPUs (its calls on GPU 1 answer the same error), so both pools are
// lost, each as soon as it copies; sessions of both go on in host memory.
TEST_F(SeveralGpus, AStickyErrorOfOneTakesTheOtherAlong) {
  const std::string fifo =
      std::filesystem::temp_directory_path() / ("kvs-sticky-" + std::to_string(getpid()));
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  setenv("LD_PRELOAD", (folder / "libsticky_error.so").c_str(), 1);
  setenv("KVS_STICKY_FIFO", fifo.c_str(), 1);
  Start({});
  unsetenv("LD_PRELOAD");
  unsetenv("KVS_STICKY_FIFO");
  auto ids = Ids(400, 5);
  const std::unique_ptr<Client> first = Attach(0), second = Attach(1);
  uint32_t held = 0;
  const kvs_sequence s = first->Open(ids, &held), t = second->Open(ids, &held);
  ASSERT_FALSE(first->Step(s, 0, ids).empty());
  ASSERT_FALSE(second->Step(t, 0, ids).empty());
  ASSERT_EQ(kvs_settle(first->session(), s), KVS_OK);
  ASSERT_EQ(kvs_settle(second->session(), t), KVS_OK);
  {
    std::FILE* const byte = std::fopen(fifo.c_str(), "w");
    ASSERT_NE(byte, nullptr);
    std::fputc('!', byte);
    std::fclose(byte);
    unlink(fifo.c_str());
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  for (int pool = 0; pool < kGpus; ++pool) {
    while (admin_->Status().pools(pool).failure().empty() &&
           std::chrono::steady_clock::now() < deadline) {
      (void)admin_->TryMoves(pool == 0 ? s : t);
    }
    EXPECT_NE(admin_->Status().pools(pool).failure(), "") << "GPU " << pool;
  }
  const v1::GetStatusResponse status = admin_->Status();
  std::printf("%s\n", status.health().c_str());
  EXPECT_TRUE(status.health().starts_with("degraded")) << status.health();
  EXPECT_EQ(status.pools(kGpus).failure(), "");  // the host's
  for (Client* const client : {first.get(), second.get()}) {
    Check(cudaSetDevice(client == first.get() ? 0 : 1), "cudaSetDevice");
    EXPECT_EQ(kvs_sequence_close(client->session(), client == first.get() ? s : t), KVS_OK);
    auto text = ids;
    const kvs_sequence again = client->Open(text, &held);
    ASSERT_NO_FATAL_FAILURE(
        ExpectAttention(client->Step(again, held, {text.begin() + held, text.end()}), text));
    for (int i = 0; i < 40; ++i) {
      text.push_back(i);
      const auto at = static_cast<uint32_t>(text.size()) - 1;
      ASSERT_NO_FATAL_FAILURE(ExpectAttention(client->Step(again, at, {i}), text)) << "step " << i;
    }
  }
}

}  // namespace
}  // namespace kvstrata::cuda
