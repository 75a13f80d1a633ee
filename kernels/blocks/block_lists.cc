// SPDX-License-Identifier: Apache-2.0
#include "kernels/blocks/block_lists.h"

#include <algorithm>

#include "kernels/cuda/device_buffer.h"
#include "kernels/step/gpu/lists/cuda_lists.h"

namespace kvstrata {
namespace {

// Scores are read in pieces of 16 bytes, of bf16 too.
int32_t StrideOf(const BlockShape& shape, const cuda::CandidateRule& rule) {
  const int32_t units = shape.max_tokens / rule.unit_tokens + 1;
  return (units + 7) / 8 * 8;
}

}  // namespace

BlockLists::BlockLists(const BlockSelectorSource& source, const cuda::CandidateRule& rule,
                       int32_t groups, int32_t run)
    : ops_(source.ops),
      geometry_(source.shape.geometry),
      rule_(rule),
      rows_(source.shape.max_decodes),
      groups_(groups),
      run_(run),
      stride_(StrideOf(source.shape, rule)) {
  BlockWorkspace& room = *source.workspace;
  const int64_t lists = int64_t{rows_} * groups_;
  scores_ = room.Add<float>(lists * stride_);
  units_ = room.Add<int32_t>(lists * rule_.take);
  counts_ = room.Add<int32_t>(lists);
  sink_end_ = room.Add<int32_t>(rows_);
  recent_begin_ = room.Add<int32_t>(rows_);
  pick_scratch_ = room.Add<std::byte>(PickScratchBytes(ops_, rows_, groups_, stride_));
  if (run_ == 0) return;
  cuda::VoteBatch shape;
  shape.rows.kv_heads = geometry_.kv_heads;
  shape.query_heads = geometry_.query_heads;
  shape.output_rows = groups_;
  shape.candidate_stride = stride_ * run_;
  if (run_ > 1) {  // the keys are quantised
    shape.groups.format.dim = geometry_.head_dim;
    shape.groups.kv_heads = geometry_.kv_heads;
    shape.rule = rule_;
  }
  vote_scratch_ = room.Add<std::byte>(VoteScratchBytes(ops_, shape, rows_));
}

Status BlockLists::Vote(const BlockCall& call, cuda::VoteBatch vote) const {
  vote.scale = geometry_.logit_scale();
  vote.rule = rule_;
  vote.tokens = call.chosen;
  vote.q = call.q;
  vote.q_dtype = geometry_.dtype;
  vote.q_stride = call.q_stride;
  vote.batch = call.rows;
  vote.query_heads = geometry_.query_heads;
  vote.output_rows = groups_;
  vote.candidate_stride = stride_ * run_;
  vote.votes = ScoresIn(*call.workspace);
  vote.scratch = call.workspace->At(vote_scratch_);
  return CudaStatus(ops_, ops_.vote(vote, call.stream), "op vote");
}

Status BlockLists::Pick(const BlockCall& call) const {
  const BlockWorkspace& room = *call.workspace;
  cuda::PickBatch w;
  w.scores = ScoresIn(room);
  w.score_stride = stride_;
  w.batch = call.rows;
  w.groups = groups_;
  w.rule = rule_;
  w.tokens = call.chosen;
  w.ahead = true;
  w.units = room.At(units_);
  w.counts = room.At(counts_);
  w.sink_end = room.At(sink_end_);
  w.recent_begin = room.At(recent_begin_);
  w.list_stride = rule_.take;
  w.scratch = room.At(pick_scratch_);
  w.scratch_lists = rows_ * groups_;
  return CudaStatus(ops_, ops_.pick(w, call.stream), "op pick");
}

cuda::DeviceSelection BlockLists::SelectionOf(const BlockWorkspace& room) const {
  return {.unit_tokens = rule_.unit_tokens,
          .groups = groups_,
          .list_stride = rule_.take,
          .units = room.At(units_),
          .counts = room.At(counts_),
          .sink_end = room.At(sink_end_),
          .recent_begin = room.At(recent_begin_)};
}

}  // namespace kvstrata
