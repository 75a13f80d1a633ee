#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/score_keys.cuh"
#include "kernels/cuda/warp_sums.cuh"
#include "kernels/ops/pick/pick_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kWarpsMax = 32;
// Keys that a CTA holds in shared memory; longer lists are for several CTAs, unless the caller says
// otherwise: one that holds more may not start beside the CTAs of the op before.
constexpr int kKeysOfOneCta = 10240;
constexpr int kCandidates = 8192;  // keys at the boundary that every CTA may look through alone
constexpr int kBins = 2048;
constexpr int kPasses = 3;     // digits of 11, 11 and 10 bits
constexpr int kCtasMax = 128;  // of a list
constexpr int kScanThreads = kBins / 4;
constexpr int kThreadsMin = kScanThreads;

__device__ constexpr int ShiftOf(int pass) { return pass == 0 ? 21 : pass == 1 ? 10 : 0; }
__device__ constexpr uint32_t DigitMask(int pass) { return pass == 2 ? 1023 : 2047; }

// The scratch of one list. Histograms and barrier are zero between calls.
struct alignas(16) ListScratch {
  int32_t histogram[kPasses][kBins];
  int2 counts[kCtasMax];  // of a CTA: keys above the range of candidates, and within
  uint32_t barrier;
};

// The keys [low, top] that the k-th largest is among; `need` of them are taken, all above them, and
// none below. Where it is one key, its lowest indices fill `need`.
struct Boundary {
  uint32_t low = 0, top = ~0u;
  int32_t need = 0;
  int32_t population = 0;  // keys in [low, top]

  __device__ bool Holds(uint32_t key) const { return key - low <= top - low; }
  __device__ bool IsOneKey() const { return low == top; }
};

// What a pass found: its digit, and how many keys have it or a larger one.
struct Digit {
  uint32_t digit;
  int32_t above, population;
};

struct Shared {
  uint32_t candidates[kCandidates];
  int32_t histogram[kPasses][kBins];
  int32_t scan_sums[kPasses][kScanThreads / 32];
  Digit found[kPasses];
  int32_t offsets[kCtasMax + 1];  // of each CTA's candidates
  int32_t above_before;           // keys above the range in the CTAs before
  int2 warp_counts[3][kWarpsMax];
  alignas(16) uint32_t keys[];  // `staged` of them
};

// One CTA's part of one list. Every thread calls every function. Each pass has its own histogram
// and each count its own place in shared memory, so that few barriers are needed.
class ListPicker {
 public:
  __device__ ListPicker(const PickBatch& w, ListScratch* scratch, uint32_t* segments, int list,
                        Candidates units, int32_t take, int32_t staged, Shared& s)
      : w_(w),
        scratch_(scratch),
        segments_(segments),
        s_(s),
        list_(list),
        ctas_(gridDim.x),
        cta_(blockIdx.x),
        first_(units.first),
        n_(units.count()),
        take_(take) {
    const int warps = static_cast<int>(blockDim.x) / 32, parts = ctas_ * warps;
    // Each warp has a run of keys; a vector of 4 is never cut but by the end of the list.
    const int per_warp = ((n_ + parts - 1) / parts + 3) / 4 * 4;
    chunk_ = cta_ * warps * per_warp;
    begin_ = min(chunk_ + warp() * per_warp, n_);
    end_ = min(begin_ + per_warp, n_);
    staged_ = per_warp * warps <= staged;
  }

  // REQUIRES: histograms in shared memory are zero (no barrier needed since).
  __device__ void Pick() {
    if (staged_) Stage();
    __syncthreads();
    Boundary b;
    b.need = take_;
    if (ctas_ == 1) {
      for (int pass = 0; pass < kPasses && !b.IsOneKey(); ++pass) {
        CountDigits(b, pass);
        Narrow(&b, pass);
      }
      return Write(b, 0, 0);
    }
    int passes = 0;
    do {
      CountDigits(b, passes);
      ShareHistogram(passes);
      Narrow(&b, passes++);
    } while (!b.IsOneKey() && b.population > kCandidates);
    int2 before = Exchange(b, passes);  // of the CTAs before: above the range, within it
    if (!b.IsOneKey()) {
      const int2 split = FindKey(&b, passes, before.y);
      before = {before.x + split.x, split.y};
    }
    Write(b, before.x, before.y);
  }

