// A CTA attends a share of the chosen blocks of one (sequence, KV head); the last CTA of an item
// merges the shares.
//
// Floor on an H100 (3.1 TB/s), 8 KV heads x 128, keep 32 of 96, blocks of 8, batch 1: a packed row
// is 80 bytes, so that 6.25 % of 128K / 1M tokens are 10.5 / 84 MB, 3.4 / 27 us, and as much again
// to score all blocks; memory brings a row every 6 cycles of an SM. A row of keys takes 17
// instructions of a warp and 5.3 wavefronts of shared memory (4 of them meet queries), a row of
// values 14 and 6.8 (zeros 1.5, values 2.4, fragments 1.5). Predicted: attend 15 / 43 us, score 9 /
// 36 us. Measured with step_bench, shares within segments: attend 29 / 78 us, score 11 / 51 us; a
// predicate and a load a channel, as it was before: 33 / 98 and 18 / 61 us (linked_bench).
//
// Where a CTA's time goes at 128K: cuts and list 3.7 us, first copies 4, queries rotated 3, two
// rounds of tiles 11 (keys 2.5 us a tile, a chain from bit to bit), sums of warps 2.2, rotated back
// 2.1, then the merge. At 1M a tile takes 10 500 cycles of 16 warps, 20 a pair of rows: 12 are the
// memory's.
#include <algorithm>

#include "kernels/cuda/last_arrival.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/mma_m16n8k16.cuh"
#include "kernels/ops/attend_packed/rotated_queries.cuh"
#include "kernels/ops/merge/merge_row.cuh"

namespace kvstrata::cuda {
namespace {

using Weight = __nv_bfloat16;    // as the values, whatever the model's dtype
constexpr int kLeastBlocks = 8;  // of a share

struct Arguments {
  AttendPackedBatch work;
  WarpMemory memory;
  float scale;      // with log2(e)
  Partials splits;  // of the CTAs of an item, in the workspace
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
  // How many lie before `block`. By whole warps.
  __device__ __forceinline__ int32_t Find(int32_t block) const {
    int32_t before = 0, left = block == 0 ? 0 : count();
    while (left > 0) {
      const int32_t step = (left + 31) / 32, probe = static_cast<int32_t>(threadIdx.x % 32) * step;
      const bool lower = probe < left && At(before + probe) < block;
      const int32_t lowers = __popc(__ballot_sync(kAllLanes, lower));
      if (lowers == 0) break;
      before += (lowers - 1) * step + 1;
      left = min(left - (lowers - 1) * step, step) - 1;
    }
    return before;
  }
};

// The chosen blocks cut into shares. Where shares a quarter larger suffice for it, none lies in two
// segments: each segment that it meets costs a CTA two rotations.
struct Shares {
  int32_t first[kSegmentsMax + 1];  // of the chosen blocks, in each segment
  int32_t count, each;              // shares, and blocks of one
  int32_t blocks;                   // of all shares
  bool within;                      // segments

  // By all threads, with a barrier in between.
  __device__ __forceinline__ void Cut(const ChosenBlocks& chosen, const SegmentTable& segments) {
    const int warps = static_cast<int>(blockDim.x / 32);
    for (int i = threadIdx.x / 32; i <= segments.count; i += warps) {
      first[i] = i == segments.count ? chosen.count() : chosen.Find(segments.at[i].first_block);
    }
    __syncthreads();
    const auto ctas = static_cast<int32_t>(gridDim.x);
    const int32_t even = max((chosen.count() + ctas - 1) / ctas, kLeastBlocks);
    int32_t size = even, needed = In(size, segments.count);
    while (needed > ctas && size <= even + even / 4) {
      size += max(even / 16, 1);
      needed = In(size, segments.count);
    }
    if (threadIdx.x != 0) return;
    within = needed <= ctas;
    each = within ? size : even;
    count = within ? needed : (chosen.count() + even - 1) / even;
    blocks = chosen.count();
  }
  // The blocks [x, y) of a share.
  __device__ __forceinline__ int2 At(int32_t share) const {
    if (!within) return {share * each, min((share + 1) * each, blocks)};
    int i = 0;
    for (; share >= Of(i, each); ++i) share -= Of(i, each);
    const int32_t begin = first[i] + share * each;
    return {begin, min(begin + each, first[i + 1])};
  }

