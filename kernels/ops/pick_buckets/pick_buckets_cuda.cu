#include <algorithm>

#include "kernels/cuda/float_bits.cuh"
#include "kernels/cuda/last_arrival.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/score_keys.cuh"
#include "kernels/ops/pick_buckets/pick_buckets_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kCtas = 132;          // of a launch, about: one on each SM
constexpr int kMostSplits = 16;     // CTAs of a list
constexpr int kHeld = 4096;         // buckets of a list whose keys and sizes stay in shared memory
constexpr int kBucketsPerWarp = 4;  // whose means a warp reads at a time

struct QuerySum {
  int32_t tokens, count;
  int32_t unused[2];
  float sum[1];  // [head_dim]
};

// What a CTA knows of its list.
struct List {
  const SentenceTable& table;
  int64_t row;
  int32_t listed, count;  // buckets of the prompt; all
  int32_t window;         // tokens from here on are attended anyway

  __device__ const float* MeanOf(int32_t bucket, int dim) const {
    return bucket < listed
               ? table.means + (row * table.bucket_stride + bucket) * dim
               : table.whole_means + (int64_t{bucket - listed} * table.rows + row) * dim;
  }
  __device__ const int32_t* KeptOf(int32_t bucket, int32_t* size) const {
    const int32_t* const firsts = table.firsts + row * (table.bucket_stride + 1) + bucket;
    *size = firsts[1] - firsts[0];
    return table.kept + row * table.kept_stride + firsts[0];
  }
  // Tokens that the bucket supplies below the window.
  __device__ int32_t SizeOf(int32_t bucket) const {
    if (bucket >= listed) {
      const int32_t* const run = table.whole + 2 * int64_t{bucket - listed};
      return min(max(window - run[0], 0), run[1] - run[0]);
    }
    int32_t size;
    const int32_t* const kept = KeptOf(bucket, &size);
    if (kept[size - 1] < window) return size;
    int32_t below = 0;
    while (kept[below] < window) ++below;
    return below;
  }
  __device__ void Write(int32_t bucket, int32_t taken, int32_t* to) const {
    if (bucket >= listed) {
      const int32_t begin = table.whole[2 * int64_t{bucket - listed}];
      for (int32_t i = 0; i < taken; ++i) to[i] = begin + i;
      return;
    }
    int32_t size;
    const int32_t* const kept = KeptOf(bucket, &size);
#pragma unroll 4
    for (int32_t i = 0; i < taken; ++i) to[i] = kept[i];
  }
};

struct Shared {
  float query[256];  // the sentence's mean
  bool last;
  int32_t histogram[256];
  uint32_t digit;
  int32_t need, all;
  int64_t warps[kWarps];
  uint32_t keys[kHeld];
  int32_t sizes[kHeld];
};

__device__ float QueryAt(const PickBucketsBatch& w, int64_t element) {
  if (w.q_dtype == DType::kF32) return static_cast<const float*>(w.q)[element];
  if (w.q_dtype == DType::kF16) return FloatOf(static_cast<const __half*>(w.q)[element]);
  return FloatOf(static_cast<const __nv_bfloat16*>(w.q)[element]);
}

// The mean of the sentence's queries; keeps their sum if `keep`.
__device__ void MeanQuery(const PickBucketsBatch& w, const List& list, int sequence, int head,
                          bool keep, float* mean) {
  const int64_t floats = QuerySumFloats(w.head_dim);
  float* const at = list.table.queries + list.row * 2 * floats;
  QuerySum* const sums[2] = {reinterpret_cast<QuerySum*>(at),
                             reinterpret_cast<QuerySum*>(at + floats)};
  const int c = threadIdx.x;
  float sum = 0;
  const int64_t first = (int64_t{sequence} * w.kv_heads + head) * w.group * w.head_dim + c;
  for (int i = 0; c < w.head_dim && i < w.group; ++i) {
    sum += QueryAt(w, first + int64_t{i} * w.head_dim);
  }
  const int32_t tokens = w.tokens[sequence], from = w.queries_from[sequence];
  const int32_t made[2] = {sums[0]->tokens, sums[1]->tokens};
  const auto counts = [=](int32_t t) { return t > from && t < tokens; };
  const int before = counts(made[0]) && (!counts(made[1]) || made[0] > made[1]) ? 0
                     : counts(made[1])                                          ? 1
                                                                                : -1;
  const int32_t count = (before < 0 ? 0 : sums[before]->count) + 1;
  QuerySum* const next = sums[before == 0 ? 1 : 0];
  __syncthreads();  // all have read `made`
  if (c < w.head_dim) {
    if (before >= 0) sum += sums[before]->sum[c];
    mean[c] = __fdiv_rn(sum, static_cast<float>(w.group * count));
    if (keep) next->sum[c] = sum;
  }
  if (keep && threadIdx.x == 0) {
    next->tokens = tokens;
    next->count = count;
  }
  __syncthreads();
}

