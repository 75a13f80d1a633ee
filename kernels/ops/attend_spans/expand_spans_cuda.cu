// Predicted on an H100, a CTA of 1024 threads a query head: 4 / 10 us for 5600 / 45000 spans, most
// of it the first histogram and the walk that writes. Measured: 16 / 50 us (docs/cuda.md).
#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/last_arrival.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/score_keys.cuh"
#include "kernels/cuda/warp_sums.cuh"
#include "kernels/ops/attend_spans/expand_spans_cuda.h"
#include "kernels/ops/attend_spans/span_parts.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int kWarps = 32;
constexpr int kThreads = 32 * kWarps;
constexpr int kBins = 2 * kThreads;
constexpr int kPasses = 3;  // digits of 11, 11 and 10 bits
constexpr int kAtOnce = 8;  // loads of a thread that do not wait for each other
constexpr int kCandidates = 2048;
constexpr int kStagedKeys = 46 * 1024;  // in shared memory; more are read again in every pass

struct Shared {
  SpanParts parts;
  int32_t histogram[kBins];
  int32_t warp_sums[kWarps];
  float least[kWarps], most[kWarps];
  int32_t candidates[kCandidates];
  int32_t candidate_count;
  uint32_t digit;
  int32_t above;  // rows of keys with larger digits
  bool cut;       // some key does not fit
  bool is_last;
};

// The sum over this thread and those before; in *total that of all. Barriers before and after.
__device__ int32_t InclusiveSum(int32_t x, Shared& s, int32_t* total = nullptr) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t sum = WarpInclusiveSum(x);
  __syncthreads();
  if (lane == 31) s.warp_sums[warp] = sum;
  __syncthreads();
  const int32_t of_lane = s.warp_sums[lane];
  if (total != nullptr) *total = __reduce_add_sync(~0u, of_lane);
  return sum + __reduce_add_sync(~0u, lane < warp ? of_lane : 0);
}

