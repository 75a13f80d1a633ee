// SPDX-License-Identifier: Apache-2.0
// One CTA's part of picking from one list.
//
// Radix passes over the keys narrow the boundary until few enough are left in it: these candidates
// of all CTAs each CTA gathers, and finds the boundary among them alone. It then writes what it
// holds of the answer in place: order comes for free. What CTAs tell each other goes through an
// Exchange (global_exchange.cuh, cluster_exchange.cuh).
#pragma once

#include <cstdint>

#include "kernels/cuda/warps/warp_sums.cuh"
#include "kernels/ops/pick/list_keys.cuh"
#include "kernels/ops/pick/picker_memory.cuh"

namespace kvstrata::cuda {

// Every thread calls every function.
template <typename Exchange>
class ListPicker {
 public:
  // The `take` largest keys go to `out` as indices + first.
  __device__ ListPicker(const ListKeys& keys, const Exchange& exchange, int32_t take, int32_t first,
                        int32_t* out, PickerMemory& s)
      : keys_(keys), exchange_(exchange), take_(take), first_(first), out_(out), s_(s) {}

  // REQUIRES: histograms in shared memory are zero, and a barrier since.
  __device__ void Pick() {
    Boundary b;
    b.need = take_;
    const bool alone = exchange_.ctas() == 1;
    int passes = 0;
    do {
      CountDigits(b, passes);
      b.Narrow(exchange_.FindDigit(passes, b.need), passes);
      ++passes;
    } while (!b.IsOneKey() && (alone || b.population > Exchange::kCandidates));
    const int2 own = CountWarp(b);
    TellWarps(0, own);
    __syncthreads();
    int2 before = WarpsBefore(0);
    if (!alone) before = AmongCtas(&b, passes, own, before);
    Write(b, before);
    if (!alone) exchange_.WaitForReaders();
  }

 private:
  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int lane() { return threadIdx.x % 32; }

  // The histogram of a digit of the keys in the range.
  __device__ void CountDigits(const Boundary& b, int pass) {
    int32_t* histogram = s_.histogram[pass];
    const auto count = [&](int, const uint32_t(&keys)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (b.Holds(keys[j])) {
          atomicAdd(&histogram[(keys[j] >> ShiftOf(pass)) & DigitMask(pass)], 1);
        }
      }
    };
    if (pass == 0) {
      keys_.StageEach(count);
    } else {
      keys_.ForEachVector(count);
    }
    __syncthreads();
  }

