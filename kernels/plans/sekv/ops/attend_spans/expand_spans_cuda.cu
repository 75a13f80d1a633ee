// SPDX-License-Identifier: Apache-2.0
// Predicted on an H100, a CTA of 1024 threads a query head: 10 / 20 us for 5600 / 45000 spans and
// one round, while attend_spans reads raw rows. Measured, when one round was all: 13 / 54 us
// (bench/notes/cuda.md). A round more: about as many passes over the spans.
#include <cuda_runtime_api.h>

#include "kernels/cuda/warps/last_arrival.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/cuda/warps/score_keys.cuh"
#include "kernels/cuda/warps/warp_sums.cuh"
#include "kernels/plans/sekv/ops/attend_spans/expand_spans_cuda.h"
#include "kernels/plans/sekv/ops/attend_spans/span_parts.cuh"

namespace kvstrata::cuda {
namespace {

constexpr int kWarps = 32;
constexpr int kThreads = 32 * kWarps;
constexpr int kHeads = 8;  // at most, of a group
constexpr int kBins = kThreads;
constexpr int kDigitBits = 10;
constexpr int kAtOnce = 8;        // loads of a thread that do not wait for each other
constexpr int kCandidates = 512;  // spans of a head that are ordered one by one, at most
constexpr int kSpanBits = 24;     // SpanLayer.span_stride
constexpr int kOrderBits = 32 + kSpanBits;

// Spans descend by relevance, ties to the lower index: so do these. No two are equal.
__device__ __forceinline__ uint64_t OrderOf(uint32_t key, int32_t span) {
  return uint64_t{key} << kSpanBits | static_cast<uint32_t>((1 << kSpanBits) - 1 - span);
}

constexpr int32_t kNoLimit = INT32_MAX;

// The search for the first span of a query head that does not fit, of one round.
struct HeadSearch {
  uint32_t floor;        // keys above it compete
  uint32_t least, most;  // the least and the largest of them
  int32_t range;         // the range of scores that has the span; -1: not known yet
  uint64_t known;        // bits of its order that are,
  uint64_t prefix;       // and their values
  int32_t room;          // rows that are left for spans in question
  int32_t candidates;    // spans in question
  uint64_t cut;          // spans of larger orders are taken; 0: not found yet
  uint64_t behind;       // spans of this round have smaller orders
  int32_t limit;         // and at most so many rows; kNoLimit in the first round
  bool more;             // the room ended: there may be another round

  // The first of a query head.
  __device__ static HeadSearch First(uint32_t floor, int32_t room) {
    return {floor, UINT32_MAX, 0, -1, 0, 0, room, 0, 0, UINT64_MAX, kNoLimit, false};
  }
  // The round behind the cut of this one.
  __device__ HeadSearch Next() const {
    HeadSearch next = First(floor, room);
    next.behind = cut;
    next.limit = room;
    return next;
  }
};

struct Shared {
  int32_t parts;
  HeadSearch search;
  int32_t warp_sums[kWarps];
  int32_t histogram[kBins];  // rows by bin
  uint64_t orders[kCandidates];
  int32_t candidate_rows[kCandidates];
  bool is_last;
};

// What of it fits into shared memory; the rest is read again whenever it is needed.
struct Arguments {
  ExpandSpansBatch work;
  bool stage_keys, stage_rows;
};

// The sum over this thread and those before; in *total that of all. Barriers before and after.
__device__ int32_t InclusiveSum(int32_t x, Shared& s, int32_t* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t sum = WarpInclusiveSum(x);
  __syncthreads();
  if (lane == 31) s.warp_sums[warp] = sum;
  __syncthreads();
  const int32_t of_lane = s.warp_sums[lane];
  *total = __reduce_add_sync(~0u, of_lane);
  return sum + __reduce_add_sync(~0u, lane < warp ? of_lane : 0);
}

__device__ float ScoreOf(uint32_t key) {
  return __uint_as_float((key >> 31) != 0 ? key & 0x7FFFFFFFu : ~key);
}

// One of kBins equal ranges between the least and the largest score; ascends with the score, and
// is the same for all where one of them is infinite.
__device__ int32_t RangeOf(const HeadSearch& s, uint32_t key) {
  const float least = ScoreOf(s.least), width = ScoreOf(s.most) - least;
  const float at = (ScoreOf(key) - least) * (width > 0 ? kBins / width : 0.0f);
  return at > 0 ? min(static_cast<int32_t>(at), kBins - 1) : 0;
}

// The key of ln(tau / (1 - tau)), which what is taken must exceed.
__device__ uint32_t FloorOf(double tau) {
  if (tau <= 0) return KeyOf(-INFINITY);
  return tau >= 1 ? KeyOf(INFINITY) : KeyOf(static_cast<float>(log(tau / (1 - tau))));
}

// Expands the spans of one query head, by a CTA.
class HeadExpander {
 public:
  __device__ HeadExpander(const Arguments& a, int sequence, int head, const SpanParts& parts,
                          uint4* dynamic, Shared& s)
      : w_(a.work),
        sequence_(sequence),
        head_(head),
        row_((int64_t{sequence} * a.work.layer.kv_heads * a.work.layer.group + head) *
             a.work.layer.span_stride),
        parts_(parts),
        spans_(parts.spans()),
        s_(s) {
    auto* free = reinterpret_cast<uint32_t*>(dynamic);
    if (a.stage_keys) {
      keys_ = free;
      free += spans_;
    }
    if (a.stage_rows) rows_ = reinterpret_cast<int32_t*>(free);
  }

