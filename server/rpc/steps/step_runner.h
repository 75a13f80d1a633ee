// SPDX-License-Identifier: Apache-2.0
// Where a remote session computes: with the CPU's ops on pages of host memory (cpu_steps.cc), or on
// the GPU that has the daemon's pages (gpu_steps.cc).
//
// Ownership: a session owns its StepDevice, a step its StepRunner, which goes first. Threads: one
// call at a time for a device and its runners (the session's strand), on work threads: calls wait
// for what they ask for, at most as long as a method says.
// Errors on a GPU, besides those that a method names: CUDA_ERROR, GPU_MEMORY; DEADLINE_EXCEEDED
// GPU_STUCK, the call may be made again; UNAVAILABLE DEVICE_FAILED, the GPU is lost to the daemon.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/backend/backend.h"
#include "kernels/cpu/executor.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/step/shadow_attention.h"
#include "kernels/step/step.h"
#include "server/store/store.h"

namespace kvstrata {

// A step (kernels/step/step.h) under way. Destroying it without End drops the new tokens, and
// returns when nothing reads or writes the members' pages any more.
class StepRunner {
 public:
  // What the last layer chose for a member; valid until the next.
  struct Chosen {
    const Selection* selection = nullptr;
    StepCost cost;  // where it was attended, and was asked for
  };
  // What was measured of a member. REQUIRES: ended; the step is still there.
  using ReadSample = std::function<Result<ShadowSample>()>;

  explicit StepRunner(const StepBatch& batch) : batch_(batch) {}
  virtual ~StepRunner() = default;
  const StepBatch& batch() const { return batch_; }

  // As Step's, on dense rows of host memory; done when they return.
  virtual Status Append(int layer, const Rows& k, const Rows& v) = 0;
  virtual Status Select(int layer, const Rows& q) = 0;
  virtual Status Attend(int layer, const Rows& q, const MutableRows& out, float* lse) = 0;
  virtual Result<Chosen> ChosenOf(int member, bool with_cost) = 0;
  // The states advance, all rows are in their pages. An error: the states are not to be used again.
  virtual Status End() = 0;

  // Measures what each Attend of the member loses. REQUIRES: it decodes; before its first Attend.
  virtual Result<ReadSample> Shadow(int member) = 0;

 private:
  const StepBatch& batch_;
};

// What only a device has that is a GPU's.
class StepGpu {
 public:
  virtual ~StepGpu() = default;
  // At the start of every task of the session, on the thread that runs it.
  virtual void Enter() = 0;
  // Frees all memory; nothing but Enter is called after it. REQUIRES: no step is open.
  virtual void Close() = 0;
  // Lets kernels follow addresses of an arena of the host tier; done when it returns.
  virtual Status Reach(uint32_t arena) = 0;
};

class StepDevice {
 public:
  // `gpu`: its own; null on a CPU.
  StepDevice(std::string_view backend, StepGpu* gpu) : backend_(backend), gpu_(gpu) {}
  virtual ~StepDevice() = default;
  std::string_view backend() const { return backend_; }
  StepGpu* gpu() const { return gpu_; }

  // REQUIRES: as StepBatch; states are refreshed from their views, which stay. Also STEPS_OPEN.
  virtual Result<std::unique_ptr<StepRunner>> Begin(std::vector<StepMember> members) = 0;
  // As SequenceState's PrefillDone, where the prompt is complete, else as its CatchUp; work may be
  // left to the next Begin. REQUIRES, of Inspect, too: refreshed from `view`, which has `blocks`
  // index blocks.
  virtual Status CatchUp(SequenceState* state, const SequenceView& view, bool prefill_done) = 0;
  virtual Result<InspectArray> Inspect(const SequenceState& state, const SequenceView& view,
                                       size_t blocks, std::string_view name) = 0;
  // Copies bytes of the device tier to the host.
  virtual Status Read(std::byte* to, const std::byte* from, uint64_t bytes) = 0;

 private:
  const std::string_view backend_;
  StepGpu* const gpu_;
};

// The StepDevice of pages in host memory: ops of a CPU backend, run by an executor. Begin and
// Attend cost what the ops do. Borrows both.
std::unique_ptr<StepDevice> NewCpuSteps(const Backend* backend, Executor* executor);

// The StepDevice of pages in GPU number `gpu` of this process, the store's `device`: CudaStep
// (kernels/step/gpu/cuda_step.h) on a stream that is the session's own and has low priority.
//
// Tensors go through page-locked memory to the GPU and back; every call waits for what it enqueued,
// at most `patience`, by asking, never in the driver: GPU_STUCK after that, and the next call waits
// for it first. A step that is dropped waits too, because its pages may go to somebody else; a GPU
// that is not done with it after `patience` is as good as lost, and its pool with it.
// Memory of the GPU, outside of the pool: a CudaWorkspace for each step that is open at a time, and
// two copies of a layer's tensors. Borrows all. Makes nothing before the first Begin; `executor`
// inspects.
std::unique_ptr<StepDevice> NewGpuSteps(const cuda::CudaOps* ops, int gpu, Store* store,
                                        uint32_t device, Executor* executor,
                                        std::chrono::milliseconds patience);

}  // namespace kvstrata
