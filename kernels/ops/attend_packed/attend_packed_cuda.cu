// A CTA attends an equal share of the chosen blocks of one (sequence, KV head), segment after
// segment; the last CTA of an item merges the shares.
//
// Floor and prediction on an H100 (3.1 TB/s), 8 KV heads x 128, keep 32 of 96, blocks of 8, batch
// 1: a packed row is 80 bytes, so that 6.25 % of 128K / 1M tokens are 10.5 / 84 MB, 3.4 / 27 us,
// and as much again to score all blocks; rotations 1.5 / 12 MB an op, at most 0.5 / 4 us. Decoding
// takes some 12 instructions and 5 to 7 wavefronts of shared memory a row and SM, where memory
// brings one every 6 cycles: both at their limit. Predicted: a latency of 6 us an op and 1.3 times
// the floor: attend 11 / 45 us, score 9 / 40 us. Measured: attend 33 / 98 us, score 18 / 61 us
// (docs/cuda.md).
#include <algorithm>

#include "kernels/cuda/last_arrival.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/ops/attend_packed/rotated_queries.cuh"
#include "kernels/ops/merge/tile_softmax.cuh"

namespace kvstrata::cuda {
namespace {

using Weight = __nv_bfloat16;    // as the values, whatever the model's dtype
constexpr int kLeastBlocks = 8;  // of a share

struct Arguments {
  AttendPackedBatch work;
  int32_t ring_bytes;  // of a warp
  float scale;         // with log2(e)
  Partials splits;     // of the CTAs of an item, in the workspace
};

// The chosen blocks of one (sequence, KV head), in order.
struct ChosenBlocks {
  const int32_t* units;
  int32_t sink_end, listed, recent_begin, blocks;

  static __device__ __forceinline__ ChosenBlocks Of(const DeviceSelection& s, int sequence,
                                                    int head, int32_t blocks) {
    ChosenBlocks c{nullptr, 0, 0, 0, blocks};
    if (s.unit_tokens == 0) return c;
    const int64_t list = int64_t{sequence} * s.groups + head;
    c.units = s.units + list * s.list_stride;
    c.listed = min(max(s.counts[list], 0), s.list_stride);
    c.sink_end = min(max(s.sink_end[sequence], 0), blocks);
    c.recent_begin = min(max(s.recent_begin[sequence], c.sink_end), blocks);
    return c;
  }
  __device__ __forceinline__ int32_t count() const {
    return sink_end + listed + blocks - recent_begin;
  }
  __device__ __forceinline__ int32_t At(int32_t i) const {
    if (i < sink_end) return i;
    i -= sink_end;
    return i < listed ? units[i] : recent_begin + i - listed;
  }
};

template <int kDim, int kChannels>
struct Shared {
  static constexpr int kWarpsMax = PackedShape<kDim, kChannels>::kThreadsMax / 32;
  SegmentTable segments;
  RotatedQueries<kDim, kChannels> queries;  // `rotated` serves as the sums of values at the end
  int32_t ids[PackedShape<kDim, kChannels>::kThreadsMax];  // chosen blocks under way
  float m[kWarpsMax][kPackedHeads], l[kWarpsMax][kPackedHeads];
  float total_m[kPackedHeads], total_l[kPackedHeads];  // of the segments done, in powers of two
  float before[kPackedHeads];                          // weight of the total before a segment
  alignas(16) float total_o[kPackedHeads][kDim];
  bool is_last;
};

// The rows of chosen blocks of one segment, as tiles of 16.
struct TileRows {
  const int32_t* ids;
  int32_t count;  // blocks
  int32_t rows, first_block, block_shift;

  static __device__ __forceinline__ TileRows Of(const PackedSegment& s, const int32_t* ids,
                                                int32_t count) {
    return {ids, count, s.rows, s.first_block, 31 - __clz(s.block)};
  }
  __device__ __forceinline__ int32_t tiles() const {
    return ((count << block_shift) + kTileRows - 1) / kTileRows;
  }
  // Bit r: row r of a tile is one.
  __device__ __forceinline__ uint32_t Present(int32_t tile) const {
    const int32_t i = tile * kTileRows + static_cast<int32_t>(threadIdx.x % kTileRows);
    const int32_t entry = i >> block_shift, inside = i & ((1 << block_shift) - 1);
    const bool present =
        entry < count &&
        ((ids[min(entry, count - 1)] - first_block) << block_shift) + inside < rows;
    return __ballot_sync(kAllLanes, present) & 0xFFFFu;
  }
};

// One warp's part of one segment.
template <int kDim, int kChannels>
class SegmentAttention {
 public:
  __device__ __forceinline__ SegmentAttention(float scale, uint32_t ring)
      : scale_(scale), ring_(ring) {}