  // What does not depend on scores. Barrier afterwards.
  __device__ void Prepare() {
    if (threadIdx.x == 0) {
      const SpanLayer& l = w_.layer;
      const auto* tau = reinterpret_cast<const float*>(l.routers[sequence_].tau);
      const float of_head = tau[int64_t{l.layer} * l.kv_heads * l.group + head_];
      s_.search = HeadSearch::First(FloorOf(of_head), w_.room[sequence_]);
    }
    if (rows_ == nullptr) return;
    ForEachLength([&](int32_t span, int32_t rows) { rows_[span] = rows; });
  }

  // Marks all spans that are taken.
  __device__ void Expand() {
    if (s_.search.room == kExpandAll) return Write([](int32_t, uint32_t) { return true; });
    __syncthreads();
    Search();
    const uint64_t cut = s_.search.cut;
    Write([=](int32_t span, uint32_t key) { return OrderOf(key, span) > cut; });
    while (s_.search.more) {
      __syncthreads();
      if (threadIdx.x == 0) s_.search = s_.search.Next();
      __syncthreads();
      Search();
      const HeadSearch search = s_.search;
      if (search.most != 0) Add(search);
    }
  }
  // The lists of the KV head's query heads as one.
  __device__ void Join() const {
    const int group = w_.layer.group;
    const int64_t item = int64_t{sequence_} * w_.layer.kv_heads + head_ / group;
    const int32_t words = (spans_ + 31) / 32;
    uint32_t* const list = w_.list + item * kSpanPieces * w_.layer.span_stride;
    int32_t written = 0;
    for (int32_t first = 0; first < words; first += kThreads) {
      const int32_t word = first + static_cast<int32_t>(threadIdx.x);
      uint32_t of_head[kHeads] = {}, taken = 0;
#pragma unroll
      for (int g = 0; g < kHeads; ++g) {
        if (g < group && word < words) {
          of_head[g] = __ldcg(w_.chosen + (item * group + g) * (w_.layer.span_stride / 32) + word);
        }
        taken |= of_head[g];
      }
      int32_t own = 0, count = 0;
      for (uint32_t any = taken; any != 0; any &= any - 1) {
        own += Pieces(word * 32 + __ffs(any) - 1);
      }
      uint32_t* out = list + written + InclusiveSum(own, s_, &count) - own;
      for (uint32_t any = taken; any != 0; any &= any - 1) {
        const int bit = __ffs(any) - 1;
        uint32_t entry = static_cast<uint32_t>(word * 32 + bit) << 8;
#pragma unroll
        for (int g = 0; g < kHeads; ++g) entry |= (of_head[g] >> bit & 1) << g;
        for (int32_t pieces = Pieces(word * 32 + bit); pieces > 0; --pieces) *out++ = entry;
      }
      written += count;
    }
    if (threadIdx.x == 0) w_.counts[item] = written;
  }

 private:
  // Finds the round's cut. Barriers before and after.
  __device__ void Search() {
    FindRange();
    __syncthreads();
    bool open = Narrow(kOrderBits);
    for (int shift = kOrderBits; open; shift = max(shift - kDigitBits, 0)) open = Narrow(shift);
    const HeadSearch search = s_.search;
    __syncthreads();
    if (search.cut == 0) Order(search);
    __syncthreads();
  }