class HeadExpander {
 public:
  __device__ HeadExpander(const ExpandSpansBatch& w, int64_t row, uint32_t* staged, Shared& s)
      : from_(w.relevance + row * w.layer.span_stride),
        spans_(s.parts.spans()),
        words_((spans_ + 31) / 32),
        staged_(spans_ <= kStagedKeys ? staged : nullptr),
        s_(s) {
    const int warp = threadIdx.x / 32, each = (words_ + kWarps - 1) / kWarps;
    begin_ = min(warp * each, words_);
    end_ = min(begin_ + each, words_);
    if (staged_ == nullptr) return;
    for (int32_t first = threadIdx.x; first < spans_; first += kAtOnce * kThreads) {
      float x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) x[j] = from_[min(first + j * kThreads, spans_ - 1)];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * kThreads < spans_) staged_[first + j * kThreads] = KeyOf(x[j]);
      }
    }
    __syncthreads();
  }

  // Keys above `floor` compete for `room` rows. Afterwards: the least key that is taken, and how
  // many rows are left for those that are equal to it.
  //
  // Scores are first cut into equal ranges between the least and the largest, as the first bits of
  // many are the same; the few of the range in question then go by the digits of their keys.
  __device__ void FindLeast(uint32_t floor, int32_t room) {
    floor_ = floor;
    least_ = floor;
    left_ = -1;
    FindRange();
    Clear();
    for (int p = 0; p < s_.parts.count; ++p) {
      const SpanPart& part = s_.parts.at[p];
      for (int32_t first = threadIdx.x; first < part.span_count; first += kAtOnce * kThreads) {
        int32_t rows[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          rows[j] = SpanLength(part, min(first + j * kThreads, part.span_count - 1)) - 1;
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int32_t u = first + j * kThreads;
          if (u >= part.span_count) break;
          const uint32_t key = Key(part.first_span + u);
          if (key > floor) atomicAdd(&s_.histogram[RangeOf(key)], rows[j]);
        }
      }
    }
    __syncthreads();
    if (!FindDigit(room)) return;  // everything fits
    room -= s_.above;
    range_ = s_.digit;
    Gather();
    uint32_t known = 0, prefix = 0;  // bits that are fixed, and their values
    for (int pass = 0; pass < kPasses; ++pass) {
      const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
      const uint32_t digits = pass == 2 ? 1023 : 2047;
      Clear();
      ForEachCandidate([&](int32_t span) {
        const uint32_t key = Key(span);
        if ((key & known) != prefix) return;
        atomicAdd(&s_.histogram[(key >> shift) & digits], Rows(span));
      });
      __syncthreads();
      FindDigit(room);
      room -= s_.above;
      prefix |= s_.digit << shift;
      known |= digits << shift;
    }
    least_ = prefix;
    left_ = room;
  }

  // Writes which spans are taken, and -inf for their coarse rows.
  __device__ void Write(bool all, uint32_t* chosen, float* coarse) {
    const int lane = threadIdx.x % 32;
    int32_t ties = 0;  // rows of keys equal to the least, of this warp and those before
    if (left_ >= 0) {
      int32_t own = 0;
      ForEach([&](int32_t span, uint32_t key) { own += key == least_ ? Rows(span) : 0; });
      own = __reduce_add_sync(~0u, own);
      ties = InclusiveSum(lane == 31 ? own : 0, s_) - (lane == 31 ? own : 0);
      ties = __shfl_sync(~0u, ties, 31);
    }
    for (int32_t word = begin_; word < end_; ++word) {
      const int32_t span = word * 32 + lane;
      const uint32_t key = span < spans_ ? Key(span) : kAbsent;
      bool taken = key > least_;
      const bool tie = left_ >= 0 && key == least_ && span < spans_;
      if (__any_sync(~0u, tie)) {
        const int32_t rows = WarpInclusiveSum(tie ? Rows(span) : 0);
        taken |= tie && ties + rows <= left_;
        ties += __shfl_sync(~0u, rows, 31);
      }
      taken = span < spans_ && (taken || all);
      const uint32_t mask = __ballot_sync(~0u, taken);
      if (lane == 0) chosen[word] = mask;
      if (taken) coarse[span] = -INFINITY;
    }
  }

 private:
  __device__ void Clear() {
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kThreads) s_.histogram[i] = 0;
    __syncthreads();
  }
  // The least and the largest of the scores that compete.
  __device__ void FindRange() {
    float least = INFINITY, most = -INFINITY;
#pragma unroll 8
    for (int32_t i = threadIdx.x; i < spans_; i += kThreads) {
      const uint32_t key = Key(i);
      if (key <= floor_) continue;
      least = fminf(least, ScoreOf(key));
      most = fmaxf(most, ScoreOf(key));
    }
    const int lane = threadIdx.x % 32;
    const auto over_lanes = [&] {
      for (int step = 16; step > 0; step /= 2) {
        least = fminf(least, __shfl_xor_sync(~0u, least, step));
        most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
      }
    };
    over_lanes();
    if (lane == 0) {
      s_.least[threadIdx.x / 32] = least;
      s_.most[threadIdx.x / 32] = most;
    }
    __syncthreads();
    least = s_.least[lane];
    most = s_.most[lane];
    over_lanes();
    base_ = least;
    scale_ = most > least ? static_cast<float>(kBins - 1) / (most - least) : 0.0f;
  }
  // Ascends with the score; all the same where one of them is infinite.
  __device__ uint32_t RangeOf(uint32_t key) const {
    const float at = (ScoreOf(key) - base_) * scale_;
    return at > 0 ? min(static_cast<uint32_t>(at), static_cast<uint32_t>(kBins - 1)) : 0u;
  }
  static __device__ float ScoreOf(uint32_t key) {
    return __uint_as_float((key >> 31) != 0 ? key & 0x7FFFFFFFu : ~key);
  }
  __device__ bool IsCandidate(uint32_t key) const { return key > floor_ && RangeOf(key) == range_; }
  // Spans of the range in question, in any order, if they are few enough.
  __device__ void Gather() {
    if (threadIdx.x == 0) s_.candidate_count = 0;
    __syncthreads();
#pragma unroll 4
    for (int32_t i = threadIdx.x; i < spans_; i += kThreads) {
      if (!IsCandidate(Key(i))) continue;
      const int32_t at = atomicAdd(&s_.candidate_count, 1);
      if (at < kCandidates) s_.candidates[at] = i;
    }
    __syncthreads();
  }
  template <typename Visit>
  __device__ void ForEachCandidate(Visit visit) const {
    if (s_.candidate_count <= kCandidates) {
      for (int32_t i = threadIdx.x; i < s_.candidate_count; i += kThreads) visit(s_.candidates[i]);
      return;
    }
    for (int32_t i = threadIdx.x; i < spans_; i += kThreads) {
      if (IsCandidate(Key(i))) visit(i);
    }
  }
  __device__ uint32_t Key(int32_t span) const {
    return staged_ != nullptr ? staged_[span] : KeyOf(from_[span]);
  }
  __device__ int32_t Rows(int32_t span) const {
    const SpanPart& part = s_.parts.Of(span);
    return SpanLength(part, span - part.first_span) - 1;
  }
  template <typename Visit>
  __device__ void ForEach(Visit visit) const {
    for (int32_t word = begin_; word < end_; ++word) {
      const int32_t span = word * 32 + static_cast<int32_t>(threadIdx.x % 32);
      if (span < spans_) visit(span, Key(span));
    }
  }
  // The largest digit whose keys, with those of larger ones, do not fit; false: all fit.
  __device__ bool FindDigit(int32_t room) {
    const int high = kBins - 1 - 2 * static_cast<int>(threadIdx.x);
    const int32_t a = s_.histogram[high], b = s_.histogram[high - 1];
    if (threadIdx.x == 0) s_.cut = false;
    const int32_t sum = InclusiveSum(a + b, s_), before = sum - a - b;
    if (before <= room && sum > room) {
      const bool first = before + a > room;
      s_.digit = static_cast<uint32_t>(first ? high : high - 1);
      s_.above = first ? before : before + a;
      s_.cut = true;
    }
    __syncthreads();
    return s_.cut;
  }

  const float* from_;
  const int32_t spans_, words_;
  uint32_t* staged_;
  Shared& s_;
  int32_t begin_, end_;  // words of this warp
  uint32_t floor_ = kAbsent, least_ = kAbsent;
  float base_ = 0, scale_ = 0;  // of the ranges that scores are cut into
  uint32_t range_ = 0;          // the one in question
  int32_t left_ = -1;           // -1: no key is cut, all above least_ are taken
};

