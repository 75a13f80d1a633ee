// SPDX-License-Identifier: Apache-2.0

#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/last_arrival.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/cuda/warps/score_keys.cuh"
#include "kernels/cuda/warps/warp_sums.cuh"
#include "kernels/plans/sentencekv/ops/pick_buckets/pick_buckets_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kMostSplits = 16;     // CTAs of a list
constexpr int kHeld = 2560;         // buckets of a list that stay in shared memory
constexpr int kHeldTokens = 2560;   // its kept tokens that stay there
constexpr int kBucketsPerWarp = 8;  // whose means a warp reads at a time
constexpr int kRounds = 4;          // digits of a key, eight bits each

struct QuerySum {
  int32_t tokens, count;
  int32_t unused[2];
  float sum[1];  // [head_dim]
};

// A CTA's list. It has `listed` buckets of the prompt, `count` in all.
struct List {
  SentenceTable table;
  int64_t row;
  int32_t listed, count;
  int32_t window;  // tokens from here on are attended anyway

  __device__ const BF16* MeanOf(int32_t bucket, int dim) const {
    return bucket < listed
               ? table.means + (row * table.bucket_stride + bucket) * dim
               : table.whole_means + (int64_t{bucket - listed} * table.rows + row) * dim;
  }
  __device__ const int32_t* kept() const { return table.kept + row * table.kept_stride; }
  __device__ BucketScore* ScoresOf(int head) const {
    return table.scores + int64_t{head} * table.score_stride();
  }
  // Where a bucket's tokens are, and how many it supplies below the window.
  __device__ BucketScore Unscored(int32_t bucket) const {
    if (bucket >= listed) {
      const int32_t* const run = table.whole + 2 * int64_t{bucket - listed};
      return {0, min(max(window - run[0], 0), run[1] - run[0]), run[0], 0};
    }
    const int32_t* const firsts = table.firsts + row * (table.bucket_stride + 1) + bucket;
    const int32_t first = firsts[0];
    int32_t size = firsts[1] - first;
    if (kept()[first + size - 1] >= window) {
      size = 0;
      while (kept()[first + size] < window) ++size;
    }
    return {0, size, first, 0};
  }
};

struct Shared {
  alignas(16) float query[256];  // the sentence's mean
  bool last;
  alignas(16) int32_t histogram[kRounds][256];
  int32_t matching[kRounds];  // buckets that are in a round's histogram
  int64_t warps[2][kWarps];
  float scores[kHeld];
  int32_t sizes[kHeld], firsts[kHeld];
  int32_t kept[kHeldTokens];
};

__device__ float QueryAt(const PickBucketsBatch& w, int64_t element) {
  if (w.q_dtype == DType::kF32) return static_cast<const float*>(w.q)[element];
  if (w.q_dtype == DType::kF16) return FloatOf(static_cast<const __half*>(w.q)[element]);
  return FloatOf(static_cast<const __nv_bfloat16*>(w.q)[element]);
}

// The sum of the sentence's queries before this step: the thread's channel.
struct QueriesBefore {
  float sum = 0;
  int32_t count = 0;
  QuerySum* next = nullptr;  // where this step's sum goes

  __device__ QueriesBefore(const PickBucketsBatch& w, const List& list, int sequence) {
    const int64_t floats = QuerySumFloats(w.head_dim);
    float* const at = list.table.queries + list.row * 2 * floats;
    QuerySum* const sums[2] = {reinterpret_cast<QuerySum*>(at),
                               reinterpret_cast<QuerySum*>(at + floats)};
    const int32_t tokens = w.tokens[sequence], from = w.queries_from[sequence];
    const int32_t made[2] = {sums[0]->tokens, sums[1]->tokens};
    const int32_t counts[2] = {sums[0]->count, sums[1]->count};
    const int c = min(static_cast<int>(threadIdx.x), w.head_dim - 1);
    const float own[2] = {sums[0]->sum[c], sums[1]->sum[c]};
    const auto is_of = [=](int32_t t) { return t > from && t < tokens; };
    const bool first = is_of(made[0]) && !(is_of(made[1]) && made[1] > made[0]);
    const bool second = !first && is_of(made[1]);
    if (first || second) {
      sum = own[second];
      count = counts[second];
    }
    // Overwrites what a step of as many tokens left that was given up.
    next = sums[first || (!second && made[1] >= tokens) ? 1 : 0];
  }
};

