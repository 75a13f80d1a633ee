// SPDX-License-Identifier: Apache-2.0
// Selector cascade (chess) on a GPU. When to select follows from counts and reports, which the host
// has; so Stage decides and, where a selection is due, Begin enqueues it for all layers at once:
// graphs hold nothing of it, and attend the list that lies at the member's place of the workspace.
//
// A selection is a function of the sequence and of the number of tokens that it sees. So a place
// remembers whose selection it holds, and a sequence that comes to another place, workspace or
// client, or to a buffer that grew, has its selection made again there.
#include <algorithm>

#include "kernels/plans/chess/cascade_trigger.h"
#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector_rows.h"

namespace kvstrata {
namespace {

// The positions between sinks and window, of which the listed pages are attended; {0, 0}: all are.
Run ListedRange(const CudaFrame& frame, int member) {
  const Plan& plan = frame.plan(member);
  const int32_t n = frame.member(member).view.tokens + 1;
  if (n < plan.min_tokens) return {};
  const int32_t window = CascadeTrigger::WindowStart(
      plan, CascadeTriggerOf(frame.state(member).selector()).selected_at());
  return {std::min(plan.cascade.sinks * plan.index.unit, n),
          std::min(std::max(window, plan.cascade.sinks) * plan.index.unit, n)};
}

// Rows of page, chunk and grid vectors that selecting from `tokens` reads.
int64_t ScoredUnits(const Plan& plan, int32_t tokens) {
  int64_t units = 0, level = tokens / plan.index.unit;
  for (const int32_t size : {plan.index.pages_per_chunk, plan.index.chunks_per_grid, 1}) {
    units += level;
    level = (level + size - 1) / size;
  }
  return units;
}

class CudaCascade final : public CudaSelector {
 public:
  explicit CudaCascade(StepMemory* memory)
      : sink_end_(memory->AddColumn()),
        recent_begin_(memory->AddColumn()),
        select_at_(memory->AddColumn()) {}

  CudaSelectorTraits traits(const Plan&) override { return {.queries = CudaQueries::kNone}; }

  Status Fit(const CudaFrame& frame, std::span<const CudaPart>) override {
    int32_t members = members_, pages = pages_;
    for (int i = 0; i < frame.members(); ++i) {
      if (!Has(frame, i)) continue;
      const int32_t need = frame.RoomFor(i) / frame.plan(i).index.unit + 1;
      Raise(&pages, need, Generous(need, kMultiple));
      members = std::max(members, frame.memory().members());
    }
    if (members == members_ && pages == pages_) return OkStatus();
    members_ = pages_ = 0;  // until all of it is there
    KVS_RETURN_IF_ERROR(FitTo(members, pages, frame));
    members_ = members;
    pages_ = pages;
    ids_.assign(static_cast<size_t>(members), 0);
    return OkStatus();
  }

  Status Stage(CudaFrame* frame) override {
    fired_.assign(static_cast<size_t>(frame->members()), 0);
    frame->OnceIndexed([this, frame] { return SelectDue(frame); });
    for (int i = 0; i < frame->members(); ++i) {
      if (!Has(*frame, i)) continue;
      SequenceState& state = frame->state(i);
      if (state.prompt_tokens() >= 0) {
        fired_[static_cast<size_t>(i)] =
            CascadeTriggerOf(state.selector())
                .Advance(state.plan(), state.reported().entropy(), state.prompt_tokens(),
                         frame->member(i).view.tokens);
      }
      const Run listed = ListedRange(*frame, i);
      StepMemory& memory = frame->memory();
      memory.At(sink_end_, i) = listed.begin;
      memory.At(recent_begin_, i) = listed.end;
      memory.At(select_at_, i) =
          IsDue(*frame, i) ? CascadeTriggerOf(state.selector()).selected_at() : -1;
    }
    return OkStatus();
  }

  cuda::DeviceSelection SelectionOf(const CudaFrame& frame, const CudaPart& part) const override {
    cuda::DeviceSelection selection;
    selection.unit_tokens = frame.plan(part.first).index.unit;
    selection.list_stride = pages_;
    selection.units = units_.as<int32_t>() + int64_t{part.first} * pages_;
    selection.counts = counts_.as<int32_t>() + part.first;
    selection.sink_end = frame.memory().On(sink_end_, part.first);
    selection.recent_begin = frame.memory().On(recent_begin_, part.first);
    return selection;
  }

  // Scored bytes are those of a trigger that fired; a selection that is made again for another
  // place reads them once more and is not counted.
  Result<Selection> Read(const CudaFrame& frame, const CudaPart& part, int member,
                         int32_t n) const override {
    const Plan& plan = part.plan;
    if (n < plan.min_tokens) return Selection::Full(n);
    int32_t count = 0;
    KVS_RETURN_IF_ERROR(frame.CopyToHost(&count, counts_.as<int32_t>() + member, sizeof(count)));
    std::vector<int32_t> pages(static_cast<size_t>(count));
    KVS_RETURN_IF_ERROR(frame.CopyToHost(pages.data(),
                                         units_.as<int32_t>() + int64_t{member} * pages_,
                                         pages.size() * sizeof(int32_t)));
    const Run listed = ListedRange(frame, member);
    Selection selection;
    selection.Reset(n, 1);
    const auto append = [&](int32_t begin, int32_t end) {
      for (int32_t page = begin; page < end; ++page) selection.units[0].push_back(page);
      AppendRun({begin * plan.index.unit, std::min(end * plan.index.unit, n)}, &selection.runs[0]);
    };
    const auto pages_for = [&plan](int32_t tokens) {
      return (tokens + plan.index.unit - 1) / plan.index.unit;
    };
    append(0, pages_for(listed.begin));
    for (const int32_t page : pages) append(page, page + 1);
    append(pages_for(listed.end), pages_for(n));

    const int32_t seen = CascadeTriggerOf(frame.state(member).selector()).selected_at();
    if (fired_[static_cast<size_t>(member)] == 0 || seen < plan.index.unit) return selection;
    const Geometry& g = frame.geometry();
    selection.scored_bytes =
        ScoredUnits(plan, seen) * g.kv_heads * g.head_dim * int64_t{sizeof(uint16_t)};
    return selection;
  }

