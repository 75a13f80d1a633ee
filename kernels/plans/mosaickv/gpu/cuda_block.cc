// SPDX-License-Identifier: Apache-2.0
// Selector block over codec packed (mosaickv) on a GPU, as kernels/plans/mosaickv/block.cc does it
// on a CPU, but that blocks are counted: of a budget of tokens as many are chosen as whole blocks
// fit. Where a short block is chosen (the last of a prompt segment whose length is no multiple of
// `block`), the CPU may find room for one more.
#include <algorithm>
#include <limits>

#include "kernels/ops/pick/pick.h"
#include "kernels/plans/mosaickv/block_ranges.h"
#include "kernels/plans/mosaickv/gpu/cuda_packed.h"
#include "kernels/plans/mosaickv/gpu/packed_room.h"
#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector_rows.h"
#include "kernels/step/gpu/lists/cuda_lists.h"

namespace kvstrata {
namespace {

constexpr int32_t kAllBlocks = std::numeric_limits<int32_t>::max();

int32_t BlocksWithin(const Plan& plan, int32_t tokens) {
  return std::max(1, CeilShare(plan.block.share, tokens) / plan.packed.block);
}

class CudaBlock final : public CudaSelector {
 public:
  CudaBlock(StepMemory* memory, CudaPacked* codec)
      : codec_(codec), blocks_(memory->AddColumn()), take_(memory->AddColumn()) {}

  CudaSelectorTraits traits(const Plan&) override { return {}; }

  Status Fit(const CudaFrame& frame, std::span<const CudaPart>) override {
    Room room = room_;
    for (int i = 0; i < frame.members(); ++i) {
      if (!Has(frame, i)) continue;
      const PackedStorage* const packed = PackedOf(frame.state(i).stored());
      const Plan& plan = frame.plan(i);
      const int32_t segments =
          packed == nullptr ? 0 : static_cast<int32_t>(packed->segments().size());
      const int32_t blocks = frame.RoomFor(i) / plan.packed.block + segments + 1;
      const int32_t list = BlocksWithin(plan, frame.RoomFor(i));
      room.members = std::max(room.members, frame.memory().members());
      room.of_head = room.of_head.Grown(blocks, list);
    }
    if (room == room_) return OkStatus();
    room_ = {};  // until all of it is there
    KVS_RETURN_IF_ERROR(FitTo(room, frame));
    room_ = room;
    return OkStatus();
  }

  // The numbers that a graph reads instead of being captured with them.
  Status Stage(CudaFrame* frame) override {
    for (int i = 0; i < frame->members(); ++i) {
      if (!Has(*frame, i)) continue;
      const PackedStorage* const packed = PackedOf(frame->state(i).stored());
      const Plan& plan = frame->plan(i);
      const int32_t n = frame->member(i).view.tokens + 1;
      const int32_t take = n < plan.min_tokens ? kAllBlocks : BlocksWithin(plan, n);
      frame->memory().At(blocks_, i) = packed == nullptr ? 0 : packed->BlockCount(0, 0);
      frame->memory().At(take_, i) = packed == nullptr ? 0 : take;
    }
    return OkStatus();
  }

  // The first block is always on and has no score.
  Status Select(CudaFrame* frame, const CudaPart& part, int layer, const Rows& q) override {
    const Geometry& g = frame->geometry();
    const int64_t list = int64_t{part.first} * g.kv_heads;
    cuda::ScorePackedBatch score;
    score.layer = codec_->LayerOf(*frame, part, layer);
    score.queries = {q.data, q.dtype, int64_t{g.query_heads} * g.head_dim, part.count, g.group()};
    score.scores = scores_.as<float>() + list * room_.of_head.blocks;
    score.score_stride = room_.of_head.blocks;
    score.first = 1;
    score.ahead = true;
    KVS_RETURN_IF_ERROR(frame->Check(
        OpsOf<cuda::PackedOps>(frame->ops().packed).score_packed(score, frame->stream()),
        "op score_packed"));

    cuda::PickBatch w;
    w.scores = score.scores;
    w.score_stride = room_.of_head.blocks;
    w.batch = part.count;
    w.groups = g.kv_heads;
    w.rule = {1, score.first, 0, 0, 0};
    w.tokens = frame->memory().On(blocks_, part.first);
    w.takes = frame->memory().On(take_, part.first);
    w.ahead = true;
    lists_.WriteTo(part, &w);
    w.scratch = pick_scratch_.as<std::byte>();
    w.scratch_lists = room_.members * g.kv_heads;
    return frame->Check(frame->ops().pick(w, frame->stream()), "op pick");
  }

