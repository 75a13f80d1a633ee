// The last kernel of op pick_bits, and the op.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>

#include "kernels/cuda/score_keys.cuh"
#include "kernels/cuda/warp_sums.cuh"
#include "kernels/ops/pick/boundary.cuh"
#include "kernels/ops/pick_bits/kept_tokens.cuh"
#include "kernels/ops/pick_bits/pick_bits_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 1024, kChooseWarps = kThreads / 32;
constexpr int kSegmentsMost = 264 * kWarps;
constexpr int kStaged = 10240;    // tokens that shared memory has room for
constexpr int kRanked = 192;      // that are ranked one against another
constexpr int kWindow = 1 << 19;  // tokens that are marked at a time
constexpr int kQuadsAtOnce = 4;   // loads of a thread under way
// fp16 weights, sums in another order: what a vote may be off by.
constexpr float kSafety = 2e-3f;
constexpr float kMostHalf = 65504;  // larger weights count as this

// A token and its vote as one number: the larger is chosen first.
using Place = uint64_t;
__device__ Place PlaceOf(float vote, int token) {
  return uint64_t{__float_as_uint(vote)} << 32 | static_cast<uint32_t>(~token);
}
__device__ float VoteOf(Place x) { return __uint_as_float(static_cast<uint32_t>(x >> 32)); }
__device__ int TokenOf(Place x) { return static_cast<int>(~static_cast<uint32_t>(x)); }

struct ChooseMemory {
  Place staged[kStaged];
  union {
    uint32_t marks[kWindow / 32];
    int32_t histogram[kBins];
  };
  Place ranked[kRanked];
  int32_t starts[kSegmentsMost + 1];  // of segments, in quads
  int32_t sums[kChooseWarps];
  Digit found;
  float weights[8];  // what a head's kept weight counts in a vote
  float log_sum[8];  // exact
  float exact_of_estimate[8];
  bool huge[8];
  int32_t count, ranked_count;
  uint32_t top_bits;  // of the largest vote
  Place last;         // the last one that is chosen
};

// One list's choice. Every thread calls every function.
class Chooser {
 public:
  __device__ Chooser(const Kept& kept, const Aim& aim, int list, int group, Candidates units,
                     ChooseMemory& s)
      : kept_(kept), aim_(aim), list_(list), group_(group), units_(units), s_(s) {}

