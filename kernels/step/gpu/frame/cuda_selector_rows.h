// SPDX-License-Identifier: Apache-2.0
// What a GPU has of each selector and codec: a row each, in the file of its GPU half, and the
// tables of them, which are made from kernels/plans/plan_list.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>

#include "base/status.h"
#include "kernels/select/selector_rows.h"
#include "kernels/step/gpu/frame/cuda_selector.h"
#include "kernels/step/gpu/frame/cuda_serves.h"

namespace kvstrata {

class CudaCodec;       // cuda_codec.h
class HotCacheBudget;  // hot_cache_budget.h
class StepMemory;      // step_memory.h

// What codecs of a workspace are made of.
struct CudaCodecSource {
  StepMemory* memory;                                // outlives them
  std::shared_ptr<HotCacheBudget> hot_cache_budget;  // null: as much as the GPU has
};

// What selectors of a workspace are made of, which outlives them.
struct CudaSelectorSource {
  StepMemory* memory;
  std::span<const std::unique_ptr<CudaCodec>> codecs;  // by CodecKind

  // T: the class of the codec that the selector is written for.
  template <typename T>
  T* CodecOf(CodecKind kind) const {
    return static_cast<T*>(codecs[static_cast<size_t>(kind)].get());
  }
};

// The codecs whose rows a selector's ops choose from there, a bit each.
constexpr uint8_t OverCodec(CodecKind codec) {
  return static_cast<uint8_t>(1u << static_cast<unsigned>(codec));
}

struct CudaSelectorRow {
  uint8_t codecs;
  std::string_view missing;  // over its other codec, in nearly all cases an op
  // What of its options the ops lack: UNIMPLEMENTED CUDA_PLAN.
  Status (*serves)(const Plan& plan);
  // Null: everything is attended.
  std::unique_ptr<CudaSelector> (*make)(const CudaSelectorSource& from);
};

// By what MakeCudaSelector's T is made of: nothing, or the memory of steps.
template <typename T>
std::unique_ptr<CudaSelector> MakeCudaSelector(const CudaSelectorSource& from) {
  if constexpr (std::is_default_constructible_v<T>) {
    return std::make_unique<T>();
  } else {
    return std::make_unique<T>(from.memory);
  }
}

std::unique_ptr<CudaSelector> NewCudaFixed(const FixedSelection& fixed, StepMemory* memory);
template <const FixedSelection& kFixed>
std::unique_ptr<CudaSelector> MakeCudaFixed(const CudaSelectorSource& from) {
  return NewCudaFixed(kFixed, from.memory);
}

inline Status ServesAll(const Plan&) { return OkStatus(); }

// The GPU's half of a codec.
struct CudaCodecRow {
  // What of its options the ops lack: UNIMPLEMENTED CUDA_PLAN.
  Status (*serves)(const Plan& plan);
  std::unique_ptr<CudaCodec> (*make)(const CudaCodecSource& from);
};
#define KVS_CUDA_CODEC(Kind, name, built) extern const CudaCodecRow kCuda##Kind;
#define KVS_CUDA_CODEC_ROW(Kind, name, built) KVS_OF_##built(&kCuda##Kind),
KVS_CODECS(KVS_CUDA_CODEC)
// By CodecKind; null: pages are attended as they are, or it is not in this build.
inline constexpr const CudaCodecRow* kCudaCodecRows[] = {nullptr, KVS_CODECS(KVS_CUDA_CODEC_ROW)};

inline constexpr uint8_t kOverRaw = OverCodec(CodecKind::kRaw);
inline constexpr uint8_t kOverLowRank = OverCodec(CodecKind::kLowRank);
inline constexpr uint8_t kOverPacked = OverCodec(CodecKind::kPacked);
inline constexpr uint8_t kOverPlanes = OverCodec(CodecKind::kPlanes);

inline constexpr CudaSelectorRow kCudaFull = {kOverRaw | kOverPacked, "", ServesAll, nullptr};
#define KVS_CUDA_SELECTOR(preset, Kind, name, built) extern const CudaSelectorRow kCuda##Kind;
#define KVS_CUDA_SELECTOR_ROW(preset, Kind, name, built) KVS_OF_##built(&kCuda##Kind),
KVS_PLANS(KVS_CUDA_SELECTOR)
inline constexpr const CudaSelectorRow* kCudaSelectorRows[] = {&kCudaFull,
                                                               KVS_PLANS(KVS_CUDA_SELECTOR_ROW)};

// The rows that are in use, by SelectorKind: these. Alone in its file, as SelectorRows.
std::span<const CudaSelectorRow* const> CudaSelectorRows();

}  // namespace kvstrata