// The mean of the sentence's queries, this step's included; keeps their sum if `keep`.
__device__ void MeanQuery(const PickBucketsBatch& w, const QueriesBefore& before, int sequence,
                          int head, bool keep, float* mean) {
  const int c = threadIdx.x;
  if (c < w.head_dim) {
    float sum = before.sum;
    const int64_t first = (int64_t{sequence} * w.kv_heads + head) * w.group * w.head_dim + c;
    for (int i = 0; i < w.group; ++i) sum += QueryAt(w, first + int64_t{i} * w.head_dim);
    mean[c] = __fdiv_rn(sum, static_cast<float>(w.group * (before.count + 1)));
    if (keep) before.next->sum[c] = sum;
  }
  __syncthreads();
  if (!keep || threadIdx.x != 0) return;
  before.next->tokens = w.tokens[sequence];
  before.next->count = before.count + 1;
}

// Means of kBucketsPerWarp buckets from `first` on, `step` apart, in a warp.
template <int kDim>
class Tile {
 public:
  // Issues all loads.
  __device__ void Load(const List& list, int32_t first, int32_t step) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kBucketsPerWarp; ++j) {
      if (first + j * step >= list.count) continue;
      rows_[j] = reinterpret_cast<const Piece*>(list.MeanOf(first + j * step, kDim))[lane];
    }
    own_ = first + lane * step;
    has_own_ = lane < kBucketsPerWarp && own_ < list.count;
    if (has_own_) score_ = list.Unscored(own_);
  }
  // Lane j writes the j-th bucket's.
  __device__ void Score(const float* query, BucketScore* scores) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < kBucketsPerWarp; ++j) {
      float dot = 0;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint32_t two = rows_[j].words[i];
        const float* const q = query + (lane * kWords + i) * 2;
        dot += __uint_as_float(two << 16) * q[0] + __uint_as_float(two & 0xFFFF0000u) * q[1];
      }
      for (int half = 16; half > 0; half /= 2) dot += __shfl_xor_sync(~0u, dot, half);
      if (lane == j) score_.score = dot;
    }
    if (has_own_) scores[own_] = score_;
  }

 private:
  static constexpr int kWords = kDim / 64;  // a lane's words, of two channels each
  struct alignas(4 * kWords) Piece {
    uint32_t words[kWords];
  };
  Piece rows_[kBucketsPerWarp] = {};
  BucketScore score_;
  int32_t own_ = 0;
  bool has_own_ = false;
};

// A bucket's score: held in shared memory, or read again.
struct Held {
  const Shared& s;
  const BucketScore* scores;

  __device__ BucketScore Of(int32_t b) const {
    return b < kHeld ? BucketScore{s.scores[b], s.sizes[b], s.firsts[b], 0} : scores[b];
  }
  __device__ uint32_t Key(int32_t b) const {
    return KeyOf(b < kHeld ? s.scores[b] : scores[b].score);
  }
  __device__ int32_t Size(int32_t b) const { return b < kHeld ? s.sizes[b] : scores[b].size; }
};

// All buckets whose key is above `key` in the digits from `shift` on are taken, and of those equal
// to it there the first `need` tokens.
struct Boundary {
  uint32_t key;
  int shift;
  int32_t need;
};

// The boundary's digit; how many tokens of it are needed, and how many there are of all digits.
struct Digit {
  uint32_t digit;
  int32_t need, all;
};

// Finds the digit in a histogram of tokens; each warp for itself. Lane 0 has the largest eight
// digits.
__device__ Digit FindDigit(const int32_t* histogram, int32_t need) {
  const int lane = threadIdx.x % 32;
  const int4* const own = reinterpret_cast<const int4*>(histogram + 248 - 8 * lane);
  const int4 high = own[1], low = own[0];
  const int32_t bins[8] = {high.w, high.z, high.y, high.x, low.w, low.z, low.y, low.x};
  int32_t sum = 0;
  for (const int32_t bin : bins) sum += bin;
  const int32_t upto = WarpInclusiveSum(sum);
  int32_t above = upto - sum;
  const int from = __ffs(__ballot_sync(~0u, upto >= need)) - 1;  // the first lane that gets there
  int digit = 255 - 8 * lane;
#pragma unroll
  for (int i = 0; i < 7; ++i) {
    if (digit != 255 - 8 * lane - i || above + bins[i] >= need) continue;
    above += bins[i];
    --digit;
  }
  return {__shfl_sync(~0u, static_cast<uint32_t>(digit), from),
          need - __shfl_sync(~0u, above, from), __shfl_sync(~0u, upto, 31)};
}

