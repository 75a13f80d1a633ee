// SPDX-License-Identifier: Apache-2.0
// Selector bits on a GPU, as kernels/plans/bits/bits.cc does it on a CPU: each KV
// head votes for tokens by its keys in few bits, which the index holds, and takes the best of them.
// Plans that are served have a window of at least a group, so that every candidate is in a group
// that was sealed before the step.
//
// A fixed budget of single tokens is taken by op pick_bits where that is the faster way and the
// device and the shape have it, else by ops vote and pick, as runs of tokens are. With max_missed
// op always says what always-on tokens get, op vote makes shares of all attention, op take says how
// many of each list, and op pick takes them.
#include <algorithm>

#include "kernels/select/selection_rule.h"
#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector_rows.h"
#include "kernels/step/gpu/lists/cuda_scored_lists.h"

namespace kvstrata {
namespace {

constexpr int32_t kMultiple = 1024;  // tokens, in growing

// Lists of a fixed budget by op pick_bits, and its room.
class OnePassLists {
 public:
  // Whether the op is the faster way and takes such lists. Once a step was served so, the next ones
  // are, as long as it takes them.
  bool Serves(const CudaFrame& frame, int32_t need, bool served) const {
    int32_t units = room_.units;
    Raise(&units, need, Generous(need, kMultiple));
    return (served || IsFaster(frame, units)) && frame.ops().pick_bits != nullptr &&
           ScratchBytes(frame, 1, units) > 0;
  }

