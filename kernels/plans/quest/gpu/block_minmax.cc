// SPDX-License-Identifier: Apache-2.0
// Selector minmax (quest) over an engine's own blocks: op score, or op vote, over what the index
// has of a page, and op pick (kernels/plans/quest/gpu/cuda_minmax.cc does so over pages of ours).
#include "kernels/blocks/block_lists.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/select/selection_rule.h"

namespace kvstrata {
namespace {

class BlockMinMax final : public BlockSelector {
 public:
  explicit BlockMinMax(const BlockSelectorSource& source)
      : ops_(source.ops),
        geometry_(source.shape.geometry),
        votes_(source.plan.minmax.group_softmax),
        deviation_(source.plan.minmax.deviation),
        lists_(source, MinMaxCandidates(source.plan), geometry_.kv_heads, votes_ ? 1 : 0) {}

  Status Select(const BlockCall& call) const override {
    KVS_RETURN_IF_ERROR(votes_ ? lists_.Vote(call, RowsOf(call)) : Score(call));
    return lists_.Pick(call);
  }
  cuda::DeviceSelection SelectionOf(const BlockWorkspace& workspace) const override {
    return lists_.SelectionOf(workspace);
  }

 private:
  cuda::VoteBatch RowsOf(const BlockCall& call) const {
    cuda::VoteBatch w;
    w.rows = call.index->RowsOf(call.tables, call.layer);
    w.fields = 2;
    w.field_stride = call.index->field_stride();
    w.deviation = deviation_;
    return w;
  }

  // The index of what this step adds is not read, so rows may be read ahead.
  Status Score(const BlockCall& call) const {
    cuda::ScoreBatch w;
    w.rows = call.index->RowsOf(call.tables, call.layer);
    w.fields = 2;
    w.field_stride = call.index->field_stride();
    w.deviation = deviation_;
    w.rule = lists_.rule();
    w.tokens = call.chosen;
    w.q = call.q;
    w.q_dtype = geometry_.dtype;
    w.q_stride = call.q_stride;
    w.batch = call.rows;
    w.query_heads = geometry_.query_heads;
    w.scores = lists_.ScoresIn(*call.workspace);
    w.unit_stride = lists_.stride();
    w.ahead = true;
    return CudaStatus(ops_, ops_.score(w, call.stream), "op score");
  }

  const cuda::CudaOps& ops_;
  const Geometry geometry_;
  const bool votes_, deviation_;
  const BlockLists lists_;
};

}  // namespace

std::unique_ptr<BlockSelector> NewBlockMinMax(const BlockSelectorSource& source) {
  return std::make_unique<BlockMinMax>(source);
}

}  // namespace kvstrata
