// SPDX-License-Identifier: Apache-2.0
#include <bit>

#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/cuda/warps/row_scores.cuh"
#include "kernels/cuda/warps/score_keys.cuh"
#include "kernels/cuda/warps/warp_sums.cuh"
#include "kernels/plans/chess/ops/cascade/cascade_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kLanes = 8;  // channels that a lane multiplies at a time
constexpr int kScoreThreads = 128;
constexpr int kUnitsPerWarp = 4;  // share what is read of the anchor
constexpr int kCascadeThreads = 1024;

// The batch, with what the host works out of it.
struct Arguments {
  CascadeBatch w;
  int64_t channels;  // channels of a vector
  int64_t scratch_bytes, units;
  int32_t piece_shift;  // log2(pieces of kLanes channels that a head has)

  __device__ std::byte* ScratchOf(int sequence) const {
    return static_cast<std::byte*>(w.scratch) + sequence * scratch_bytes;
  }
  __device__ float* AnchorOf(int sequence) const {
    return reinterpret_cast<float*>(ScratchOf(sequence));
  }
  // The chunk (level 1) or grid (level 2) that is filling.
  __device__ __nv_bfloat16* FillingOf(int sequence, int level) const {
    return reinterpret_cast<__nv_bfloat16*>(AnchorOf(sequence) + channels) + (level - 1) * channels;
  }
  __device__ float* ScoresOf(int sequence) const {
    return reinterpret_cast<float*>(FillingOf(sequence, 1) + 2 * channels);
  }
  __device__ uint8_t* KeptOf(int sequence) const {
    return reinterpret_cast<uint8_t*>(ScoresOf(sequence) + units);
  }
};

// Unit counts of a sequence, by level: pages, chunks, grids.
struct Counts {
  int32_t complete[3];     // with a stored row
  int32_t units[3];        // to be scored: at most one more of a level
  int32_t filling_tokens;  // in the page after the last complete one
  int32_t window_start;    // page

  __device__ Counts(const CascadeBatch& w, int32_t tokens) {
    complete[0] = units[0] = tokens / w.page_tokens;
    complete[1] = complete[0] / w.pages_per_chunk;
    complete[2] = complete[1] / w.chunks_per_grid;
    units[1] = (units[0] + w.pages_per_chunk - 1) / w.pages_per_chunk;
    units[2] = (units[1] + w.chunks_per_grid - 1) / w.chunks_per_grid;
    filling_tokens = tokens - units[0] * w.page_tokens;
    window_start = max(units[0] + (filling_tokens > 0 ? 1 : 0) - w.window, 0);
  }
  // Where a level's scores begin behind those of the finer ones.
  __device__ int32_t First(int level) const {
    return level == 0 ? 0 : level == 1 ? units[0] : units[0] + units[1];
  }
};

// One channel of one head (of all layers) of one sequence.
template <typename T>
class Channel {
 public:
  __device__ Channel(const CascadeBatch& w, int sequence, int head, int channel)
      : w_(w), sequence_(sequence), head_(head), channel_(channel) {}

  // The sum over stored rows [first, last) of a level, in their order.
  __device__ float SumOf(int level, int32_t first, int32_t last) const {
    const DeviceRows& rows = w_.levels[level];
    float sum = 0;
#pragma unroll 8
    for (int32_t u = first; u < last; ++u) {
      sum += FloatOf(At<__nv_bfloat16>(rows, head_ * rows.head_stride, u));
    }
    return sum;
  }
  // The mean of the tokens of the page that is filling.
  __device__ float FillingPage(const Counts& n) const {
    const int32_t first = n.units[0] * w_.page_tokens;
    const int64_t head = head_ % w_.keys.kv_heads * w_.keys.head_stride +
                         head_ / w_.keys.kv_heads * w_.key_layer_stride;
    float sum = 0;
#pragma unroll 8
    for (int32_t i = 0; i < n.filling_tokens; ++i) {
      sum += FloatOf(At<T>(w_.keys, head, first + i));
    }
    return __fdiv_rn(sum, static_cast<float>(n.filling_tokens));
  }

 private:
  template <typename Row>
  __device__ Row At(const DeviceRows& rows, int64_t head, int32_t r) const {
    const uint64_t* const pages = rows.pages + int64_t{sequence_} * rows.page_stride;
    return reinterpret_cast<const Row*>(RowAddress(rows, pages, rows.offset + head, r))[channel_];
  }

  const CascadeBatch& w_;
  const int sequence_, head_, channel_;
};