 private:
  static constexpr int32_t kMultiple = 64;  // pages, in growing

  Status FitTo(int32_t members, int32_t pages, const CudaFrame& frame) {
    const Geometry& g = frame.geometry();
    StepMemory& memory = frame.memory();
    memory.NoteGrowth();
    const int64_t channels = int64_t{g.layers} * g.kv_heads * g.head_dim;
    constexpr int64_t kInt = sizeof(int32_t);
    KVS_RETURN_IF_ERROR(memory.Fit(&units_, int64_t{members} * pages * kInt));
    KVS_RETURN_IF_ERROR(memory.Fit(&counts_, members * kInt));
    return memory.Fit(&scratch_, members * cuda::CascadeScratchBytes(channels, pages));
  }

  bool IsDue(const CudaFrame& frame, int member) const {
    return Has(frame, member) && frame.state(member).prompt_tokens() >= 0 &&
           ids_[static_cast<size_t>(member)] !=
               CascadeTriggerOf(frame.state(member).selector()).selection_id();
  }

  // Members that follow each other and whose selections are due, all of one plan, share a launch.
  Status SelectDue(CudaFrame* frame) {
    for (int first = 0, last; first < frame->members(); first = last) {
      last = first + 1;
      if (!IsDue(*frame, first)) continue;
      const auto joins = [&](int i) {
        return IsDue(*frame, i) && frame->plan(i) == frame->plan(first);
      };
      while (last < frame->members() && joins(last)) ++last;
      KVS_RETURN_IF_ERROR(SelectMembers(frame, first, last - first));
      for (int i = first; i < last; ++i) {
        ids_[static_cast<size_t>(i)] = CascadeTriggerOf(frame->state(i).selector()).selection_id();
      }
    }
    return OkStatus();
  }

  Status SelectMembers(CudaFrame* frame, int first, int count) {
    const Plan& plan = frame->plan(first);
    cuda::CascadeBatch w;
    w.keys = cuda::KeyRows(frame->PagesOf(first, 0));
    w.key_layer_stride = PageLayout::Of(frame->geometry()).layer_stride;
    for (int level = 0; level < 3; ++level) w.levels[level] = frame->IndexRowsOf(first, level, 0);
    w.layers = frame->geometry().layers;
    w.page_tokens = plan.index.unit;
    w.pages_per_chunk = plan.index.pages_per_chunk;
    w.chunks_per_grid = plan.index.chunks_per_grid;
    w.sinks = plan.cascade.sinks;
    w.window = plan.cascade.recent;
    std::ranges::copy(plan.cascade.rho, w.rho);
    w.tokens = frame->memory().On(select_at_, first);
    w.batch = count;
    for (int i = first; i < first + count; ++i) {
      w.pages_max =
          std::max(w.pages_max,
                   CascadeTriggerOf(frame->state(i).selector()).selected_at() / plan.index.unit);
    }
    w.scratch = scratch_.as<std::byte>();
    w.list_stride = pages_;
    // The lists as steps that select nothing find them.
    w.units = units_.as<int32_t>() + int64_t{first} * pages_;
    w.counts = counts_.as<int32_t>() + first;
    frame->NoteLaunch();
    return frame->Check(frame->ops().cascade(w, frame->stream()), "op cascade");
  }

  const StepMemory::Column sink_end_, recent_begin_, select_at_;
  int32_t members_ = 0, pages_ = 0;  // room; pages: candidates of a member
  DeviceBuffer units_, counts_, scratch_;
  std::vector<uint64_t> ids_;   // by place: CascadeTrigger::selection_id; 0: nobody's
  std::vector<uint8_t> fired_;  // by member: its trigger fired in this Begin
};

Status Serves(const Plan& plan) {
  if (plan.cascade.pruning != CascadeOptions::Pruning::kTop) {
    return PlanUnserved("cascade", "\"literal\"", "op cascade by quantiles");
  }
  if (plan.cascade.lists != CascadeOptions::Lists::kModel) {
    const bool by_layer = plan.cascade.lists == CascadeOptions::Lists::kLayer;
    return PlanUnserved("lists", by_layer ? "\"layer\"" : "\"head\"", "op cascade by layer");
  }
  if (plan.cascade.centred) return PlanUnserved("centred", "true", "op cascade of centred vectors");
  return CudaIndexServes(plan);
}

}  // namespace

constinit const CudaSelectorRow kCudaCascade = {kOverRaw, "op attend_packed over pages", Serves,
                                                MakeCudaSelector<CudaCascade>};

}  // namespace kvstrata