 private:
  __device__ __forceinline__ int32_t Of(int segment, int32_t size) const {
    return (first[segment + 1] - first[segment] + size - 1) / size;
  }
  __device__ __forceinline__ int32_t In(int32_t size, int32_t segments) const {
    int32_t sum = 0;
    for (int i = threadIdx.x % 32; i < segments; i += 32) sum += Of(i, size);
    return __reduce_add_sync(kAllLanes, sum);
  }
};

template <int kDim, int kChannels>
struct Shared {
  static constexpr int kWarpsMax = PackedShape<kDim, kChannels>::kThreadsMax / 32;
  SegmentTable segments;
  Shares shares;
  RotatedQueries<kDim, kChannels> queries;  // `rotated` serves as the sums of values at the end
  int32_t ids[PackedShape<kDim, kChannels>::kThreadsMax];  // chosen blocks under way
  float m[kWarpsMax][kPackedHeads], l[kWarpsMax][kPackedHeads];
  float total_m[kPackedHeads], total_l[kPackedHeads];  // of the segments done, in powers of two
  float before[kPackedHeads];                          // weight of the total before a segment
  alignas(16) float total_o[kPackedHeads][kDim];
  bool is_last;
};

// The rows of chosen blocks of one segment, as tiles of 32.
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
  // Whether the lane's row of a tile is one.
  __device__ __forceinline__ bool Has(int32_t tile) const {
    const int32_t i = tile * kTileRows + static_cast<int32_t>(threadIdx.x % kTileRows);
    const int32_t entry = i >> block_shift, inside = i & ((1 << block_shift) - 1);
    return entry < count &&
           ((ids[min(entry, count - 1)] - first_block) << block_shift) + inside < rows;
  }
};

__device__ __forceinline__ float SumOfLanes(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

__device__ __forceinline__ float MaxOfLanes(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// The softmax of one warp over rows of which every lane has one, and its sums of weighted values by
// entries: o[i] is the accumulator of entries 16i + g and 16i + 8 + g, heads 2t and 2t + 1.
template <int kProducts>
struct RowSoftmax {
  float m[kPackedHeads], l[kPackedHeads];  // m the same in all lanes, in powers of two
  float o[kProducts][4];

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int h = 0; h < kPackedHeads; ++h) {
      m[h] = -INFINITY;
      l[h] = 0;
    }
#pragma unroll
    for (int i = 0; i < kProducts; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
  }
  // Logits of the lane's row, in powers of two, to weights.
  __device__ __forceinline__ uint4 Weigh(float (&s)[kPackedHeads], int heads) {
    bool higher = false;
#pragma unroll
    for (int h = 0; h < kPackedHeads; ++h) higher |= h < heads && s[h] > m[h];
    if (__any_sync(kAllLanes, higher)) RaiseMaxima(s, heads);
#pragma unroll
    for (int h = 0; h < kPackedHeads; ++h) {
      s[h] = h < heads ? WeightOf(s[h], m[h]) : 0;
      l[h] += s[h];
    }
    using E = Element<Weight>;
    return {E::Pack(s[0], s[1]), E::Pack(s[2], s[3]), E::Pack(s[4], s[5]), E::Pack(s[6], s[7])};
  }

 private:
  __device__ __forceinline__ void RaiseMaxima(const float (&s)[kPackedHeads], int heads) {
    const int t = threadIdx.x % 4;
    float of_lane[2] = {1, 1};
#pragma unroll
    for (int h = 0; h < kPackedHeads; ++h) {
      if (h >= heads) break;
      const float top = fmaxf(m[h], MaxOfLanes(s[h]));
      const float weight = WeightOf(m[h], top);
      m[h] = top;
      l[h] *= weight;
      if (h / 2 == t) of_lane[h % 2] = weight;
    }
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) o[i][j] *= of_lane[j % 2];
    }
  }
};

