// SPDX-License-Identifier: Apache-2.0
// What a GPU has of each selector (kernels/select/selector_rows.h): one row each, by SelectorKind.
#ifndef KVSTRATA_KERNELS_STEP_GPU_FRAME_CUDA_SELECTOR_ROWS_H_
#define KVSTRATA_KERNELS_STEP_GPU_FRAME_CUDA_SELECTOR_ROWS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "base/status.h"
#include "kernels/plan/built_plans.h"
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

// GPU halves of codecs, each in its own file.
std::unique_ptr<CudaCodec> NewCudaSpans(const CudaCodecSource& from);
std::unique_ptr<CudaCodec> NewCudaPacked(const CudaCodecSource& from);
std::unique_ptr<CudaCodec> NewCudaPlanes(const CudaCodecSource& from);

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

// Each in its own file.
std::unique_ptr<CudaSelector> NewCudaFixed(const FixedSelection& fixed, StepMemory* memory);
std::unique_ptr<CudaSelector> NewCudaMinMax(const CudaSelectorSource& from);
std::unique_ptr<CudaSelector> NewCudaCascade(const CudaSelectorSource& from);
std::unique_ptr<CudaSelector> NewCudaVote(const CudaSelectorSource& from);
std::unique_ptr<CudaSelector> NewCudaBucket(const CudaSelectorSource& from);
std::unique_ptr<CudaSelector> NewCudaZoom(const CudaSelectorSource& from);
std::unique_ptr<CudaSelector> NewCudaBlock(const CudaSelectorSource& from);
std::unique_ptr<CudaSelector> NewCudaBits(const CudaSelectorSource& from);
std::unique_ptr<CudaSelector> NewCudaFine(const CudaSelectorSource& from);

template <const FixedSelection& kFixed>
std::unique_ptr<CudaSelector> MakeCudaFixed(const CudaSelectorSource& from) {
  return NewCudaFixed(kFixed, from.memory);
}

inline Status ServesAll(const Plan&) { return OkStatus(); }

// The GPU's half of a codec.
struct CudaCodecRow {
  // What of its options the ops lack: UNIMPLEMENTED CUDA_PLAN.
  Status (*serves)(const Plan& plan) = ServesAll;
  // Null: pages are attended as they are.
  std::unique_ptr<CudaCodec> (*make)(const CudaCodecSource& from) = nullptr;
};
inline constexpr CudaCodecRow kCudaCodecRows[] = {
    {},
    KVS_OF_SEKV({ServesAll, NewCudaSpans}),
    KVS_OF_MOSAICKV({CudaPackedServes, NewCudaPacked}),
    {CudaPlanesServes, NewCudaPlanes},
};  // by CodecKind

inline constexpr uint8_t kOverRaw = OverCodec(CodecKind::kRaw);
inline constexpr uint8_t kOverLowRank = OverCodec(CodecKind::kLowRank);
inline constexpr uint8_t kOverPacked = OverCodec(CodecKind::kPacked);
inline constexpr uint8_t kOverPlanes = OverCodec(CodecKind::kPlanes);

inline constexpr CudaSelectorRow kCudaSelectorRows[] = {
    {kOverRaw | kOverPacked, "", ServesAll, nullptr},  // full
    {kOverRaw, "op attend_packed over runs of positions", ServesAll,
     MakeCudaFixed<kWindowSelection>},
    {kOverRaw, "op attend_packed over pages", CudaMinMaxServes, NewCudaMinMax},
    {kOverRaw, "op attend_packed over pages", CudaCascadeServes, NewCudaCascade},
    {kOverRaw, "op vote over packed keys", CudaVoteServes, NewCudaVote},
    {kOverRaw, "op expand_spans by buckets", CudaBucketServes, NewCudaBucket},
    KVS_OF_SEKV({kOverLowRank, "", ServesAll, NewCudaZoom}),
    KVS_OF_MOSAICKV({kOverPacked, "the selector's half over ops score and pick", CudaBlockServes,
                     NewCudaBlock}),
    {kOverRaw, "op attend_packed over lists of tokens", CudaBitsServes, NewCudaBits},
    {kOverPlanes, "", CudaFineServes, NewCudaFine},
};  // by SelectorKind

// The rows that are in use: these. Alone in its file, as SelectorRows.
std::span<const CudaSelectorRow> CudaSelectorRows();

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_STEP_GPU_FRAME_CUDA_SELECTOR_ROWS_H_