  // Sums of heads, and where segments begin. barrier at the end.
  __device__ void Begin() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp < 8) {
      const HeadPart* const parts = kept_.parts + int64_t{list_} * kept_.splits * 8 + warp;
      float sum = 0, huge = -INFINITY;
      for (int i = lane; i < kept_.splits && warp < group_; i += 32) {
        const HeadPart part = parts[i * 8];
        sum += part.sum;
        huge = fmaxf(huge, part.huge);
      }
      for (int step = 16; step > 0; step /= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        huge = fmaxf(huge, __shfl_xor_sync(~0u, huge, step));
      }
      if (lane == 0) {
        const bool there = warp < group_ && sum > 0;
        // Estimated sum / exact sum.
        const float ratio = there ? fmaxf(1 / sum, 0x1p-100f) : 0.0f;
        s_.exact_of_estimate[warp] = ratio;
        s_.weights[warp] = ratio / aim_.scale;
        s_.huge[warp] = huge > -INFINITY;
        s_.log_sum[warp] = s_.huge[warp] ? aim_.log_sum[warp] + huge
                           : there       ? aim_.log_sum[warp] + log2f(sum)
                                         : INFINITY;
      }
    }
    int32_t before = 0;
    for (int first = 0; first < kept_.warps; first += kThreads) {
      const int i = first + static_cast<int>(threadIdx.x);
      const int32_t n = i < kept_.warps ? kept_.counts[int64_t{list_} * kept_.warps + i] : 0;
      const int32_t inclusive = InclusiveSum(n);
      if (i < kept_.warps) s_.starts[i + 1] = before + inclusive;
      before += total_of_sum_;
    }
    if (threadIdx.x == 0) s_.starts[0] = 0;
    quads_ = before;
    __syncthreads();
  }

  // The largest factor by which a vote by the estimates is too small.
  __device__ float MostRatio() const { return Fold(s_.exact_of_estimate, 0, true); }
  __device__ float LeastRatio() const { return Fold(s_.exact_of_estimate, INFINITY, false); }
  __device__ bool AnyHuge() const {
    bool any = false;
    for (int h = 0; h < group_; ++h) any |= s_.huge[h];
    return any;
  }

  // Stages the tokens with a vote of at least `floor`; returns how many there are.
  __device__ int32_t Collect(float floor) {
    floor_ = floor;
    __syncthreads();  // what the call before counted has been read
    if (threadIdx.x == 0) s_.count = 0, s_.top_bits = 0;
    __syncthreads();
    uint32_t top = 0;
    FromMemory([&](bool counts, Place place) {
      const uint32_t reach = __ballot_sync(~0u, counts);
      if (reach == 0) return;
      int32_t at = 0;
      const int lane = threadIdx.x % 32, leader = __ffs(reach) - 1;
      if (lane == leader) at = atomicAdd(&s_.count, __popc(reach));
      at = __shfl_sync(~0u, at, leader) + __popc(reach & ((1u << lane) - 1));
      if (!counts) return;
      top = max(top, static_cast<uint32_t>(place >> 32));
      if (at < kStaged) s_.staged[at] = place;
    });
    top = __reduce_max_sync(~0u, top);
    if (threadIdx.x % 32 == 0) atomicMax(&s_.top_bits, top);
    __syncthreads();
    count_ = s_.count;
    return count_;
  }

  // The take-th largest place. REQUIRES: Collect gave at least take > 0.
  __device__ Place FindLast(int32_t take) {
    const uint32_t base = __float_as_uint(floor_);
    const int width = 64 - __clzll((uint64_t{s_.top_bits - base} << 32) | 0xFFFFFFFFu);
    int shift = max(width - 11, 0);
    Place prefix = 0;  // of places less the floor's, from `shift` + 11 on
    int32_t need = take, population = count_;
    int above = 64;  // bits from here on are those of `prefix`
    while (population > kRanked) {
      const int bits = min(above, width) - shift;
      for (int i = threadIdx.x; i < kBins; i += kThreads) s_.histogram[i] = 0;
      __syncthreads();
      ForEach([&](bool counts, Place place) {
        const Place x = place - (uint64_t{base} << 32);
        if (counts && (above == 64 || x >> above == prefix)) {
          atomicAdd(&s_.histogram[(x >> shift) & ((1u << bits) - 1)], 1);
        }
      });
      __syncthreads();
      const Digit digit = FindDigit(s_.histogram, need, s_.sums, &s_.found);
      prefix = (above == 64 ? 0 : prefix << bits) | digit.digit;
      need -= digit.above;
      population = digit.population;
      above = shift;
      shift = max(shift - 11, 0);
      __syncthreads();
      if (above == 0) break;
    }
    if (threadIdx.x == 0) s_.ranked_count = 0;
    __syncthreads();
    ForEach([&](bool counts, Place place) {
      const Place x = place - (uint64_t{base} << 32);
      if (counts && (above == 64 || x >> above == prefix)) {
        const int32_t at = atomicAdd(&s_.ranked_count, 1);
        if (at < kRanked) s_.ranked[at] = place;
      }
    });
    __syncthreads();
    const int32_t n = min(s_.ranked_count, kRanked);
    if (static_cast<int>(threadIdx.x) < n) {
      const Place own = s_.ranked[threadIdx.x];
      int32_t larger = 0;
      for (int i = 0; i < n; ++i) larger += s_.ranked[i] > own ? 1 : 0;
      if (larger == need - 1) s_.last = own;
    }
    __syncthreads();
    return s_.last;
  }

  // Writes all tokens down to `last`, in order.
  __device__ void Write(Place last, int32_t take, int32_t* out) {
    int32_t written = 0;
    for (int first = units_.first / 32 * 32; first < units_.last; first += kWindow) {
      const int words = min((units_.last - first + 31) / 32, kWindow / 32);
      const int each = (words + kThreads - 1) / kThreads;
      for (int i = threadIdx.x; i < words; i += kThreads) s_.marks[i] = 0;
      __syncthreads();
      ForEach([&](bool counts, Place place) {
        const int at = TokenOf(place) - first;
        if (counts && place >= last && at >= 0 && at < kWindow) {
          atomicOr(&s_.marks[at / 32], 1u << at % 32);
        }
      });
      __syncthreads();
      const int begin = static_cast<int>(threadIdx.x) * each, end = min(begin + each, words);
      int32_t own = 0;
      for (int i = begin; i < end; ++i) own += __popc(s_.marks[i]);
      int32_t at = written + InclusiveSum(own) - own;
      for (int i = begin; i < end; ++i) {
        for (uint32_t marks = s_.marks[i]; marks != 0; marks &= marks - 1) {
          if (at < take) out[at] = first + 32 * i + __ffs(marks) - 1;
          ++at;
        }
      }
      written += total_of_sum_;
      __syncthreads();
    }
  }

  __device__ float log_sum(int head) const { return s_.log_sum[head]; }

 private:
  __device__ float Fold(const float* of_heads, float x, bool largest) const {
    for (int h = 0; h < group_; ++h) x = largest ? fmaxf(x, of_heads[h]) : fminf(x, of_heads[h]);
    return x;
  }

  // Over the CTA; total_of_sum_: of all. Barriers inside.
  __device__ int32_t InclusiveSum(int32_t x) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int32_t inclusive = WarpInclusiveSum(x);
    __syncthreads();
    if (lane == 31) s_.sums[warp] = inclusive;
    __syncthreads();
    const int32_t of_warp = s_.sums[lane];
    total_of_sum_ = __reduce_add_sync(~0u, of_warp);
    return __reduce_add_sync(~0u, lane < warp ? of_warp : 0) + inclusive;
  }

  // The segment of a quad.
  __device__ int SegmentOf(int quad) const {
    int low = 0, high = kept_.warps;  // starts[low] <= quad < starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (s_.starts[middle] <= quad ? low : high) = middle;
    }
    return low;
  }

  // visit(counts, place) of all kept tokens, from memory; all lanes of a warp visit together.
  template <typename Visit>
  __device__ void FromMemory(Visit visit) const {
    for (int base = 0; base < quads_; base += kThreads * kQuadsAtOnce) {
      uint4 pieces[kQuadsAtOnce][2];
      int tokens[kQuadsAtOnce];
      int64_t at[kQuadsAtOnce];
#pragma unroll
      for (int j = 0; j < kQuadsAtOnce; ++j) {
        const int quad = base + j * kThreads + static_cast<int>(threadIdx.x);
        tokens[j] = -4, at[j] = 0;
        pieces[j][0] = pieces[j][1] = {};
        if (quad >= quads_) continue;
        const int segment = SegmentOf(quad);
        at[j] = (int64_t{list_} * kept_.warps + segment) * kept_.room + quad - s_.starts[segment];
        tokens[j] = kept_.tokens[at[j]];
        pieces[j][0] = kept_.weights[at[j] * kept_.quad];
        pieces[j][1] = kept_.weights[at[j] * kept_.quad + 1];
      }
#pragma unroll
      for (int j = 0; j < kQuadsAtOnce; ++j) {
        float votes[4] = {};
        Add(pieces[j][0], 0, votes);
        Add(pieces[j][1], 2, votes);
        if (kept_.quad == 4 && tokens[j] >= 0) {
          Add(kept_.weights[at[j] * 4 + 2], 4, votes);
          Add(kept_.weights[at[j] * 4 + 3], 6, votes);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = tokens[j] + i;
          const bool counts = token >= units_.first && token < units_.last && votes[i] >= floor_;
          visit(counts, PlaceOf(votes[i], token));
        }
      }
    }
  }

  // The weights of two heads.
  __device__ void Add(const uint4& piece, int head, float (&votes)[4]) const {
    const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(pairs[i]));
      votes[i] += fminf(pair.x, kMostHalf) * s_.weights[head] +
                  fminf(pair.y, kMostHalf) * s_.weights[head + 1];
    }
  }

  // visit(counts, place) of what Collect found.
  template <typename Visit>
  __device__ void ForEach(Visit visit) const {
    if (count_ > kStaged) return FromMemory(visit);
    for (int i = threadIdx.x; i < count_; i += kThreads) visit(true, s_.staged[i]);
  }

  const Kept& kept_;
  const Aim& aim_;
  const int list_, group_;
  const Candidates units_;
  ChooseMemory& s_;
  int32_t quads_ = 0, count_ = 0, total_of_sum_ = 0;
  float floor_ = 0;
};

