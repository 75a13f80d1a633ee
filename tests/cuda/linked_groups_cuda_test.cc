// SPDX-License-Identifier: Apache-2.0
// Sequences on a GPU that open on what is packed of their prompt, in memory or on disk, without its
// raw rows, and on upper planes alone while a disk brings the others (linked_cuda_fixture.h).

#include "tests/cuda/linked_cuda_fixture.h"
#include "tests/e2e/operator.h"
#include "tests/fakes/scratch_dir.h"

namespace kvstrata::cuda {
namespace {

// Everything by all planes: off by the rounding of eight bits.
constexpr char kFine[] = "strata{recent = 4096, min_tokens = 0, keep_raw = \"no\"}";
constexpr char kFineOnUpper[] =
    "strata{recent = 4096, min_tokens = 0, keep_raw = \"no\", open_on = \"upper\"}";
constexpr char kHostOnUpper[] =
    "strata{lower = \"host\", hot = 32, fine_above = 0.001, skip_below = 0, min_tokens = 0, "
    "keep_raw = \"no\", open_on = \"upper\"}";
constexpr uint32_t kPrompt = 304, kHeld = 288;  // 256 are packed
constexpr std::chrono::seconds kPatience{60};

class LinkedCudaGroups : public LinkedCuda {
 protected:
  LinkedCudaGroups() { tolerance_ = 2e-2; }

  // Opens the prompt, which is held, and has the last raw pages alone.
  void OpenHeld(const char* plan, LinkedSequence* s, const testing::DaemonProcess& daemon) {
    uint32_t held = 0;
    ASSERT_NO_FATAL_FAILURE(Open(plan, Ids(kPrompt), s, &held));
    ASSERT_EQ(held, kHeld);
    testing::Operator admin(daemon.socket());
    EXPECT_EQ(admin.Show(s->handle).sequence().absent_pages(), 256u / kPage);
  }
};

TEST_F(LinkedCudaGroups, ASecondSequenceNeedsNoRawRows) {
  LinkedSequence first, second, child;
  ASSERT_NO_FATAL_FAILURE(Open(kFine, Ids(kPrompt), &first));
  ASSERT_NO_FATAL_FAILURE(Prefill(&first, Ids(kPrompt), true));
  ASSERT_KVS(kvs_settle(session_, first.handle));
  ASSERT_KVS(kvs_sequence_close(session_, first.handle));
  ASSERT_NO_FATAL_FAILURE(OpenHeld(kFine, &second, daemon_));
  ASSERT_KVS(kvs_sequence_fork(session_, second.handle, &child.handle));
  child.ids = second.ids;
  for (LinkedSequence* const s : {&second, &child}) {
    ASSERT_NO_FATAL_FAILURE(Prefill(s, Ids(kPrompt), s == &second));
    ASSERT_NO_FATAL_FAILURE(Decode(s, 50, true));
    ASSERT_KVS(kvs_settle(session_, s->handle));
    ASSERT_NO_FATAL_FAILURE(Decode(s, 5, false));
  }
  EXPECT_EQ(testing::Operator(daemon_.socket()).Audit(), "");
}

// A daemon on a GPU with a disk, killed and started again.
class LinkedCudaDisk : public LinkedCudaGroups, public ::testing::WithParamInterface<const char*> {
 protected:
  void Restart() {
    kvs_detach(std::exchange(session_, nullptr));
    if (disk_daemon_ != nullptr) disk_daemon_->Stop(SIGKILL);
    disk_daemon_.reset();
    std::vector<std::string> flags;
    for (const std::string& setting :
         {std::string("pool.device=cuda"), std::string("pool.device_bytes=256MiB"),
          std::string("pool.host_bytes=16MiB"), "disk.path=" + folder_ / "tier",
          std::string("disk.budget_bytes=64MiB"), std::string("disk.segment_bytes=4MiB"),
          std::string("disk.load_timeout=60s")}) {
      flags.insert(flags.end(), {"--set", setting});
    }
    disk_daemon_ = std::make_unique<testing::DaemonProcess>(flags);
    ASSERT_NO_FATAL_FAILURE(Attach(*disk_daemon_));
  }
  void AwaitWrites() {
    testing::Operator admin(disk_daemon_->socket());
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (admin.Status().disks(0).waiting() != 0) {
      ASSERT_LT(std::chrono::steady_clock::now(), end);
      std::this_thread::yield();
    }
  }
  // A step that is held to nothing: what has not come is not attended finely.
  void StepUnchecked(LinkedSequence* s, const std::vector<int32_t>& ids) {
    LinkedTensors tensors(static_cast<int>(ids.size()), true);
    kvs_step* step = nullptr;
    ASSERT_NO_FATAL_FAILURE(Begin({s}, {ids}, &tensors, &step));
    for (int layer = 0; layer < kLayers; ++layer) {
      ASSERT_NO_FATAL_FAILURE(Layer(step, layer, &tensors));
    }
    ASSERT_KVS(kvs_step_end(step, stream_));
  }
  // The rest of the prompt and five tokens more: checked where all has come.
  void GoOn(LinkedSequence* s, bool all_here) {
    if (all_here) {
      ASSERT_KVS(kvs_settle(session_, s->handle));
      ASSERT_NO_FATAL_FAILURE(Prefill(s, Ids(kPrompt), true));
      return Decode(s, 5, true);
    }
    const std::vector<int32_t> ids = Ids(kPrompt - kHeld, kHeld);
    ASSERT_NO_FATAL_FAILURE(StepUnchecked(s, ids));
    ASSERT_KVS(kvs_prefill_done(session_, s->handle));
    for (int i = 0; i < 5; ++i) ASSERT_NO_FATAL_FAILURE(StepUnchecked(s, {1000 + i}));
    ASSERT_KVS(kvs_settle(session_, s->handle));
  }
  // Outputs of eight tokens more, all of which are checked.
  std::vector<std::vector<float>> Answers(LinkedSequence* s) {
    std::vector<std::vector<float>> answers;
    LinkedTensors tensors(1, true);
    for (int i = 0; i < 8; ++i) {
      Step({s}, {{2000 + i}}, &tensors);
      for (int layer = 0; layer < kLayers; ++layer) answers.push_back(tensors.Output(layer, 0));
    }
    return answers;
  }

