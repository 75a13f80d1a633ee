#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/float_bits.cuh"
#include "kernels/ops/pick/pick_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kWarps = 16, kThreads = kWarps * 32;
constexpr int kStagedKeys = 8192;  // keys that a CTA holds in shared memory
constexpr int kCandidates = 8192;  // keys at the boundary that every CTA may look through alone
constexpr int kBins = 2048;
constexpr int kPasses = 3;     // digits of 11, 11 and 10 bits
constexpr int kCtasMax = 128;  // of a list

// The scratch of one list. Histograms and barrier are zero between calls.
struct alignas(16) ListScratch {
  int32_t histogram[kPasses][kBins];
  int2 counts[kCtasMax];  // of a CTA: keys above the range of candidates, and within
  uint32_t barrier;
};

// Keys order as the scores do: NaN first, -0 equal to 0.
__device__ uint32_t KeyOf(float x) {
  uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0;
  if (bits == 0x80000000u) bits = 0;
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// The keys [low, top] that the k-th largest is among; `need` of them are taken, all above them, and
// none below. Where it is one key, `need` is what its lowest indices fill.
struct Boundary {
  uint32_t low = 0, top = ~0u;
  int32_t need = 0;
  int32_t population = 0;  // keys in [low, top]
};

struct Shared {
  uint32_t keys[kStagedKeys];
  uint32_t candidates[kCandidates];
  int32_t histogram[kBins];
  int32_t offsets[kCtasMax + 1];  // of each CTA's candidates
  int32_t warp_sums[kWarps];
  int2 warp_counts[kWarps];
  uint32_t digit;
  int32_t above, population;  // keys of larger digits, and of `digit`
};

// One CTA's part of one list. Every thread calls every function.
class ListPicker {
 public:
  __device__ ListPicker(const PickBatch& w, ListScratch* scratch, uint32_t* segments,
                        Candidates units, Shared& s)
      : w_(w), scratch_(scratch), segments_(segments), s_(s), ctas_(gridDim.x), cta_(blockIdx.x) {
    first_ = units.first;
    const int n = units.count();
    // Each warp has a run of keys; a vector of 4 is never cut but by the end of the list.
    const int parts = ctas_ * kWarps;
    per_warp_ = ((n + parts - 1) / parts + 3) / 4 * 4;
    begin_ = min((cta_ * kWarps + warp()) * per_warp_, n);
    end_ = min(begin_ + per_warp_, n);
    chunk_ = cta_ * kWarps * per_warp_;
    staged_ = per_warp_ * kWarps <= kStagedKeys;
  }

  __device__ void Pick(int list) {
    if (staged_) Stage(list);
    list_ = list;
    Boundary b = FindRange();
    const int2 before = Exchange(b);  // of the CTAs before: above the range, within it
    int32_t taken_before = before.x, ties_before = before.y;
    if (b.low != b.top) {
      const int32_t within = before.y;
      FindKey(&b);
      const int2 split = CountCandidates(b, within);
      taken_before += split.x;
      ties_before = split.y;
    }
    Write(b, taken_before, ties_before);
  }

 private:
  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ bool alone() const { return ctas_ == 1; }

  // Keys i .. i + 3 from memory; those beyond the list are anything.
  __device__ uint4 FetchKeys(int list, int i) const {
    const int64_t at = int64_t{list} * w_.score_stride + i;
    if (w_.dtype == DType::kF32) {
      const float4 x = *reinterpret_cast<const float4*>(static_cast<const float*>(w_.scores) + at);
      return {KeyOf(x.x), KeyOf(x.y), KeyOf(x.z), KeyOf(x.w)};
    }
    const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(w_.scores) + at);
    return {KeyOf(__uint_as_float(x.x << 16)), KeyOf(__uint_as_float(x.x & 0xFFFF0000u)),
            KeyOf(__uint_as_float(x.y << 16)), KeyOf(__uint_as_float(x.y & 0xFFFF0000u))};
  }
  __device__ void Stage(int list) {
#pragma unroll 4
    for (int i = begin_ + 4 * lane(); i < end_; i += 128) {
      *reinterpret_cast<uint4*>(&s_.keys[i - chunk_]) = FetchKeys(list, i);
    }
    __syncwarp();
  }

  // visit(i, keys, valid) for the warp's keys in vectors of 4, lane by lane in ascending order; all
  // lanes visit equally often, `valid` may be 0.
  template <typename Visit>
  __device__ void ForEachVector(Visit visit) const {
    for (int base = begin_; base < end_; base += 128) {
      const int i = base + 4 * lane();
      const int valid = max(0, min(4, end_ - i));
      uint4 v = {};
      if (valid > 0) {
        v = staged_ ? *reinterpret_cast<const uint4*>(&s_.keys[i - chunk_]) : FetchKeys(list_, i);
      }
      const uint32_t keys[4] = {v.x, v.y, v.z, v.w};
      visit(i, keys, valid);
    }
  }

  __device__ void ClearHistogram() {
    for (int i = threadIdx.x; i < kBins; i += kThreads) s_.histogram[i] = 0;
    __syncthreads();
  }

  // Waits for all CTAs of the list; what they wrote before is seen after. The top bit flips when
  // the last one arrives, and the rest is 0 again.
  __device__ void Barrier() {
    __syncthreads();
    if (threadIdx.x == 0) {
      const uint32_t add = cta_ == 0 ? 0x80000000u - (ctas_ - 1) : 1;
      __threadfence();
      const uint32_t old = atomicAdd(&scratch_->barrier, add);
      uint32_t now;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                     : "=r"(now)
                     : "l"(&scratch_->barrier)
                     : "memory");
      } while (((now ^ old) & 0x80000000u) == 0);
      __threadfence();
    }
    __syncthreads();
  }

  // Adds this CTA's histogram to the list's, and takes that.
  __device__ void ShareHistogram(int32_t* all) {
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      if (s_.histogram[i] != 0) atomicAdd(&all[i], s_.histogram[i]);
    }
    Barrier();
    static_assert(kBins == 4 * kThreads);
    reinterpret_cast<int4*>(s_.histogram)[threadIdx.x] =
        __ldcg(reinterpret_cast<const int4*>(all) + threadIdx.x);
    __syncthreads();
  }

  // Narrows `b` to the digit at `shift` that its need ends in, by the histogram of digits.
  __device__ void Narrow(Boundary* b, int shift) {
    const int at = kThreads - 1 - static_cast<int>(threadIdx.x);  // from the largest digit down
    const int4 bins = reinterpret_cast<const int4*>(s_.histogram)[at];
    const int32_t sum = bins.x + bins.y + bins.z + bins.w;
    int32_t above = BlockExclusiveSum<kWarps>(sum, s_.warp_sums);
    if (above < b->need && b->need <= above + sum) {
      const int32_t counts[4] = {bins.w, bins.z, bins.y, bins.x};
      int i = 0;
      while (above + counts[i] < b->need) above += counts[i++];
      s_.digit = 4 * at + 3 - i;
      s_.above = above;
      s_.population = counts[i];
    }
    __syncthreads();
    b->low |= s_.digit << shift;
    b->top = b->low | ((1u << shift) - 1);
    b->need -= s_.above;
    b->population = s_.population;
    // Taken whole: everything above the key below is taken, and no tie is left.
    if (b->population == b->need && b->low > 0) {
      --b->low;
      b->top = b->low;
      b->need = 0;
    }
  }

  // Passes over all keys, until few enough are left at the boundary.
  __device__ Boundary FindRange() {
    Boundary b;
    b.need = w_.rule.take;
    b.population = kCandidates + 1;
    for (int pass = 0; pass < kPasses && b.low != b.top && b.population > kCandidates; ++pass) {
      const int shift = pass == 0 ? 21 : pass == 1 ? 10 : 0;
      ClearHistogram();
      const uint32_t mask = pass == 2 ? 1023 : 2047;
      ForEachVector([&](int, const uint32_t(&keys)[4], int valid) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j < valid && keys[j] >= b.low && keys[j] <= b.top) {
            atomicAdd(&s_.histogram[(keys[j] >> shift) & mask], 1);
          }
        }
      });
      if (alone()) {
        __syncthreads();
      } else {
        __syncthreads();
        ShareHistogram(scratch_->histogram[pass]);
      }
      passes_ = pass + 1;
      shift_ = shift;
      Narrow(&b, shift);
    }
    return b;
  }

  // This warp's keys above the range and within it.
  __device__ int2 CountWarp(const Boundary& b) const {
    int2 count = {0, 0};
    ForEachVector([&](int, const uint32_t(&keys)[4], int valid) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j >= valid) continue;
        count.x += keys[j] > b.top;
        count.y += keys[j] >= b.low && keys[j] <= b.top;
      }
    });
    return {__reduce_add_sync(~0u, count.x), __reduce_add_sync(~0u, count.y)};
  }

  // The counts of the warps before this one; `all`, those of the CTA.
  __device__ int2 CountsBefore(int2 own, int2* all) {
    __syncthreads();
    if (lane() == 0) s_.warp_counts[warp()] = own;
    __syncthreads();
    int2 before = {0, 0};
    *all = {0, 0};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const int2 count = s_.warp_counts[i];
      if (i < warp()) before = {before.x + count.x, before.y + count.y};
      *all = {all->x + count.x, all->y + count.y};
    }
    return before;
  }

  // Writes this warp's keys within the range, in order.
  __device__ void WriteCandidates(const Boundary& b, uint32_t* out) const {
    ForEachVector([&](int, const uint32_t(&keys)[4], int valid) {
      bool within[4];
      int count = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        within[j] = j < valid && keys[j] >= b.low && keys[j] <= b.top;
        count += within[j];
      }
      if (__any_sync(~0u, count > 0) == 0) return;
      const int inclusive = WarpInclusiveSum(count);
      uint32_t* at = out + inclusive - count;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (within[j]) *at++ = keys[j];
      }
      out += __shfl_sync(~0u, inclusive, 31);
    });
  }

  // Tells the other CTAs what this one has above and within the range, and gathers all candidates,
  // unless the range is one key. Returns what the CTAs before this one have.
  __device__ int2 Exchange(const Boundary& b) {
    const bool gather = b.low != b.top;
    int2 own;
    const int2 before = CountsBefore(CountWarp(b), &own);
    if (alone()) {
      if (gather) WriteCandidates(b, s_.candidates + before.y);
      __syncthreads();
      return {0, 0};
    }
    if (gather) WriteCandidates(b, segments_ + int64_t{cta_} * kCandidates + before.y);
    if (threadIdx.x == 0) scratch_->counts[cta_] = own;
    Barrier();
    ResetHistograms();
    return Gather(gather);
  }

  // No CTA reads the histograms after the barrier of Exchange.
  __device__ void ResetHistograms() {
    auto* bins = &scratch_->histogram[0][0];
    for (int i = cta_ * kThreads + threadIdx.x; i < passes_ * kBins; i += ctas_ * kThreads) {
      bins[i] = 0;
    }
  }

  __device__ int2 Gather(bool candidates) {
    const int i = threadIdx.x;
    const int2 count = i < ctas_ ? __ldcg(&scratch_->counts[i]) : int2{0, 0};
    const int32_t above = BlockExclusiveSum<kWarps>(count.x, s_.warp_sums);
    int32_t total;
    const int32_t within = BlockExclusiveSum<kWarps>(count.y, s_.warp_sums, &total);
    if (i < ctas_) s_.offsets[i] = within;
    if (i == 0) s_.offsets[ctas_] = total;
    if (i == cta_) s_.above = above;
    __syncthreads();
    if (candidates) {
#pragma unroll 4
      for (int j = threadIdx.x; j < total; j += kThreads) {
        const int from = SegmentOf(j);
        s_.candidates[j] = __ldcg(segments_ + int64_t{from} * kCandidates + j - s_.offsets[from]);
      }
      __syncthreads();
    }
    return {s_.above, s_.offsets[cta_]};
  }

  // The CTA whose segment holds candidate j.
  __device__ int SegmentOf(int j) const {
    int low = 0, high = ctas_;  // offsets[low] <= j < offsets[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (s_.offsets[middle] <= j ? low : high) = middle;
    }
    return low;
  }

  // Narrows the range of the candidates to one key.
  __device__ void FindKey(Boundary* b) {
    const int32_t count = b->population;
    for (int shift = shift_; b->low != b->top;) {
      const int bits = shift == 21 ? 11 : 10;
      shift -= bits;
      ClearHistogram();
      for (int j = threadIdx.x; j < count; j += kThreads) {
        const uint32_t key = s_.candidates[j];
        if (key >= b->low && key <= b->top) {
          atomicAdd(&s_.histogram[(key >> shift) & ((1u << bits) - 1)], 1);
        }
      }
      __syncthreads();
      Narrow(b, shift);
    }
  }

  // Of the first `count` candidates: how many lie above the key, and how many are it.
  __device__ int2 CountCandidates(const Boundary& b, int32_t count) {
    int2 own = {0, 0}, all;
    for (int j = threadIdx.x; j < count; j += kThreads) {
      own.x += s_.candidates[j] > b.top;
      own.y += s_.candidates[j] == b.top;
    }
    own = {__reduce_add_sync(~0u, own.x), __reduce_add_sync(~0u, own.y)};
    CountsBefore(own, &all);
    return all;
  }

  // Writes this CTA's part of the answer: every key above the boundary, and of those equal to it as
  // many as are needed after the `ties_before` of the CTAs before.
  __device__ void Write(const Boundary& b, int32_t taken_before, int32_t ties_before) {
    int2 all;
    const int2 before = CountsBefore(CountWarp(b), &all);
    int32_t taken = taken_before + before.x, ties = ties_before + before.y;
    int32_t* out = w_.units + int64_t{list_} * w_.list_stride;
    ForEachVector([&](int i, const uint32_t(&keys)[4], int valid) {
      int32_t count = 0;  // above in the low half, equal in the high half
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j < valid) count += keys[j] > b.top ? 1 : keys[j] == b.top ? 0x10000 : 0;
      }
      if (__any_sync(~0u, count != 0) == 0) return;
      const int32_t inclusive = WarpInclusiveSum(count), exclusive = inclusive - count;
      int32_t above = taken + (exclusive & 0xFFFF), equal = ties + (exclusive >> 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j >= valid || keys[j] < b.top) continue;
        const bool tie = keys[j] == b.top;
        if (!tie || equal < b.need) out[above + min(equal, b.need)] = first_ + i + j;
        above += !tie;
        equal += tie;
      }
      const int32_t sum = __shfl_sync(~0u, inclusive, 31);
      taken += sum & 0xFFFF;
      ties += sum >> 16;
    });
  }

  const PickBatch& w_;
  ListScratch* scratch_;
  uint32_t* segments_;
  Shared& s_;
  const int ctas_, cta_;
  int first_ = 0, list_ = 0, passes_ = 0, shift_ = 0;
  int per_warp_ = 0, begin_ = 0, end_ = 0, chunk_ = 0;
  bool staged_ = false;
};

