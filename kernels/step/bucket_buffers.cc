#include "kernels/step/bucket_buffers.h"

#include <algorithm>

namespace kvstrata {
namespace {

cuda::VoteBatch VoteShape(const Geometry& g, int32_t stride, int32_t items) {
  cuda::VoteBatch vote;
  vote.rows.kv_heads = g.kv_heads;
  vote.batch = items;
  vote.query_heads = g.query_heads;
  vote.output_rows = g.kv_heads;
  vote.candidate_stride = stride;
  return vote;
}

}  // namespace

Status BucketBuffers::Fit(const cuda::CudaOps& ops, const Geometry& geometry, int32_t members,
                          int32_t tau) {
  if (tau == 0) return OkStatus();
  const auto lists = static_cast<uint64_t>(members) * static_cast<uint64_t>(geometry.kv_heads);
  KVS_RETURN_IF_ERROR(units.Reserve(ops, lists * static_cast<uint64_t>(tau) * sizeof(int32_t)));
  KVS_RETURN_IF_ERROR(counts.Reserve(ops, lists * sizeof(int32_t)));
  return counters.Reserve(ops, lists * sizeof(uint32_t));
}

Status BucketBuffers::FitPrompt(const cuda::CudaOps& ops, const Geometry& geometry,
                                int32_t tokens) {
  if (tokens <= stride) return OkStatus();
  constexpr int64_t kMultiple = 64, kFloat = sizeof(float);
  const auto larger =
      static_cast<int32_t>((int64_t{tokens} + tokens / 4 + kMultiple - 1) / kMultiple * kMultiple);
  const int64_t list_bytes = int64_t{geometry.kv_heads} * larger * kFloat;
  const int64_t item_bytes = list_bytes + ops.vote_scratch_bytes(VoteShape(geometry, larger, 1));
  stride = 0;  // until all of it is there
  items = static_cast<int32_t>(std::clamp<int64_t>(kVoteBytes / item_bytes, 1, kMostItems));
  int64_t vote_bytes = 0;  // small batches have more CTAs a list
  for (int32_t batch = 1; batch <= items; ++batch) {
    vote_bytes = std::max(vote_bytes, ops.vote_scratch_bytes(VoteShape(geometry, larger, batch)));
  }
  cuda::PickBatch to_pick;
  to_pick.score_stride = larger;
  to_pick.batch = 1;
  to_pick.groups = geometry.kv_heads;
  const auto reserve = [&ops](DeviceBuffer* buffer, int64_t bytes) {
    return buffer->Reserve(ops, static_cast<uint64_t>(bytes));
  };
  KVS_RETURN_IF_ERROR(reserve(&votes, items * list_bytes));
  KVS_RETURN_IF_ERROR(reserve(&scratch, vote_bytes));
  KVS_RETURN_IF_ERROR(reserve(&sums, list_bytes));
  KVS_RETURN_IF_ERROR(reserve(&importance, list_bytes));
  KVS_RETURN_IF_ERROR(pick.Free());  // its counters must be zero
  KVS_RETURN_IF_ERROR(reserve(&pick, ops.pick_scratch_bytes(to_pick)));
  KVS_RETURN_IF_ERROR(
      reserve(&picked, (int64_t{geometry.kv_heads} + 2) * int64_t{sizeof(int32_t)}));
  stride = larger;
  return OkStatus();
}

}  // namespace kvstrata