// Grid (layers * kv_heads, batch), a thread a channel: anchors and the vectors of filling units.
template <typename T>
__global__ void AnchorKernel(const __grid_constant__ Arguments a) {
  WaitForPrevious();
  LetNextStart();
  const CascadeBatch& w = a.w;
  const int head = blockIdx.x, sequence = blockIdx.y;
  if (w.tokens[sequence] < 0) return;
  const Counts n(w, w.tokens[sequence]);
  const Channel<T> channel(w, sequence, head, threadIdx.x);
  const int64_t at = int64_t{head} * blockDim.x + threadIdx.x;

  float sum = channel.SumOf(0, n.window_start, n.complete[0]);
  int32_t count = n.complete[0] - n.window_start;
  if (n.filling_tokens > 0) {
    sum += channel.FillingPage(n);
    ++count;
  }
  a.AnchorOf(sequence)[at] = __fdiv_rn(sum, static_cast<float>(count));

  float child = 0;  // the unit that is filling of the level below
  for (int level = 1; level < 3; ++level) {
    if (n.units[level] == n.complete[level]) continue;
    const int32_t size = level == 1 ? w.pages_per_chunk : w.chunks_per_grid;
    const int32_t first = (n.units[level] - 1) * size;
    float children = channel.SumOf(level - 1, first, n.complete[level - 1]);
    if (n.units[level - 1] > n.complete[level - 1]) children += child;
    const auto mean =
        Rounded<__nv_bfloat16>(__fdiv_rn(children, static_cast<float>(n.units[level - 1] - first)));
    a.FillingOf(sequence, level)[at] = mean;
    child = FloatOf(mean);
  }
}

// Where a unit's vector lies: head h (of all layers) at base + h * head_stride.
struct UnitVector {
  const char* base;
  int64_t head_stride;

  // unit: counted through the levels, as the scores are.
  static __device__ UnitVector Of(const Arguments& a, const Counts& n, int sequence, int32_t unit) {
    const int level = unit >= n.First(2) ? 2 : unit >= n.First(1) ? 1 : 0;
    const int32_t u = unit - n.First(level);
    const DeviceRows& rows = a.w.levels[level];
    if (u >= n.complete[level]) {
      return {reinterpret_cast<const char*>(a.FillingOf(sequence, level)),
              int64_t{rows.head_dim} * int64_t{sizeof(__nv_bfloat16)}};
    }
    const uint64_t* const pages = rows.pages + int64_t{sequence} * rows.page_stride;
    return {RowAddress(rows, pages, rows.offset, u), rows.head_stride};
  }
};

// Grid (units / (warps * kUnitsPerWarp), batch): a warp has kUnitsPerWarp units.
__global__ void __launch_bounds__(kScoreThreads) ScoreKernel(const __grid_constant__ Arguments a) {
  WaitForPrevious();
  LetNextStart();
  const int sequence = blockIdx.y, lane = threadIdx.x % 32;
  if (a.w.tokens[sequence] < 0) return;
  const Counts n(a.w, a.w.tokens[sequence]);
  const int32_t total = n.First(2) + n.units[2];
  const auto first =
      static_cast<int32_t>((blockIdx.x * (kScoreThreads / 32) + threadIdx.x / 32) * kUnitsPerWarp);
  if (first >= total) return;
  UnitVector vectors[kUnitsPerWarp];
#pragma unroll
  for (int j = 0; j < kUnitsPerWarp; ++j) {
    vectors[j] = UnitVector::Of(a, n, sequence, min(first + j, total - 1));
  }
  const float* const anchor = a.AnchorOf(sequence);
  const auto pieces = static_cast<int32_t>(a.channels / kLanes);
  float dots[kUnitsPerWarp] = {};
#pragma unroll 2
  for (int32_t i = lane; i < pieces; i += 32) {
    const int32_t head = i >> a.piece_shift, piece = i - (head << a.piece_shift);
    float x[kLanes];
    LoadFloats(anchor, DType::kF32, int64_t{i} * kLanes, x);
#pragma unroll
    for (int j = 0; j < kUnitsPerWarp; ++j) {
      float row[kLanes];
      LoadFloats(vectors[j].base + head * vectors[j].head_stride, DType::kBF16, piece * kLanes,
                 row);
#pragma unroll
      for (int c = 0; c < kLanes; ++c) dots[j] += x[c] * row[c];
    }
  }
#pragma unroll
  for (int j = 0; j < kUnitsPerWarp; ++j) {
    for (int step = 16; step > 0; step /= 2) dots[j] += __shfl_xor_sync(~0u, dots[j], step);
    if (lane == 0 && first + j < total) a.ScoresOf(sequence)[first + j] = dots[j];
  }
}