 private:
  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int lane() { return threadIdx.x % 32; }

  // Keys i .. i + 3 from memory.
  __device__ uint4 FetchKeys(int i) const {
    const int64_t at = int64_t{list_} * w_.score_stride + i;
    uint4 keys;
    if (w_.dtype == DType::kF32) {
      const float4 x = *reinterpret_cast<const float4*>(static_cast<const float*>(w_.scores) + at);
      keys = {KeyOf(x.x), KeyOf(x.y), KeyOf(x.z), KeyOf(x.w)};
    } else {
      const uint2 x = *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(w_.scores) + at);
      keys = {KeyOf(__uint_as_float(x.x << 16)), KeyOf(__uint_as_float(x.x & 0xFFFF0000u)),
              KeyOf(__uint_as_float(x.y << 16)), KeyOf(__uint_as_float(x.y & 0xFFFF0000u))};
    }
    if (i + 1 >= n_) keys.y = kAbsent;
    if (i + 2 >= n_) keys.z = kAbsent;
    if (i + 3 >= n_) keys.w = kAbsent;
    return keys;
  }
  __device__ void Stage() {
#pragma unroll 4
    for (int i = begin_ + 4 * lane(); i < end_; i += 128) {
      *reinterpret_cast<uint4*>(&s_.keys[i - chunk_]) = FetchKeys(i);
    }
  }

  // visit(i, keys) for the warp's keys in vectors of 4, lane by lane in ascending order; all lanes
  // visit equally often, beyond the end keys that are absent.
  template <typename Visit>
  __device__ void ForEachVector(Visit visit) const {
    for (int base = begin_; base < end_; base += 128) {
      const int i = base + 4 * lane();
      uint4 v = {kAbsent, kAbsent, kAbsent, kAbsent};
      if (i < end_) {
        v = staged_ ? *reinterpret_cast<const uint4*>(&s_.keys[i - chunk_]) : FetchKeys(i);
      }
      const uint32_t keys[4] = {v.x, v.y, v.z, v.w};
      visit(i, keys);
    }
  }

  // The histogram of a digit of the keys in the range.
  __device__ void CountDigits(const Boundary& b, int pass) {
    int32_t* histogram = s_.histogram[pass];
    ForEachVector([&](int, const uint32_t(&keys)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (b.Holds(keys[j])) {
          atomicAdd(&histogram[(keys[j] >> ShiftOf(pass)) & DigitMask(pass)], 1);
        }
      }
    });
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
    }
    __syncthreads();
  }

  // Adds this CTA's histogram to the list's, and takes that.
  __device__ void ShareHistogram(int pass) {
    int32_t* own = s_.histogram[pass];
    int32_t* all = scratch_->histogram[pass];
    for (int i = threadIdx.x; i < kBins; i += blockDim.x) {
      if (own[i] != 0) atomicAdd(&all[i], own[i]);
    }
    Barrier();
    if (threadIdx.x < kScanThreads) {
      reinterpret_cast<int4*>(own)[threadIdx.x] =
          __ldcg(reinterpret_cast<const int4*>(all) + threadIdx.x);
    }
    __syncthreads();
  }

  // Narrows `b` to the digit that its need ends in, from the largest digit down.
  __device__ void Narrow(Boundary* b, int pass) {
    const int at = kScanThreads - 1 - static_cast<int>(threadIdx.x);
    int4 bins = {};
    int32_t sum = 0, inclusive = 0;
    if (at >= 0) {
      bins = reinterpret_cast<const int4*>(s_.histogram[pass])[at];
      sum = bins.x + bins.y + bins.z + bins.w;
      inclusive = WarpInclusiveSum(sum);
      if (lane() == 31) s_.scan_sums[pass][warp()] = inclusive;
    }
    __syncthreads();
    if (at >= 0) {
      const int32_t of_lane = lane() < warp() ? s_.scan_sums[pass][lane()] : 0;
      int32_t above = __reduce_add_sync(~0u, of_lane) + inclusive - sum;
      if (above < b->need && b->need <= above + sum) {
        const int32_t counts[4] = {bins.w, bins.z, bins.y, bins.x};
        int i = 0;
        for (; i < 3 && above + counts[i] < b->need; ++i) above += counts[i];
        s_.found[pass] = {static_cast<uint32_t>(4 * at + 3 - i), above, counts[i]};
      }
    }
    __syncthreads();
    const Digit found = s_.found[pass];
    b->low |= found.digit << ShiftOf(pass);
    b->top = b->low | ((1u << ShiftOf(pass)) - 1);
    b->need -= found.above;
    b->population = found.population;
    // Taken whole: everything above the key below is taken, and no tie is left.
    if (b->population == b->need && b->low > 0) {
      b->top = --b->low;
      b->need = 0;
    }
  }

  // This warp's keys above the range and within it.
  __device__ int2 CountWarp(const Boundary& b) const {
    int2 count = {0, 0};
    ForEachVector([&](int, const uint32_t(&keys)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        count.x += keys[j] > b.top;
        count.y += b.Holds(keys[j]);
      }
    });
    return {__reduce_add_sync(~0u, count.x), __reduce_add_sync(~0u, count.y)};
  }

  // The counts of the warps before this one; `all`, unless null, those of the CTA. place: 0 to 2,
  // not used before.
  __device__ int2 CountsBefore(int2 own, int place, int2* all = nullptr) {
    if (lane() == 0) s_.warp_counts[place][warp()] = own;
    __syncthreads();
    const bool real = lane() < static_cast<int>(blockDim.x) / 32;
    const int2 count = real ? s_.warp_counts[place][lane()] : int2{0, 0};
    if (all != nullptr) *all = {__reduce_add_sync(~0u, count.x), __reduce_add_sync(~0u, count.y)};
    const bool before = lane() < warp();
    return {__reduce_add_sync(~0u, before ? count.x : 0),
            __reduce_add_sync(~0u, before ? count.y : 0)};
  }

  // Writes this warp's keys within the range, in order.
  __device__ void WriteCandidates(const Boundary& b, uint32_t* out) const {
    ForEachVector([&](int, const uint32_t(&keys)[4]) {
      int count = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) count += b.Holds(keys[j]);
      if (__any_sync(~0u, count > 0) == 0) return;
      const int inclusive = WarpInclusiveSum(count);
      uint32_t* at = out + inclusive - count;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (b.Holds(keys[j])) *at++ = keys[j];
      }
      out += __shfl_sync(~0u, inclusive, 31);
    });
  }

  // Tells the other CTAs what this one has above and within the range, and gathers all candidates,
  // unless the range is one key. Returns what the CTAs before this one have.
  __device__ int2 Exchange(const Boundary& b, int passes) {
    int2 own;
    const int2 before = CountsBefore(CountWarp(b), 0, &own);
    if (!b.IsOneKey()) WriteCandidates(b, segments_ + int64_t{cta_} * kCandidates + before.y);
    if (threadIdx.x == 0) scratch_->counts[cta_] = own;
    Barrier();
    // No CTA reads the histograms any more.
    auto* bins = &scratch_->histogram[0][0];
    const int threads = static_cast<int>(blockDim.x);
    for (int i = cta_ * threads + threadIdx.x; i < passes * kBins; i += ctas_ * threads) {
      bins[i] = 0;
    }
    if (warp() == 0) ScanCounts();
    __syncthreads();
    if (!b.IsOneKey()) Gather();
    return {s_.above_before, s_.offsets[cta_]};
  }

  // Offsets of the CTAs' candidates, by one warp: 4 CTAs a lane.
  __device__ void ScanCounts() {
    static_assert(kCtasMax == 128);
    int2 counts[4];
    int32_t within = 0, above_before = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 4 * lane() + j;
      counts[j] = i < ctas_ ? __ldcg(&scratch_->counts[i]) : int2{0, 0};
      within += counts[j].y;
      if (i < cta_) above_before += counts[j].x;
    }
    above_before = __reduce_add_sync(~0u, above_before);
    int32_t offset = WarpInclusiveSum(within) - within;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      s_.offsets[4 * lane() + j] = offset;
      offset += counts[j].y;
    }
    if (lane() == 31) s_.offsets[kCtasMax] = offset;
    if (lane() == 0) s_.above_before = above_before;
  }

  // All CTAs' candidates, in order.
  __device__ void Gather() {
    const int total = s_.offsets[kCtasMax];
#pragma unroll 4
    for (int j = threadIdx.x; j < total; j += blockDim.x) {
      int from = 0;  // the last CTA whose candidates begin at or before j
#pragma unroll
      for (int step = kCtasMax / 2; step > 0; step /= 2) {
        if (s_.offsets[from + step] <= j) from += step;
      }
      s_.candidates[j] = __ldcg(segments_ + int64_t{from} * kCandidates + j - s_.offsets[from]);
    }
    __syncthreads();
  }

  // Narrows the range of the candidates to one key. Returns how many of the first `before`
  // candidates lie above it, and how many are it.
  __device__ int2 FindKey(Boundary* b, int passes, int32_t before) {
    const int32_t count = s_.offsets[kCtasMax];
    for (int pass = passes; pass < kPasses && !b->IsOneKey(); ++pass) {
      for (int j = threadIdx.x; j < count; j += blockDim.x) {
        const uint32_t key = s_.candidates[j];
        if (b->Holds(key)) {
          atomicAdd(&s_.histogram[pass][(key >> ShiftOf(pass)) & DigitMask(pass)], 1);
        }
      }
      __syncthreads();
      Narrow(b, pass);
    }
    int2 own = {0, 0}, all;
    for (int j = threadIdx.x; j < before; j += blockDim.x) {
      own.x += s_.candidates[j] > b->top;
      own.y += s_.candidates[j] == b->top;
    }
    CountsBefore({__reduce_add_sync(~0u, own.x), __reduce_add_sync(~0u, own.y)}, 1, &all);
    return all;
  }

  // Writes this CTA's part of the answer: every key above the boundary, and of those equal to it as
  // many as are needed after the `ties_before` of the CTAs before.
  __device__ void Write(const Boundary& b, int32_t taken_before, int32_t ties_before) {
    const int2 before = CountsBefore(CountWarp(b), 2);
    int32_t taken = taken_before + before.x, ties = ties_before + before.y;
    int32_t* out = w_.lists != nullptr ? reinterpret_cast<int32_t*>(w_.lists[list_])
                                       : w_.units + int64_t{list_} * w_.list_stride;
    ForEachVector([&](int i, const uint32_t(&keys)[4]) {
      int32_t count = 0;  // above in the low half, equal in the high half
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        count += keys[j] > b.top ? 1 : keys[j] == b.top ? 0x10000 : 0;
      }
      if (__any_sync(~0u, count != 0) == 0) return;
      const int32_t inclusive = WarpInclusiveSum(count), exclusive = inclusive - count;
      int32_t above = taken + (exclusive & 0xFFFF), equal = ties + (exclusive >> 16);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (keys[j] < b.top) continue;
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
  const int list_, ctas_, cta_;
  const int first_, n_, take_;
  int begin_ = 0, end_ = 0, chunk_ = 0;  // the warp's keys, and the CTA's first
  bool staged_ = false;
};

// Grid (CTAs a list, lists). staged: keys that shared memory has room for.
__global__ __launch_bounds__(kWarpsMax * 32) void PickKernel(PickBatch w, ListScratch* scratch,
                                                             uint32_t* segments, int32_t staged) {
  extern __shared__ uint4 dynamic[];
  auto& shared = *reinterpret_cast<Shared*>(dynamic);
  const int list = blockIdx.y, sequence = list / w.groups;
  for (int i = threadIdx.x; i < kPasses * kBins / 4; i += blockDim.x) {
    reinterpret_cast<int4*>(shared.histogram)[i] = {0, 0, 0, 0};
  }
  if (!w.ahead) WaitForPrevious();
  const int32_t tokens = w.tokens[sequence];
  CandidateRule rule = w.rule;
  if (w.takes != nullptr) rule.take = w.takes[sequence];
  WaitForPrevious();
  LetNextStart();
  if (tokens == kNoQuery) return;
  const Candidates units = CandidatesOf(rule, tokens);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    w.counts[list] = units.full ? 0 : rule.take;
    if (list % w.groups == 0) {
      w.sink_end[sequence] = units.full ? 0 : units.first * w.rule.unit_tokens;
      w.recent_begin[sequence] = units.full ? 0 : units.last * w.rule.unit_tokens;
    }
  }
  if (units.full || rule.take <= 0) return;
  ListPicker picker(w, scratch + list, segments + int64_t{list} * gridDim.x * kCandidates, list,
                    units, rule.take, staged, shared);
  picker.Pick();
}

