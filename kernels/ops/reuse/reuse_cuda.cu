#include "kernels/cuda/float_bits.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/ops/reuse/reuse_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kWarps = 16;  // more find no room beside the attention of the layer before

struct CosineSums {
  double dot = 0, aa = 0, bb = 0;

  __device__ void Add(const float (&a)[8], const float (&b)[8]) {
    float ab = 0, a2 = 0, b2 = 0;
    for (int i = 0; i < 8; ++i) {
      ab += a[i] * b[i];
      a2 += a[i] * a[i];
      b2 += b[i] * b[i];
    }
    dot += ab;
    aa += a2;
    bb += b2;
  }
  // Over the warp, in all lanes.
  __device__ void Reduce() {
    for (int step = 16; step > 0; step /= 2) {
      dot += __shfl_xor_sync(~0u, dot, step);
      aa += __shfl_xor_sync(~0u, aa, step);
      bb += __shfl_xor_sync(~0u, bb, step);
    }
  }
  __device__ bool Reaches(double theta) const {
    const double norms = sqrt(aa) * sqrt(bb);
    return (norms > 0 ? dot / norms : 0) >= theta;
  }
};

// The pick that counts in a step of `tokens`; -1: none.
__device__ int LastPick(int32_t first, int32_t second, int32_t tokens) {
  const bool has_first = first > 0 && (first < tokens);
  const bool has_second = second > 0 && (second < tokens);
  if (has_first && has_second) return first > second ? 0 : 1;
  return has_first ? 0 : has_second ? 1 : -1;
}

// What a lane compares of the pick's query, of one head.
struct Piece {
  float x[8] = {};

  __device__ void Load(const ReuseBatch& w, const float* query, int head) {
    const int lane = threadIdx.x % 32;
    if (head >= w.query_heads || lane * 8 >= w.head_dim) return;
    LoadFloats(query, DType::kF32, int64_t{head} * w.head_dim + lane * 8, x);
  }
};

// By all threads: the same answer in each. `before`: the pick's query; `then`: what the lane
// compares of it first, of head `warp`.
__device__ bool IsAlike(const ReuseBatch& w, int64_t q_at, const float* before, Piece then) {
  __shared__ CosineSums warps[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  CosineSums all;
  bool each = true;
  for (int head = warp; head < w.query_heads; head += kWarps) {
    CosineSums sums;
    if (head != warp) then.Load(w, before, head);
    if (lane * 8 < w.head_dim) {
      float now[8];
      LoadFloats(w.q, w.q_dtype, q_at + int64_t{head} * w.head_dim + lane * 8, now);
      sums.Add(now, then.x);
    }
    if (w.per_head) {
      sums.Reduce();
      each &= sums.Reaches(w.theta);
    }
    all.dot += sums.dot;
    all.aa += sums.aa;
    all.bb += sums.bb;
  }
  if (w.per_head) return __syncthreads_and(each) != 0;
  all.Reduce();
  if (lane == 0) warps[warp] = all;
  __syncthreads();
  all = lane < kWarps ? warps[lane] : CosineSums{};
  all.Reduce();
  return all.Reaches(w.theta);
}

__device__ void KeepQuery(const ReuseBatch& w, int64_t q_at, int64_t floats, float* to) {
  for (int64_t i = int64_t{threadIdx.x} * 8; i < floats; i += kWarps * 32 * 8) {
    float x[8];
    LoadFloats(w.q, w.q_dtype, q_at + i, x);
    auto* out = reinterpret_cast<float4*>(to + i);
    out[0] = {x[0], x[1], x[2], x[3]};
    out[1] = {x[4], x[5], x[6], x[7]};
  }
}

// Grid (batch).
__global__ __launch_bounds__(kWarps * 32) void ReuseKernel(ReuseBatch w, PickCacheLayout layout) {
  if (!w.ahead) WaitForPrevious();
  const int sequence = blockIdx.x;
  const int32_t tokens = w.tokens[sequence];
  const Candidates units = CandidatesOf(w.rule, tokens);
  if (units.full) {
    WaitForPrevious();
    LetNextStart();
    if (threadIdx.x == 0) w.voting[sequence] = tokens;
    return;
  }
  auto* cache = reinterpret_cast<char*>(w.caches[sequence]) + w.layer * layout.layer_bytes();
  const int32_t made[2] = {*reinterpret_cast<const int32_t*>(cache),
                           *reinterpret_cast<const int32_t*>(cache + layout.pick_bytes())};
  const int last = LastPick(made[0], made[1], tokens);
  const int64_t q_at = sequence * layout.query_floats;
  const auto query_of = [&](int pick) {
    return reinterpret_cast<float*>(cache + pick * layout.pick_bytes() + layout.query_at());
  };
  Piece then;
  if (last >= 0) then.Load(w, query_of(last), static_cast<int>(threadIdx.x) / 32);
  WaitForPrevious();
  LetNextStart();
  const bool hit = last >= 0 && w.theta < 1 && IsAlike(w, q_at, query_of(last), then);
  __syncthreads();  // all have read `made`
  const int pick = hit ? last : last == 0 ? 1 : 0;
  if (!hit) KeepQuery(w, q_at, layout.query_floats, query_of(pick));
  if (threadIdx.x != 0) return;
  char* const at = cache + pick * layout.pick_bytes();
  w.voting[sequence] = hit ? kNoQuery : tokens;
  w.lists[sequence] = reinterpret_cast<uint64_t>(at + layout.list_at());
  if (!hit) {
    *reinterpret_cast<int32_t*>(at) = tokens;
    return;
  }
  if (made[1 - pick] >= tokens) {  // of a step that was given up
    *reinterpret_cast<int32_t*>(cache + (1 - pick) * layout.pick_bytes()) = 0;
  }
  w.counts[sequence] = w.rule.take;
  w.sink_end[sequence] = units.first;
  w.recent_begin[sequence] = w.append_departed ? CandidatesOf(w.rule, made[pick]).last : units.last;
}

}  // namespace

int ReuseCuda(const ReuseBatch& w, Stream stream) {
  if (w.head_dim % 8 != 0 || w.head_dim > 256 || w.rule.unit_tokens != 1) {
    return cudaErrorInvalidValue;
  }
  if (w.batch == 0) return cudaSuccess;
  const PickCacheLayout layout{int64_t{w.query_heads} * w.head_dim, w.rule.take};
  return LaunchDependent(ReuseKernel, dim3(w.batch), kWarps * 32, 0, stream, w, layout);
}

}  // namespace kvstrata::cuda