  Status Fit(const CudaFrame& frame, const CudaScoredLists::Room& need) {
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

  // keys: what is scored; the rest is filled in.
  Status Pick(const CudaFrame& frame, const CudaPart& part, const cuda::CandidateRule& rule,
              const Rows& q, const cuda::VoteBatch& keys) const {
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

  const CudaLists& lists() const { return lists_; }

 private:
  // Measured on an H100, 128 channels, 2 bits, groups of 4 heads (bench/notes/score_bits.md): 8
  // lists of 32K and of 128K tokens take longer by the op, 8 of 1M and 64 of 128K less long. By
  // lines through these points 8 lists cross at 1.3M candidates, and 16 take 7 % less with 2M.
  // Nothing was measured of many lists that are shorter.
  static constexpr int32_t kLongList = 128 << 10;
  static constexpr int64_t kManyCandidates = int64_t{2} << 20;  // those of all lists

  // By the room of the workspace, so that what has grown into it stays there.
  static bool IsFaster(const CudaFrame& frame, int32_t units) {
    const int64_t lists = int64_t{frame.memory().members()} * frame.geometry().kv_heads;
    return units >= kLongList && lists * units >= kManyCandidates;
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

  int32_t members_ = 0;
  CudaScoredLists::Room room_;
  CudaLists lists_;
  DeviceBuffer scratch_;
};

class CudaBits final : public CudaSelector {
 public:
  CudaSelectorTraits traits(const Plan& plan) override {
    // With max_missed the newest key is scored, too, and op always reads after what is before it.
    const bool shares = SharesIn(plan.bits);
    return {.idles_when_short = true, .reads_ahead = !shares, .attends_newest = !shares};
  }

  Status Fit(const CudaFrame& frame, std::span<const CudaPart>) override {
    CudaScoredLists::Room singles, others;
    bool shares = false;
    for (int i = 0; i < frame.members(); ++i) {
      if (!Has(frame, i)) continue;
      const BitsOptions& bits = frame.plan(i).bits;
      const int32_t units = frame.RoomFor(i);
      // With max_missed a list may hold all that there is room for.
      const int32_t most = units <= best_.units() ? best_.units() : Generous(units, kMultiple);
      CudaScoredLists::Room& need = OfSingles(bits) ? singles : others;
      need.units = std::max(need.units, units);
      const int32_t rows = SharesIn(bits) ? std::min(bits.budget, most) : bits.budget;
      need.list = std::max(need.list, rows / bits.run);
      shares |= SharesIn(bits);
    }
    if (shares) KVS_RETURN_IF_ERROR(FitAlways(frame));
    KVS_RETURN_IF_ERROR(ChooseOps(frame, singles));
    CudaScoredLists::Room need = others;
    if (!one_pass_) {
      need = {std::max(singles.units, others.units), std::max(singles.list, others.list)};
    }
    return need.units == 0 ? OkStatus() : best_.Fit(frame, need, kMultiple);
  }

  Status Select(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q) override {
    const cuda::CandidateRule rule = BitsCandidates(part.plan);
    cuda::VoteBatch keys;
    keys.groups = frame->IndexGroupsOf(part.first, layer);
    keys.ahead = true;
    if (SharesIn(part.plan.bits)) return SelectShares(*frame, part, layer, rule, q, keys);
    if (InOnePass(part.plan.bits)) return one_pass_lists_.Pick(*frame, part, rule, q, keys);
    KVS_RETURN_IF_ERROR(best_.Vote(*frame, part, rule, q, keys));
    return best_.Pick(*frame, part, rule, rule.unit_tokens);
  }

  cuda::DeviceSelection SelectionOf(const CudaFrame&, const CudaPart& part) const override {
    return ListsOf(part.plan).SelectionOf(part, part.plan.bits.run);
  }

  Result<Selection> Read(const CudaFrame& frame, const CudaPart& part, int member,
                         int32_t n) const override {
    const CudaLists& chosen = ListsOf(part.plan);
    KVS_ASSIGN_OR_RETURN(const CudaLists::Read lists, chosen.ReadMember(frame, member));
    if (lists.recent_begin == 0) return Selection::Full(n);
    const int32_t heads = frame.geometry().kv_heads, group = part.plan.index.unit;
    const int32_t run = part.plan.bits.run;
    Selection selection;
    selection.Reset(n, heads);
    const int32_t groups = (lists.recent_begin + group - 1) / group - lists.sink_end / group;
    selection.scored_bytes = groups * heads * frame.state(member).index().row_bytes();
    if (SharesIn(part.plan.bits)) {
      const int32_t always = lists.sink_end + (n - lists.recent_begin);
      selection.scored_bytes += always * heads * frame.geometry().row_bytes();
    }
    for (int head = 0; head < heads; ++head) {
      std::vector<Run>& runs = selection.runs[head];
      AppendRun({0, lists.sink_end}, &runs);
      for (int32_t i = 0; i < lists.counts[head]; ++i) {
        const int32_t unit = lists.units[static_cast<size_t>(head * chosen.stride() + i)];
        AppendRun({unit * run, (unit + 1) * run}, &runs);
      }
      AppendRun({lists.recent_begin, n}, &runs);
    }
    return selection;
  }

 private:
  // Whether votes are shares of all attention.
  static bool SharesIn(const BitsOptions& bits) { return bits.max_missed > 0; }

  const CudaLists& ListsOf(const Plan& plan) const {
    return InOnePass(plan.bits) ? one_pass_lists_.lists() : best_.lists();
  }

  static bool OfSingles(const BitsOptions& bits) { return !SharesIn(bits) && bits.run == 1; }
  bool InOnePass(const BitsOptions& bits) const { return one_pass_ && OfSingles(bits); }

  // By which ops lists of a fixed budget of single tokens are made, and their room if that is one
  // pass.
  Status ChooseOps(const CudaFrame& frame, const CudaScoredLists::Room& singles) {
    if (singles.units == 0) return OkStatus();
    const bool before = one_pass_;
    one_pass_ = one_pass_lists_.Serves(frame, singles.units, before);
    if (one_pass_ != before) frame.memory().NoteGrowth();  // graphs hold the other ops
    return one_pass_ ? one_pass_lists_.Fit(frame, singles) : OkStatus();
  }

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

  Status SelectShares(const CudaFrame& frame, const CudaPart& part, int layer,
                      const cuda::CandidateRule& rule, const Rows& q, cuda::VoteBatch keys) const {
    cuda::AlwaysBatch always = AlwaysOf(frame, part, layer, q);
    always.groups = keys.groups;
    always.rule = rule;
    KVS_RETURN_IF_ERROR(frame.Check(frame.ops().always(always, frame.stream()), "op always"));
    keys.always = always.always;
    KVS_RETURN_IF_ERROR(best_.Vote(frame, part, rule, q, keys));
    return best_.PickMost(frame, part, rule, rule.unit_tokens,
                          BitsMissed(part.plan, frame.geometry().group()),
                          part.plan.bits.budget / rule.unit_tokens);
  }

  bool one_pass_ = false;  // lists of a fixed budget of single tokens
  OnePassLists one_pass_lists_;
  CudaScoredLists best_;  // the others
  DeviceBuffer always_;   // what op always writes
  int32_t always_members_ = 0;
};

Status Serves(const Plan& plan) {
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

}  // namespace

constinit const CudaSelectorRow kCudaBits = {kOverRaw, "op attend_packed over lists of tokens",
                                             Serves, MakeCudaSelector<CudaBits>};

}  // namespace kvstrata
