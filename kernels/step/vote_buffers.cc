#include "kernels/step/vote_buffers.h"

#include <algorithm>
#include <bit>

namespace kvstrata {
namespace {

int32_t PowerOfTwo(int32_t n) {
  return static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(n)));
}

}  // namespace

VoteBuffers::Capacity VoteBuffers::Capacity::Grown(const Capacity& need) const {
  Capacity c = *this;
  if (need.batch > batch) c.batch = PowerOfTwo(need.batch);
  if (need.lists > lists) c.lists = PowerOfTwo(need.lists);
  constexpr int64_t kMultiple = 64;
  if (need.tokens > tokens) {
    const int64_t generous = int64_t{need.tokens} + need.tokens / 4;
    c.tokens = static_cast<int32_t>((generous + kMultiple - 1) / kMultiple * kMultiple);
  }
  c.chunk_lists = std::max(chunk_lists, need.chunk_lists);
  return c;
}

Status VoteBuffers::Fit(const cuda::CudaOps& ops, const Geometry& geometry, const Capacity& c) {
  if (c.lists == 0) return OkStatus();
  const auto reserve = [&ops](DeviceBuffer* buffer, int64_t bytes) {
    return buffer->Reserve(ops, static_cast<uint64_t>(bytes));
  };
  constexpr int64_t kInt = sizeof(int32_t), kFloat = sizeof(float), kAddress = sizeof(uint64_t);
  KVS_RETURN_IF_ERROR(reserve(&votes, int64_t{c.batch} * c.tokens * kFloat));
  cuda::VoteBatch vote;
  vote.rows.kv_heads = geometry.kv_heads;
  vote.query_heads = geometry.query_heads;
  vote.output_rows = 1;
  vote.candidate_stride = c.tokens;
  cuda::PickBatch to_pick;
  to_pick.score_stride = c.tokens;
  to_pick.scratch_lists = c.batch;
  int64_t vote_bytes = 0, pick_bytes = 0;  // small batches have more CTAs a list
  for (int32_t batch = 1; batch <= c.batch; ++batch) {
    vote.batch = to_pick.batch = batch;
    vote_bytes = std::max(vote_bytes, ops.vote_scratch_bytes(vote));
    pick_bytes = std::max(pick_bytes, ops.pick_scratch_bytes(to_pick));
  }
  KVS_RETURN_IF_ERROR(reserve(&scratch, vote_bytes));
  // Its counters lie where the numbers of lists and CTAs put them, and must be zero.
  KVS_RETURN_IF_ERROR(pick.Free());
  KVS_RETURN_IF_ERROR(reserve(&pick, pick_bytes));
  KVS_RETURN_IF_ERROR(reserve(&mean, int64_t{geometry.query_heads} * geometry.head_dim * kFloat));
  KVS_RETURN_IF_ERROR(reserve(&lists, c.lists * kAddress));
  for (DeviceBuffer* const ints : {&voting, &counts, &sink_end, &recent_begin}) {
    KVS_RETURN_IF_ERROR(reserve(ints, c.lists * kInt));
  }
  return reserve(&units, int64_t{c.lists} * c.chunk_lists * kInt);
}

}  // namespace kvstrata
