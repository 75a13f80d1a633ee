// SPDX-License-Identifier: Apache-2.0
// GpuSession: what a session with a GPU keeps beside its sequences: a workspace for each stream of
// steps, which of the steps that ended here the GPU has finished, and of which sequences it wrote
// rows that are not finite.
//
// kvs_step_end returns while the GPU still works. The step's reader slot is left by the GPU itself,
// and what the step committed is told to the daemon only afterwards: nobody may copy, share or read
// a page whose rows are not there yet.
//
// Threads: any; one short lock. Destruction waits for the GPU.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <string_view>

#include "base/sync.h"
#include "client/linked/page_map.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/step/gpu/frame/cuda_workspace.h"
#include "proto/shm_layout.h"

namespace kvstrata::client {

// The value of KVSTRATA_HOT_CACHE_BYTES. INVALID_ARGUMENT HOT_CACHE_BYTES.
Result<uint64_t> ParseHotCacheBytes(std::string_view text);

// While it lives, the session's GPU is the calling thread's current device: an engine with several
// may have made another one current. 0.1 us.
class OnGpu {
 public:
  explicit OnGpu(const Gpu& gpu);
  ~OnGpu();
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

 private:
  const cuda::CudaOps* const ops_;
  int former_ = -1;  // -1: nothing has to be undone
};

class GpuSession {
 public:
  // Registers the session segment's reader slots, so that the GPU can write them. Hot caches take
  // at most KVSTRATA_HOT_CACHE_BYTES of the GPU together, by default an eighth of its memory.
  // RESOURCE_EXHAUSTED MAP_FAILED, GPU_MEMORY; INVALID_ARGUMENT HOT_CACHE_BYTES.
  static Result<std::unique_ptr<GpuSession>> Make(const Gpu& gpu, shm::SessionHeader* header);
  ~GpuSession();

  const Gpu& gpu() const { return gpu_; }
  // The workspace of the steps of a model on a stream: one at a time. Lives as long as this.
  CudaWorkspace* WorkspaceOf(uint64_t model, const Geometry& geometry, cuda::Stream stream);

  // Where the GPU writes 0 when it is done with the step that holds a reader slot.
  uint64_t* ExitOf(int slot) { return reinterpret_cast<uint64_t*>(&header_->readers[slot].epoch); }
  // A step that holds `slot` ended; the number to ask Done for.
  uint64_t Ended(int slot);
  // The slot was free and is held by another step now: whoever held it before is done.
  void Entered(int slot);
  bool Done(int slot, uint64_t number) const;

  // Where the GPU notes that a step wrote a NaN or an infinity: a word for each slot of a sequence,
  // and one for padding, which nobody reads.
  static constexpr int32_t kPaddingWord = shm::kMaxSequences;
  // Whether the slot's sequence has such a row. True from the end of the step on that wrote it, if
  // not before: steps behind it may be under way.
  bool WroteNotFinite(uint32_t slot) const;
  // A sequence got the slot.
  void ForgetNotFinite(uint32_t slot);

 private:
  GpuSession(const Gpu& gpu, shm::SessionHeader* header, uint64_t hot_cache_bytes)
      : gpu_(gpu),
        header_(header),
        hot_cache_budget_(std::make_shared<HotCacheBudget>(hot_cache_bytes)) {}

  // Steps that held a slot: the last one that ended, the last one known to be done.
  struct Holders {
    std::atomic<uint64_t> ended{0}, done{0};
  };

  const Gpu gpu_;
  shm::SessionHeader* const header_;
  const std::shared_ptr<HotCacheBudget> hot_cache_budget_;
  PageLockedBuffer not_finite_;
  std::array<Holders, shm::kMaxReaders> holders_;
  Mutex mu_;
  std::map<std::pair<uint64_t, cuda::Stream>, std::unique_ptr<CudaWorkspace>> workspaces_
      KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata::client
