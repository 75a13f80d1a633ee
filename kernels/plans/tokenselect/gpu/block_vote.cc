// SPDX-License-Identifier: Apache-2.0
// Selector vote (tokenselect) over an engine's own blocks: ops vote over keys and pick, at every
// step. Lists are not kept from one step to the next, since that needs a state by sequence.
#include "kernels/blocks/block_lists.h"
#include "kernels/select/selection_rule.h"

namespace kvstrata {
namespace {

class BlockVote final : public BlockSelector {
 public:
  explicit BlockVote(const BlockSelectorSource& source)
      : lists_(source, VoteCandidates(source.plan), 1, 1) {}

  Status Select(const BlockCall& call) const override {
    cuda::VoteBatch w;
    w.rows = call.index->KeysOf(call.tables, call.layer);
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

std::unique_ptr<BlockSelector> NewBlockVote(const BlockSelectorSource& source) {
  return std::make_unique<BlockVote>(source);
}

}  // namespace kvstrata
