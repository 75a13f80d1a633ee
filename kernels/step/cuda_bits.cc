// Selector bits on a GPU, as kernels/select/bits.cc does it on a CPU: each KV head votes for tokens
// by its keys in few bits, which the index holds, and takes the best of them. Plans that are served
// have a window of at least a group, so that every candidate is in a group that was sealed before
// the step.
#include <algorithm>

#include "kernels/plan_rows.h"
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
    for (int i = 0; i < frame.members(); ++i) {
      if (!Has(frame, i)) continue;
      need.units = std::max(need.units, frame.RoomFor(i));
      need.list = std::max(need.list, frame.plan(i).bits.budget);
    }
    return need.units == 0 ? OkStatus() : best_.Fit(frame, need, kMultiple);
  }

  Status Select(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q) override {
    const cuda::CandidateRule rule = BitsCandidates(part.plan);
    cuda::VoteBatch keys;
    keys.groups = frame->IndexGroupsOf(part.first, layer);
    keys.ahead = true;
    KVS_RETURN_IF_ERROR(best_.Vote(*frame, part, rule, q, keys));
    return best_.Pick(*frame, part, rule);
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

  CudaScoredLists best_;
};

}  // namespace

Status CudaBitsServes(const Plan& plan) {
  if (plan.bits.max_missed > 0) {
    return PlanUnserved("max_missed", NumberText(plan.bits.max_missed),
                        "op take over votes in the GPU's memory");
  }
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
