// SPDX-License-Identifier: Apache-2.0
// Every CTA scores an equal share of the blocks of one (sequence, KV head), its warps tiles of 32.
#include <algorithm>

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/plans/mosaickv/ops/attend_packed/rotated_queries.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int kStagesMost = 3;  // tiles of a warp on their way or in use

template <int kDim, int kChannels>
struct Shared {
  int32_t segments;
  RotatedQueries<kDim, kChannels> queries;
};

// A warp's tiles of block keys of one segment: rows [begin, end), 32 at a time.
class BlockTiles {
 public:
  __device__ __forceinline__ BlockTiles(const PackedSegment& s, const RowFormat& f, int32_t begin,
                                        int32_t end, uint32_t ring, int32_t stages)
      : from_(s.blocks + int64_t{begin} * f.stride()),
        chunks_((end - begin) * f.chunks),
        tile_chunks_(kTileRows * f.chunks),
        next_(static_cast<int32_t>(threadIdx.x / 32) * tile_chunks_),
        ring_(ring),
        stages_(stages) {
#pragma unroll 1
    for (int i = 0; i < stages; ++i) Issue();
  }
  // The oldest tile, in shared memory. The next is asked for by Issue, when this one is used up.
  __device__ __forceinline__ uint32_t Await() const {
    AwaitOldestCopy(stages_);
    return ring_ + stage_ * tile_chunks_ * 16;
  }
  __device__ __forceinline__ void Issue() {
    __syncwarp();
    if (next_ < chunks_) {
      const auto lane = static_cast<int32_t>(threadIdx.x % 32);
      uint32_t to = ring_ + static_cast<uint32_t>(stage_ * tile_chunks_ + lane) * 16;
      uint64_t from = from_ + static_cast<uint64_t>(next_ + lane) * 16;
#pragma unroll 5
      for (int32_t i = lane; i < tile_chunks_; i += 32) {
        CopyChunk(to, from, next_ + i < chunks_);
        to += 32 * 16;
        from += 32 * 16;
      }
    }
    EndCopies();
    next_ += static_cast<int32_t>(blockDim.x / 32) * tile_chunks_;
    stage_ = stage_ + 1 == stages_ ? 0 : stage_ + 1;
  }

 private:
  const uint64_t from_;
  const int32_t chunks_, tile_chunks_;
  int32_t next_;  // chunk
  const uint32_t ring_;
  const int32_t stages_;
  int32_t stage_ = 0;
};

// The largest of the first `heads` of four.
__device__ __forceinline__ float Largest(const float4& x, int heads) {
  float best = x.x;
  if (heads > 1) best = fmaxf(best, x.y);
  if (heads > 2) best = fmaxf(best, x.z);
  if (heads > 3) best = fmaxf(best, x.w);
  return best;
}

// A CTA's share of one (sequence, KV head).
template <int kDim, int kChannels>
struct Scorer {
  using Table = QueryTable<kChannels>;

  const ScorePackedBatch& w;
  const WarpMemory& memory;
  uint4* dynamic;
  Shared<kDim, kChannels>& shared;
  bool waited = false;    // for the kernel before, and has the queries
  uint64_t rotation = 0;  // whose tables are there

  // Scores of blocks [begin, end) of a segment to out[block].
  __device__ __forceinline__ void Segment(const PackedSegment& s, int32_t begin, int32_t end,
                                          float* out) {
    const int group = w.queries.group, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const RowFormat format = RowFormat::Of(StoredChannels(w.layer), s.keep, s.neighbours);
    const auto table = static_cast<uint32_t>(__cvta_generic_to_shared(dynamic));
    const bool rotates = s.r_k != rotation;
    FirstRows<kDim, kChannels> first_rows;
    if (rotates) {
      if (!waited) PrefetchRotation<kDim, kChannels>(s.r_k);
      first_rows.Load(s.r_k);
    }
    BlockTiles tiles(s, format, begin, end, memory.PartOf(table, warp), memory.stages);
    if (rotates) {
      if (!waited) LoadQueries();
      __syncthreads();  // the queries are there, and those of the segment before used up
      shared.queries.Rotate(s.r_k, first_rows, group);
      __syncthreads();
      shared.queries.FillTables(reinterpret_cast<char*>(dynamic), group);
      __syncthreads();
      rotation = s.r_k;
    }
    const int32_t step = static_cast<int32_t>(blockDim.x / 32) * kTileRows;
#pragma unroll 1
    for (int32_t row = begin + warp * kTileRows; row < end; row += step) {
      const uint32_t own = tiles.Await() + lane * format.stride();
      float best = -INFINITY;
#pragma unroll 1
      for (int first = 0; first < group; first += kTableHeads) {
        const uint32_t of_heads = table + first / kTableHeads * Table::kBytes;
        const float4 products = Table::Products(of_heads, own, format);
        best = fmaxf(best, Largest(products, group - first));
      }
      tiles.Issue();
      if (row + lane < end) out[row + lane] = best;
    }
  }
  __device__ __forceinline__ void LoadQueries() {
    WaitForPrevious();
    LetNextStart();
    shared.queries.Load(w.queries, blockIdx.z, blockIdx.y);
    waited = true;
  }
};

