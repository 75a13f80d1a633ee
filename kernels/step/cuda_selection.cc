// What a CudaStep selected, read back for tools and tests.
#include <algorithm>

#include "kernels/step/cuda_step.h"
#include "kernels/step/step_cost.h"

namespace kvstrata {
namespace {

Selection WindowOf(const Plan& plan, int32_t n) {
  if (AttendsInFull(n, plan.window.sinks + plan.window.recent, 0, plan.min_tokens))
    return Selection::Full(n);
  Selection window;
  window.Reset(n, 1);
  AppendRun({0, plan.window.sinks}, &window.runs[0]);
  AppendRun({n - plan.window.recent, n}, &window.runs[0]);
  return window;
}

}  // namespace

const CudaStep::Part& CudaStep::PartOf(int member) const {
  return *std::find_if(parts_.rbegin(), parts_.rend(),
                       [member](const Part& part) { return part.first <= member; });
}

Result<Selection> CudaStep::ReadSelection(int member) const {
  if (selected_layer_ < 0) {
    return FailedPrecondition("SELECTION_NONE", "no layer of this step was selected; attend one");
  }
  return ReadPart(PartOf(member), member);
}

Result<Selection> CudaStep::ReadPart(const Part& part, int member) const {
  const int32_t n = members_[member].view.tokens + part.begin + 1;
  if (ReadsSpans(part)) {
    KVS_RETURN_IF_ERROR(CheckReadable());
    return ReadSpans(part, member, n);
  }
  if (!Selects(part, selected_layer_)) return Selection::Full(n);
  if (part.plan.selector == SelectorKind::kWindow) return WindowOf(part.plan, n);
  KVS_RETURN_IF_ERROR(CheckReadable());
  if (part.plan.selector == SelectorKind::kCascade) return ReadCascade(member, n);
  if (part.plan.selector == SelectorKind::kBucket) return ReadBuckets(member, n);
  if (part.plan.selector == SelectorKind::kVote) {
    return ReadVotes(part, member, part.prompt ? n - 1 : n);
  }
  if (part.plan.selector == SelectorKind::kBlock) return ReadBlocks(member, n);
  return ReadUnits(member, n);
}

Status CudaStep::CheckReadable() const {
  KVS_ASSIGN_OR_RETURN(const bool capturing, IsCapturing(stream_));
  if (!capturing) return OkStatus();
  return FailedPrecondition("CAPTURE_READ", "a selection cannot be read while a graph is captured");
}

// A selection of minmax, as its selector makes it (kernels/select/minmax.cc).
Result<Selection> CudaStep::ReadUnits(int member, int32_t n) const {
  const Part& part = PartOf(member);
  const Geometry& g = geometry();
  const cuda::DeviceSelection device =
      SelectionOf({member, 1, 1, true, part.plan}, selected_layer_);
  std::vector<int32_t> counts(static_cast<size_t>(g.kv_heads));
  std::vector<int32_t> units(counts.size() * static_cast<size_t>(device.list_stride));
  int32_t sink_end = 0, recent_begin = 0;
  KVS_RETURN_IF_ERROR(CopyToHost(counts.data(), device.counts, counts.size() * sizeof(int32_t)));
  KVS_RETURN_IF_ERROR(CopyToHost(units.data(), device.units, units.size() * sizeof(int32_t)));
  KVS_RETURN_IF_ERROR(CopyToHost(&sink_end, device.sink_end, sizeof(sink_end)));
  KVS_RETURN_IF_ERROR(CopyToHost(&recent_begin, device.recent_begin, sizeof(recent_begin)));
  if (recent_begin == 0) return Selection::Full(n);

  const int32_t page = part.plan.index.unit;
  Selection selection;
  selection.Reset(n, g.kv_heads);
  selection.scored_bytes =
      int64_t{2} * ((recent_begin - sink_end) / page) * g.kv_heads * g.head_dim * SizeOf(g.dtype);
  for (int head = 0; head < g.kv_heads; ++head) {
    std::vector<Run>& runs = selection.runs[head];
    AppendRun({0, sink_end}, &runs);
    for (int32_t i = 0; i < counts[head]; ++i) {
      const int32_t unit = units[static_cast<size_t>(head * device.list_stride + i)];
      selection.units[head].push_back(unit);
      AppendRun({unit * page, (unit + 1) * page}, &runs);
    }
    AppendRun({recent_begin, n}, &runs);
  }
  return selection;
}

Result<StepCost> CudaStep::ReadCost(int member) const {
  KVS_RETURN_IF_ERROR(ReadSelection(member).status());
  std::vector<Selection> selections;
  std::vector<ReadChunk> chunks;
  const int32_t committed = members_[member].view.tokens;
  for (const Part& part : parts_) {
    if (member < part.first || member >= part.first + part.count) continue;
    KVS_ASSIGN_OR_RETURN(selections.emplace_back(), ReadPart(part, member));
    chunks.push_back({nullptr, committed + part.begin, part.new_tokens});
  }
  for (size_t i = 0; i < chunks.size(); ++i) chunks[i].selection = &selections[i];
  const bool stored = PartOf(member).selects;
  const SequenceState& state = *members_[member].state;
  const int32_t stored_end = !stored                    ? 0
                             : state.spans() != nullptr ? state.spans()->end()
                                                        : PackedEnd(members_[member]);
  return CostOf(members_[member], selected_layer_, stored_end, chunks);
}

}  // namespace kvstrata
