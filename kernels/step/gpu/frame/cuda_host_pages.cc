// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/frame/cuda_host_pages.h"

#include <algorithm>
#include <utility>

#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/memory/cuda_hot_pages.h"

namespace kvstrata {

CudaHostPages::CudaHostPages(StepMemory* memory, std::shared_ptr<HotCacheBudget> budget)
    : budget_(std::move(budget)), committed_(memory->AddColumn()) {
  memory->Add(&pages_);
  memory->Add(&tables_);
}

bool CudaHostPages::MayPromote(const CudaFrame& frame, int member) {
  return frame.member(member).view.host_pages != nullptr && frame.CodecOf(member) == nullptr &&
         frame.SelectorOf(member) != nullptr;
}

Status CudaHostPages::Fit(const CudaFrame& frame, int32_t pages) {
  constexpr int32_t kMultiple = 64, kTableWords = sizeof(cuda::HotPages) / sizeof(uint64_t);
  bool any = pages_.stride() > 0;
  for (int i = 0; i < frame.members(); ++i) any |= MayPromote(frame, i);
  if (!any) return OkStatus();
  StepMemory& memory = frame.memory();
  const int32_t stride = pages <= pages_.stride() ? pages_.stride() : Generous(pages, kMultiple);
  KVS_RETURN_IF_ERROR(memory.Fit(&pages_, memory.members(), stride));
  KVS_RETURN_IF_ERROR(memory.Fit(&tables_, memory.members(), kTableWords));
  const int64_t lists = int64_t{memory.members()} * frame.geometry().kv_heads;
  return memory.Fit(&counters_, lists * int64_t{sizeof(uint32_t)});
}

Status CudaHostPages::Stage(CudaFrame* frame) {
  for (int i = 0; i < frame->members(); ++i) {
    SequenceState& state = frame->state(i);
    std::shared_ptr<CudaHotPages>& hot = state.on_gpu.hot_pages;
    const bool may_promote = MayPromote(*frame, i);
    if (!may_promote) hot.reset();
    if (pages_.stride() == 0) continue;  // no member ever did
    StepMemory& memory = frame->memory();
    memory.At(committed_, i) = frame->member(i).view.tokens;
    if (may_promote && state.prompt_tokens() >= 0) KVS_RETURN_IF_ERROR(Follow(frame, i));
    const cuda::HotPages table = hot == nullptr ? cuda::HotPages{} : hot->table();
    KVS_RETURN_IF_ERROR(
        memory.Write(&tables_, i, std::as_bytes(std::span(&table, 1)), frame->stream()));
  }
  return OkStatus();
}

Status CudaHostPages::Follow(CudaFrame* frame, int member) {
  const StepMember& m = frame->member(member);
  std::shared_ptr<CudaHotPages>& hot = m.state->on_gpu.hot_pages;
  const int32_t page_tokens = frame->geometry().page_tokens;
  const int32_t count = (m.view.tokens + m.new_tokens + page_tokens - 1) / page_tokens;
  if (hot == nullptr || count > hot->page_stride()) {
    hot.reset();  // releases what the next one takes
    KVS_ASSIGN_OR_RETURN(hot, CudaHotPages::Create(frame->ops(), frame->geometry(), m.state->plan(),
                                                   pages_.stride(), budget_));
  }
  if (hot->table().entries == nullptr) return OkStatus();
  std::vector<uint64_t>& known = hot->pages;
  known.resize(static_cast<size_t>(count));
  int32_t first = count, last = 0;
  for (int32_t i = 0; i < count; ++i) {
    const uint64_t host = m.view.host_pages[i] != 0 ? cuda::kHostPage : 0;
    const uint64_t address = reinterpret_cast<uint64_t>(m.view.pages[i]) | host;
    if (known[static_cast<size_t>(i)] == address) continue;
    known[static_cast<size_t>(i)] = address;
    first = std::min(first, i);
    last = i + 1;
  }
  if (first >= last) return OkStatus();
  KVS_RETURN_IF_ERROR(
      frame->memory().Write(&pages_, member, std::as_bytes(std::span(known)), frame->stream()));
  cuda::RebaseBatch w;
  w.hot = hot->table();
  w.pages = pages_.Row<uint64_t>(member);
  w.first = first;
  w.last = last;
  w.layers = frame->geometry().layers;
  w.kv_heads = frame->geometry().kv_heads;
  w.layer_bytes = PageLayout::Of(frame->geometry()).layer_stride;
  frame->NoteLaunch();
  return frame->Check(frame->ops().rebase(w, frame->stream()), "op rebase");
}

Status CudaHostPages::Promote(const CudaFrame& frame, const CudaPart& part, int layer,
                              cuda::PagedLayer* pages) {
  pages->hot = tables_.Row<cuda::HotPages>(part.first);
  pages->hot_row = layer * frame.geometry().kv_heads;
  cuda::PromoteBatch w;
  w.layer = *pages;
  w.selection = frame.SelectionOf(part, layer);
  w.batch = part.count;
  w.layer_bytes = PageLayout::Of(frame.geometry()).layer_stride;
  w.tokens = frame.VisibleFrom(frame.FirstRow(part));
  w.committed = frame.memory().On(committed_, part.first);
  w.counters = counters_.as<uint32_t>();
  return frame.Check(frame.ops().promote(w, frame.stream()), "op promote");
}

}  // namespace kvstrata