// REQUIRES: tau > 0; histograms and counts are 0. With fewer tokens than tau all are taken: the
// boundary is below every key. Ends as soon as one bucket is left that has the digits so far.
__device__ Boundary FindBoundary(Shared& s, const Held& held, int32_t count, int32_t tau) {
  uint32_t prefix = 0;
  int32_t need = tau;
  for (int round = 0; round < kRounds; ++round) {
    const int shift = 24 - 8 * round;
    int matching = 0;
    for (int32_t b = threadIdx.x; b < count; b += kThreads) {
      const uint32_t key = held.Key(b);
      if (round > 0 && key >> shift >> 8 != prefix) continue;
      atomicAdd(&s.histogram[round][key >> shift & 255], held.Size(b));
      ++matching;
    }
    matching = __reduce_add_sync(~0u, matching);
    if (threadIdx.x % 32 == 0 && matching > 0) atomicAdd(&s.matching[round], matching);
    __syncthreads();
    if (round > 0 && s.matching[round] == 1) return {prefix, shift + 8, need};
    const Digit digit = FindDigit(s.histogram[round], need);
    if (round == 0 && digit.all < tau) return {kAbsent, 0, 0};
    prefix = prefix << 8 | digit.digit;
    need = digit.need;
  }
  return {prefix, 0, need};
}

// The sum over the threads before this one; *total: over all. Calls take turns in `warps`.
__device__ int64_t SumBefore(int64_t (&warps)[kWarps], int64_t own, int64_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t upto = own;
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(~0u, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31) warps[warp] = upto;
  __syncthreads();
  int64_t before = 0, all = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += warps[i];
    all += warps[i];
  }
  *total = all;
  return before + upto - own;
}

// What is taken of a bucket, and where in the list it goes.
struct Taken {
  int32_t at, count;
};

// The tokens of a bucket, by eight threads.
__device__ void WriteTokens(const Shared& s, const List& list, int32_t bucket, int32_t first,
                            Taken taken, int32_t* to) {
  for (int32_t i = threadIdx.x % 8; i < taken.count; i += 8) {
    const int32_t at = first + i;
    to[taken.at + i] = bucket >= list.listed ? at : at < kHeldTokens ? s.kept[at] : list.kept()[at];
  }
}

// Lists the tokens of what is taken, bucket after bucket; how many they are. Overwrites what is
// held of a bucket with what is taken of it.
__device__ int32_t WriteList(Shared& s, const List& list, const Held& held, Boundary boundary,
                             int32_t* to) {
  int64_t done = 0;  // tokens above the boundary << 32 | on it, of the buckets before
  for (int32_t begin = 0; begin < list.count; begin += kThreads) {
    const int32_t b = begin + static_cast<int32_t>(threadIdx.x);
    const BucketScore own = b < list.count ? held.Of(b) : BucketScore{};
    const uint32_t key = b < list.count ? KeyOf(own.score) >> boundary.shift : kAbsent;
    const int32_t above = key > boundary.key ? own.size : 0;
    const int32_t tied = key == boundary.key ? own.size : 0;
    int64_t total = 0;
    const int64_t before =
        done + SumBefore(s.warps[begin / kThreads % 2], int64_t{above} << 32 | tied, &total);
    const auto ties_before = static_cast<int32_t>(before & 0xFFFFFFFF);
    const int32_t ties = min(max(boundary.need - ties_before, 0), tied);
    const Taken taken{static_cast<int32_t>(before >> 32) + min(ties_before, boundary.need),
                      above + ties};
    done += total;
    if (b >= list.count) continue;
    if (b < kHeld) {
      s.scores[b] = __int_as_float(taken.at);
      s.sizes[b] = taken.count;
      continue;
    }
    for (int32_t i = 0; i < taken.count; ++i) {
      to[taken.at + i] = b >= list.listed ? own.first + i : list.kept()[own.first + i];
    }
  }
  __syncthreads();
  const int32_t held_count = min(list.count, kHeld);
  for (auto b = static_cast<int32_t>(threadIdx.x / 8); b < held_count; b += kThreads / 8) {
    WriteTokens(s, list, b, s.firsts[b], {__float_as_int(s.scores[b]), s.sizes[b]}, to);
  }
  return static_cast<int32_t>(done >> 32) +
         min(static_cast<int32_t>(done & 0xFFFFFFFF), boundary.need);
}

