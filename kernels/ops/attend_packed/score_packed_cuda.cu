// Every CTA scores an equal share of the blocks of one (sequence, KV head), its warps tiles of 16.
#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/row_scores.cuh"
#include "kernels/ops/attend_packed/rotated_queries.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int kCtasPerSm = 2;

template <int kDim, int kChannels>
struct Shared {
  SegmentTable segments;
  RotatedQueries<kDim, kChannels> queries;
};

// A warp's tiles of block keys of one segment: rows [begin, end), 16 at a time.
class BlockTiles {
 public:
  __device__ __forceinline__ BlockTiles(const PackedSegment& s, const RowFormat& f, int32_t begin,
                                        int32_t end, uint32_t ring)
      : from_(s.blocks + int64_t{begin} * f.stride()),
        chunks_((end - begin) * f.chunks),
        tile_chunks_(kTileRows * f.chunks),
        next_(static_cast<int32_t>(threadIdx.x / 32) * tile_chunks_),
        ring_(ring) {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) Issue();
  }
  // The oldest tile, in shared memory. The next is asked for by Issue, when this one is used up.
  __device__ __forceinline__ uint32_t Await() const {
    AwaitOldestCopy();
    return ring_ + stage_ * tile_chunks_ * 16;
  }
  __device__ __forceinline__ void Issue() {
    __syncwarp();
    if (next_ < chunks_) {
#pragma unroll 1
      for (auto i = static_cast<int32_t>(threadIdx.x % 32); i < tile_chunks_; i += 32) {
        const bool real = next_ + i < chunks_;
        CopyChunk(ring_ + (stage_ * tile_chunks_ + i) * 16,
                  from_ + (real ? (next_ + i) * int64_t{16} : 0), real);
      }
    }
    EndCopies();
    next_ += static_cast<int32_t>(blockDim.x / 32) * tile_chunks_;
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

 private:
  const uint64_t from_;
  const int32_t chunks_, tile_chunks_;
  int32_t next_;  // chunk
  const uint32_t ring_;
  int stage_ = 0;
};

template <int kDim, int kChannels>
__device__ __forceinline__ void ScoreSegment(const ScorePackedBatch& w, const PackedSegment& s,
                                             int32_t begin, int32_t end, uint32_t ring, float* out,
                                             Shared<kDim, kChannels>& shared) {
  const int group = w.queries.group, lane = threadIdx.x % 32, t = lane % 4;
  const bool wide = group > 4;
  const RowFormat format = RowFormat::Of(StoredChannels(w.layer), s.keep, s.neighbours);
  BlockTiles tiles(s, format, begin, end, ring);
  __syncthreads();  // the queries are there, and those of the segment before used up
  shared.queries.Rotate(s.r_k, group);
  __syncthreads();
  shared.queries.MakeFragments(group);
  __syncthreads();
  KeyRuns<kChannels> keys;
  keys.Locate(format);
  const int32_t step = static_cast<int32_t>(blockDim.x / 32) * kTileRows;
#pragma unroll 1
  for (int32_t row = begin + static_cast<int32_t>(threadIdx.x / 32) * kTileRows; row < end;
       row += step) {
    float scores[4];
    shared.queries.Score(keys, tiles.Await(), format.stride(), wide, scores);
    tiles.Issue();
    const float row_g[2] = {scores[0], scores[1]}, row_g8[2] = {scores[2], scores[3]};
    const int first = LaneQuery(lane, wide);
    const float best_g = GroupMax(row_g, first, group), best_g8 = GroupMax(row_g8, first, group);
    const int32_t own = row + lane / 4 + 8 * t;  // by lanes t = 0 and 1
    if (t < 2 && own < end) out[s.first_block + own] = t == 0 ? best_g : best_g8;
  }
}

// Grid (CTAs an item, kv_heads, batch).
template <int kDim, int kChannels>
__global__ void __launch_bounds__(PackedShape<kDim, kChannels>::kThreadsMax, kCtasPerSm)
    ScorePackedKernel(const __grid_constant__ ScorePackedBatch w, int32_t ring_bytes) {
  extern __shared__ uint4 dynamic[];
  __shared__ Shared<kDim, kChannels> shared;
  const int head = blockIdx.y, sequence = blockIdx.z;
  WaitForPrevious();
  LetNextStart();
  shared.segments.Load(w.layer, sequence, head);
  shared.queries.Load(w.queries, sequence, head);
  __syncthreads();
  const int32_t last = min(shared.segments.blocks(), w.first + w.score_stride);
  const auto ctas = static_cast<int32_t>(gridDim.x);
  const int32_t each = ((last - w.first + ctas - 1) / ctas + kTileRows - 1) / kTileRows * kTileRows;
  int32_t begin = w.first + static_cast<int32_t>(blockIdx.x) * each;
  const int32_t end = min(begin + each, last);
  uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(dynamic)) +
                  threadIdx.x / 32 * static_cast<uint32_t>(ring_bytes);
  KeepInRegister(ring);
  float* out = w.scores + (int64_t{sequence} * w.layer.kv_heads + head) * w.score_stride - w.first;
#pragma unroll 1
  while (begin < end) {
    const PackedSegment& s = shared.segments.at[shared.segments.Of(begin)];
    const int32_t stop = min(end, SegmentTable::EndBlock(s));
    if (stop <= begin) return;
    ScoreSegment(w, s, begin - s.first_block, stop - s.first_block, ring, out, shared);
    begin = stop;
  }
}

template <int kDim, int kChannels>
int Launch(const ScorePackedBatch& w, Stream stream) {
  const auto kernel = ScorePackedKernel<kDim, kChannels>;
  const int tile = LargestFormat(w.layer).tile_bytes();
  const TileRings rings = TileRings::Of(PackedShape<kDim, kChannels>::kThreadsMax, tile);
  if (const int error = AllowShared(kernel, rings.bytes); error != 0) return error;
  const int items = w.layer.kv_heads * w.queries.batch;
  const int ctas =
      std::max(1, kCtasPerSm * DeviceAttribute(cudaDevAttrMultiProcessorCount) / items);
  return LaunchDependent(kernel, dim3(ctas, w.layer.kv_heads, w.queries.batch), rings.warps * 32,
                         rings.bytes, stream, w, int32_t{kStages * tile});
}

}  // namespace

int ScorePackedCuda(const ScorePackedBatch& w, Stream stream) {
  if (!IsValid(w.queries) || w.first < 0 || w.score_stride < 0) return cudaErrorInvalidValue;
  if (w.queries.batch == 0 || w.score_stride == 0) return cudaSuccess;
  return ForPacked(w.layer,
                   [&]<int kDim, int kChannels>() { return Launch<kDim, kChannels>(w, stream); });
}

}  // namespace kvstrata::cuda