// Grid (CTAs an item, kv_heads, batch).
template <int kDim, int kChannels>
__global__ void __launch_bounds__(PackedShape<kDim, kChannels>::kThreadsMax, 1)
    ScorePackedKernel(const __grid_constant__ ScorePackedBatch w,
                      const __grid_constant__ WarpMemory memory) {
  extern __shared__ uint4 dynamic[];
  __shared__ Shared<kDim, kChannels> shared;
  const int head = blockIdx.y, sequence = blockIdx.z;
  const SegmentTable segments(dynamic, shared.segments);
  if (!w.ahead) WaitForPrevious();
  segments.Load(w.layer, sequence, head);
  __syncthreads();
  const int32_t last = min(segments.blocks(), w.first + w.score_stride);
  const auto ctas = static_cast<int32_t>(gridDim.x);
  // Shares count from block 0: extents of whole numbers of shares are not shared by two CTAs.
  const int32_t each = ((last + ctas - 1) / ctas + kTileRows - 1) / kTileRows * kTileRows;
  const int32_t share = static_cast<int32_t>(blockIdx.x) * each, end = min(share + each, last);
  int32_t begin = max(share, w.first);
  float* out = w.scores + (int64_t{sequence} * w.layer.kv_heads + head) * w.score_stride - w.first;
  Scorer<kDim, kChannels> scorer{w, memory, SegmentTable::Behind(dynamic, w.layer), shared};
#pragma unroll 1
  while (begin < end) {
    const PackedSegment& s = segments.at[segments.Of(begin)];
    const int32_t stop = min(end, SegmentTable::EndBlock(s));
    if (stop <= begin) break;
    scorer.Segment(s, begin - s.first_block, stop - s.first_block, out + s.first_block);
    begin = stop;
  }
  WaitForPrevious();  // also where nothing was scored: kernels behind rely on it
}

template <int kDim, int kChannels>
int Launch(const ScorePackedBatch& w, Stream stream) {
  const auto kernel = ScorePackedKernel<kDim, kChannels>;
  const int tables =
      RotatedQueries<kDim, kChannels>::TablesOf(w.queries.group) * QueryTable<kChannels>::kBytes;
  const int segments = SegmentTable::BytesOf(w.layer);
  const WarpMemory memory = WarpMemory::Of(
      PackedShape<kDim, kChannels>::kThreadsMax, int{sizeof(Shared<kDim, kChannels>)} + segments,
      kStagesMost, LargestFormat(w.layer).tile_bytes(), 0, tables);
  const int bytes = segments + memory.total();
  if (const int error = AllowShared(kernel, bytes); error != 0) return error;
  const int items = w.layer.kv_heads * w.queries.batch;
  const int ctas = std::max(1, DeviceAttribute(cudaDevAttrMultiProcessorCount) / items);
  return LaunchDependent(kernel, dim3(ctas, w.layer.kv_heads, w.queries.batch), memory.warps * 32,
                         bytes, stream, w, memory);
}

}  // namespace

int ScorePackedCuda(const ScorePackedBatch& w, Stream stream) {
  if (!IsValid(w.queries) || w.first < 0 || w.score_stride < 0) return cudaErrorInvalidValue;
  if (w.queries.batch == 0 || w.score_stride == 0) return cudaSuccess;
  return ForPacked(w.layer,
                   [&]<int kDim, int kChannels>() { return Launch<kDim, kChannels>(w, stream); });
}

}  // namespace kvstrata::cuda