// Scores of kBucketsPerWarp buckets from `first` on, `step` apart, by a warp.
template <int kDim>
__device__ void ScoreBuckets(const List& list, const float* query, int32_t first, int32_t step,
                             float* scores) {
  constexpr int kOwn = kDim / 32;  // channels of a lane
  const int lane = threadIdx.x % 32;
  float dots[kBucketsPerWarp] = {}, rows[kBucketsPerWarp][kOwn];
#pragma unroll
  for (int j = 0; j < kBucketsPerWarp; ++j) {
    const float* const mean = list.MeanOf(min(first + j * step, list.count - 1), kDim);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) rows[j][i] = mean[lane + 32 * i];
  }
#pragma unroll
  for (int j = 0; j < kBucketsPerWarp; ++j) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) dots[j] += rows[j][i] * query[lane + 32 * i];
    for (int half = 16; half > 0; half /= 2) dots[j] += __shfl_xor_sync(~0u, dots[j], half);
    if (lane == 0 && first + j * step < list.count) scores[first + j * step] = dots[j];
  }
}

// Key and size of a bucket: held in shared memory, or made again.
__device__ uint32_t KeyAt(const Shared& s, const float* scores, int32_t bucket) {
  return bucket < kHeld ? s.keys[bucket] : KeyOf(scores[bucket]);
}
__device__ int32_t SizeAt(const Shared& s, const List& list, int32_t bucket) {
  return bucket < kHeld ? s.sizes[bucket] : list.SizeOf(bucket);
}

// All buckets above `key` are taken, and of those equal to it the first `need` tokens.
struct Boundary {
  uint32_t key;
  int32_t need;
};

// Finds the digit that the boundary's bucket has, in a histogram of tokens; lane 0 has the largest
// eight digits. By one warp.
__device__ void FindDigit(Shared& s) {
  const int lane = threadIdx.x;
  int32_t own = 0;
  for (int i = 0; i < 8; ++i) own += s.histogram[255 - 8 * lane - i];
  int32_t upto = own;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
  const int32_t need = s.need;
  if (lane == 31) s.all = upto;
  __syncwarp();
  if (upto < need || upto - own >= need) return;
  int32_t above = upto - own;
  int digit = 255 - 8 * lane;
  while (above + s.histogram[digit] < need) above += s.histogram[digit--];
  s.digit = static_cast<uint32_t>(digit);
  s.need = need - above;
}

// REQUIRES: tau > 0. With fewer tokens than tau all are taken: the boundary is below every key.
__device__ Boundary FindBoundary(Shared& s, const List& list, const float* scores, int32_t tau) {
  if (threadIdx.x == 0) s.need = tau;
  uint32_t prefix = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < 256; i += kThreads) s.histogram[i] = 0;
    __syncthreads();
    for (int32_t b = threadIdx.x; b < list.count; b += kThreads) {
      const uint32_t key = KeyAt(s, scores, b);
      if (shift < 24 && key >> shift >> 8 != prefix) continue;
      atomicAdd(&s.histogram[key >> shift & 255], SizeAt(s, list, b));
    }
    __syncthreads();
    if (threadIdx.x < 32) FindDigit(s);
    __syncthreads();
    if (shift == 24 && s.all < tau) return {kAbsent, 0};
    prefix = prefix << 8 | s.digit;
  }
  return {prefix, s.need};
}

// The sum over the threads before this one; *total: over all.
__device__ int64_t SumBefore(Shared& s, int64_t own, int64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t upto = own;
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
  __syncthreads();  // the sums of the last round are read
  if (lane == 31) s.warps[warp] = upto;
  __syncthreads();
  int64_t before = 0, all = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += s.warps[i];
    all += s.warps[i];
  }
  *total = all;
  return before + upto - own;
}

