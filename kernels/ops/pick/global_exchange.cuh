// SPDX-License-Identifier: Apache-2.0
// How the CTAs of a list tell each other what they have, through global memory. REQUIRES: all of
// them run at once (a cooperative launch), or there is one.
#pragma once

#include <cstdint>

#include "kernels/ops/pick/picker_memory.cuh"

namespace kvstrata::cuda {

// The scratch of one list. Histograms and barrier are zero between calls.
struct alignas(16) ListScratch {
  int32_t histogram[kPasses][kBins];
  int2 counts[kPickCtasMax];  // a CTA's keys above the range of candidates, and within
  uint32_t barrier;
};

// Every thread of every CTA calls every function, in this order, FindDigit once a pass.
class GlobalExchange {
 public:
  static constexpr int kCtasMax = kPickCtasMax;
  static constexpr int kCandidates = kPickCandidates;  // that every CTA may look through alone

  // segments: [CTAs of the list][kCandidates].
  __device__ GlobalExchange(ListScratch* scratch, uint32_t* segments, PickerMemory& s)
      : scratch_(scratch), segments_(segments), s_(s), ctas_(gridDim.x), cta_(blockIdx.x) {}

  __device__ int ctas() const { return ctas_; }
  __device__ int cta() const { return cta_; }

  // The digit of the need-th largest of all keys that the CTAs have counted in
  // s.histogram[pass]. REQUIRES: a barrier since.
  __device__ Digit FindDigit(int pass, int32_t need) {
    if (ctas_ > 1) SumHistograms(pass);
    return cuda::FindDigit(s_.histogram[pass], need, s_.group_sums[pass], &s_.found[pass]);
  }

  // Where this CTA's candidates go.
  __device__ uint32_t* Segment() const { return segments_ + int64_t{cta_} * kCandidates; }

  // This CTA's keys above the range, and within.
  __device__ void Tell(int2 counts) {
    if (threadIdx.x == 0) scratch_->counts[cta_] = counts;
  }

  // Waits until all CTAs have told, and have written their segments.
  __device__ void Wait() { Barrier(); }

  __device__ int2 CountsOf(int cta) const { return __ldcg(&scratch_->counts[cta]); }
  __device__ uint32_t Candidate(int cta, int i) const {
    return __ldcg(segments_ + int64_t{cta} * kCandidates + i);
  }

  // No more is asked.
  __device__ void DoneReading(int passes) {
    // Since Wait, no CTA reads the histograms any more.
    auto* bins = &scratch_->histogram[0][0];
    const int threads = static_cast<int>(blockDim.x);
    for (int i = cta_ * threads + threadIdx.x; i < passes * kBins; i += ctas_ * threads) {
      bins[i] = 0;
    }
  }

  // Waits until the CTA may end.
  __device__ void WaitForReaders() {}

 private:
  // Adds this CTA's histogram to the list's, and takes that.
  __device__ void SumHistograms(int pass) {
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

  ListScratch* scratch_;
  uint32_t* segments_;
  PickerMemory& s_;
  const int ctas_, cta_;
};

}  // namespace kvstrata::cuda