  // Forgets the segment before.
  __device__ __forceinline__ void Open(const PackedLayer& layer, const PackedSegment& s) {
    format_ = RowFormat::Of(StoredChannels(layer), s.keep, s.neighbours);
    block_chunks_ = s.block * format_.chunks;
    inverse_ = (1u << 20) / static_cast<uint32_t>(block_chunks_) + 1;
    arrays_[0] = s.keys;
    arrays_[1] = s.values;
    keys_.Locate(format_);
    values_.Locate(format_);
    softmax_ = {};
  }
  __device__ __forceinline__ void Begin(const TileRows& rows) {
    next_ = static_cast<int32_t>(threadIdx.x / 32);
    stage_ = 0;
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) Issue(rows);
  }
  __device__ __forceinline__ void Run(const TileRows& rows,
                                      const RotatedQueries<kDim, kChannels>& queries, bool wide) {
    const auto warps = static_cast<int32_t>(blockDim.x / 32);
#pragma unroll 1
    for (auto tile = static_cast<int32_t>(threadIdx.x / 32); tile < rows.tiles(); tile += warps) {
      AwaitOldestCopy();
      Attend(rows.Present(tile), queries, wide);
      Issue(rows);
    }
  }
  __device__ __forceinline__ TileSoftmax<kChannels / 16>& softmax() { return softmax_; }