// One warp's part of one segment.
template <int kDim, int kChannels>
class SegmentAttention {
  using Table = QueryTable<kChannels>;
  using Tile = ValueTile<kChannels>;

 public:
  using Softmax = RowSoftmax<kChannels / 16>;
  static constexpr int kWeightBytes = kTileRows * kPackedHeads * int{sizeof(Weight)};
  static constexpr int kOtherBytes = kWeightBytes + Tile::kBytes;  // of a warp, before its rows

  // `own`: the warp's part of shared memory.
  __device__ __forceinline__ SegmentAttention(float scale, uint32_t tables, uint32_t own)
      : scale_(scale), tables_(tables), own_(own) {}

  // Forgets the segment before.
  __device__ __forceinline__ void Open(const PackedLayer& layer, const PackedSegment& s) {
    format_ = RowFormat::Of(StoredChannels(layer), s.keep, s.neighbours);
    block_chunks_ = s.block * format_.chunks;
    inverse_ = (1u << 20) / static_cast<uint32_t>(block_chunks_) + 1;
    keys_ = s.keys;
    values_ = s.values;
    softmax_.Clear();
  }
  __device__ __forceinline__ void Begin(const TileRows& rows) {
    const auto first = static_cast<int32_t>(threadIdx.x / 32);
    Issue(rows, first, keys_, Keys());
    Issue(rows, first, values_, Values());
  }
  // Keys of the next tile are on their way while values of this one are attended, and so on.
  __device__ __forceinline__ void Run(const TileRows& rows, int group) {
    const auto warps = static_cast<int32_t>(blockDim.x / 32);
#pragma unroll 1
    for (auto tile = static_cast<int32_t>(threadIdx.x / 32); tile < rows.tiles(); tile += warps) {
      AwaitOldestCopy(2);
      const uint4 weights = Weigh(rows.Has(tile), group);
      Issue(rows, tile + warps, keys_, Keys());
      AwaitOldestCopy(2);
      Spread(weights);
      Issue(rows, tile + warps, values_, Values());
      AddRows();
    }
  }
  __device__ __forceinline__ Softmax& softmax() { return softmax_; }
  __device__ __forceinline__ const RowFormat& format() const { return format_; }