// Grid (CTAs a list, lists).
__global__ __launch_bounds__(kThreads) void PickKernel(PickBatch w, ListScratch* scratch,
                                                       uint32_t* segments) {
  extern __shared__ uint4 shared[];
  const int list = blockIdx.y, sequence = list / w.groups;
  const Candidates units = CandidatesOf(w.rule, w.tokens[sequence]);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    w.counts[list] = units.full ? 0 : w.rule.take;
    if (list % w.groups == 0) {
      w.sink_end[sequence] = units.full ? 0 : units.first * w.rule.unit_tokens;
      w.recent_begin[sequence] = units.full ? 0 : units.last * w.rule.unit_tokens;
    }
  }
  if (units.full || w.rule.take <= 0) return;
  ListPicker picker(w, scratch + list, segments + int64_t{list} * gridDim.x * kCandidates, units,
                    *reinterpret_cast<Shared*>(shared));
  picker.Pick(list);
}

// CTAs that surely run at once: one an SM of the current device.
int Resident() {
  static const int multiprocessors = [] {
    int device = 0, count = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return std::max(count, 1);
  }();
  return multiprocessors;
}

// Several CTAs a list pay where one cannot hold it; all of them must run at once.
int CtasPerList(const PickBatch& w) {
  constexpr int kKeysPerCta = 2048;
  const int most = std::min(kCtasMax, std::max(1, Resident() / (w.batch * w.groups)));
  if (w.ctas_per_list > 0) return std::min(w.ctas_per_list, most);
  return w.score_stride <= kStagedKeys ? 1 : std::min(most, w.score_stride / kKeysPerCta);
}

