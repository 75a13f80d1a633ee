// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "kernels/step/finite_rows.h"
#include "kernels/step/gpu/cuda_inspect.h"
#include "kernels/step/gpu/cuda_shadow.h"
#include "kernels/step/gpu/cuda_step.h"
#include "server/rpc/steps/step_runner.h"

namespace kvstrata {
namespace {

constexpr int kGpuStepsOpen = 4;  // steps of a session, at a time

using Clock = std::chrono::steady_clock;

constexpr uint64_t kAlign = 256;                    // alignment of tensors in a buffer
constexpr std::chrono::microseconds kAskAgain{50};  // after as long a time of asking all the while

uint64_t Padded(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// What a step has of the GPU besides its pages. Its tensors lie at the same places in every step of
// a shape, so that calls that come again are launched as graphs
// (kernels/step/gpu/memory/repeated_call.h).
class Room {
 public:
  // word: what `not_finite` becomes.
  Room(const cuda::CudaOps& ops, const Geometry& of, std::unique_ptr<PageLockedBuffer> word)
      : geometry(of),
        not_finite(std::move(word)),
        workspace(ops, of, 0, nullptr, not_finite->At<uint32_t>(0)),
        ops_(ops) {}

  // REQUIRES: nothing is under way.
  Status Reserve(uint64_t bytes) {
    KVS_RETURN_IF_ERROR(device_.Reserve(ops_, bytes));
    return page_locked_.Reserve(ops_, bytes);
  }
  std::byte* page_locked(uint64_t at) const { return page_locked_.At<std::byte>(at); }
  std::byte* device(uint64_t at) const { return device_.as<std::byte>() + at; }

  // What the workspace is given. REQUIRES: nothing is under way.
  std::atomic_ref<uint32_t> not_finite_word() const {
    return std::atomic_ref<uint32_t>(*not_finite->At<uint32_t>(0));
  }
  const Geometry geometry;
  const std::unique_ptr<PageLockedBuffer> not_finite;
  CudaWorkspace workspace;
  bool taken = false;

 private:
  const cuda::CudaOps& ops_;
  DeviceBuffer device_;
  PageLockedBuffer page_locked_;
};

class GpuSteps final : public StepDevice, private StepGpu {
 public:
  GpuSteps(const cuda::CudaOps* ops, int gpu, Store* store, uint32_t device, Executor* executor,
           std::chrono::milliseconds patience)
      : StepDevice("cuda", this),
        ops_(*ops),
        gpu_(gpu),
        store_(store),
        device_(device),
        executor_(executor),
        patience_(patience) {}
  ~GpuSteps() override {
    Enter();
    Close();
  }

  // What fails here fails in the next call that needs it.
  void Enter() override { (void)ops_.use_device(gpu_); }
  void Close() override {
    rooms_.clear();
    if (done_ != nullptr) (void)ops_.destroy_event(std::exchange(done_, nullptr));
    if (stream_ != nullptr) (void)ops_.destroy_stream(std::exchange(stream_, nullptr));
  }

  Result<std::unique_ptr<StepRunner>> Begin(std::vector<StepMember> members) override;
  Status CatchUp(SequenceState* state, const SequenceView&, bool prefill_done) override {
    return prefill_done ? state->ClosePrompt() : OkStatus();
  }
  Result<InspectArray> Inspect(const SequenceState& state, const SequenceView& view, size_t blocks,
                               std::string_view name) override {
    const DeviceRead read = [this](std::byte* to, const std::byte* from, uint64_t bytes) {
      return Read(to, from, bytes);
    };
    return InspectFromGpu(state, view, blocks, read, *executor_, name);
  }
  Status Reach(uint32_t arena) override {
    return store_->devices().ReachFromDevice(arena, device_);
  }
  Status Read(std::byte* to, const std::byte* from, uint64_t bytes) override {
    return Check(ops_.copy_2d(gpu_, to, from, {bytes, bytes, 1}), "reading from the GPU");
  }

  const cuda::CudaOps& ops() const { return ops_; }
  cuda::Stream stream() const { return stream_; }
  // These two tell the store if the device is lost, and say so.
  Status Check(int code, const char* what) {
    Status status = CudaStatus(ops_, code, what);
    return code == 0 || !ops_.is_sticky(code) ? status : Lost(status);
  }
  Status Told(Status status);
  // Waits for all that was enqueued. GPU_STUCK.
  Status Await();
  // As Await, for a step that is over: without an answer the device counts as lost.
  void AwaitForGood();

 private:
  Status Lost(const Status& why);
  Status MakeStream();
  Result<Room*> TakeRoom(const Geometry& geometry);

  const cuda::CudaOps& ops_;
  const int gpu_;
  Store* const store_;
  const uint32_t device_;  // in the store
  Executor* const executor_;
  const std::chrono::milliseconds patience_;
  cuda::Stream stream_ = nullptr;
  cuda::Event done_ = nullptr;
  std::vector<std::unique_ptr<Room>> rooms_;
};

class GpuStep final : public StepRunner {
 public:
  GpuStep(GpuSteps* device, Room* room, std::unique_ptr<CudaStep> step)
      : StepRunner(*step), device_(*device), room_(*room), step_(std::move(step)) {
    room_.taken = true;
  }
  ~GpuStep() override {
    step_.reset();
    device_.AwaitForGood();
    room_.taken = false;
  }

  Status Append(int layer, const Rows& k, const Rows& v) override {
    const int32_t heads = room_.geometry.kv_heads;
    const uint64_t k_bytes = BytesOf(heads, k.dtype), v_bytes = BytesOf(heads, v.dtype);
    KVS_RETURN_IF_ERROR(Prepare(Padded(k_bytes) + v_bytes));
    KVS_ASSIGN_OR_RETURN(const Rows keys, Upload(k, k_bytes, 0));
    KVS_ASSIGN_OR_RETURN(const Rows values, Upload(v, v_bytes, Padded(k_bytes)));
    room_.not_finite_word().store(0, std::memory_order_relaxed);
    KVS_RETURN_IF_ERROR(device_.Told(step_->Append(layer, keys, values)));
    KVS_RETURN_IF_ERROR(device_.Await());
    if (room_.not_finite_word().load(std::memory_order_acquire) == 0) return OkStatus();
    return CheckFinite(*step_, k, v);
  }
  Status Select(int layer, const Rows& q) override {
    const uint64_t bytes = BytesOf(room_.geometry.query_heads, q.dtype);
    KVS_RETURN_IF_ERROR(Prepare(bytes));
    KVS_ASSIGN_OR_RETURN(const Rows queries, Upload(q, bytes, 0));
    KVS_RETURN_IF_ERROR(device_.Told(step_->Select(layer, queries)));
    return device_.Await();
  }
  Status Attend(int layer, const Rows& q, const MutableRows& out, float* lse) override {
    const int32_t heads = room_.geometry.query_heads;
    const uint64_t q_bytes = BytesOf(heads, q.dtype), out_bytes = BytesOf(heads, out.dtype);
    const uint64_t lse_bytes =
        lse == nullptr ? 0
                       : sizeof(float) * static_cast<uint64_t>(int64_t{step_->tokens()} * heads);
    const uint64_t out_at = Padded(q_bytes), lse_at = out_at + Padded(out_bytes);
    KVS_RETURN_IF_ERROR(Prepare(lse_at + lse_bytes));
    KVS_ASSIGN_OR_RETURN(const Rows queries, Upload(q, q_bytes, 0));
    const MutableRows rows{room_.device(out_at), out.token_stride, out.head_stride, out.dtype};
    float* const sums = lse == nullptr ? nullptr : reinterpret_cast<float*>(room_.device(lse_at));
    KVS_RETURN_IF_ERROR(device_.Told(step_->Attend(layer, queries, rows, sums)));
    // Outputs and sums in one piece.
    KVS_RETURN_IF_ERROR(
        device_.Check(device_.ops().copy_async(room_.page_locked(out_at), room_.device(out_at),
                                               lse_at - out_at + lse_bytes, device_.stream()),
                      "copying a tensor"));
    KVS_RETURN_IF_ERROR(device_.Await());
    std::memcpy(out.data, room_.page_locked(out_at), out_bytes);
    if (lse != nullptr) std::memcpy(lse, room_.page_locked(lse_at), lse_bytes);
    return OkStatus();
  }
  Result<Chosen> ChosenOf(int member, bool with_cost) override {
    read_.resize(static_cast<size_t>(step_->members()));
    std::optional<Selection>& selection = read_[static_cast<size_t>(member)];
    if (!selection) {
      Result<Selection> read = step_->ReadSelection(member);
      if (!read.ok()) return device_.Told(read.status());
      selection = std::move(read).value();
    }
    if (!with_cost) return Chosen{&*selection, {}};
    const Result<StepCost> cost = step_->ReadCost(member);
    if (!cost.ok()) return device_.Told(cost.status());
    return Chosen{&*selection, *cost};
  }
  Status End() override {
    KVS_RETURN_IF_ERROR(device_.Told(step_->End(device_.stream())));
    return device_.Await();
  }
  Result<ReadSample> Shadow(int member) override {
    shadows_.resize(static_cast<size_t>(step_->members()));
    Result<std::unique_ptr<CudaShadow>> shadow = CudaShadow::Make(device_.ops(), room_.geometry);
    if (!shadow.ok()) return device_.Told(shadow.status());
    std::unique_ptr<CudaShadow>& kept = shadows_[static_cast<size_t>(member)];
    kept = std::move(shadow).value();
    step_->Shadow(member, kept.get());
    return ReadSample([measured = kept.get()]() -> Result<ShadowSample> {
      if (!measured->lost()) return measured->Read();
      return Internal("RECALL_LOST", "measuring a step on the GPU failed; its answers are right");
    });
  }

 private:
  // The size of all new tokens' rows; rows of host memory are dense.
  uint64_t BytesOf(int32_t heads, DType dtype) const {
    const int32_t dim = room_.geometry.head_dim;
    return static_cast<uint64_t>(int64_t{step_->tokens()} * heads * dim * SizeOf(dtype));
  }
  // Puts rows at `at` of the room's memory, and has them copied.
  Result<Rows> Upload(const Rows& rows, uint64_t bytes, uint64_t at) {
    std::memcpy(room_.page_locked(at), rows.data, bytes);
    KVS_RETURN_IF_ERROR(device_.Check(
        device_.ops().copy_async(room_.device(at), room_.page_locked(at), bytes, device_.stream()),
        "copying a tensor"));
    return Rows{room_.device(at), rows.token_stride, rows.head_stride, rows.dtype};
  }
  // Nothing is under way, and the room has so many bytes.
  Status Prepare(uint64_t bytes) {
    KVS_RETURN_IF_ERROR(device_.Await());
    read_.clear();
    return device_.Told(room_.Reserve(bytes));
  }

  GpuSteps& device_;
  Room& room_;
  std::unique_ptr<CudaStep> step_;
  std::vector<std::optional<Selection>> read_;  // selections of the last layer, by member
  std::vector<std::unique_ptr<CudaShadow>> shadows_;
};

// --- the session's ------------------------------------------------------------------------------

Status GpuSteps::Lost(const Status& why) {
  Status lost =
      Unavailable("DEVICE_FAILED",
                  "the GPU answers no call of this daemon any more: " + std::string(why.message()) +
                      "; look at dmesg and nvidia-smi, then restart kvstratad");
  store_->devices().LoseDevice(device_, lost);
  return lost;
}

// For an error whose code is not here: a lost device answers it to everything.
Status GpuSteps::Told(Status status) {
  if (status.ok()) return status;
  bool done = false;
  const int code = ops_.is_event_done(done_, &done);
  return code == 0 || !ops_.is_sticky(code) ? status : Lost(status);
}

Status GpuSteps::Await() {
  KVS_RETURN_IF_ERROR(Check(ops_.record_event(done_, stream_), "marking work on the GPU"));
  const Clock::time_point begin = Clock::now();
  for (;;) {
    bool done = false;
    KVS_RETURN_IF_ERROR(Check(ops_.is_event_done(done_, &done), "waiting for the GPU"));
    if (done) return OkStatus();
    const auto waited = Clock::now() - begin;
    if (waited >= patience_) break;
    // Most calls are shorter; then a work thread is not to keep a core from the GPU's driver.
    if (waited > kAskAgain) std::this_thread::sleep_for(kAskAgain);
  }
  return {Code::kDeadlineExceeded, "GPU_STUCK",
          "the GPU has not finished this step's work for " + std::to_string(patience_.count()) +
              " ms; make the call again, or end the step; look at nvidia-smi"};
}

void GpuSteps::AwaitForGood() {
  const Status done = Await();
  if (done.reason() != "GPU_STUCK") return;  // after an error nothing is under way any more
  store_->devices().LoseDevice(
      device_,
      Unavailable("DEVICE_FAILED", "the GPU has not finished a step that is over: " +
                                       std::string(done.message()) + ", then restart kvstratad"));
}

// Not when a session opens: gRPC's own threads must not wait for the driver.
Status GpuSteps::MakeStream() {
  if (stream_ != nullptr) return OkStatus();
  if (done_ == nullptr) KVS_RETURN_IF_ERROR(Check(ops_.create_event(&done_), "making an event"));
  return Check(ops_.create_stream(&stream_), "making a stream");
}

Result<Room*> GpuSteps::TakeRoom(const Geometry& geometry) {
  std::unique_ptr<Room>* other = nullptr;
  for (std::unique_ptr<Room>& room : rooms_) {
    if (room->taken) continue;
    if (room->geometry == geometry) return room.get();
    other = &room;
  }
  if (rooms_.size() < static_cast<size_t>(kGpuStepsOpen)) other = &rooms_.emplace_back();
  if (other == nullptr) {
    return ResourceExhausted("STEPS_OPEN", std::to_string(kGpuStepsOpen) +
                                               " steps of this session are open on the GPU; end "
                                               "one");
  }
  auto not_finite = std::make_unique<PageLockedBuffer>();
  KVS_RETURN_IF_ERROR(Told(not_finite->Reserve(ops_, sizeof(uint32_t))));
  *other = std::make_unique<Room>(ops_, geometry, std::move(not_finite));
  return other->get();
}

Result<std::unique_ptr<StepRunner>> GpuSteps::Begin(std::vector<StepMember> members) {
  KVS_RETURN_IF_ERROR(MakeStream());
  KVS_ASSIGN_OR_RETURN(Room * room, TakeRoom(members.front().state->geometry()));
  Result<std::unique_ptr<CudaStep>> step =
      CudaStep::Begin(std::move(members), &room->workspace, stream_, {});
  if (!step.ok()) return Told(step.status());
  return std::unique_ptr<StepRunner>(
      std::make_unique<GpuStep>(this, room, std::move(step).value()));
}

// --- a step's -----------------------------------------------------------------------------------

}  // namespace

std::unique_ptr<StepDevice> NewGpuSteps(const cuda::CudaOps* ops, int gpu, Store* store,
                                        uint32_t device, Executor* executor,
                                        std::chrono::milliseconds patience) {
  return std::make_unique<GpuSteps>(ops, gpu, store, device, executor, patience);
}

}  // namespace kvstrata