// The lists of a KV head's query heads as one.
__device__ void JoinLists(const ExpandSpansBatch& w, int64_t item, int32_t words, Shared& s) {
  const SpanLayer& l = w.layer;
  const uint32_t* chosen = w.chosen + item * l.group * (l.span_stride / 32);
  const int32_t each = (words + kThreads - 1) / kThreads;
  const int32_t begin = min(static_cast<int32_t>(threadIdx.x) * each, words);
  const int32_t end = min(begin + each, words);
  int32_t own = 0, count = 0;
  for (int32_t word = begin; word < end; ++word) {
    uint32_t any = 0;
    for (int g = 0; g < l.group; ++g) {
      any |= __ldcg(chosen + int64_t{g} * (l.span_stride / 32) + word);
    }
    own += __popc(any);
  }
  // One entry a span, at the end of the list's memory: what is written below never overtakes what
  // is still to be read there.
  uint32_t* const list = w.list + item * kSpanPieces * l.span_stride;
  uint32_t* const spans = list + int64_t{kSpanPieces - 1} * l.span_stride;
  uint32_t* out = spans + InclusiveSum(own, s, &count) - own;
  for (int32_t word = begin; word < end; ++word) {
    uint32_t of_head[8] = {}, any = 0;
#pragma unroll
    for (int g = 0; g < 8; ++g) {
      if (g < l.group) of_head[g] = __ldcg(chosen + int64_t{g} * (l.span_stride / 32) + word);
      any |= of_head[g];
    }
    for (; any != 0; any &= any - 1) {
      const int bit = __ffs(static_cast<int>(any)) - 1;
      uint32_t heads = 0;
#pragma unroll
      for (int g = 0; g < 8; ++g) heads |= (of_head[g] >> bit & 1) << g;
      *out++ = static_cast<uint32_t>(word * 32 + bit) << 8 | heads;
    }
  }
  __syncthreads();
  int32_t written = 0;
  for (int32_t first = 0; first < count; first += kThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    const uint32_t entry = i < count ? spans[i] : 0;
    int32_t pieces = 0, total = 0;
    if (i < count) {
      const auto span = static_cast<int32_t>(entry >> 8);
      const SpanPart& part = s.parts.Of(span);
      pieces = SpanPieces(SpanLength(part, span - part.first_span));
    }
    const int32_t at = written + InclusiveSum(pieces, s, &total) - pieces;
    for (int32_t p = 0; p < pieces; ++p) list[at + p] = entry;
    written += total;
  }
  if (threadIdx.x == 0) w.counts[item] = written;
}