 private:
  __device__ __forceinline__ uint32_t Keys() const { return own_ + kOtherBytes; }
  __device__ __forceinline__ uint32_t Values() const { return Keys() + format_.tile_bytes(); }
  __device__ __forceinline__ uint32_t OwnRow() const {
    return threadIdx.x % 32 * static_cast<uint32_t>(format_.stride());
  }
  // What the lane's row weighs, for every head.
  __device__ __forceinline__ uint4 Weigh(bool present, int group) {
    const uint32_t key = Keys() + OwnRow();
    float s[kPackedHeads];
#pragma unroll
    for (int first = 0; first < kPackedHeads; first += kTableHeads) {
      if (first >= group) break;
      const float4 products =
          Table::Products(tables_ + first / kTableHeads * Table::kBytes, key, format_);
      s[first] = present ? products.x * scale_ : -INFINITY;
      s[first + 1] = present ? products.y * scale_ : -INFINITY;
      s[first + 2] = present ? products.z * scale_ : -INFINITY;
      s[first + 3] = present ? products.w * scale_ : -INFINITY;
    }
    return softmax_.Weigh(s, group);
  }
  // Weights and values to where fragments are read from.
  __device__ __forceinline__ void Spread(uint4 weights) const {
    StoreShared128(own_ + threadIdx.x % 32 * 16, weights);
    Tile::Fill(own_ + kWeightBytes, Values() + OwnRow(), format_);
  }
  __device__ __forceinline__ void AddRows() {
    const uint4 p = LoadTransposed(own_ + threadIdx.x % 32 * 16);
    const int products = format_.channels() / 16;
#pragma unroll
    for (int i = 0; i < kChannels / 16; ++i) {
      if (i >= products) break;
      const uint32_t tile = own_ + kWeightBytes;
      const uint4 low = Tile::Fragment(tile, i, 0), high = Tile::Fragment(tile, i, 1);
      MmaM16N8K16<Weight>(softmax_.o[i], low.x, low.y, low.z, low.w, p.x, p.y);
      MmaM16N8K16<Weight>(softmax_.o[i], high.x, high.y, high.z, high.w, p.z, p.w);
    }
  }
  // The chunks of a block follow each other in memory, and a tile's blocks in shared memory. What
  // is no row is zeros.
  __device__ __forceinline__ void Issue(const TileRows& rows, int32_t tile, uint64_t array,
                                        uint32_t to) const {
    __syncwarp();
    if (tile < rows.tiles()) {
      const int32_t first = tile * kTileRows >> rows.block_shift;
#pragma unroll 5
      for (auto i = static_cast<int32_t>(threadIdx.x % 32); i < kTileRows * format_.chunks;
           i += 32) {
        const auto nth = static_cast<int32_t>(static_cast<uint32_t>(i) * inverse_ >> 20);
        const int32_t entry = min(first + nth, rows.count - 1);
        const int32_t chunk = (rows.ids[entry] - rows.first_block - nth) * block_chunks_ + i;
        const bool real = first + nth == entry && chunk < rows.rows * format_.chunks;
        CopyChunk(to + i * 16, array + (real ? int64_t{chunk} * 16 : 0), real);
      }
    }
    EndCopies();
  }

  const float scale_;
  const uint32_t tables_, own_;
  RowFormat format_;
  int32_t block_chunks_;
  uint32_t inverse_;  // of block_chunks_, exact for the chunks of a tile
  uint64_t keys_, values_;
  Softmax softmax_;
};

