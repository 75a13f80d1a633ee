// Selector bits on a GPU, as kernels/select/bits.cc does it on a CPU: each KV head votes for tokens
// by its keys in few bits, which the index holds, and takes the best of them: by op pick_bits where
// that is the faster way and the device and the shape have it, else by ops vote and pick. Plans
// that are served have a window of at least a group, so that every candidate is in a group that was
// sealed before the step.
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
    if (need.units == 0) return OkStatus();
    int32_t units = room_.units;
    Raise(&units, need.units, Generous(need.units, kMultiple));
    one_pass_ = (one_pass_ || IsFasterInOnePass(frame, units)) && TakesOnePass(frame, units);
    return one_pass_ ? FitOnePass(frame, need) : best_.Fit(frame, need, kMultiple);
  }

  Status Select(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q) override {
    const cuda::CandidateRule rule = BitsCandidates(part.plan);
    cuda::VoteBatch keys;
    keys.groups = frame->IndexGroupsOf(part.first, layer);
    keys.ahead = true;
    if (one_pass_) return PickInOnePass(*frame, part, rule, q, keys);
    KVS_RETURN_IF_ERROR(best_.Vote(*frame, part, rule, q, keys));
    return best_.Pick(*frame, part, rule);
  }

  cuda::DeviceSelection SelectionOf(const CudaFrame&, const CudaPart& part) const override {
    return chosen().SelectionOf(part, 1);
  }

  Result<Selection> Read(const CudaFrame& frame, const CudaPart& part, int member,
                         int32_t n) const override {
    KVS_ASSIGN_OR_RETURN(const CudaLists::Read lists, chosen().ReadMember(frame, member));
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
        const int32_t token = lists.units[static_cast<size_t>(head * chosen().stride() + i)];
        AppendRun({token, token + 1}, &runs);
      }
      AppendRun({lists.recent_begin, n}, &runs);
    }
    return selection;
  }

 private:
  static constexpr int32_t kMultiple = 1024;  // tokens, in growing

  // Where the op is the faster way. Measured on an H100, 128 channels, 2 bits, groups of 4 heads
  // (bench/notes/score_bits.md): 8 lists of 32K and of 128K tokens take longer by it, 8 of 1M and
  // 64 of 128K less long. By lines through these points 8 lists cross at 1.3M candidates, and 16
  // take 7 % less with 2M. Nothing was measured of many lists that are shorter.
  static constexpr int32_t kLongList = 128 << 10;
  static constexpr int64_t kManyCandidates = int64_t{2} << 20;  // of all lists

  // By the room of the workspace, so that what has grown into it stays there.
  static bool IsFasterInOnePass(const CudaFrame& frame, int32_t units) {
    const int64_t lists = int64_t{frame.memory().members()} * frame.geometry().kv_heads;
    return units >= kLongList && lists * units >= kManyCandidates;
  }
  static bool TakesOnePass(const CudaFrame& frame, int32_t units) {
    return frame.ops().pick_bits != nullptr && ScratchBytes(frame, 1, units) > 0;
  }

  // 0: of some unit the op does not take such lists.
  static int64_t ScratchBytes(const CudaFrame& frame, int32_t members, int32_t units) {
    cuda::PickBitsBatch w;
    w.vote.groups.kv_heads = w.vote.output_rows = frame.geometry().kv_heads;
    w.vote.query_heads = frame.geometry().query_heads;
    w.vote.candidate_stride = units;
    int64_t bytes = 0;
    for (int32_t unit = 32; unit <= 256; unit += 32) {
      w.vote.groups.format.tokens = unit;
      for (w.vote.batch = 1; w.vote.batch <= members; ++w.vote.batch) {
        const int64_t own = frame.ops().pick_bits_scratch_bytes(w);
        if (own == 0) return 0;
        bytes = std::max(bytes, own);
      }
    }
    return bytes;
  }

  const CudaLists& chosen() const { return one_pass_ ? lists_ : best_.lists(); }

  Status FitOnePass(const CudaFrame& frame, const CudaScoredLists::Room& need) {
    CudaScoredLists::Room room = room_;
    Raise(&room.units, need.units, Generous(need.units, kMultiple));
    room.list = std::max(room.list, need.list);
    const int32_t members = std::max(members_, frame.memory().members());
    if (room == room_ && members == members_) return OkStatus();
    room_ = {}, members_ = 0;  // until all of it is there
    StepMemory& memory = frame.memory();
    memory.NoteGrowth();
    KVS_RETURN_IF_ERROR(lists_.Fit(&memory, members, frame.geometry().kv_heads, room.list));
    KVS_RETURN_IF_ERROR(memory.Fit(&scratch_, ScratchBytes(frame, members, room.units)));
    room_ = room, members_ = members;
    return OkStatus();
  }

  Status PickInOnePass(const CudaFrame& frame, const CudaPart& part,
                       const cuda::CandidateRule& rule, const Rows& q,
                       const cuda::VoteBatch& keys) const {
    cuda::PickBitsBatch w;
    w.vote = keys;
    w.vote.scale = frame.geometry().logit_scale();
    w.vote.rule = rule;
    w.vote.tokens = frame.VisibleFrom(frame.FirstRow(part));
    w.vote.q = q.data;
    w.vote.q_dtype = q.dtype;
    w.vote.batch = part.count;
    w.vote.query_heads = frame.geometry().query_heads;
    w.vote.output_rows = frame.geometry().kv_heads;
    w.vote.candidate_stride = room_.units;
    w.vote.scratch = scratch_.as<std::byte>();
    lists_.WriteTo(part, &w.pick);
    return frame.Check(frame.ops().pick_bits(w, frame.stream()), "op pick_bits");
  }

  bool one_pass_ = false;
  // In one pass.
  int32_t members_ = 0;
  CudaScoredLists::Room room_;
  CudaLists lists_;
  DeviceBuffer scratch_;
  CudaScoredLists best_;  // elsewhere
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
