// Selector bits on a GPU, as kernels/select/bits.cc does it on a CPU: each KV head votes for tokens
// by its keys in few bits, which the index holds, and takes the best of them. Plans that are served
// have a window of at least a group, so that every candidate is in a group that was sealed before
// the step.
#include <algorithm>

#include "kernels/select/selection_rule.h"
#include "kernels/step/cuda_frame.h"
#include "kernels/step/cuda_scored_lists.h"
#include "kernels/step/cuda_selector_rows.h"

namespace kvstrata {
namespace {

class CudaBits final : public CudaSelector {
 public:
  CudaQueries queries() const override { return CudaQueries::kDense; }
  bool IdlesWhenShort() const override { return true; }

  Status Fit(const CudaFrame& frame, std::span<const CudaPart>) override {
    CudaScoredLists::Room need;
    bool shares = false;
    for (int i = 0; i < frame.members(); ++i) {
      if (!Has(frame, i)) continue;
      const BitsOptions& bits = frame.plan(i).bits;
      const int32_t units = frame.RoomFor(i);
      need.units = std::max(need.units, units);
      // With max_missed a list may hold all that there is room for.
      const int32_t most = units <= best_.units() ? best_.units() : Generous(units, kMultiple);
      need.list = std::max(need.list, SharesIn(bits) ? std::min(bits.budget, most) : bits.budget);
      shares = shares || SharesIn(bits);
    }
    if (need.units == 0) return OkStatus();
    if (shares) KVS_RETURN_IF_ERROR(FitAlways(frame));
    return best_.Fit(frame, need, kMultiple);
  }
  // With max_missed the newest key is scored, too, and op always reads after what is before it.
  bool ReadsAhead(const Plan& plan) const override { return !SharesIn(plan.bits); }
  bool AttendsNewest(const Plan& plan) const override { return !SharesIn(plan.bits); }

  Status Select(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q) override {
    const cuda::CandidateRule rule = BitsCandidates(part.plan);
    cuda::VoteBatch keys;
    keys.groups = frame->IndexGroupsOf(part.first, layer);
    keys.ahead = true;
    if (!SharesIn(part.plan.bits)) {
      KVS_RETURN_IF_ERROR(best_.Vote(*frame, part, rule, q, keys));
      return best_.Pick(*frame, part, rule);
    }
    cuda::AlwaysBatch always = AlwaysOf(*frame, part, layer, q);
    always.groups = keys.groups;
    always.rule = rule;
    KVS_RETURN_IF_ERROR(frame->Check(frame->ops().always(always, frame->stream()), "op always"));
    keys.always = always.always;
    KVS_RETURN_IF_ERROR(best_.Vote(*frame, part, rule, q, keys));
    return best_.PickMost(*frame, part, rule, BitsMissed(part.plan, frame->geometry().group()),
                          part.plan.bits.budget);
  }

  cuda::DeviceSelection SelectionOf(const CudaFrame&, const CudaPart& part) const override {
    return best_.lists().SelectionOf(part, 1);
  }

  Result<Selection> Read(const CudaFrame& frame, const CudaPart& part, int member,
                         int32_t n) const override {
    KVS_ASSIGN_OR_RETURN(const CudaLists::Read lists, best_.lists().ReadMember(frame, member));
    if (lists.recent_begin == 0) return Selection::Full(n);
    const int32_t heads = frame.geometry().kv_heads, unit = part.plan.index.unit;
    Selection selection;
    selection.Reset(n, heads);
    const int32_t groups = (lists.recent_begin + unit - 1) / unit - lists.sink_end / unit;
    selection.scored_bytes = groups * heads * frame.state(member).index().row_bytes();
    if (SharesIn(part.plan.bits)) {
      const int32_t always = lists.sink_end + (n - lists.recent_begin);
      selection.scored_bytes += always * heads * frame.geometry().row_bytes();
    }
    for (int head = 0; head < heads; ++head) {
      std::vector<Run>& runs = selection.runs[head];
      AppendRun({0, lists.sink_end}, &runs);
      for (int32_t i = 0; i < lists.counts[head]; ++i) {
        const int32_t token = lists.units[static_cast<size_t>(head * best_.lists().stride() + i)];
        AppendRun({token, token + 1}, &runs);
      }
      AppendRun({lists.recent_begin, n}, &runs);
    }
    return selection;
  }

 private:
  static constexpr int32_t kMultiple = 1024;  // tokens, in growing

  // Whether votes are shares of all attention.
  static bool SharesIn(const BitsOptions& bits) { return bits.max_missed > 0; }

  Status FitAlways(const CudaFrame& frame) {
    StepMemory& memory = frame.memory();
    if (memory.members() <= always_members_) return OkStatus();
    memory.NoteGrowth();
    const int64_t heads = int64_t{memory.members()} * frame.geometry().query_heads;
    KVS_RETURN_IF_ERROR(memory.Fit(&always_, heads * cuda::kAlwaysFloats * int64_t{sizeof(float)}));
    always_members_ = memory.members();
    return OkStatus();
  }

  cuda::AlwaysBatch AlwaysOf(const CudaFrame& frame, const CudaPart& part, int layer,
                             const Rows& q) const {
    const Geometry& g = frame.geometry();
    cuda::AlwaysBatch w;
    w.keys = cuda::KeyRows(frame.PagesOf(part.first, layer));
    w.scale = g.logit_scale();
    w.tokens = frame.VisibleFrom(frame.FirstRow(part));
    w.q = q.data;
    w.q_dtype = q.dtype;
    w.batch = part.count;
    w.query_heads = g.query_heads;
    w.always = always_.as<float>() + int64_t{part.first} * g.query_heads * cuda::kAlwaysFloats;
    return w;
  }

  CudaScoredLists best_;
  DeviceBuffer always_;  // of op always
  int32_t always_members_ = 0;
};

}  // namespace

Status CudaBitsServes(const Plan& plan) {
  if (plan.index.unit % 32 != 0) {
    return PlanUnserved("unit", std::to_string(plan.index.unit),
                        "op vote over groups that are no multiple of 32 tokens");
  }
  if (plan.bits.recent < plan.index.unit) {
    return PlanUnserved(
        "recent",
        std::to_string(plan.bits.recent) + " below unit = " + std::to_string(plan.index.unit),
        "op vote over keys of a group that is not sealed");
  }
  return OkStatus();
}

std::unique_ptr<CudaSelector> NewCudaBits(const CudaSelectorSource&) {
  return std::make_unique<CudaBits>();
}

}  // namespace kvstrata
