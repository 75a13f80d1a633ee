// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/frame/cuda_index.h"

#include <algorithm>

#include "kernels/step/gpu/frame/cuda_frame.h"

namespace kvstrata {

CudaIndex::CudaIndex(StepMemory* memory) : from_(memory->AddColumn()), to_(memory->AddColumn()) {
  memory->Add(&blocks_);
}

Status CudaIndex::Fit(const CudaFrame& frame) {
  constexpr int32_t kMultiple = 8;  // blocks, in growing
  int32_t blocks = blocks_.stride();
  for (int i = 0; i < frame.members(); ++i) {
    const int32_t need = frame.state(i).index().BlocksFor(frame.RoomFor(i));
    Raise(&blocks, need, Generous(need, kMultiple));
  }
  return frame.memory().Fit(&blocks_, frame.memory().members(), blocks);
}

Status CudaIndex::Stage(CudaFrame* frame) {
  for (int i = 0; i < frame->members(); ++i) {
    const SequenceState& state = frame->state(i);
    const SequenceView& view = frame->member(i).view;
    frame->memory().At(from_, i) = state.indexed_tokens();
    frame->memory().At(to_, i) = view.tokens;
    const std::span blocks(view.index_blocks,
                           static_cast<size_t>(state.index().BlocksFor(view.tokens)));
    KVS_RETURN_IF_ERROR(frame->memory().Write(&blocks_, i, std::as_bytes(blocks), frame->stream()));
  }
  return OkStatus();
}

// A coarser level's rows come from those of the level below, which are written before.
Status CudaIndex::Summarize(CudaFrame* frame) {
  for (int first = 0, last; first < frame->members(); first = last) {
    const IndexLayout& index = frame->state(first).index();
    for (last = first + 1; last < frame->members() && frame->state(last).index() == index;) ++last;
    if (index.kind == IndexLayout::Kind::kNone) continue;
    if (index.kind == IndexLayout::Kind::kBits) {
      KVS_RETURN_IF_ERROR(Quantise(frame, first, last - first));
      continue;
    }
    for (int level = 0; level < index.level_count; ++level) {
      KVS_RETURN_IF_ERROR(SummarizeLevel(frame, first, last - first, level));
    }
  }
  for (int i = 0; i < frame->members(); ++i) {
    frame->state(i).NoteIndexed(frame->state(i).tokens());
  }
  return OkStatus();
}

Status CudaIndex::SummarizeLevel(CudaFrame* frame, int first, int count, int level) {
  const IndexLayout& index = frame->state(first).index();
  const int32_t units = UnitsOf(*frame, first, count, level);
  using Kind = cuda::SummarizeBatch::Kind;
  const bool means = index.kind == IndexLayout::Kind::kMean;
  const PageLayout layout = PageLayout::Of(frame->geometry());
  cuda::SummarizeBatch w;
  w.kind = means                                         ? Kind::kMean
           : index.kind == IndexLayout::Kind::kDeviation ? Kind::kDeviation
                                                         : Kind::kMinMax;
  w.source =
      level == 0 ? cuda::KeyRows(frame->PagesOf(first, 0)) : RowsOf(*frame, first, level - 1, 0);
  w.summary = RowsOf(*frame, first, level, 0);
  w.field_stride = means ? 0 : index.field_stride();
  w.row_tokens = level == 0 ? 1 : index.levels[level - 1].unit_tokens;
  w.unit_rows = index.levels[level].unit_tokens / w.row_tokens;
  w.from = frame->memory().On(from_, first);
  w.to = frame->memory().On(to_, first);
  w.batch = count;
  w.units_max = units;
  w.layers = frame->geometry().layers;
  w.source_layer_stride = level == 0 ? layout.layer_stride : index.layer_stride(level - 1);
  w.summary_layer_stride = index.layer_stride(level);
  if (units > 0) frame->NoteLaunch();
  return frame->Check(frame->ops().summarize(w, frame->stream()), "op summarize");
}

// A launch takes so many layers of members.
Status CudaIndex::Quantise(CudaFrame* frame, int first, int count) {
  constexpr int kMostLayers = 65535;
  const IndexLayout& index = frame->state(first).index();
  const int most = std::max(kMostLayers / index.layers, 1);
  for (int end = first + count; first < end; first += most) {
    cuda::QuantiseKeysBatch w;
    w.keys = cuda::KeyRows(frame->PagesOf(first, 0));
    w.groups = GroupsOf(*frame, first, 0);
    w.from = frame->memory().On(from_, first);
    w.to = frame->memory().On(to_, first);
    w.batch = std::min(most, end - first);
    w.groups_max = UnitsOf(*frame, first, w.batch, 0);
    w.layers = index.layers;
    w.key_layer_stride = PageLayout::Of(frame->geometry()).layer_stride;
    w.group_layer_stride = index.layer_stride(0);
    if (w.groups_max > 0) frame->NoteLaunch();
    KVS_RETURN_IF_ERROR(
        frame->Check(frame->ops().quantise_keys(w, frame->stream()), "op quantise_keys"));
  }
  return OkStatus();
}

int32_t CudaIndex::UnitsOf(const CudaFrame& frame, int first, int count, int level) {
  const IndexLayout& index = frame.state(first).index();
  int32_t units = 0;
  for (int i = first; i < first + count; ++i) {
    const SequenceState& state = frame.state(i);
    units = std::max(units, index.UnitsFor(level, state.tokens()) -
                                index.UnitsFor(level, state.indexed_tokens()));
  }
  return units;
}

cuda::DeviceGroups CudaIndex::GroupsOf(const CudaFrame& frame, int first, int layer) const {
  const IndexLayout& index = frame.state(first).index();
  cuda::DeviceGroups groups;
  groups.blocks = blocks_.Row<uint64_t>(first);
  groups.block_stride = blocks_.stride();
  groups.block_groups = index.levels[0].units_per_block;
  groups.kv_heads = index.kv_heads;
  groups.format = index.group();
  groups.offset = index.RowOffset(0, layer, 0, 0, 0);
  groups.head_stride = index.levels[0].units_per_block * index.row_bytes();
  return groups;
}

cuda::DeviceRows CudaIndex::RowsOf(const CudaFrame& frame, int first, int level, int layer) const {
  return cuda::IndexRows(blocks_.Row<uint64_t>(first), blocks_.stride(), frame.state(first).index(),
                         level, layer, 0);
}

}  // namespace kvstrata
