// SPDX-License-Identifier: Apache-2.0
// Selector bits over an engine's own blocks: ops vote over groups and pick
// (kernels/plans/bits/gpu/cuda_bits.cc does so over pages of ours, and has more ways).
#include "kernels/blocks/block_lists.h"
#include "kernels/select/selection_rule.h"

namespace kvstrata {
namespace {

class BlockBits final : public BlockSelector {
 public:
  explicit BlockBits(const BlockSelectorSource& source)
      : lists_(source, BitsCandidates(source.plan), source.shape.geometry.kv_heads,
               source.plan.bits.run) {}

  Status Select(const BlockCall& call) const override {
    cuda::VoteBatch w;
    w.groups = call.index->GroupsOf(call.tables, call.layer);
    w.ahead = true;
    KVS_RETURN_IF_ERROR(lists_.Vote(call, w));
    return lists_.Pick(call);
  }
  cuda::DeviceSelection SelectionOf(const BlockWorkspace& workspace) const override {
    return lists_.SelectionOf(workspace);
  }

 private:
  const BlockLists lists_;
};

}  // namespace

std::unique_ptr<BlockSelector> NewBlockBits(const BlockSelectorSource& source) {
  return std::make_unique<BlockBits>(source);
}

}  // namespace kvstrata