// CeilShare of pick.h for n > 0: no product and sum in one, as on the host.
__device__ int32_t ShareOf(double share, int32_t n) {
  const double units = ceil(__dadd_rn(__dmul_rn(share, n), -1e-9));
  return static_cast<int32_t>(fmin(fmax(units, 1.0), static_cast<double>(n)));
}

// Units of one level that compete: those of [begin, end) whose parent was kept.
struct Level {
  const float* scores;    // by unit
  const uint8_t* parent;  // by parent unit: whether it was kept; null: all were
  int32_t size;           // units of a parent
  int32_t begin, end;

  __device__ uint32_t KeyAt(int32_t unit) const {
    if (unit >= end || (parent != nullptr && parent[unit / size] == 0)) return kAbsent;
    return KeyOf(scores[unit]);
  }
};

struct Shared {
  int32_t histogram[256];
  uint32_t digit;
  int32_t need;                 // units to take that have the digits so far
  uint32_t warp_counts[2][32];  // a warp's keys above the boundary << 16 | on it
};

// What is kept of a level: all keys above `key`, and of those equal to it the first `ties`.
struct Boundary {
  uint32_t key;
  int32_t ties;
};

// Finds the digit of the share-th largest key in a histogram of one digit of those that have the
// digits so far. By one warp; lane 0 has the largest eight digits.
__device__ void FindDigit(Shared& s, bool first, double share) {
  const int lane = threadIdx.x;
  int32_t own = 0;
  for (int i = 0; i < 8; ++i) own += s.histogram[255 - 8 * lane - i];
  const int32_t upto = WarpInclusiveSum(own);
  const int32_t need = first ? ShareOf(share, __shfl_sync(~0u, upto, 31)) : s.need;
  int32_t above = upto - own;
  __syncwarp();
  if (need <= above || need > upto) return;
  for (int digit = 255 - 8 * lane;; --digit) {
    if (above + s.histogram[digit] >= need) {
      s.digit = static_cast<uint32_t>(digit);
      s.need = need - above;
      return;
    }
    above += s.histogram[digit];
  }
}

// Called by the whole CTA. REQUIRES: some unit competes.
__device__ Boundary FindBoundary(const Level& level, double share, Shared& s) {
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += kCascadeThreads) s.histogram[i] = 0;
    __syncthreads();
    for (int32_t u = level.begin + static_cast<int32_t>(threadIdx.x); u < level.end;
         u += kCascadeThreads) {
      const uint32_t key = level.KeyAt(u);
      if (key == kAbsent || key >> shift >> 8 != prefix) continue;
      atomicAdd(&s.histogram[key >> shift & 255], 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) FindDigit(s, shift == 24, share);
    __syncthreads();
    prefix = prefix << 8 | s.digit;
  }
  return {prefix, s.need};
}

// Marks what is kept and, with `units`, lists it; how many are.
__device__ int32_t Keep(const Level& level, Boundary boundary, uint8_t* kept, int32_t* units,
                        Shared& s) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t before_lane = (1u << lane) - 1;
  int32_t above = 0, ties = 0;  // before this round's units
  int round = 0;
  for (int32_t first = level.begin; first < level.end; first += kCascadeThreads, round ^= 1) {
    const int32_t unit = first + static_cast<int32_t>(threadIdx.x);
    const uint32_t key = level.KeyAt(unit);
    const bool is_above = key > boundary.key, is_tie = key == boundary.key;
    const uint32_t all_above = __ballot_sync(~0u, is_above), all_ties = __ballot_sync(~0u, is_tie);
    if (lane == 0) s.warp_counts[round][warp] = __popc(all_above) << 16 | __popc(all_ties);
    __syncthreads();
    const uint32_t upto =
        static_cast<uint32_t>(WarpInclusiveSum(static_cast<int32_t>(s.warp_counts[round][lane])));
    const uint32_t before = warp == 0 ? 0 : __shfl_sync(~0u, upto, warp - 1);
    const uint32_t total = __shfl_sync(~0u, upto, 31);
    const int32_t my_above =
        above + static_cast<int32_t>(before >> 16) + __popc(all_above & before_lane);
    const int32_t my_ties =
        ties + static_cast<int32_t>(before & 0xFFFFu) + __popc(all_ties & before_lane);
    const bool is_kept = is_above || (is_tie && my_ties < boundary.ties);
    if (unit < level.end) kept[unit] = is_kept ? 1 : 0;
    if (is_kept && units != nullptr) units[my_above + min(my_ties, boundary.ties)] = unit;
    above += static_cast<int32_t>(total >> 16);
    ties += static_cast<int32_t>(total & 0xFFFFu);
  }
  __syncthreads();
  return above + min(ties, boundary.ties);
}

