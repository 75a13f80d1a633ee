#include "kernels/step/cuda_workspace.h"

#include <algorithm>
#include <utility>

#include "kernels/step/cuda_frame.h"

namespace kvstrata {
namespace {

// By SelectorKind.
CudaSelectors NewSelectors(StepMemory* memory, CudaPacked* packed, CudaSpans* spans) {
  return {nullptr,
          NewCudaWindow(memory),
          NewCudaMinMax(memory),
          NewCudaCascade(memory),
          NewCudaVote(memory),
          NewCudaBucket(memory),
          NewCudaZoom(spans),
          NewCudaBlock(memory, packed)};
}

}  // namespace

CudaWorkspace::CudaWorkspace(const cuda::CudaOps& ops, const Geometry& geometry,
                             int32_t reserve_tokens,
                             std::shared_ptr<HotCacheBudget> hot_cache_budget)
    : geometry_(geometry),
      reserve_tokens_(reserve_tokens),
      memory_(ops),
      packed_(&memory_),
      spans_(&memory_),
      selectors_(NewSelectors(&memory_, &packed_, &spans_)),
      far_pages_(&memory_, std::move(hot_cache_budget)),
      graphs_(geometry.layers),
      lengths_(memory_.AddColumn()),
      from_(memory_.AddColumn()),
      to_(memory_.AddColumn()) {
  memory_.Add(&pages_);
  memory_.Add(&blocks_);
}

CudaWorkspace::~CudaWorkspace() {
  KVS_CHECK(!in_step_);
  memory_.AwaitEnd();  // graphs that are gone must not run
}

CudaCodec* CudaWorkspace::CodecOf(const Plan& plan) {
  if (plan.codec == CodecKind::kPacked) return &packed_;
  return plan.codec == CodecKind::kLowRank ? &spans_ : nullptr;
}

Status CudaWorkspace::Fit(const CudaFrame& frame, std::span<const CudaPart> parts) {
  KVS_RETURN_IF_ERROR(packed_.Check(frame));
  KVS_RETURN_IF_ERROR(spans_.Check(frame));
  KVS_RETURN_IF_ERROR(memory_.FitMembers(frame.members(), frame.tokens()));
  KVS_RETURN_IF_ERROR(FitRows(frame));
  KVS_RETURN_IF_ERROR(packed_.Fit(frame));
  KVS_RETURN_IF_ERROR(spans_.Fit(frame));
  for (const auto& selector : selectors_) {
    if (selector != nullptr) KVS_RETURN_IF_ERROR(selector->Fit(frame, parts));
  }
  return memory_.FitSlots();
}

Status CudaWorkspace::FitRows(const CudaFrame& frame) {
  int32_t pages = 0, blocks = 0, chunk = 0;
  for (int i = 0; i < frame.members(); ++i) {
    const int32_t new_tokens = frame.member(i).new_tokens;
    pages = std::max(pages, frame.RoomFor(i) / geometry_.page_tokens + 1);
    blocks = std::max(blocks, frame.state(i).index().BlocksFor(frame.RoomFor(i)));
    if (new_tokens <= kItemsOfMember) continue;
    chunk = std::max(chunk, std::min(new_tokens, cuda::kAttendChunkRows));
  }
  constexpr int32_t kPageMultiple = 64, kBlockMultiple = 8;
  const int32_t members = memory_.members();
  const auto stride = [](const WordTable& table, int32_t need, int32_t multiple) {
    return need <= table.stride() ? table.stride() : Generous(need, multiple);
  };
  KVS_RETURN_IF_ERROR(memory_.Fit(&pages_, members, stride(pages_, pages, kPageMultiple)));
  KVS_RETURN_IF_ERROR(memory_.Fit(&blocks_, members, stride(blocks_, blocks, kBlockMultiple)));
  KVS_RETURN_IF_ERROR(far_pages_.Fit(frame, pages));
  Raise(&chunk_, chunk, PowerOfTwo(chunk));
  const int64_t tiles = int64_t{chunk_} * geometry_.group() / 64 + 1;
  const int64_t items = std::max<int64_t>({members, kItemsOfMember, tiles});
  KVS_RETURN_IF_ERROR(
      memory_.Fit(&attend_counters_, items * geometry_.kv_heads * int64_t{sizeof(uint32_t)}));
  const cuda::CudaOps& ops = memory_.ops();
  KVS_RETURN_IF_ERROR(memory_.Fit(
      &attend_workspace_, ops.attend_raw_workspace_bytes(geometry_.group(), geometry_.head_dim)));
  if (chunk_ == 0) return OkStatus();
  return memory_.Fit(&chunk_workspace_, ops.attend_chunk_workspace_bytes(geometry_.head_dim));
}

}  // namespace kvstrata