 private:
  __device__ __forceinline__ void Attend(uint32_t present,
                                         const RotatedQueries<kDim, kChannels>& queries,
                                         bool wide) {
    const uint32_t keys = ring_ + stage_ * 2 * format_.tile_bytes();
    float s[4];
    queries.Score(keys_, keys, format_.stride(), wide, s);
    uint32_t p0, p1;
    softmax_.template Weigh<Weight>(present, scale_, s, p0, p1);
    values_.ForEach(keys + format_.tile_bytes(), format_.stride(),
                    [&](int i, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
                      MmaM16N8K16<Weight>(softmax_.o[i], a0, a1, a2, a3, p0, p1);
                    });
  }
  // The chunks of a block follow each other in memory, and a tile's blocks in shared memory. What
  // is no row is zeros.
  __device__ __forceinline__ void Issue(const TileRows& rows) {
    __syncwarp();
    if (next_ < rows.tiles()) {
      const uint32_t to = ring_ + stage_ * 2 * format_.tile_bytes();
      const int32_t first = next_ * kTileRows >> rows.block_shift;
#pragma unroll 1
      for (auto i = static_cast<int32_t>(threadIdx.x % 32); i < kTileRows * format_.chunks;
           i += 32) {
        const auto nth = static_cast<int32_t>(static_cast<uint32_t>(i) * inverse_ >> 20);
        const int32_t entry = min(first + nth, rows.count - 1);
        const int32_t chunk = (rows.ids[entry] - rows.first_block - nth) * block_chunks_ + i;
        const bool real = first + nth == entry && chunk < rows.rows * format_.chunks;
        const int64_t from = real ? int64_t{chunk} * 16 : 0;
        CopyChunk(to + i * 16, arrays_[0] + from, real);
        CopyChunk(to + format_.tile_bytes() + i * 16, arrays_[1] + from, real);
      }
    }
    EndCopies();
    next_ += static_cast<int32_t>(blockDim.x / 32);
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

  const float scale_;
  const uint32_t ring_;
  RowFormat format_;
  int32_t block_chunks_;
  uint32_t inverse_;  // of block_chunks_, exact for the chunks of a tile
  uint64_t arrays_[2];
  KeyRuns<kChannels> keys_;
  ValueRuns<kChannels> values_;
  TileSoftmax<kChannels / 16> softmax_;
  int32_t next_;  // tile to be copied next
  int stage_;
};

// Warps' sums of a segment to the CTA's, in shared.queries.rotated [group][kChannels], and what
// they and the total so far weigh in the new total. `scratch` [warps][group][kChannels].
template <int kDim, int kChannels>
__device__ __forceinline__ void SumWarps(SegmentAttention<kDim, kChannels>& attention, int group,
                                         float* scratch, Shared<kDim, kChannels>& shared) {
  auto& softmax = attention.softmax();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  softmax.SumWeights();
  if (g == 0) {
    for (int i = 0; i < 2; ++i) {
      shared.m[warp][2 * t + i] = softmax.m[i];
      shared.l[warp][2 * t + i] = softmax.l[i];
    }
  }
  __syncthreads();  // tiles are used up too: the scratch is where they were
  if (threadIdx.x < kPackedHeads) {
    const int head = threadIdx.x;
    float top = shared.total_m[head], sum = 0;
    for (int w = 0; w < warps; ++w) top = fmaxf(top, shared.m[w][head]);
    for (int w = 0; w < warps; ++w) sum += WeightOf(shared.m[w][head], top) * shared.l[w][head];
    const float before = WeightOf(shared.total_m[head], top);
    shared.before[head] = before;
    shared.total_m[head] = top;
    shared.total_l[head] = before * shared.total_l[head] + sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = 2 * t + i;
    if (head >= group) continue;
    const float weight = WeightOf(softmax.m[i], shared.total_m[head]);
    float* to = scratch + (warp * group + head) * kChannels + ValueRuns<kChannels>::kRun * g;
#pragma unroll
    for (int j = 0; j < kChannels / 16; ++j) {
      *reinterpret_cast<float2*>(to + 2 * j) = {weight * softmax.o[j][i],
                                                weight * softmax.o[j][2 + i]};
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < group * kChannels; i += blockDim.x) {
    float sum = 0;
#pragma unroll 4
    for (int w = 0; w < warps; ++w) sum += scratch[w * group * kChannels + i];
    (&shared.queries.rotated[0][0])[i] = sum;
  }
  __syncthreads();
}

// scratch [parts][group][kDim]: each part of the threads has the product of some rows of R and the
// sums.
template <int kDim, int kChannels>
__device__ __forceinline__ void RotateBack(uint64_t r, int stored, int group, float* scratch,
                                           const Shared<kDim, kChannels>& shared) {
  constexpr int kColumns = kDim / 4;
  const int column = threadIdx.x % kColumns, part = threadIdx.x / kColumns;
  const int parts = static_cast<int>(blockDim.x) / kColumns;
  const auto* rows = reinterpret_cast<const float4*>(r);
  float4 sums[kPackedHeads] = {};
#pragma unroll 6
  for (int c = part; c < stored; c += parts) {
    const float4 x = rows[c * kColumns + column];
#pragma unroll
    for (int h = 0; h < kPackedHeads; ++h) {
      if (h >= group) break;
      const float o = (&shared.queries.rotated[0][0])[h * kChannels + c];
      sums[h] = {sums[h].x + o * x.x, sums[h].y + o * x.y, sums[h].z + o * x.z,
                 sums[h].w + o * x.w};
    }
  }
#pragma unroll
  for (int h = 0; h < kPackedHeads; ++h) {
    if (h >= group) break;
    reinterpret_cast<float4*>(scratch)[(part * group + h) * kColumns + column] = sums[h];
  }
}

// Adds a segment's sums to the CTA's total. Barriers before and after.
template <int kDim, int kChannels>
__device__ __forceinline__ void AddToTotal(int group, const float* scratch,
                                           Shared<kDim, kChannels>& shared) {
  constexpr int kColumns = kDim / 4;
  const int parts = static_cast<int>(blockDim.x) / kColumns;
#pragma unroll 1
  for (int i = threadIdx.x; i < group * kColumns; i += blockDim.x) {
    auto& total = reinterpret_cast<float4*>(shared.total_o)[i];
    const float before = shared.before[i / kColumns];
    float4 o = {before * total.x, before * total.y, before * total.z, before * total.w};
#pragma unroll 4
    for (int p = 0; p < parts; ++p) {
      const float4 x = reinterpret_cast<const float4*>(scratch)[p * group * kColumns + i];
      o = {o.x + x.x, o.y + x.y, o.z + x.z, o.w + x.w};
    }
    total = o;
  }
}

// All of a CTA's share: blocks [begin, end) of the chosen ones. The result is the total in
// `shared`.
template <int kDim, int kChannels>
__device__ __forceinline__ void AttendShare(const Arguments& a, const ChosenBlocks& chosen,
                                            int32_t begin, int32_t end, uint4* dynamic,
                                            Shared<kDim, kChannels>& shared) {
  const PackedLayer& layer = a.work.layer;
  const int group = a.work.queries.group;
  auto* scratch = reinterpret_cast<float*>(dynamic);
  uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(dynamic)) +
                  threadIdx.x / 32 * static_cast<uint32_t>(a.ring_bytes);
  KeepInRegister(ring);
  SegmentAttention<kDim, kChannels> attention(a.scale, ring);
  const auto own = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  int open = -1;                // segment
  int32_t count = 0, done = 0;  // of the ids in shared memory
#pragma unroll 1
  while (true) {
    if (done == count && begin < end) {
      __syncthreads();  // the ids before are used up
      count = min(end - begin, threads);
      done = 0;
      if (own < count) shared.ids[own] = chosen.At(begin + own);
      begin += threads;
      __syncthreads();
    }
    // The next segment, and how many of the ids lie in it.
    int segment = -1, n = 0;
    if (done < count) {
      segment = shared.segments.Of(shared.ids[done]);
      const int32_t last = SegmentTable::EndBlock(shared.segments.at[segment]);
      n = __syncthreads_count(own >= done && own < count && shared.ids[own] < last);
      if (n == 0) segment = -1;  // a list that names blocks that are none
    }
    if (open >= 0 && segment != open) {
      SumWarps(attention, group, scratch, shared);
      RotateBack(shared.segments.at[open].r_v, StoredChannels(layer), group, scratch, shared);
      __syncthreads();
      AddToTotal(group, scratch, shared);
      __syncthreads();
    }
    if (segment < 0) return;
    const PackedSegment& s = shared.segments.at[segment];
    const TileRows rows = TileRows::Of(s, shared.ids + done, n);
    if (segment != open) attention.Open(layer, s);
    attention.Begin(rows);
    if (segment != open) {
      shared.queries.Rotate(s.r_k, group);
      __syncthreads();
      shared.queries.MakeFragments(group);
      __syncthreads();
      open = segment;
    }
    attention.Run(rows, shared.queries, group > 4);
    done += n;
  }
}

// Grid (CTAs an item, kv_heads, batch).
template <int kDim, int kChannels>
__global__ void __launch_bounds__(PackedShape<kDim, kChannels>::kThreadsMax, 1)
    AttendPackedKernel(const __grid_constant__ Arguments a) {
  extern __shared__ uint4 dynamic[];
  __shared__ Shared<kDim, kChannels> shared;
  constexpr int kColumns = kDim / 4;
  const AttendPackedBatch& w = a.work;
  const int head = blockIdx.y, sequence = blockIdx.z, group = w.queries.group;
  WaitForPrevious();
  LetNextStart();
  shared.segments.Load(w.layer, sequence, head);
  shared.queries.Load(w.queries, sequence, head);
  for (int i = threadIdx.x; i < kPackedHeads * kColumns; i += blockDim.x) {
    reinterpret_cast<float4*>(shared.total_o)[i] = {0, 0, 0, 0};
  }
  if (threadIdx.x < kPackedHeads) {
    shared.total_m[threadIdx.x] = -INFINITY;
    shared.total_l[threadIdx.x] = 0;
  }
  __syncthreads();
  const ChosenBlocks chosen =
      ChosenBlocks::Of(w.selection, sequence, head, shared.segments.blocks());
  const auto ctas = static_cast<int32_t>(gridDim.x), cta = static_cast<int32_t>(blockIdx.x);
  const int32_t each = max((chosen.count() + ctas - 1) / ctas, kLeastBlocks);
  const int32_t sharers = max((chosen.count() + each - 1) / each, 1);
  if (cta >= sharers) return;
  AttendShare(a, chosen, cta * each, min((cta + 1) * each, chosen.count()), dynamic, shared);

  const int32_t item = sequence * w.layer.kv_heads + head;
  const int64_t rows = int64_t{w.queries.batch} * w.layer.kv_heads * group;
  const auto for_each_column = [&](auto store) {
    for (int i = threadIdx.x; i < group * kColumns; i += blockDim.x) {
      store(int64_t{item} * group + i / kColumns, i / kColumns, i % kColumns);
    }
  };
  const auto total = [&](int of_head, int column) {
    return WeightedRow{shared.total_m[of_head], shared.total_l[of_head],
                       reinterpret_cast<const float4*>(shared.total_o[of_head])[column]};
  };
  if (sharers == 1) {
    return for_each_column([&](int64_t row, int of_head, int column) {
      StoreResult(w.with, w.to, w.partial, rows, row, kDim, column, total(of_head, column));
    });
  }
  for_each_column([&](int64_t row, int of_head, int column) {
    const int64_t at = cta * rows + row;
    const WeightedRow x = total(of_head, column);
    reinterpret_cast<float4*>(a.splits.o + at * kDim)[column] = x.o;
    if (column != 0) return;
    a.splits.m[at] = x.m * kLn2;
    a.splits.l[at] = x.l;
  });
  if (!ArrivesLast(w.counters + item, sharers, shared.is_last)) return;
  for_each_column([&](int64_t row, int, int column) {
    WeightedRow sum;
    Partials splits = a.splits;
    splits.parts = sharers;
    AddParts<4>(splits, rows, row, kDim, column, sum);
    StoreResult(w.with, w.to, w.partial, rows, row, kDim, column, sum);
  });
}

// CTAs that share an item.
int32_t CtasOf(const AttendPackedBatch& w) {
  const int32_t items = w.layer.kv_heads * w.queries.batch;
  return std::max(1, DeviceAttribute(cudaDevAttrMultiProcessorCount) / std::max(items, 1));
}

int64_t SplitRows(const AttendPackedBatch& w) {
  return int64_t{CtasOf(w)} * w.queries.batch * w.layer.kv_heads * w.queries.group;
}

template <int kDim, int kChannels>
int Launch(const AttendPackedBatch& w, Stream stream) {
  const auto kernel = AttendPackedKernel<kDim, kChannels>;
  const int tile = 2 * LargestFormat(w.layer).tile_bytes();
  const TileRings rings = TileRings::Of(PackedShape<kDim, kChannels>::kThreadsMax, tile);
  // Sums of warps, and products of rotations, lie where tiles did.
  const int threads = rings.warps * 32;
  const int sums = w.queries.group * 4 * std::max(rings.warps * kChannels, 4 * threads);
  const int bytes = std::max(rings.bytes, sums);
  if (const int error = AllowShared(kernel, bytes); error != 0) return error;
  Arguments a{w, kStages * tile, w.scale * kLog2E, {}};
  a.splits.o = w.workspace;
  a.splits.m = w.workspace + SplitRows(w) * kDim;
  a.splits.l = a.splits.m + SplitRows(w);
  return LaunchDependent(kernel, dim3(CtasOf(w), w.layer.kv_heads, w.queries.batch), threads, bytes,
                         stream, a);
}

bool IsValid(const AttendPackedBatch& w) {
  const DeviceSelection& s = w.selection;
  const bool chosen =
      s.unit_tokens == 1 && s.groups == w.layer.kv_heads && s.lists == nullptr && !s.shared;
  return IsValid(w.queries) && (s.unit_tokens == 0 || chosen) &&
         (w.to.rows != nullptr || w.partial.o != nullptr);
}

}  // namespace

int64_t AttendPackedWorkspaceBytes(const AttendPackedBatch& w) {
  return SplitRows(w) * (w.layer.head_dim + 2) * int64_t{sizeof(float)};
}

int AttendPackedCuda(const AttendPackedBatch& w, Stream stream) {
  if (!IsValid(w)) return cudaErrorInvalidValue;
  if (w.queries.batch == 0) return cudaSuccess;
  return ForPacked(w.layer,
                   [&]<int kDim, int kChannels>() { return Launch<kDim, kChannels>(w, stream); });
}

}  // namespace kvstrata::cuda