  // Lists of blocks, one for every KV head.
  cuda::DeviceSelection SelectionOf(const CudaFrame&, const CudaPart& part) const override {
    return lists_.SelectionOf(part, 1);
  }

  Result<Selection> Read(const CudaFrame& frame, const CudaPart& part, int member,
                         int32_t n) const override {
    const Geometry& g = frame.geometry();
    const PackedStorage* const packed = PackedOf(frame.state(member).stored());
    if (n < part.plan.min_tokens || packed == nullptr) return Selection::Full(n);
    KVS_ASSIGN_OR_RETURN(const CudaLists::Read lists, lists_.ReadMember(frame, member));
    const int layer = frame.selected_layer();
    Selection selection;
    selection.Reset(n, g.kv_heads);
    for (int head = 0; head < g.kv_heads; ++head) {
      const BlockRanges ranges(*packed, layer, head);
      std::vector<int32_t>& units = selection.units[head];
      for (int32_t id = 0; id < lists.sink_end; ++id) units.push_back(id);
      const int32_t* const list = lists.units.data() + int64_t{head} * lists_.stride();
      units.insert(units.end(), list, list + lists.counts[head]);
      for (int32_t id = lists.recent_begin; id < ranges.count(); ++id) units.push_back(id);
      for (const int32_t id : units) AppendRun(ranges.Tokens(id), &selection.runs[head]);
      AppendRun({packed->end(), n}, &selection.runs[head]);
      for (size_t s = 0; s < packed->segments().size(); ++s) {
        const PackedRows& blocks = packed->head(static_cast<int>(s), layer, head).blocks;
        selection.scored_bytes += int64_t{ranges.end(s) - ranges.first(s)} * blocks.stride;
      }
    }
    return selection;
  }

 private:
  struct Room {
    int32_t members = 0;
    BlockRoom of_head;
    bool operator==(const Room&) const = default;
  };

  Status FitTo(const Room& room, const CudaFrame& frame) {
    const int32_t heads = frame.geometry().kv_heads;
    StepMemory& memory = frame.memory();
    memory.NoteGrowth();
    const int64_t lists = int64_t{room.members} * heads;
    KVS_RETURN_IF_ERROR(memory.Fit(&scores_, lists * room.of_head.blocks * int64_t{sizeof(float)}));
    KVS_RETURN_IF_ERROR(lists_.Fit(&memory, room.members, heads, room.of_head.list));
    return memory.FitZeroed(
        &pick_scratch_, PickScratchBytes(frame.ops(), room.members, heads, room.of_head.blocks));
  }

  const CudaPacked* const codec_;
  const StepMemory::Column blocks_, take_;
  Room room_;
  CudaLists lists_;
  DeviceBuffer scores_, pick_scratch_;
};

Status BlockServes(const Plan& plan) {
  // Op score_packed takes the group's maximum.
  return plan.block.group_softmax
             ? PlanUnserved("group", "\"softmax\"", "op score_packed with a softmax over the group")
             : OkStatus();
}

std::unique_ptr<CudaSelector> NewBlock(const CudaSelectorSource& from) {
  return std::make_unique<CudaBlock>(from.memory, from.CodecOf<CudaPacked>(CodecKind::kPacked));
}

}  // namespace

constinit const CudaSelectorRow kCudaBlock = {
    kOverPacked, "the selector's half over ops score and pick", BlockServes, NewBlock};

}  // namespace kvstrata