  const ScratchDir folder_;
  std::unique_ptr<testing::DaemonProcess> disk_daemon_;
};

INSTANTIATE_TEST_SUITE_P(, LinkedCudaDisk, ::testing::Values(kFine, kFineOnUpper, kHostOnUpper));

// Whatever of it had come when its first steps ran, once all has they are those of one that waited.
TEST_P(LinkedCudaDisk, OnceAllHasComeAnswersAreThoseOfASequenceThatWaited) {
  ASSERT_NO_FATAL_FAILURE(Restart());
  LinkedSequence written;
  ASSERT_NO_FATAL_FAILURE(Open(GetParam(), Ids(kPrompt), &written));
  ASSERT_NO_FATAL_FAILURE(Prefill(&written, Ids(kPrompt), true));
  ASSERT_KVS(kvs_settle(session_, written.handle));
  ASSERT_NO_FATAL_FAILURE(AwaitWrites());
  std::vector<std::vector<float>> want;
  for (const bool waits : {true, false, false}) {
    SCOPED_TRACE(waits);
    ASSERT_NO_FATAL_FAILURE(Restart());
    LinkedSequence s;
    ASSERT_NO_FATAL_FAILURE(OpenHeld(GetParam(), &s, *disk_daemon_));
    ASSERT_NO_FATAL_FAILURE(GoOn(&s, waits));
    testing::Operator admin(disk_daemon_->socket());
    EXPECT_EQ(admin.Show(s.handle).sequence().arriving(), "");
    EXPECT_EQ(admin.Status().artefact_hits(), 1u);
    const auto answers = Answers(&s);
    if (waits) want = answers;
    EXPECT_EQ(answers, want);
    EXPECT_EQ(admin.Audit(), "");
  }
}

}  // namespace
}  // namespace kvstrata::cuda