// Lists the tokens of what is taken, bucket after bucket; how many they are.
__device__ int32_t WriteTokens(Shared& s, const List& list, const float* scores, Boundary boundary,
                               int32_t* to) {
  int64_t done = 0;  // tokens above the boundary << 32 | on it, of the buckets before
  for (int32_t first = 0; first < list.count; first += kThreads) {
    const int32_t b = first + static_cast<int32_t>(threadIdx.x);
    const uint32_t key = b < list.count ? KeyAt(s, scores, b) : kAbsent;
    const int32_t size = b < list.count ? SizeAt(s, list, b) : 0;
    const int32_t above = key > boundary.key ? size : 0, tied = key == boundary.key ? size : 0;
    int64_t total = 0;
    const int64_t before = done + SumBefore(s, int64_t{above} << 32 | tied, &total);
    const auto ties_before = static_cast<int32_t>(before & 0xFFFFFFFF);
    const int32_t ties = min(max(boundary.need - ties_before, 0), tied);
    const int32_t at = static_cast<int32_t>(before >> 32) + min(ties_before, boundary.need);
    if (above + ties > 0) list.Write(b, above + ties, to + at);
    done += total;
  }
  return static_cast<int32_t>(done >> 32) +
         min(static_cast<int32_t>(done & 0xFFFFFFFF), boundary.need);
}

// Grid (splits, kv_heads, batch).
template <int kDim>
__global__ __launch_bounds__(kThreads) void PickBucketsKernel(PickBucketsBatch w) {
  extern __shared__ uint4 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  WaitForPrevious();
  LetNextStart();
  const int split = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
  const int64_t out = int64_t{sequence} * w.kv_heads + head;
  const int32_t window = w.recent_begin[sequence];
  const bool keeps = split == 0;
  if (keeps && window == 0 && threadIdx.x == 0) w.counts[out] = 0;
  if (w.queries_from[sequence] < 0 || (window == 0 && !keeps)) return;
  const SentenceTable& table = w.tables[sequence];
  const int64_t row = int64_t{w.layer} * w.kv_heads + head;
  List list{table, row, 0, 0, window};
  MeanQuery(w, list, sequence, head, keeps, s.query);
  if (window == 0) return;

  list.listed = table.bucket_stride > 0 ? table.counts[row] : 0;
  list.count = list.listed + w.whole[sequence];
  float* const scores = table.scores + int64_t{head} * table.score_stride();
  const auto warps = static_cast<int32_t>(gridDim.x * kWarps);
  const auto warp = static_cast<int32_t>(split * kWarps + threadIdx.x / 32);
  for (int32_t b = warp; b < list.count; b += warps * kBucketsPerWarp) {
    ScoreBuckets<kDim>(list, s.query, b, warps, scores);
  }
  if (!ArrivesLast(w.counters + out, static_cast<int32_t>(gridDim.x), s.last)) return;

  for (int32_t b = threadIdx.x; b < min(list.count, kHeld); b += kThreads) {
    s.keys[b] = KeyOf(scores[b]);
    s.sizes[b] = list.SizeOf(b);
  }
  __syncthreads();
  Boundary boundary{~0u, 0};  // nothing
  if (w.tau > 0) boundary = FindBoundary(s, list, scores, w.tau);
  const int32_t count =
      WriteTokens(s, list, scores, boundary, w.units + out * int64_t{w.list_stride});
  if (threadIdx.x == 0) w.counts[out] = count;
}

template <int kDim>
int Launch(const PickBucketsBatch& w, Stream stream) {
  constexpr int kBytes = sizeof(Shared);
  const int lists = w.kv_heads * w.batch;
  const dim3 grid(std::clamp(kCtas / lists, 1, kMostSplits), w.kv_heads, w.batch);
  return LaunchDependent(PickBucketsKernel<kDim>, grid, kThreads, kBytes, stream, w);
}

}  // namespace

int PickBucketsCuda(const PickBucketsBatch& w, Stream stream) {
  static_assert(sizeof(Shared) <= 48 * 1024);
  if (w.kv_heads < 1 || w.group < 1 || w.tau < 0 || w.list_stride < w.tau || w.batch > 65535) {
    return cudaErrorInvalidValue;
  }
  if (w.batch == 0) return cudaSuccess;
  return w.head_dim == 64    ? Launch<64>(w, stream)
         : w.head_dim == 128 ? Launch<128>(w, stream)
         : w.head_dim == 256 ? Launch<256>(w, stream)
                             : int{cudaErrorInvalidValue};
}

}  // namespace kvstrata::cuda