// Into shared memory; complete after AwaitKept and a barrier.
__device__ void LoadKept(Shared& s, const List& list) {
  const int32_t count = list.listed > 0 ? min(list.table.kept_stride, kHeldTokens) : 0;
  for (int32_t i = threadIdx.x; i < count; i += kThreads) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(&s.kept[i]))),
                 "l"(list.kept() + i)
                 : "memory");
  }
}
__device__ void AwaitKept() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Grid (splits, kv_heads, batch). Buckets are loaded while the kernel before is at work.
template <int kDim>
__global__ __launch_bounds__(kThreads) void PickBucketsKernel(PickBucketsBatch w) {
  extern __shared__ uint4 dynamic[];
  Shared& s = *reinterpret_cast<Shared*>(dynamic);
  const int split = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z;
  const int64_t out = int64_t{sequence} * w.kv_heads + head;
  const int64_t row = int64_t{w.layer} * w.kv_heads + head;
  const bool keeps = split == 0;  // the query
  const bool ready = w.queries_from[sequence] >= 0;
  List list{{}, row, 0, 0, w.recent_begin[sequence]};
  const bool picks = ready && list.window != 0;
  if (ready) list.table = w.tables[sequence];
  if (picks) {
    list.listed = list.table.bucket_stride > 0 ? list.table.counts[row] : 0;
    list.count = list.listed + w.whole[sequence];
  }
  const auto warps = static_cast<int32_t>(gridDim.x * kWarps);
  auto bucket = static_cast<int32_t>(split * kWarps + threadIdx.x / 32);
  Tile<kDim> tile;
  tile.Load(list, bucket, warps);
  LoadKept(s, list);
  for (int i = threadIdx.x; i < kRounds * 256; i += kThreads) s.histogram[i / 256][i % 256] = 0;
  if (threadIdx.x < kRounds) s.matching[threadIdx.x] = 0;
  if (!ready) {
    WaitForPrevious();
    if (keeps && threadIdx.x == 0) w.counts[out] = 0;
    return;
  }
  const QueriesBefore before(w, list, sequence);

  WaitForPrevious();
  LetNextStart();
  if (keeps && !picks && threadIdx.x == 0) w.counts[out] = 0;
  if (!picks && !keeps) return;
  MeanQuery(w, before, sequence, head, keeps, s.query);
  if (!picks) return;
  BucketScore* const scores = list.ScoresOf(head);
  for (;;) {
    tile.Score(s.query, scores);
    bucket += warps * kBucketsPerWarp;
    if (bucket >= list.count) break;
    tile.Load(list, bucket, warps);
  }
  AwaitKept();
  if (!ArrivesLast(w.counters + out, static_cast<int32_t>(gridDim.x), s.last)) return;

  for (int32_t b = threadIdx.x; b < min(list.count, kHeld); b += kThreads) {
    const BucketScore score = scores[b];
    s.scores[b] = score.score;
    s.sizes[b] = score.size;
    s.firsts[b] = score.first;
  }
  __syncthreads();
  const Held held{s, scores};
  Boundary boundary{~0u, 0, 0};  // nothing
  if (w.tau > 0) boundary = FindBoundary(s, held, list.count, w.tau);
  const int32_t count = WriteList(s, list, held, boundary, w.units + out * int64_t{w.list_stride});
  if (threadIdx.x == 0) w.counts[out] = count;
}

template <int kDim>
int Launch(const PickBucketsBatch& w, Stream stream) {
  constexpr int kBytes = sizeof(Shared);
  const int lists = w.kv_heads * w.batch;
  const dim3 grid(SplitsOfWave(1, lists, kMostSplits), w.kv_heads, w.batch);
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