// A CTA a sequence.
__global__ void __launch_bounds__(kCascadeThreads)
    CascadeKernel(const __grid_constant__ Arguments a) {
  __shared__ Shared s;
  WaitForPrevious();
  LetNextStart();
  const CascadeBatch& w = a.w;
  const int sequence = blockIdx.x;
  if (w.tokens[sequence] < 0) return;
  const Counts n(w, w.tokens[sequence]);
  // Candidates, by level: a chunk or grid competes if it holds a page that does.
  int32_t begin[3] = {min(w.sinks, n.window_start)}, end[3] = {n.window_start};
  if (begin[0] >= end[0]) {
    if (threadIdx.x == 0) w.counts[sequence] = 0;
    return;
  }
  const int32_t sizes[3] = {w.pages_per_chunk, w.chunks_per_grid, 1};
  for (int level = 1; level < 3; ++level) {
    begin[level] = begin[level - 1] / sizes[level - 1];
    end[level] = (end[level - 1] - 1) / sizes[level - 1] + 1;
  }
  uint8_t* parent = nullptr;
  int32_t count = 0;
  for (int i = 2; i >= 0; --i) {
    const Level level{a.ScoresOf(sequence) + n.First(i), parent, sizes[i], begin[i], end[i]};
    uint8_t* const kept = a.KeptOf(sequence) + n.First(i);
    const Boundary boundary = FindBoundary(level, w.rho[2 - i], s);
    int32_t* const units = i > 0 ? nullptr : w.units + int64_t{sequence} * w.list_stride;
    count = Keep(level, boundary, kept, units, s);
    parent = kept;
  }
  if (threadIdx.x == 0) w.counts[sequence] = count;
}

bool IsValid(const CascadeBatch& w) {
  for (const DeviceRows& rows : w.levels) {
    if (rows.dtype != DType::kBF16 || rows.head_dim != w.keys.head_dim || rows.page_rows < 1) {
      return false;
    }
  }
  const int32_t heads = w.keys.kv_heads;
  return w.layers > 0 && heads > 0 && w.page_tokens > 0 && w.pages_per_chunk > 0 &&
         w.chunks_per_grid > 0 && w.window > 0 && w.sinks >= 0 && w.batch >= 0 && w.batch < 65536 &&
         w.pages_max >= 0 && w.list_stride >= w.pages_max;
}

Arguments ArgumentsOf(const CascadeBatch& w) {
  const int32_t dim = w.keys.head_dim;
  Arguments a{w, int64_t{w.layers} * w.keys.kv_heads * dim, 0, CascadeUnits(w.pages_max),
              std::countr_zero(static_cast<uint32_t>(dim / kLanes))};
  a.scratch_bytes = CascadeScratchBytes(a.channels, w.pages_max);
  return a;
}

}  // namespace

int CascadeCuda(const CascadeBatch& w, Stream stream) {
  if (!IsValid(w)) return cudaErrorInvalidValue;
  if (w.batch == 0) return cudaSuccess;
  const Arguments a = ArgumentsOf(w);
  const auto batch = static_cast<uint32_t>(w.batch);
  const dim3 heads(static_cast<uint32_t>(w.layers * w.keys.kv_heads), batch);
  const int anchors = ForRows(w.keys.dtype, w.keys.head_dim, [&]<typename T, int kDim>() {
    return LaunchDependent(AnchorKernel<T>, heads, kDim, 0, stream, a);
  });
  if (anchors != cudaSuccess) return anchors;
  constexpr int64_t kUnitsPerCta = kScoreThreads / 32 * kUnitsPerWarp;
  const dim3 units(static_cast<uint32_t>((a.units + kUnitsPerCta - 1) / kUnitsPerCta), batch);
  const int scores = LaunchDependent(ScoreKernel, units, kScoreThreads, 0, stream, a);
  if (scores != cudaSuccess) return scores;
  return LaunchDependent(CascadeKernel, dim3(batch), kCascadeThreads, 0, stream, a);
}

}  // namespace kvstrata::cuda