// The key of ln(tau / (1 - tau)), which what is taken must exceed.
__device__ uint32_t FloorOf(double tau) {
  if (tau <= 0) return KeyOf(-INFINITY);
  return tau >= 1 ? KeyOf(INFINITY) : KeyOf(static_cast<float>(log(tau / (1 - tau))));
}

// Grid (query_heads, batch).
__global__ void __launch_bounds__(kThreads)
    ExpandSpansKernel(const __grid_constant__ ExpandSpansBatch w) {
  extern __shared__ uint4 dynamic[];
  __shared__ Shared shared;
  const SpanLayer& l = w.layer;
  const int head = blockIdx.x, sequence = blockIdx.y, query_heads = gridDim.x;
  const int64_t row = int64_t{sequence} * query_heads + head;
  WaitForPrevious();
  LetNextStart();
  shared.parts.Load(l, sequence);
  __syncthreads();
  const int32_t words = (shared.parts.spans() + 31) / 32;
  if (words > 0) {
    HeadExpander expander(w, row, reinterpret_cast<uint32_t*>(dynamic), shared);
    const int32_t room = w.room[sequence];
    const auto* tau = reinterpret_cast<const float*>(l.routers[sequence].tau);
    __syncthreads();
    if (room != kExpandAll) {
      expander.FindLeast(FloorOf(tau[int64_t{l.layer} * query_heads + head]), room);
    }
    expander.Write(room == kExpandAll, w.chosen + row * (l.span_stride / 32),
                   w.coarse + row * l.span_stride);
  }
  const int64_t item = int64_t{sequence} * l.kv_heads + head / l.group;
  if (ArrivesLast(w.counters + item, l.group, shared.is_last)) JoinLists(w, item, words, shared);
}

}  // namespace

int ExpandSpansCuda(const ExpandSpansBatch& w, Stream stream) {
  if (!IsValid(w.layer, {nullptr, 0, w.batch, 1})) return cudaErrorInvalidValue;
  if (w.batch == 0) return cudaSuccess;
  const int bytes = std::min(w.layer.span_stride, kStagedKeys) * static_cast<int>(sizeof(uint32_t));
  if (const int error = AllowShared(ExpandSpansKernel, bytes); error != 0) return error;
  return LaunchDependent(ExpandSpansKernel, dim3(w.layer.kv_heads * w.layer.group, w.batch),
                         kThreads, static_cast<size_t>(bytes), stream, w);
}

}  // namespace kvstrata::cuda
