// Selector bits on a GPU, as kernels/select/bits.cc does it on a CPU: each KV head votes for tokens
// by its keys in few bits, which the index holds, and takes the best of them. Plans that are served
// have a window of at least a group, so that every candidate is in a group that was sealed before
// the step.
#include <algorithm>

#include "kernels/step/cuda_frame.h"
#include "kernels/step/cuda_lists.h"
#include "kernels/step/cuda_selector_rows.h"

namespace kvstrata {
namespace {

class CudaBits final : public CudaSelector {
 public:
  CudaQueries queries() const override { return CudaQueries::kDense; }
  bool IdlesWhenShort() const override { return true; }

  Status Fit(const CudaFrame& frame, std::span<const CudaPart>) override {
    Room room = room_;
    for (int i = 0; i < frame.members(); ++i) {
      if (!Has(frame, i)) continue;
      const int32_t tokens = frame.RoomFor(i);
      Raise(&room.tokens, tokens, Generous(tokens, kMultiple));
      room.list = std::max(room.list, frame.plan(i).bits.budget);
      room.members = std::max(room.members, frame.memory().members());
    }
    if (room == room_) return OkStatus();
    room_ = {};  // until all of it is there
    KVS_RETURN_IF_ERROR(FitTo(room, frame));
    room_ = room;
    return OkStatus();
  }

  Status Select(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q) override {
    KVS_RETURN_IF_ERROR(Vote(*frame, part, layer, q));
    return Pick(*frame, part);
  }

  cuda::DeviceSelection SelectionOf(const CudaFrame&, const CudaPart& part) const override {
    return lists_.SelectionOf(part, 1);
  }

  Result<Selection> Read(const CudaFrame& frame, const CudaPart& part, int member,
                         int32_t n) const override {
    KVS_ASSIGN_OR_RETURN(const CudaLists::Read lists, lists_.ReadMember(frame, member));
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
        const int32_t token = lists.units[static_cast<size_t>(head * lists_.stride() + i)];
        AppendRun({token, token + 1}, &runs);
      }
      AppendRun({lists.recent_begin, n}, &runs);
    }
    return selection;
  }

 private:
  static constexpr int32_t kMultiple = 1024;  // tokens, in growing

  struct Room {
    int32_t members = 0;
    int32_t tokens = 0, list = 0;  // of a (member, KV head): candidates, chosen ones
    bool operator==(const Room&) const = default;
  };

  Status FitTo(const Room& room, const CudaFrame& frame) {
    const Geometry& g = frame.geometry();
    StepMemory& memory = frame.memory();
    memory.NoteGrowth();
    const int64_t lists = int64_t{room.members} * g.kv_heads;
    KVS_RETURN_IF_ERROR(memory.Fit(&votes_, lists * room.tokens * int64_t{sizeof(float)}));
    KVS_RETURN_IF_ERROR(lists_.Fit(&memory, room.members, g.kv_heads, room.list));
    cuda::VoteBatch vote;
    vote.rows.kv_heads = g.kv_heads;
    vote.query_heads = g.query_heads;
    vote.output_rows = g.kv_heads;
    vote.candidate_stride = room.tokens;
    KVS_RETURN_IF_ERROR(
        memory.Fit(&vote_scratch_, VoteScratchBytes(frame.ops(), vote, room.members)));
    return memory.FitZeroed(&pick_scratch_,
                            PickScratchBytes(frame.ops(), room.members, g.kv_heads, room.tokens));
  }

  float* VotesOf(const CudaFrame& frame, const CudaPart& part) const {
    return votes_.as<float>() + int64_t{part.first} * frame.geometry().kv_heads * room_.tokens;
  }

  Status Vote(const CudaFrame& frame, const CudaPart& part, int layer, const Rows& q) {
    cuda::VoteBatch w;
    w.groups = frame.IndexGroupsOf(part.first, layer);
    w.ahead = true;
    w.scale = frame.geometry().logit_scale();
    w.rule = BitsCandidates(part.plan);
    w.tokens = frame.VisibleFrom(frame.FirstRow(part));
    w.q = q.data;
    w.q_dtype = q.dtype;
    w.batch = part.count;
    w.query_heads = frame.geometry().query_heads;
    w.output_rows = frame.geometry().kv_heads;
    w.candidate_stride = room_.tokens;
    w.votes = VotesOf(frame, part);
    w.scratch = vote_scratch_.as<std::byte>();
    return frame.Check(frame.ops().vote(w, frame.stream()), "op vote");
  }

  Status Pick(const CudaFrame& frame, const CudaPart& part) {
    cuda::PickBatch w;
    w.scores = VotesOf(frame, part);
    w.score_stride = room_.tokens;
    w.batch = part.count;
    w.groups = frame.geometry().kv_heads;
    w.rule = BitsCandidates(part.plan);
    w.tokens = frame.VisibleFrom(frame.FirstRow(part));
    w.ahead = true;
    lists_.WriteTo(part, &w);
    w.scratch = pick_scratch_.as<std::byte>();
    w.scratch_lists = room_.members * w.groups;
    return frame.Check(frame.ops().pick(w, frame.stream()), "op pick");
  }

  Room room_;
  CudaLists lists_;
  DeviceBuffer votes_, vote_scratch_, pick_scratch_;
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