// Several CTAs a list pay where one cannot hold it; all of them must run at once.
int CtasPerList(const PickBatch& w) {
  constexpr int kKeysPerCta = 2048;
  const int resident = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  const int most = std::clamp(resident / (w.batch * w.groups), 1, kCtasMax);
  if (w.ctas_per_list > 0) return std::min(w.ctas_per_list, most);
  return w.score_stride <= kKeysOfOneCta ? 1 : std::min(most, w.score_stride / kKeysPerCta);
}

int32_t StagedKeys(const PickBatch& w, int ctas) {
  return ctas == 1 && w.score_stride > kKeysOfOneCta ? kPickKeysOfCta : kKeysOfOneCta;
}

size_t SharedBytes(int32_t staged) { return sizeof(Shared) + staged * sizeof(uint32_t); }

int LaunchCooperative(const PickBatch& w, dim3 grid, int threads, ListScratch* scratch,
                      uint32_t* segments, int32_t staged, Stream stream) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = SharedBytes(staged);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = DeviceAttribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? 2 : 1;
  return cudaLaunchKernelEx(&config, PickKernel, w, scratch, segments, staged);
}

// Lists whose counters lie at the beginning of the scratch.
int32_t ScratchLists(const PickBatch& w) { return std::max(w.scratch_lists, w.batch * w.groups); }