// Warps' sums of a segment to the CTA's, in shared.queries.rotated [group][kChannels], and what
// they and the total so far weigh in the new total. `scratch` [warps][group][kChannels].
template <int kDim, int kChannels>
__device__ __forceinline__ void SumWarps(SegmentAttention<kDim, kChannels>& attention, int group,
                                         float* scratch, Shared<kDim, kChannels>& shared) {
  auto& softmax = attention.softmax();
  const RowFormat& format = attention.format();
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll
  for (int h = 0; h < kPackedHeads; ++h) {
    if (h >= group) break;
    const float sum = SumOfLanes(softmax.l[h]);
    if (lane != 0) continue;
    shared.m[warp][h] = softmax.m[h];
    shared.l[warp][h] = sum;
  }
  __syncthreads();  // tiles are used up too: the scratch is where they were
  for (int head = warp; head < group; head += warps) {
    const float own = lane < warps ? shared.m[lane][head] : -INFINITY;
    const float top = fmaxf(shared.total_m[head], MaxOfLanes(own));
    const float sum = SumOfLanes(lane < warps ? WeightOf(own, top) * shared.l[lane][head] : 0);
    if (lane != 0) continue;
    const float before = WeightOf(shared.total_m[head], top);
    shared.before[head] = before;
    shared.total_m[head] = top;
    shared.total_l[head] = before * shared.total_l[head] + sum;
  }
  __syncthreads();
  float weights[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = min(2 * t + i, group - 1);
    weights[i] = WeightOf(shared.m[warp][head], shared.total_m[head]);
  }
  float* const to = scratch + (warp * group + 2 * t) * kChannels;
#pragma unroll
  for (int j = 0; j < kChannels / 8; ++j) {
    if (8 * j >= format.channels()) break;
    const int channel = EntryChannel(8 * j + g, format);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (2 * t + i >= group) break;
      to[i * kChannels + channel] = weights[i] * softmax.o[j / 2][j % 2 * 2 + i];
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
  const auto tables = static_cast<uint32_t>(__cvta_generic_to_shared(dynamic));
  const uint32_t own = a.memory.PartOf(tables, threadIdx.x / 32);
  SegmentAttention<kDim, kChannels> attention(a.scale, tables, own);
  const auto thread = static_cast<int32_t>(threadIdx.x), threads = static_cast<int32_t>(blockDim.x);
  int open = -1;                // segment
  int32_t count = 0, done = 0;  // of the ids in shared memory
#pragma unroll 1
  while (true) {
    if (done == count && begin < end) {
      __syncthreads();  // the ids before are used up
      count = min(end - begin, threads);
      done = 0;
      if (thread < count) shared.ids[thread] = chosen.At(begin + thread);
      begin += threads;
      __syncthreads();
    }
    // The next segment, and how many of the ids lie in it.
    int segment = -1, n = 0;
    if (done < count) {
      segment = shared.segments.Of(shared.ids[done]);
      const int32_t last = SegmentTable::EndBlock(shared.segments.at[segment]);
      n = __syncthreads_count(thread >= done && thread < count && shared.ids[thread] < last);
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
      shared.queries.FillTables(reinterpret_cast<char*>(dynamic), attention.format(), group);
      __syncthreads();
      open = segment;
    }
    attention.Run(rows, group);
    done += n;
  }
}

// The rotations of all segments to the L2, by all CTAs of an item.
template <int kDim, int kChannels>
__device__ __forceinline__ void PrefetchRotations(const SegmentTable& segments) {
#pragma unroll 1
  for (int i = blockIdx.x; i < 2 * segments.count; i += gridDim.x) {
    const PackedSegment& s = segments.at[i / 2];
    PrefetchRotation<kDim, kChannels>(i % 2 == 0 ? s.r_k : s.r_v);
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
  if (!w.ahead) WaitForPrevious();
  shared.segments.Load(w.layer, sequence, head);
  for (int i = threadIdx.x; i < kPackedHeads * kColumns; i += blockDim.x) {
    reinterpret_cast<float4*>(shared.total_o)[i] = {0, 0, 0, 0};
  }
  if (threadIdx.x < kPackedHeads) {
    shared.total_m[threadIdx.x] = -INFINITY;
    shared.total_l[threadIdx.x] = 0;
  }
  __syncthreads();
  if (w.ahead) PrefetchRotations<kDim, kChannels>(shared.segments);
  WaitForPrevious();
  LetNextStart();
  shared.queries.Load(w.queries, sequence, head);
  const ChosenBlocks chosen =
      ChosenBlocks::Of(w.selection, sequence, head, shared.segments.blocks());
  shared.shares.Cut(chosen, shared.segments);
  __syncthreads();
  const int32_t shares = shared.shares.count, cta = static_cast<int32_t>(blockIdx.x);
  const int32_t sharers = max(shares, 1);
  if (cta >= sharers) return;
  if (cta < shares) {
    const int2 blocks = shared.shares.At(cta);
    AttendShare(a, chosen, blocks.x, blocks.y, dynamic, shared);
  }

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
  using Shape = PackedShape<kDim, kChannels>;
  const int tables =
      RotatedQueries<kDim, kChannels>::TablesOf(w.queries.group) * QueryTable<kChannels>::kBytes;
  const WarpMemory memory = WarpMemory::Of(Shape::kThreadsMax, sizeof(Shared<kDim, kChannels>), 1,
                                           2 * LargestFormat(w.layer).tile_bytes(),
                                           SegmentAttention<kDim, kChannels>::kOtherBytes, tables);
  // Sums of warps, and products of rotations, lie where tables and tiles did.
  const int threads = memory.warps * 32;
  const int sums = w.queries.group * 4 * std::max(memory.warps * kChannels, 4 * threads);
  const int bytes = std::max(memory.total(), sums);
  if (const int error = AllowShared(kernel, bytes); error != 0) return error;
  Arguments a{w, memory, w.scale * kLog2E, {}};
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
