#include "kernels/step/packed_buffers.h"

#include <algorithm>
#include <bit>

namespace kvstrata {
namespace {

int32_t Multiple(int64_t n, int64_t of) { return static_cast<int32_t>((n + of - 1) / of * of); }

}  // namespace

int32_t PackedBuffers::SegmentsFor(int32_t final, int32_t extents) {
  return std::max(extents, std::min(final + kPiecesMax, kSegmentsMax));
}

PackedBuffers::Capacity PackedBuffers::Capacity::Grown(const Capacity& need) const {
  Capacity c = *this;
  if (need.batch > batch) {
    c.batch = static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(need.batch)));
  }
  if (need.segments > segments) {
    c.segments = std::min(Multiple(need.segments + 4, 16), kSegmentsMax);
  }
  c.keep = std::max(keep, need.keep);
  // Together: both grow with a sequence, and each growth makes graphs stale.
  if (need.blocks > blocks || need.list > list) {
    c.blocks = std::max(blocks, Multiple(need.blocks + need.blocks / 4, 64));
    c.list = std::max(list, Multiple(need.list + need.list / 4 + 1, 64));
  }
  return c;
}

Status PackedBuffers::Fit(const cuda::CudaOps& ops, const Geometry& geometry, const Capacity& c) {
  if (c.batch == 0) return OkStatus();
  const auto reserve = [&ops](DeviceBuffer* buffer, int64_t bytes) {
    return buffer->Reserve(ops, static_cast<uint64_t>(bytes));
  };
  constexpr int64_t kInt = sizeof(int32_t), kFloat = sizeof(float);
  const int64_t lists = int64_t{c.batch} * geometry.kv_heads;
  KVS_RETURN_IF_ERROR(reserve(&scores, lists * c.blocks * kFloat));
  KVS_RETURN_IF_ERROR(reserve(&units, lists * c.list * kInt));
  KVS_RETURN_IF_ERROR(reserve(&counts, lists * kInt));
  KVS_RETURN_IF_ERROR(reserve(&sink_end, c.batch * kInt));
  KVS_RETURN_IF_ERROR(reserve(&recent_begin, c.batch * kInt));
  const int64_t rows = int64_t{c.batch} * geometry.query_heads;
  KVS_RETURN_IF_ERROR(reserve(&partial, rows * (geometry.head_dim + 2) * kFloat));

  cuda::PickBatch to_pick;
  to_pick.score_stride = c.blocks;
  to_pick.groups = geometry.kv_heads;
  to_pick.scratch_lists = static_cast<int32_t>(lists);
  cuda::AttendPackedBatch attend;
  attend.layer.kv_heads = geometry.kv_heads;
  attend.layer.head_dim = geometry.head_dim;
  attend.queries.group = geometry.group();
  int64_t pick_bytes = 0, attend_bytes = 0;  // small batches have more CTAs a list
  for (int32_t batch = 1; batch <= c.batch; ++batch) {
    to_pick.batch = attend.queries.batch = batch;
    pick_bytes = std::max(pick_bytes, ops.pick_scratch_bytes(to_pick));
    attend_bytes = std::max(attend_bytes, ops.attend_packed_workspace_bytes(attend));
  }
  // Its counters lie where the numbers of lists and CTAs put them, and must be zero.
  KVS_RETURN_IF_ERROR(pick.Free());
  KVS_RETURN_IF_ERROR(reserve(&pick, pick_bytes));
  return reserve(&workspace, attend_bytes);
}

}  // namespace kvstrata
