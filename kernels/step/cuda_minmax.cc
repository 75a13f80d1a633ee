// Selector minmax (quest) on a GPU, as kernels/select/minmax.cc does it on a CPU: pages are
// scored by the extremes of their keys, which the index holds, and the best are picked.
#include <algorithm>

#include "kernels/step/cuda_frame.h"
#include "kernels/step/cuda_lists.h"
#include "kernels/step/cuda_selector_rows.h"

namespace kvstrata {
namespace {

class CudaMinMax final : public CudaSelector {
 public:
  CudaQueries queries() const override { return CudaQueries::kDense; }
  bool IdlesWhenShort() const override { return true; }
  // Op score reads ahead, op vote does not.
  bool ReadsAhead(const Plan& plan) const override { return !plan.minmax.group_softmax; }

  Status Fit(const CudaFrame& frame, std::span<const CudaPart>) override {
    Room room = room_;
    for (int i = 0; i < frame.members(); ++i) {
      if (!Has(frame, i)) continue;
      const cuda::CandidateRule rule = MinMaxCandidates(frame.plan(i));
      const int32_t units = frame.RoomFor(i) / rule.unit_tokens + 1;
      Raise(&room.units, units, Generous(units, kMultiple));
      room.list = std::max(room.list, rule.take);
      room.members = std::max(room.members, frame.memory().members());
    }
    if (room == room_) return OkStatus();
    room_ = {};  // until all of it is there
    KVS_RETURN_IF_ERROR(FitTo(room, frame));
    room_ = room;
    return OkStatus();
  }

  Status Select(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q) override {
    KVS_RETURN_IF_ERROR(part.plan.minmax.group_softmax ? Vote(*frame, part, layer, q)
                                                       : Score(*frame, part, layer, q));
    return Pick(*frame, part);
  }

  cuda::DeviceSelection SelectionOf(const CudaFrame&, const CudaPart& part) const override {
    return lists_.SelectionOf(part, part.plan.index.unit);
  }

  Result<Selection> Read(const CudaFrame& frame, const CudaPart& part, int member,
                         int32_t n) const override {
    KVS_ASSIGN_OR_RETURN(const CudaLists::Read lists, lists_.ReadMember(frame, member));
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
        const int32_t unit = lists.units[static_cast<size_t>(head * lists_.stride() + i)];
        selection.units[head].push_back(unit);
        AppendRun({unit * page, (unit + 1) * page}, &runs);
      }
      AppendRun({lists.recent_begin, n}, &runs);
    }
    return selection;
  }

 private:
  static constexpr int32_t kMultiple = 64;  // units, in growing

  struct Room {
    int32_t members = 0;
    int32_t units = 0, list = 0;  // of a (member, KV head): candidates, chosen ones
    bool operator==(const Room&) const = default;
  };

  Status FitTo(const Room& room, const CudaFrame& frame) {
    const Geometry& g = frame.geometry();
    StepMemory& memory = frame.memory();
    memory.NoteGrowth();
    const int64_t lists = int64_t{room.members} * g.kv_heads;
    KVS_RETURN_IF_ERROR(memory.Fit(&scores_, lists * room.units * int64_t{sizeof(float)}));
    KVS_RETURN_IF_ERROR(lists_.Fit(&memory, room.members, g.kv_heads, room.list));
    cuda::VoteBatch vote;
    vote.rows.kv_heads = g.kv_heads;
    vote.batch = room.members;
    vote.query_heads = g.query_heads;
    vote.output_rows = g.kv_heads;
    vote.candidate_stride = room.units;
    KVS_RETURN_IF_ERROR(memory.Fit(&vote_scratch_, frame.ops().vote_scratch_bytes(vote)));
    return memory.FitZeroed(&pick_scratch_,
                            PickScratchBytes(frame.ops(), room.members, g.kv_heads, room.units));
  }

  float* ScoresOf(const CudaFrame& frame, const CudaPart& part) const {
    return scores_.as<float>() + int64_t{part.first} * frame.geometry().kv_heads * room_.units;
  }

  Status Score(const CudaFrame& frame, const CudaPart& part, int layer, const Rows& q) {
    cuda::ScoreBatch w;
    w.rows = frame.IndexRowsOf(part.first, 0, layer);
    w.fields = 2;
    w.field_stride = frame.state(part.first).index().field_stride();
    w.rule = MinMaxCandidates(part.plan);
    w.tokens = frame.VisibleFrom(frame.FirstRow(part));
    w.q = q.data;
    w.q_dtype = q.dtype;
    w.batch = part.count;
    w.query_heads = frame.geometry().query_heads;
    w.unit_stride = room_.units;
    w.scores = ScoresOf(frame, part);
    w.ahead = true;
    return frame.Check(frame.ops().score(w, frame.stream()), "op score");
  }

  Status Vote(const CudaFrame& frame, const CudaPart& part, int layer, const Rows& q) {
    cuda::VoteBatch w;
    w.rows = frame.IndexRowsOf(part.first, 0, layer);
    w.fields = 2;
    w.field_stride = frame.state(part.first).index().field_stride();
    w.scale = frame.geometry().logit_scale();
    w.rule = MinMaxCandidates(part.plan);
    w.tokens = frame.VisibleFrom(frame.FirstRow(part));
    w.q = q.data;
    w.q_dtype = q.dtype;
    w.batch = part.count;
    w.query_heads = frame.geometry().query_heads;
    w.output_rows = frame.geometry().kv_heads;
    w.candidate_stride = room_.units;
    w.votes = ScoresOf(frame, part);
    w.scratch = vote_scratch_.as<std::byte>();
    return frame.Check(frame.ops().vote(w, frame.stream()), "op vote");
  }

  Status Pick(const CudaFrame& frame, const CudaPart& part) {
    cuda::PickBatch w;
    w.scores = ScoresOf(frame, part);
    w.score_stride = room_.units;
    w.batch = part.count;
    w.groups = frame.geometry().kv_heads;
    w.rule = MinMaxCandidates(part.plan);
    w.tokens = frame.VisibleFrom(frame.FirstRow(part));
    w.ahead = true;
    lists_.WriteTo(part, &w);
    w.scratch = pick_scratch_.as<std::byte>();
    w.scratch_lists = room_.members * w.groups;
    return frame.Check(frame.ops().pick(w, frame.stream()), "op pick");
  }

  Room room_;
  CudaLists lists_;
  DeviceBuffer scores_, vote_scratch_, pick_scratch_;
};

}  // namespace

Status CudaMinMaxServes(const Plan& plan) { return CudaIndexServes(plan); }

std::unique_ptr<CudaSelector> NewCudaMinMax(const CudaSelectorSource&) {
  return std::make_unique<CudaMinMax>();
}

}  // namespace kvstrata