int Launch(const PickBatch& w, int ctas, cudaStream_t stream) {
  const int lists = w.batch * w.groups;
  static const cudaError_t raised =
      cudaFuncSetAttribute(PickKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (raised != cudaSuccess) return raised;
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas, lists);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = ctas > 1 ? 1 : 0;
  auto* scratch = static_cast<ListScratch*>(w.scratch);
  return cudaLaunchKernelEx(&config, PickKernel, w, scratch,
                            reinterpret_cast<uint32_t*>(scratch + lists));
}

}  // namespace

int64_t PickScratchBytes(const PickBatch& w) {
  const int64_t lists = int64_t{w.batch} * w.groups;
  const int ctas = CtasPerList(w);
  if (ctas == 1) return 16;
  return lists * (sizeof(ListScratch) + int64_t{ctas} * kCandidates * sizeof(uint32_t));
}

int PickCuda(const PickBatch& w, Stream stream) {
  if (w.batch == 0) return cudaSuccess;
  const bool known = w.dtype == DType::kF32 || w.dtype == DType::kBF16;
  if (!known || w.score_stride % 8 != 0 || w.list_stride < w.rule.take || w.scratch == nullptr) {
    return cudaErrorInvalidValue;
  }
  return Launch(w, CtasPerList(w), static_cast<cudaStream_t>(stream));
}

}  // namespace kvstrata::cuda
