// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/frame/cuda_workspace.h"

#include <algorithm>
#include <utility>

#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector_rows.h"

namespace kvstrata {
namespace {

// By CodecKind; null: pages are attended as they are.
std::vector<std::unique_ptr<CudaCodec>> NewCodecs(const CudaCodecSource& from) {
  std::vector<std::unique_ptr<CudaCodec>> codecs;
  for (const CudaCodecRow* const row : kCudaCodecRows) {
    codecs.push_back(row == nullptr ? nullptr : row->make(from));
  }
  return codecs;
}

// By SelectorKind; null: everything is attended.
std::vector<std::unique_ptr<CudaSelector>> NewSelectors(const CudaSelectorSource& from) {
  std::vector<std::unique_ptr<CudaSelector>> selectors;
  for (const CudaSelectorRow* const row : CudaSelectorRows()) {
    selectors.push_back(row == nullptr || row->make == nullptr ? nullptr : row->make(from));
  }
  return selectors;
}

}  // namespace

CudaWorkspace::CudaWorkspace(const cuda::CudaOps& ops, const Geometry& geometry,
                             int32_t reserve_tokens,
                             std::shared_ptr<HotCacheBudget> hot_cache_budget, uint32_t* not_finite)
    : geometry_(geometry),
      reserve_tokens_(reserve_tokens),
      not_finite_(not_finite),
      memory_(ops),
      codecs_(NewCodecs({&memory_, hot_cache_budget})),
      selectors_(NewSelectors({&memory_, codecs_})),
      index_(&memory_),
      host_pages_(&memory_, std::move(hot_cache_budget)),
      graphs_(geometry.layers),
      lengths_(memory_.AddColumn()),
      words_(memory_.AddColumn()) {
  memory_.Add(&pages_);
}

CudaWorkspace::~CudaWorkspace() {
  KVS_CHECK(!in_step_);
  memory_.AwaitEnd();  // graphs that are gone must not run
}

Status CudaWorkspace::Fit(const CudaFrame& frame, std::span<const CudaPart> parts) {
  for (const auto& codec : codecs_) {
    if (codec != nullptr) KVS_RETURN_IF_ERROR(codec->Check(frame));
  }
  KVS_RETURN_IF_ERROR(memory_.FitMembers(frame.members(), frame.tokens()));
  KVS_RETURN_IF_ERROR(FitRows(frame));
  for (const auto& codec : codecs_) {
    if (codec != nullptr) KVS_RETURN_IF_ERROR(codec->Fit(frame));
  }
  for (const auto& selector : selectors_) {
    if (selector != nullptr) KVS_RETURN_IF_ERROR(selector->Fit(frame, parts));
  }
  return memory_.FitSlots();
}

Status CudaWorkspace::FitRows(const CudaFrame& frame) {
  constexpr int32_t kMultiple = 64;  // pages, in growing
  int32_t pages = 0, chunk = 0;
  for (int i = 0; i < frame.members(); ++i) {
    const int32_t new_tokens = frame.member(i).new_tokens;
    pages = std::max(pages, frame.RoomFor(i) / geometry_.page_tokens + 1);
    if (new_tokens <= kItemsOfMember) continue;
    chunk = std::max(chunk, std::min(new_tokens, cuda::kAttendChunkRows));
  }
  const int32_t members = memory_.members();
  int32_t stride = pages_.stride();
  Raise(&stride, pages, Generous(pages, kMultiple));
  KVS_RETURN_IF_ERROR(memory_.Fit(&pages_, members, stride));
  KVS_RETURN_IF_ERROR(index_.Fit(frame));
  KVS_RETURN_IF_ERROR(host_pages_.Fit(frame, pages));
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