int Launch(const PickBatch& w, int ctas, Stream stream) {
  const int most = static_cast<int>(SharedBytes(kPickKeysOfCta));
  if (const int error = AllowShared(PickKernel, most); error != 0) return error;
  const int32_t staged = StagedKeys(w, ctas);
  const int lists = w.batch * w.groups;
  auto* scratch = static_cast<ListScratch*>(w.scratch);
  auto* segments = reinterpret_cast<uint32_t*>(scratch + ScratchLists(w));
  // More warps where a CTA has many keys to go through.
  const int threads = w.score_stride / ctas > 4096 ? kWarpsMax * 32 : kThreadsMin;
  const dim3 grid(ctas, lists);
  return ctas > 1 ? LaunchCooperative(w, grid, threads, scratch, segments, staged, stream)
                  : LaunchDependent(PickKernel, grid, threads, SharedBytes(staged), stream, w,
                                    scratch, segments, staged);
}

}  // namespace

int64_t PickScratchBytes(const PickBatch& w) {
  const int64_t lists = int64_t{w.batch} * w.groups;
  const int ctas = CtasPerList(w);
  if (ctas == 1) return 16;
  return ScratchLists(w) * int64_t{sizeof(ListScratch)} +
         lists * ctas * kCandidates * int64_t{sizeof(uint32_t)};
}

int PickCuda(const PickBatch& w, Stream stream) {
  if (w.batch == 0) return cudaSuccess;
  const bool known = w.dtype == DType::kF32 || w.dtype == DType::kBF16;
  if (!known || w.score_stride % 8 != 0 || w.list_stride < w.rule.take || w.scratch == nullptr) {
    return cudaErrorInvalidValue;
  }
  return Launch(w, CtasPerList(w), stream);
}

}  // namespace kvstrata::cuda
