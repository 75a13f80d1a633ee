// SPDX-License-Identifier: Apache-2.0
#include "client/linked/gpu_session.h"

#include <charconv>
#include <cstdlib>
#include <string>

namespace kvstrata::client {

namespace {

// An engine's own allocations come after ours, and what it has at the start is not known here: so a
// share of the whole.
constexpr uint64_t kHotCacheShare = 8;

Result<uint64_t> HotCacheBytes(const Gpu& gpu) {
  const char* const text = std::getenv("KVSTRATA_HOT_CACHE_BYTES");
  if (text != nullptr && *text != '\0') return ParseHotCacheBytes(text);
  cuda::DeviceInfo info;
  KVS_RETURN_IF_ERROR(CudaStatus(*gpu.ops, gpu.ops->describe_device(gpu.device, &info),
                                 "asking how much memory a GPU has"));
  return info.total_bytes / kHotCacheShare;
}

}  // namespace

Result<uint64_t> ParseHotCacheBytes(std::string_view text) {
  uint64_t bytes = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, bytes);
  if (error == std::errc() && stop == end) return bytes;
  return InvalidArgument("HOT_CACHE_BYTES",
                         "KVSTRATA_HOT_CACHE_BYTES is '" + std::string(text) +
                             "'; allowed: a number of bytes, 0 for no hot caches");
}

OnGpu::OnGpu(const Gpu& gpu) : ops_(gpu.ops) {
  int current = -1;
  if (ops_->device_in_use(&current) != 0 || current == gpu.device) return;
  if (ops_->use_device(gpu.device) == 0) former_ = current;
}

OnGpu::~OnGpu() {
  if (former_ >= 0) (void)ops_->use_device(former_);
}

Result<std::unique_ptr<GpuSession>> GpuSession::Make(const Gpu& gpu, shm::SessionHeader* header) {
  KVS_ASSIGN_OR_RETURN(const uint64_t hot_cache_bytes, HotCacheBytes(gpu));
  if (const int error = gpu.ops->register_host(header, sizeof(*header), false); error != 0) {
    return ResourceExhausted("MAP_FAILED", std::string("registering the session segment: ") +
                                               gpu.ops->error_text(error) + "; look at ulimit -l");
  }
  std::unique_ptr<GpuSession> made(new GpuSession(gpu, header, hot_cache_bytes));
  const OnGpu current(gpu);
  KVS_RETURN_IF_ERROR(made->not_finite_.Reserve(*gpu.ops, (kPaddingWord + 1) * sizeof(uint32_t)));
  return made;
}

GpuSession::~GpuSession() {
  {
    const OnGpu current(gpu_);
    MutexLock lock(mu_);
    workspaces_.clear();
  }
  // An error is of work long past: nothing can be done about it here.
  (void)gpu_.ops->unregister_host(header_);
}

CudaWorkspace* GpuSession::WorkspaceOf(uint64_t model, const Geometry& geometry,
                                       cuda::Stream stream) {
  MutexLock lock(mu_);
  std::unique_ptr<CudaWorkspace>& workspace = workspaces_[{model, stream}];
  if (workspace == nullptr) {
    workspace = std::make_unique<CudaWorkspace>(*gpu_.ops, geometry, 0, hot_cache_budget_,
                                                not_finite_.At<uint32_t>(0));
  }
  return workspace.get();
}

uint64_t GpuSession::Ended(int slot) {
  return holders_[static_cast<size_t>(slot)].ended.fetch_add(1, std::memory_order_relaxed) + 1;
}

void GpuSession::Entered(int slot) {
  Holders& h = holders_[static_cast<size_t>(slot)];
  h.done.store(h.ended.load(std::memory_order_relaxed), std::memory_order_release);
}

// A slot that was taken again before Entered is seen only delays the answer.
bool GpuSession::Done(int slot, uint64_t number) const {
  if (holders_[static_cast<size_t>(slot)].done.load(std::memory_order_acquire) >= number) {
    return true;
  }
  return header_->readers[slot].epoch.load(std::memory_order_acquire) == 0;
}

bool GpuSession::WroteNotFinite(uint32_t slot) const {
  uint32_t& word = not_finite_.At<uint32_t>(0)[slot];
  return std::atomic_ref<uint32_t>(word).load(std::memory_order_acquire) != 0;
}

void GpuSession::ForgetNotFinite(uint32_t slot) {
  uint32_t& word = not_finite_.At<uint32_t>(0)[slot];
  std::atomic_ref<uint32_t>(word).store(0, std::memory_order_relaxed);
}

}  // namespace kvstrata::client
