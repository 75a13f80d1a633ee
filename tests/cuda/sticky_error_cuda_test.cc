// SPDX-License-Identifier: Apache-2.0
// A sticky error in the daemon's context, a real one (sticky_error.cu): the device pool is lost,
// seen in its health, its sequences are told, and the same prompt is served from host memory.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>

#include "tests/cuda/small_client.h"
#include "tests/cuda/transport_engines.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/daemon_process.h"

namespace kvstrata::cuda {
namespace {

// Preloads only what is started while it lives.
class Preloaded {
 public:
  explicit Preloaded(const std::string& fifo) {
    const auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    setenv("LD_PRELOAD", (folder / "libsticky_error.so").c_str(), 1);
    setenv("KVS_STICKY_FIFO", fifo.c_str(), 1);
  }
  ~Preloaded() {
    unsetenv("LD_PRELOAD");
    unsetenv("KVS_STICKY_FIFO");
  }
};

class StickyError : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(mkfifo(fifo_.c_str(), 0600), 0);
    const Preloaded preloaded(fifo_);
    daemon_ = std::make_unique<testing::DaemonProcess>(
        std::vector<std::string>{"--set", "pool.device=cuda", "--set", "pool.device_bytes=256MiB"});
    admin_ = std::make_unique<testing::Operator>(daemon_->socket());
  }
  void TearDown() override { unlink(fifo_.c_str()); }

  Status Move(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const v1::MoveRequest&,
                                                      v1::MoveResponse*),
              uint64_t sequence) {
    const auto stub = v1::Admin::NewStub(
        grpc::CreateChannel("unix:" + daemon_->socket(), grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    v1::MoveRequest request;
    v1::MoveResponse response;
    request.set_sequence(sequence);
    return FromGrpc((stub.get()->*method)(&context, request, &response));
  }
  void RunTheKernel() {
    const int fd = open(fifo_.c_str(), O_WRONLY | O_CLOEXEC);
    EXPECT_EQ(write(fd, "!", 1), 1);
    close(fd);
  }
  // Runs it; then moves pages until a copy answers the error.
  Status Break(uint64_t sequence) {
    RunTheKernel();
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    for (;;) {
      for (const auto method : {&v1::Admin::Stub::Demote, &v1::Admin::Stub::Prefetch}) {
        const Status moved = Move(method, sequence);
        if (!moved.ok()) return moved;
      }
      if (std::chrono::steady_clock::now() > deadline) return OkStatus();
    }
  }

  const std::string fifo_ =
      std::filesystem::temp_directory_path() / ("kvs-sticky-" + std::to_string(getpid()));
  std::unique_ptr<testing::DaemonProcess> daemon_;
  std::unique_ptr<testing::Operator> admin_;
};

TEST_F(StickyError, LosesTheDevicePoolAndNothingElse) {
  std::vector<int32_t> prompt(200);
  for (size_t i = 0; i < prompt.size(); ++i) prompt[i] = static_cast<int32_t>(i);
  SmallClient client(daemon_->socket());
  uint32_t held = 0;
  const kvs_sequence first = client.Open(prompt, &held);
  const std::vector<float> want = client.Step(first, 0, prompt);
  ASSERT_FALSE(want.empty()) << kvs_error_message();
  // Only then the daemon knows of the step: before, there would be nothing to move.
  ASSERT_EQ(kvs_settle(client.session(), first), KVS_OK) << kvs_error_message();
  EXPECT_EQ(admin_->Demote(first).pages(), 12u);
  EXPECT_EQ(admin_->Prefetch(first).pages(), 12u);
  EXPECT_EQ(admin_->Status().health(), "serving");

  const Status broken = Break(first);
  EXPECT_EQ(broken.reason(), "DEVICE_FAILED") << broken.ToString();
  EXPECT_NE(broken.message().find("illegal"), std::string::npos) << broken.message();
  const v1::GetStatusResponse status = admin_->Status();
  EXPECT_TRUE(status.health().starts_with("degraded: the device pool is lost")) << status.health();
  std::printf("%s\n", status.health().c_str());
  EXPECT_NE(status.pools(0).failure(), "");
  EXPECT_EQ(status.pools(1).failure(), "");

  // Decoding ends where the table does.
  auto tokens = static_cast<uint32_t>(prompt.size());
  while (tokens < 400 && !client.Step(first, tokens, {7}).empty()) ++tokens;
  EXPECT_LT(tokens, 400u);
  EXPECT_STREQ(kvs_error_reason(), "DEVICE_FAILED") << kvs_error_message();
  EXPECT_EQ(kvs_sequence_close(client.session(), first), KVS_OK);

  const kvs_sequence again = client.Open(prompt, &held);
  std::vector<float> got = client.Step(again, held, {prompt.begin() + held, prompt.end()});
  ASSERT_EQ(got.size(), want.size()) << kvs_error_message();
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-2) << i;
  tokens = static_cast<uint32_t>(prompt.size());
  for (int i = 0; i < 100; ++i, ++tokens) {
    ASSERT_FALSE(client.Step(again, tokens, {i}).empty()) << kvs_error_message();
  }
  EXPECT_EQ(admin_->Audit(), "");
  EXPECT_EQ(daemon_->Stop(SIGTERM), 0);
}

// A step that the daemon runs itself finds the error first.
TEST_F(StickyError, IsFoundByARemoteStep) {
  RemoteEngine remote(daemon_->socket(), "remote");
  uint32_t held = 0;
  const uint64_t sequence = remote.Open("full", {1}, &held);
  std::vector<LayerAnswer> answers;
  remote.Step(sequence, 0, {1}, &answers);
  ASSERT_FALSE(HasFailure());
  EXPECT_EQ(admin_->Status().health(), "serving");

  RunTheKernel();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  Status failed;
  for (uint32_t at = 1; failed.ok() && std::chrono::steady_clock::now() < deadline; ++at) {
    const std::vector<int32_t> id = {7};
    const Result<uint64_t> step = remote.client().Begin(sequence, id);
    failed = step.status();
    if (!step.ok()) break;
    const v1::TensorRef k = remote.Tensor('k', 0, at, id);
    for (int layer = 0; failed.ok() && layer < TransportModel::kLayers; ++layer) {
      failed = remote.client().Append(*step, layer, k, k);
    }
    const Status ended = remote.client().End(*step, !failed.ok());
    if (failed.ok()) failed = ended;
  }
  EXPECT_EQ(failed.reason(), "DEVICE_FAILED") << failed.ToString();
  EXPECT_TRUE(admin_->Status().health().starts_with("degraded: the device pool is lost"))
      << admin_->Status().health();
  EXPECT_TRUE(remote.client().Close(sequence).ok());
  // A session that opens now computes nowhere.
  RemoteEngine later(daemon_->socket(), "later");
  const uint64_t other = later.Open("full", {2}, &held);
  const std::vector<int32_t> id = {2};
  EXPECT_EQ(later.client().Begin(other, id).status().reason(), "DEVICE_FAILED");
  EXPECT_EQ(admin_->Audit(), "");
  EXPECT_EQ(daemon_->Stop(SIGTERM), 0);
}

}  // namespace
}  // namespace kvstrata::cuda