// Grid (lists): the choice, or what the second round needs.
__global__ __launch_bounds__(kThreads) void ChooseKernel(const __grid_constant__ PickBitsBatch w,
                                                         const __grid_constant__ Kept kept,
                                                         bool again) {
  extern __shared__ uint4 dynamic[];
  auto& s = *reinterpret_cast<ChooseMemory*>(dynamic);
  const int heads = w.vote.groups.kv_heads, list = blockIdx.x, sequence = list / heads;
  WaitForPrevious();
  LetNextStart();
  const int32_t tokens = w.vote.tokens[sequence];
  if (tokens == kNoQuery) return;
  const int32_t take = w.vote.rule.take;
  const Candidates units = CandidatesOf(w.vote.rule, tokens);
  if (!again && threadIdx.x == 0) {
    w.pick.counts[list] = units.full ? 0 : take;
    if (list % heads == 0) {
      w.pick.sink_end[sequence] = units.full ? 0 : units.first;
      w.pick.recent_begin[sequence] = units.full ? 0 : units.last;
    }
  }
  Aim& second = kept.aims[static_cast<int>(gridDim.x) + list];
  const Aim& aim = again ? second : kept.aims[list];
  const bool idle = units.full || take <= 0;
  if (idle || aim.wanted == 0) {
    if (!again && threadIdx.x == 0) second.wanted = 0;
    return;
  }
  Chooser chooser(kept, aim, list, w.vote.query_heads / heads, units, s);
  chooser.Begin();

  // A token that was left out has less than this.
  const float left_out = aim.cut * chooser.MostRatio() * (1 + kSafety);
  // Votes up to here are those of all their weights; of others they are at most too small.
  const float most = kMostHalf / aim.scale * chooser.LeastRatio() * (1 - kSafety);
  int32_t count = chooser.Collect(again ? aim.cut * (1 - 4 * kSafety) : left_out);
  bool proven = again || (count >= take && !chooser.AnyHuge());
  if (again && count < take) count = chooser.Collect(0);
  Place last = 0;
  if (count >= take && proven) {
    last = chooser.FindLast(take);
    proven = again || VoteOf(last) < most;
  }
  if (!proven) {
    float reached = 0;  // by `take` tokens, in exact votes
    if (!chooser.AnyHuge() && chooser.Collect(0) >= take) reached = VoteOf(chooser.FindLast(take));
    __syncthreads();
    if (threadIdx.x < 8) second.log_sum[threadIdx.x] = chooser.log_sum(threadIdx.x);
    if (threadIdx.x == 0) {
      second.cut = reached * (1 - kSafety);
      second.scale = ScaleOf(second.cut, take, w.vote.query_heads / heads);
      second.wanted = 1;
    }
    return;
  }
  int32_t* const out = w.pick.lists != nullptr ? reinterpret_cast<int32_t*>(w.pick.lists[list])
                                               : w.pick.units + int64_t{list} * w.pick.list_stride;
  chooser.Write(last, min(take, count), out);
  if (!again && threadIdx.x == 0) second.wanted = 0;
}