  // Writes which spans are taken, and -inf for their coarse rows.
  template <typename IsTaken>
  __device__ void Write(IsTaken is_taken) {
    ForEach([&](int32_t span, uint32_t key) {
      const bool taken = span < spans_ && is_taken(span, key);
      const uint32_t mask = __ballot_sync(~0u, taken);
      if (threadIdx.x % 32 == 0) w_.chosen[(row_ + span) / 32] = mask;
      if (taken) w_.coarse[row_ + span] = -INFINITY;
    });
  }
  // Adds a later round's. The thread that wrote a word before writes it again.
  __device__ void Add(const HeadSearch& search) {
    ForEach([&](int32_t span, uint32_t key) {
      const uint64_t order = OrderOf(key, span);
      const bool taken = span < spans_ && order > search.cut && order < search.behind &&
                         Rows(span) <= search.limit;
      const uint32_t mask = __ballot_sync(~0u, taken);
      if (threadIdx.x % 32 == 0 && mask != 0) w_.chosen[(row_ + span) / 32] |= mask;
      if (taken) w_.coarse[row_ + span] = -INFINITY;
    });
  }
  // visit(span, rows), several loads at once.
  template <typename Visit>
  __device__ void ForEachLength(Visit visit) const {
    for (int32_t first = threadIdx.x; first < spans_; first += kAtOnce * kThreads) {
      int32_t rows[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) rows[j] = Read(min(first + j * kThreads, spans_ - 1));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int32_t span = first + j * kThreads;
        if (span < spans_) visit(span, rows[j]);
      }
    }
  }
  __device__ int32_t Rows(int32_t span) const {
    return rows_ != nullptr ? rows_[span] : Read(span);
  }
  __device__ int32_t Read(int32_t span) const {
    const SpanPart& part = parts_.OfSpan(span);
    return SpanLength(part, span) - 1;
  }
  __device__ int32_t Pieces(int32_t span) const { return SpanPieces(Rows(span) + 1); }
  __device__ uint32_t Key(int32_t span) const {
    return keys_ready_ ? keys_[span] : KeyOf(w_.relevance[row_ + span]);
  }
  // visit(span, key) by whole warps, in which spans beyond the last have the key kAbsent.
  template <typename Visit>
  __device__ void ForEach(Visit visit) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    for (int32_t first = threadIdx.x; first - lane < spans_; first += kAtOnce * kThreads) {
      uint32_t keys[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) keys[j] = Key(min(first + j * kThreads, spans_ - 1));
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int32_t span = first + j * kThreads;
        if (span - lane < spans_) visit(span, span < spans_ ? keys[j] : kAbsent);
      }
    }
  }
  // visit(span, key, rows)
  template <typename Visit>
  __device__ void ForEachWithRows(Visit visit) const {
    if (rows_ != nullptr) {
      ForEach([&](int32_t span, uint32_t key) {
        if (span < spans_) visit(span, key, rows_[span]);
      });
    } else {
      ForEachLength([&](int32_t span, int32_t rows) { visit(span, Key(span), rows); });
    }
  }
  // The least and the largest score of the round; in the first one scores become keys.
  __device__ void FindRange() {
    HeadSearch& search = s_.search;
    const uint32_t floor = search.floor;
    uint32_t least = UINT32_MAX, most = 0;
    const auto widen = [&](uint32_t key) {
      least = min(least, key);
      most = max(most, key);
    };
    if (search.limit == kNoLimit) {
      ForEach([&](int32_t span, uint32_t key) {
        if (keys_ != nullptr && span < spans_) keys_[span] = key;
        if (key > floor) widen(key);
      });
    } else {
      const uint64_t behind = search.behind;
      const int32_t limit = search.limit;
      ForEachWithRows([&](int32_t span, uint32_t key, int32_t rows) {
        if (key > floor && rows <= limit && OrderOf(key, span) < behind) widen(key);
      });
    }
    least = __reduce_min_sync(~0u, least);
    most = __reduce_max_sync(~0u, most);
    keys_ready_ = keys_ != nullptr;
    if (threadIdx.x % 32 != 0 || most == 0) return;
    atomicMin(&search.least, least);
    atomicMax(&search.most, most);
  }
  __device__ static bool InQuestion(const HeadSearch& s, uint32_t key, uint64_t order) {
    if (key <= s.floor || order >= s.behind) return false;
    return s.range < 0 || (RangeOf(s, key) == s.range && (order & s.known) == s.prefix);
  }
  // Cuts what is in question, first by ranges of scores, then by the digit of orders below bit
  // `shift`. Whether that leaves too many.
  __device__ bool Narrow(int shift) {
    const int low = max(shift - kDigitBits, 0);
    s_.histogram[threadIdx.x] = 0;
    __syncthreads();
    {
      const HeadSearch search = s_.search;
      ForEachWithRows([&](int32_t span, uint32_t key, int32_t rows) {
        const uint64_t order = OrderOf(key, span);
        if (!InQuestion(search, key, order) || rows > search.limit) return;
        const int32_t digit = search.range < 0 ? RangeOf(search, key)
                                               : static_cast<int32_t>(order >> low & (kBins - 1));
        atomicAdd(&s_.histogram[digit], rows);
      });
    }
    __syncthreads();
    FindDigit(low);
    __syncthreads();
    const HeadSearch search = s_.search;
    if (search.cut != 0) return false;
    ForEach([&](int32_t span, uint32_t key) {
      if (!InQuestion(search, key, OrderOf(key, span)) || Rows(span) > search.limit) return;
      const int32_t at = atomicAdd(&s_.search.candidates, 1);
      if (at >= kCandidates) return;
      s_.orders[at] = OrderOf(key, span);
      s_.candidate_rows[at] = Rows(span);
    });
    __syncthreads();
    return s_.search.candidates > kCandidates;
  }
  // The largest digit whose spans, with those of larger ones, do not fit, is what is in question
  // now; if there is none, all spans above the floor are taken. Barrier afterwards.
  __device__ void FindDigit(int low) {
    HeadSearch& search = s_.search;
    const int32_t room = search.room, digit = kBins - 1 - static_cast<int32_t>(threadIdx.x);
    const int32_t rows = s_.histogram[digit];
    int32_t all = 0;
    const int32_t upto = InclusiveSum(rows, s_, &all), larger = upto - rows;
    if (threadIdx.x == 0 && all <= room) search.cut = OrderOf(search.floor, 0);
    if (larger > room || upto <= room) return;
    if (search.range < 0) {
      search.range = digit;
    } else {
      search.known |= uint64_t{kBins - 1} << low;
      search.prefix |= static_cast<uint64_t>(digit) << low;
    }
    search.room = room - larger;
    search.candidates = 0;
  }
  // The first candidate that does not fit is the cut.
  __device__ void Order(const HeadSearch& search) const {
    const auto i = static_cast<int32_t>(threadIdx.x);
    if (i >= search.candidates) return;
    int32_t before = 0;
    for (int j = 0; j < search.candidates; ++j) {
      before += s_.orders[j] > s_.orders[i] ? s_.candidate_rows[j] : 0;
    }
    if (before <= search.room && before + s_.candidate_rows[i] > search.room) {
      s_.search.cut = s_.orders[i];
      s_.search.room = search.room - before;
      s_.search.more = true;
    }
  }

  const ExpandSpansBatch& w_;
  const int sequence_, head_;
  const int64_t row_;  // where the head's begins in scores
  const SpanParts& parts_;
  const int32_t spans_;
  Shared& s_;
  uint32_t* keys_ = nullptr;  // [spans], if they fit,
  bool keys_ready_ = false;   // and are there
  int32_t* rows_ = nullptr;   // [spans], if they fit
};