  // Counts are of keys above the range, and within it (or above a key, and equal to it).
  __device__ static int2 WarpSum(int2 of_lane) {
    return {__reduce_add_sync(~0u, of_lane.x), __reduce_add_sync(~0u, of_lane.y)};
  }
  __device__ int2 CountWarp(const Boundary& b) const {
    int2 count = {0, 0};
    keys_.ForEachVector([&](int, const uint32_t(&keys)[4]) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        count.x += keys[j] > b.top;
        count.y += b.Holds(keys[j]);
      }
    });
    return WarpSum(count);
  }

  // A warp's counts for the others to add up after a barrier. place: 0 to 2, not used before.
  __device__ void TellWarps(int place, int2 count) {
    if (lane() == 0) s_.warp_counts[place][warp()] = count;
  }
  __device__ int2 WarpsBefore(int place) const {
    return WarpSum(lane() < warp() ? s_.warp_counts[place][lane()] : int2{0, 0});
  }
  __device__ int2 AllWarps(int place) const {
    const bool real = lane() < static_cast<int>(blockDim.x) / 32;
    return WarpSum(real ? s_.warp_counts[place][lane()] : int2{0, 0});
  }

  // Tells the other CTAs what this one has, and narrows the range to one key. own, before: what the
  // warp has, and those of this CTA before it. Returns the keys above the boundary and equal to it
  // in all warps before.
  __device__ int2 AmongCtas(Boundary* b, int passes, int2 own, int2 before) {
    exchange_.Tell(AllWarps(0));
    if (!b->IsOneKey()) WriteCandidates(*b, exchange_.Segment() + before.y);
    exchange_.Wait();
    if (warp() == 0) ScanCounts();
    __syncthreads();
    const int32_t candidates = s_.offsets[kOffsets], of_ctas_before = s_.offsets[exchange_.cta()];
    if (!b->IsOneKey()) Gather(candidates);
    exchange_.DoneReading(passes);
    before = {s_.above_before + before.x, of_ctas_before + before.y};
    if (b->IsOneKey()) return before;
    FindKey(b, passes, candidates);
    TellWarps(1, Split(*b, threadIdx.x, of_ctas_before, blockDim.x));
    TellWarps(2, Split(*b, before.y + lane(), before.y + own.y, 32));
    __syncthreads();
    const int2 of_ctas = AllWarps(1), of_warps = WarpsBefore(2);
    return {before.x + of_ctas.x + of_warps.x, of_ctas.y + of_warps.y};
  }

  // Writes this warp's keys within the range, in order.
  __device__ void WriteCandidates(const Boundary& b, uint32_t* out) const {
    keys_.ForEachVector([&](int, const uint32_t(&keys)[4]) {
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

  // Offsets of the CTAs' candidates, by one warp; behind them, their number.
  __device__ void ScanCounts() {
    int2 counts[kCtasOfLane];
    int32_t within = 0, above_before = 0;
#pragma unroll
    for (int j = 0; j < kCtasOfLane; ++j) {
      const int i = kCtasOfLane * lane() + j;
      counts[j] = i < exchange_.ctas() ? exchange_.CountsOf(i) : int2{0, 0};
      within += counts[j].y;
      if (i < exchange_.cta()) above_before += counts[j].x;
    }
    above_before = __reduce_add_sync(~0u, above_before);
    int32_t offset = WarpInclusiveSum(within) - within;
#pragma unroll
    for (int j = 0; j < kCtasOfLane; ++j) {
      s_.offsets[kCtasOfLane * lane() + j] = offset;
      offset += counts[j].y;
    }
    if (lane() == 31) s_.offsets[kOffsets] = offset;
    if (lane() == 0) s_.above_before = above_before;
  }

  // All CTAs' candidates, in order.
  __device__ void Gather(int32_t total) {
    constexpr int kAtOnce = 4;  // loads of a thread under way
    const int threads = static_cast<int>(blockDim.x);
    for (int first = threadIdx.x; first < total; first += kAtOnce * threads) {
      uint32_t keys[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = first + j * threads;
        if (at < total) keys[j] = CandidateAt(at);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int at = first + j * threads;
        if (at < total) s_.candidates[at] = keys[j];
      }
    }
    __syncthreads();
  }
  __device__ uint32_t CandidateAt(int at) const {
    int from = 0;  // the last CTA whose candidates begin at or before `at`
#pragma unroll
    for (int step = Exchange::kCtasMax / 2; step > 0; step /= 2) {
      if (s_.offsets[from + step] <= at) from += step;
    }
    return exchange_.Candidate(from, at - s_.offsets[from]);
  }

  // Narrows the range of the candidates to one key.
  __device__ void FindKey(Boundary* b, int passes, int32_t candidates) {
    for (int pass = passes; pass < kPasses && !b->IsOneKey(); ++pass) {
      for (int j = threadIdx.x; j < candidates; j += blockDim.x) {
        const uint32_t key = s_.candidates[j];
        if (b->Holds(key)) {
          atomicAdd(&s_.histogram[pass][(key >> ShiftOf(pass)) & DigitMask(pass)], 1);
        }
      }
      __syncthreads();
      b->Narrow(FindDigit(s_.histogram[pass], b->need, s_.group_sums[pass], &s_.found[pass]), pass);
    }
  }

  // Counts, over all lanes' candidates begin, begin + step, ... before `end`, those above the key
  // and those equal to it.
  __device__ int2 Split(const Boundary& b, int begin, int end, int step) const {
    int2 count = {0, 0};
    for (int j = begin; j < end; j += step) {
      count.x += s_.candidates[j] > b.top;
      count.y += s_.candidates[j] == b.top;
    }
    return WarpSum(count);
  }

  // Writes this warp's part of the answer: every key above the boundary, and of those equal to it
  // as many as are needed. before: the keys above and equal in all warps before.
  __device__ void Write(const Boundary& b, int2 before) {
    int32_t taken = before.x, ties = before.y;
    keys_.ForEachVector([&](int i, const uint32_t(&keys)[4]) {
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
        if (!tie || equal < b.need) out_[above + min(equal, b.need)] = first_ + i + j;
        above += !tie;
        equal += tie;
      }
      const int32_t sum = __shfl_sync(~0u, inclusive, 31);
      taken += sum & 0xFFFF;
      ties += sum >> 16;
    });
  }

  // offsets[0 .. kOffsets) are of CTAs, real or not.
  static constexpr int kCtasOfLane = (Exchange::kCtasMax + 31) / 32;
  static constexpr int kOffsets = 32 * kCtasOfLane;
  static_assert(kOffsets <= kPickCtasMax);

  ListKeys keys_;
  Exchange exchange_;
  const int32_t take_, first_;
  int32_t* out_;
  PickerMemory& s_;
};

}  // namespace kvstrata::cuda
