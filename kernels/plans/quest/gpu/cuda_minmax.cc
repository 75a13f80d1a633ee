// SPDX-License-Identifier: Apache-2.0
// Selector minmax (quest) on a GPU, as kernels/plans/quest/minmax.cc does it on a CPU: pages are
// scored by the extremes of their keys, or by their mean and variance, which the index holds, and
// the best are picked.
#include <algorithm>

#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector_rows.h"
#include "kernels/step/gpu/lists/cuda_scored_lists.h"

namespace kvstrata {
namespace {

class CudaMinMax final : public CudaSelector {
 public:
  CudaSelectorTraits traits(const Plan& plan) override {
    return {.idles_when_short = true, .reads_ahead = !plan.minmax.group_softmax};
  }

  Status Fit(const CudaFrame& frame, std::span<const CudaPart>) override {
    CudaScoredLists::Room need;
    for (int i = 0; i < frame.members(); ++i) {
      if (!Has(frame, i)) continue;
      const cuda::CandidateRule rule = MinMaxCandidates(frame.plan(i));
      need.units = std::max(need.units, frame.RoomFor(i) / rule.unit_tokens + 1);
      need.list = std::max(need.list, rule.take);
    }
    return need.units == 0 ? OkStatus() : best_.Fit(frame, need, kMultiple);
  }

  Status Select(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q) override {
    const cuda::CandidateRule rule = MinMaxCandidates(part.plan);
    KVS_RETURN_IF_ERROR(part.plan.minmax.group_softmax
                            ? best_.Vote(*frame, part, rule, q, RowsOf(*frame, part, layer))
                            : Score(*frame, part, layer, q));
    return best_.Pick(*frame, part, rule);
  }

  cuda::DeviceSelection SelectionOf(const CudaFrame&, const CudaPart& part) const override {
    return best_.lists().SelectionOf(part, part.plan.index.unit);
  }

  Result<Selection> Read(const CudaFrame& frame, const CudaPart& part, int member,
                         int32_t n) const override {
    KVS_ASSIGN_OR_RETURN(const CudaLists::Read lists, best_.lists().ReadMember(frame, member));
    if (lists.recent_begin == 0) return Selection::Full(n);
    const Geometry& g = frame.geometry();
    const int32_t page = part.plan.index.unit;
    Selection selection;
    selection.Reset(n, g.kv_heads);
    selection.scored_bytes = int64_t{2} * ((lists.recent_begin - lists.sink_end) / page) *
                             g.kv_heads * g.head_dim * SizeOf(g.dtype);
    for (int head = 0; head < g.kv_heads; ++head) {
      std::vector<Run>& runs = selection.runs[head];
      AppendRun({0, lists.sink_end}, &runs);
      for (int32_t i = 0; i < lists.counts[head]; ++i) {
        const int32_t unit = lists.units[static_cast<size_t>(head * best_.lists().stride() + i)];
        selection.units[head].push_back(unit);
        AppendRun({unit * page, (unit + 1) * page}, &runs);
      }
      AppendRun({lists.recent_begin, n}, &runs);
    }
    return selection;
  }

 private:
  static constexpr int32_t kMultiple = 64;  // units, in growing

  static cuda::VoteBatch RowsOf(const CudaFrame& frame, const CudaPart& part, int layer) {
    cuda::VoteBatch w;
    w.rows = frame.IndexRowsOf(part.first, 0, layer);
    w.fields = 2;
    w.field_stride = frame.state(part.first).index().field_stride();
    w.deviation = part.plan.minmax.deviation;
    return w;
  }

  Status Score(const CudaFrame& frame, const CudaPart& part, int layer, const Rows& q) {
    cuda::ScoreBatch w;
    w.rows = frame.IndexRowsOf(part.first, 0, layer);
    w.fields = 2;
    w.field_stride = frame.state(part.first).index().field_stride();
    w.deviation = part.plan.minmax.deviation;
    w.rule = MinMaxCandidates(part.plan);
    w.tokens = frame.VisibleFrom(frame.FirstRow(part));
    w.q = q.data;
    w.q_dtype = q.dtype;
    w.batch = part.count;
    w.query_heads = frame.geometry().query_heads;
    w.unit_stride = best_.units();
    w.scores = best_.ScoresOf(frame, part);
    w.ahead = true;
    return frame.Check(frame.ops().score(w, frame.stream()), "op score");
  }

  CudaScoredLists best_;
};

}  // namespace

constinit const CudaSelectorRow kCudaMinMax = {kOverRaw, "op attend_packed over pages",
                                               CudaIndexServes, MakeCudaSelector<CudaMinMax>};

}  // namespace kvstrata