// Grid (query_heads, batch).
__global__ void __launch_bounds__(kThreads) ExpandSpansKernel(const __grid_constant__ Arguments a) {
  extern __shared__ uint4 dynamic[];
  __shared__ Shared shared;
  const ExpandSpansBatch& w = a.work;
  const int head = blockIdx.x, sequence = blockIdx.y, group = w.layer.group;
  if (!w.ahead) WaitForPrevious();
  const SpanParts parts(dynamic, shared.parts);
  parts.Load(w.layer, sequence);
  __syncthreads();
  HeadExpander expander(a, sequence, head, parts, SpanParts::Behind(dynamic, w.layer), shared);
  const bool empty = parts.spans() == 0;
  if (!empty) expander.Prepare();
  __syncthreads();
  if (w.ahead) WaitForPrevious();
  LetNextStart();
  if (!empty) expander.Expand();
  const int64_t item = int64_t{sequence} * w.layer.kv_heads + head / group;
  if (ArrivesLast(w.counters + item, group, shared.is_last)) expander.Join();
}

}  // namespace

int ExpandSpansCuda(const ExpandSpansBatch& w, Stream stream) {
  if (!IsValid(w.layer, {nullptr, 0, w.batch, 1})) return cudaErrorInvalidValue;
  if (w.batch == 0) return cudaSuccess;
  const int64_t most = DeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) -
                       static_cast<int>(sizeof(Shared)) - 1024 -  // and what alignment may take
                       SpanParts::BytesOf(w.layer);
  const int64_t array = int64_t{w.layer.span_stride} * static_cast<int>(sizeof(int32_t));
  const Arguments a{w, array <= most, 2 * array <= most};
  const auto bytes = SpanParts::BytesOf(w.layer) +
                     static_cast<int>(array * (int{a.stage_keys} + int{a.stage_rows}));
  if (const int error = AllowShared(ExpandSpansKernel, bytes); error != 0) return error;
  return LaunchDependent(ExpandSpansKernel, dim3(w.layer.kv_heads * w.layer.group, w.batch),
                         kThreads, static_cast<size_t>(bytes), stream, a);
}

}  // namespace kvstrata::cuda
