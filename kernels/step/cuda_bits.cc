// Selector bits on a GPU, as kernels/select/bits.cc does it on a CPU: each KV head votes for tokens
// by its keys in few bits, which the index holds, and takes the best of them (op vote_pick). Plans
// that are served have a window of at least a group, so that every candidate is in a group that was
// sealed before the step.
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
    const Status fits = FitTo(room, frame);
    if (!fits.ok()) room_ = {};  // all of it is asked for again
    return fits;
  }

  Status Select(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q) override {
    cuda::VotePickBatch w = BatchOf(*frame, part);
    w.vote.groups = frame->IndexGroupsOf(part.first, layer);
    w.vote.q = q.data;
    w.vote.q_dtype = q.dtype;
    return frame->Check(frame->ops().vote_pick(w, frame->stream()), "op vote_pick");
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
    StepMemory& memory = frame.memory();
    memory.NoteGrowth();
    room_ = room;
    KVS_RETURN_IF_ERROR(lists_.Fit(&memory, room.members, frame.geometry().kv_heads, room.list));
    cuda::VotePickBatch shape = ShapeOf(frame.geometry());
    int64_t scratch = 0, exchange = 0;
    for (shape.vote.batch = 1; shape.vote.batch <= room.members; ++shape.vote.batch) {
      scratch = std::max(scratch, frame.ops().vote_pick_scratch_bytes(shape));
      exchange = std::max(exchange, frame.ops().vote_pick_exchange_bytes(shape));
    }
    KVS_RETURN_IF_ERROR(memory.Fit(&scratch_, scratch));
    return memory.FitZeroed(&exchange_, exchange);
  }

  // What a batch has in every step and layer, for any number of members.
  cuda::VotePickBatch ShapeOf(const Geometry& g) const {
    cuda::VotePickBatch w;
    w.vote.groups.kv_heads = w.vote.output_rows = g.kv_heads;
    w.vote.groups.format.dim = g.head_dim;
    w.vote.query_heads = g.query_heads;
    w.vote.candidate_stride = room_.tokens;
    w.pick.scratch_lists = room_.members * g.kv_heads;
    return w;
  }

  // But for groups and queries.
  cuda::VotePickBatch BatchOf(const CudaFrame& frame, const CudaPart& part) const {
    cuda::VotePickBatch w = ShapeOf(frame.geometry());
    w.vote.batch = part.count;
    w.vote.rule = BitsCandidates(part.plan);
    w.vote.tokens = frame.VisibleFrom(frame.FirstRow(part));
    w.vote.ahead = true;
    w.vote.scale = frame.geometry().logit_scale();
    w.vote.scratch = scratch_.as<std::byte>();
    lists_.WriteTo(part, &w.pick);
    w.pick.scratch = exchange_.as<std::byte>();
    return w;
  }

  Room room_;
  CudaLists lists_;
  DeviceBuffer scratch_, exchange_;  // of the op
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
