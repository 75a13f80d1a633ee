// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/lists/cuda_scored_lists.h"

#include <algorithm>

namespace kvstrata {

Status CudaScoredLists::Fit(const CudaFrame& frame, const Room& need, int32_t multiple) {
  Room room = room_;
  Raise(&room.units, need.units, Generous(need.units, multiple));
  room.list = std::max(room.list, need.list);
  const int32_t members = std::max(members_, frame.memory().members());
  if (room == room_ && members == members_) return OkStatus();
  room_ = {}, members_ = 0;  // until all of it is there
  KVS_RETURN_IF_ERROR(FitTo(frame, members, room));
  room_ = room, members_ = members;
  return OkStatus();
}

Status CudaScoredLists::FitTo(const CudaFrame& frame, int32_t members, const Room& room) {
  const Geometry& g = frame.geometry();
  StepMemory& memory = frame.memory();
  memory.NoteGrowth();
  const int64_t lists = int64_t{members} * g.kv_heads;
  KVS_RETURN_IF_ERROR(memory.Fit(&scores_, lists * room.units * int64_t{sizeof(float)}));
  KVS_RETURN_IF_ERROR(lists_.Fit(&memory, members, g.kv_heads, room.list));
  KVS_RETURN_IF_ERROR(memory.Fit(&takes_, lists * int64_t{sizeof(int32_t)}));
  cuda::VoteBatch vote;
  vote.rows.kv_heads = g.kv_heads;
  vote.query_heads = g.query_heads;
  vote.output_rows = g.kv_heads;
  vote.candidate_stride = room.units;
  KVS_RETURN_IF_ERROR(memory.Fit(&vote_scratch_, VoteScratchBytes(frame.ops(), vote, members)));
  return memory.FitZeroed(&pick_scratch_,
                          PickScratchBytes(frame.ops(), members, g.kv_heads, room.units));
}

float* CudaScoredLists::ScoresOf(const CudaFrame& frame, const CudaPart& part) const {
  return scores_.as<float>() + int64_t{part.first} * frame.geometry().kv_heads * room_.units;
}

Status CudaScoredLists::Vote(const CudaFrame& frame, const CudaPart& part,
                             const cuda::CandidateRule& rule, const Rows& q,
                             cuda::VoteBatch vote) const {
  vote.scale = frame.geometry().logit_scale();
  vote.rule = rule;
  vote.tokens = frame.VisibleFrom(frame.FirstRow(part));
  vote.q = q.data;
  vote.q_dtype = q.dtype;
  vote.batch = part.count;
  vote.query_heads = frame.geometry().query_heads;
  vote.output_rows = frame.geometry().kv_heads;
  vote.candidate_stride = room_.units;
  vote.votes = ScoresOf(frame, part);
  vote.scratch = vote_scratch_.as<std::byte>();
  return frame.Check(frame.ops().vote(vote, frame.stream()), "op vote");
}

cuda::PickBatch CudaScoredLists::PickOf(const CudaFrame& frame, const CudaPart& part,
                                        const cuda::CandidateRule& rule, int32_t run) const {
  cuda::PickBatch w;
  w.scores = ScoresOf(frame, part);
  w.score_stride = room_.units / run;
  w.batch = part.count;
  w.groups = frame.geometry().kv_heads;
  w.rule = rule;
  w.tokens = frame.VisibleFrom(frame.FirstRow(part));
  w.ahead = true;
  lists_.WriteTo(part, &w);
  w.scratch = pick_scratch_.as<std::byte>();
  w.scratch_lists = members_ * w.groups;
  return w;
}

Status CudaScoredLists::Pick(const CudaFrame& frame, const CudaPart& part,
                             const cuda::CandidateRule& rule, int32_t run) const {
  return frame.Check(frame.ops().pick(PickOf(frame, part, rule, run), frame.stream()), "op pick");
}

Status CudaScoredLists::PickMost(const CudaFrame& frame, const CudaPart& part,
                                 const cuda::CandidateRule& rule, int32_t run, double missed,
                                 int32_t most) const {
  cuda::PickBatch w = PickOf(frame, part, rule, run);
  cuda::TakeBatch take;
  take.votes = ScoresOf(frame, part);
  take.vote_stride = w.score_stride;
  take.batch = part.count;
  take.groups = w.groups;
  take.rule = rule;
  take.tokens = w.tokens;
  take.missed = missed;
  take.most = std::min(most, w.list_stride);
  take.takes = takes_.as<int32_t>() + int64_t{part.first} * w.groups;
  KVS_RETURN_IF_ERROR(frame.Check(frame.ops().take(take, frame.stream()), "op take"));
  w.takes = take.takes;
  w.take_each = true;
  w.ahead = false;  // op take has only just been enqueued
  return frame.Check(frame.ops().pick(w, frame.stream()), "op pick");
}

}  // namespace kvstrata