// Where the parts of the scratch begin.
struct Layout {
  Kept kept;  // without addresses
  int64_t parts_at = 0, counts_at = 0, tokens_at = 0, weights_at = 0, bytes = 0;

  explicit Layout(const PickBitsBatch& work) {
    const VoteBatch& w = work.vote;
    constexpr int kCtas = 264;  // one wave of two CTAs on each of 132 SMs
    const int heads = w.groups.kv_heads, lists = heads * w.batch;
    const int blocks = (w.candidate_stride + kBlockRows - 1) / kBlockRows + 1;
    kept.splits = std::clamp((kCtas + lists / 2) / lists, 1, (blocks + kWarps - 1) / kWarps);
    kept.warps = kept.splits * kWarps;
    kept.quad = w.query_heads > 4 * heads ? 4 : 2;
    const int group = std::max(w.groups.format.tokens, 1);
    const int turn = group % kBlockRows == 0 ? group : 2 * group;
    const int turns = (w.candidate_stride + turn - 1) / turn + 2;  // two are cut
    kept.room = (turns + kept.warps - 1) / kept.warps * ((turn + kBlockRows - 1) / kBlockRows) *
                (kBlockRows / 4);
    const int64_t quads = int64_t{lists} * kept.warps * kept.room;
    parts_at = int64_t{2} * lists * static_cast<int64_t>(sizeof(Aim));
    counts_at =
        parts_at + int64_t{lists} * kept.splits * 8 * static_cast<int64_t>(sizeof(HeadPart));
    tokens_at = counts_at + int64_t{lists} * kept.warps * 4;
    weights_at = (tokens_at + quads * 4 + 15) / 16 * 16;
    bytes = weights_at + quads * kept.quad * 16;
  }
  Kept At(void* scratch) const {
    auto* const at = static_cast<std::byte*>(scratch);
    Kept out = kept;
    out.aims = reinterpret_cast<Aim*>(at);
    out.parts = reinterpret_cast<HeadPart*>(at + parts_at);
    out.counts = reinterpret_cast<int32_t*>(at + counts_at);
    out.tokens = reinterpret_cast<int32_t*>(at + tokens_at);
    out.weights = reinterpret_cast<uint4*>(at + weights_at);
    return out;
  }
};

