// Selector cascade (chess) in a CudaStep. When to select follows from counts and reports, which the
// host has; so Begin decides and, where a selection is due, enqueues it for all layers at once:
// graphs hold nothing of it, and attend the list that lies at the member's place of the workspace.
//
// A selection is a function of the sequence and of the number of tokens that it sees. So a place
// remembers whose selection it holds, and a sequence that comes to another place, workspace or
// client, or to a buffer that grew, has its selection made again there.
#include <algorithm>

#include "kernels/select/cascade_trigger.h"
#include "kernels/step/cuda_step.h"

namespace kvstrata {

bool CudaStep::Cascades(const StepMember& m) {
  return m.state->plan().selector == SelectorKind::kCascade;
}

const CascadeTrigger& CudaStep::TriggerOf(const StepMember& m) {
  return *m.state->selector_->trigger();
}

// The positions between sinks and window, of which the listed pages are attended; {0, 0}: all are.
Run CudaStep::CascadeList(const StepMember& m) {
  const Plan& plan = m.state->plan();
  const int32_t n = m.view.tokens + 1;
  if (n < plan.min_tokens) return {};
  const int32_t window = CascadeTrigger::WindowStart(plan, TriggerOf(m).selected_at());
  return {std::min(plan.cascade.sinks * plan.index.unit, n),
          std::min(std::max(window, plan.cascade.sinks) * plan.index.unit, n)};
}

void CudaStep::DecideCascades() {
  reselects_.assign(members_.size(), 0);
  for (int i = 0; i < members(); ++i) {
    const StepMember& m = members_[i];
    SequenceState& state = *m.state;
    if (!Cascades(m) || state.prompt_tokens_ < 0) continue;
    reselects_[i] = state.selector_->trigger()->Advance(state.plan_, state.entropy_,
                                                        state.prompt_tokens_, m.view.tokens);
  }
}

bool CudaStep::IsCascadeDue(int member) const {
  const StepMember& m = members_[member];
  return Cascades(m) && m.state->prompt_tokens() >= 0 &&
         ws_.cascade_ids_[member] != TriggerOf(m).selection_id();
}

int32_t CudaStep::CascadeAt(int member) const {
  return IsCascadeDue(member) ? TriggerOf(members_[member]).selected_at() : -1;
}

Status CudaStep::SelectCascades() {
  for (int first = 0, last; first < members(); first = last) {
    last = first + 1;
    if (!IsCascadeDue(first)) continue;
    const Plan& plan = members_[first].state->plan();
    while (last < members() && IsCascadeDue(last) && members_[last].state->plan() == plan) ++last;
    KVS_RETURN_IF_ERROR(SelectCascade(first, last - first));
    for (int i = first; i < last; ++i) {
      ws_.cascade_ids_[i] = TriggerOf(members_[i]).selection_id();
    }
  }
  return OkStatus();
}

// Of members whose selection is due, all of one plan.
Status CudaStep::SelectCascade(int first, int count) {
  const Part part{first, count, 1, false, {}};
  const Plan& plan = members_[first].state->plan();
  cuda::CascadeBatch w;
  w.keys = cuda::KeyRows(PagesOf(part, 0));
  w.key_layer_stride = PageLayout::Of(geometry()).layer_stride;
  for (int level = 0; level < 3; ++level) w.levels[level] = IndexRowsOf(part, level, 0);
  w.layers = geometry().layers;
  w.page_tokens = plan.index.unit;
  w.pages_per_chunk = plan.index.pages_per_chunk;
  w.chunks_per_grid = plan.index.chunks_per_grid;
  w.sinks = plan.cascade.sinks;
  w.window = plan.cascade.recent;
  std::ranges::copy(plan.cascade.rho, w.rho);
  w.tokens = ws_.Ints(PerMember::kSelectAt) + first;
  w.batch = count;
  for (int i = first; i < first + count; ++i) {
    w.pages_max = std::max(w.pages_max, TriggerOf(members_[i]).selected_at() / plan.index.unit);
  }
  w.scratch = ws_.cascade_scratch_.as<std::byte>();
  w.list_stride = ws_.capacity_.cascade_pages;
  w.units = ws_.cascade_units_.as<int32_t>() + int64_t{first} * w.list_stride;
  w.counts = ws_.cascade_counts_.as<int32_t>() + first;
  launched_ = true;
  return Check(ops_.cascade(w, stream_), "op cascade");
}

cuda::DeviceSelection CudaStep::CascadeOf(const Part& part) const {
  cuda::DeviceSelection selection;
  selection.unit_tokens = members_[part.first].state->plan().index.unit;
  selection.list_stride = ws_.capacity_.cascade_pages;
  selection.units = ws_.cascade_units_.as<int32_t>() + int64_t{part.first} * selection.list_stride;
  selection.counts = ws_.cascade_counts_.as<int32_t>() + part.first;
  selection.sink_end = ws_.Ints(PerMember::kSinkEnd) + part.first;
  selection.recent_begin = ws_.Ints(PerMember::kRecentBegin) + part.first;
  return selection;
}

// As its selector makes it (kernels/select/cascade.cc). Scored bytes are those of a trigger that
// fired; a selection that is made again for another place reads them once more and is not counted.
Result<Selection> CudaStep::ReadCascade(int member, int32_t n) const {
  const StepMember& m = members_[member];
  const Plan& plan = m.state->plan();
  if (n < plan.min_tokens) return Selection::Full(n);
  const cuda::DeviceSelection device = CascadeOf({member, 1, 1, true, {}});
  int32_t count = 0;
  KVS_RETURN_IF_ERROR(CopyToHost(&count, device.counts, sizeof(count)));
  std::vector<int32_t> pages(static_cast<size_t>(count));
  KVS_RETURN_IF_ERROR(CopyToHost(pages.data(), device.units, pages.size() * sizeof(int32_t)));

  const Run list = CascadeList(m);
  Selection selection;
  selection.Reset(n, 1);
  const auto append = [&](int32_t begin, int32_t end) {
    for (int32_t page = begin; page < end; ++page) selection.units[0].push_back(page);
    AppendRun({begin * plan.index.unit, std::min(end * plan.index.unit, n)}, &selection.runs[0]);
  };
  const auto pages_for = [&plan](int32_t tokens) {
    return (tokens + plan.index.unit - 1) / plan.index.unit;
  };
  append(0, pages_for(list.begin));
  for (const int32_t page : pages) append(page, page + 1);
  append(pages_for(list.end), pages_for(n));

  const int32_t seen = TriggerOf(m).selected_at();
  if (reselects_[member] == 0 || seen < plan.index.unit) return selection;
  int64_t units = 0, level = seen / plan.index.unit;
  for (const int32_t size : {plan.index.pages_per_chunk, plan.index.chunks_per_grid, 1}) {
    units += level;
    level = (level + size - 1) / size;
  }
  selection.scored_bytes =
      units * geometry().kv_heads * geometry().head_dim * int64_t{sizeof(uint16_t)};
  return selection;
}

}  // namespace kvstrata