bool IsValid(const PickBitsBatch& work) {
  const VoteBatch& w = work.vote;
  const QuantisedGroup& f = w.groups.format;
  return f.IsValid() && f.tokens % kTileTokens == 0 && w.groups.block_groups >= 1 &&
         w.groups.kv_heads >= 1 && w.query_heads % w.groups.kv_heads == 0 &&
         w.query_heads <= 8 * w.groups.kv_heads && w.output_rows == w.groups.kv_heads &&
         w.rule.unit_tokens == 1 && w.rule.recent_tokens >= f.tokens && w.scratch != nullptr &&
         w.reuse.caches == nullptr && work.pick.list_stride >= w.rule.take &&
         work.pick.takes == nullptr;
}

}  // namespace

int64_t PickBitsScratchBytes(const PickBitsBatch& work) {
  return DeviceAttribute(cudaDevAttrComputeCapabilityMajor) < 9 ? 0 : Layout(work).bytes;
}

int PickBitsCuda(const PickBitsBatch& work, Stream stream) {
  const VoteBatch& w = work.vote;
  if (w.batch == 0) return cudaSuccess;
  if (!IsValid(work) || DeviceAttribute(cudaDevAttrComputeCapabilityMajor) < 9) {
    return cudaErrorInvalidValue;
  }
  const Kept kept = Layout(work).At(w.scratch);
  constexpr int kBytes = sizeof(ChooseMemory);
  if (const int error = AllowShared(ChooseKernel, kBytes); error != 0) return error;
  if (const int error = LaunchSample(work, kept, stream); error != 0) return error;
  for (int round = 0; round < 2; ++round) {
    if (const int error = LaunchFilter(work, kept, round, stream); error != 0) return error;
    const int error = LaunchDependent(ChooseKernel, dim3(w.groups.kv_heads * w.batch), kThreads,
                                      kBytes, stream, work, kept, round > 0);
    if (error != 0) return error;
  }
  return cudaSuccess;
}

}  // namespace kvstrata::cuda
