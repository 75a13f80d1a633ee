// SPDX-License-Identifier: Apache-2.0
// The channels of rotated rows that are kept, and their packed bytes: 8 rows a warp, a row to the
// four lanes (g, 0..3), each of which has channels 8 n + 2t and 8 n + 2t + 1 of it, as products of
// tensor cores leave them (fragments.cuh).
#pragma once

#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/fragments.cuh"

namespace kvstrata::cuda {

// How packed rows lie (attend_packed.h).
struct PackFormat {
  int32_t keep, neighbours;
  int32_t value_offset, stride;  // bytes

  static __device__ __forceinline__ PackFormat Of(int channels, int keep, int neighbours) {
    const int value_offset = (channels / neighbours + 127) / 128 * 16;
    return {keep, neighbours, value_offset, value_offset + (2 * keep + 15) / 16 * 16};
  }
};

template <typename X>
__device__ __forceinline__ X SumOfFour(X x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// Fewer than the wanted number of norms exceed `at`, or exactly so many.
struct Cut {
  int32_t at;  // as bits
  bool exact;
};

// For eight rows at once; neighbouring rows are cut at similar values, so it starts at `guess`.
// About as many norms as are wanted lie in an octave around the cut: the next probe is as far away
// as the count is off, as long as that stays between what is known, and helps. count(value) is how
// many norms of the row exceed it, NaNs always.
template <typename Count>
__device__ __forceinline__ Cut FindCut(int wanted, int32_t guess, Count count) {
  constexpr int32_t kTop = 0x7F800000;  // infinity: only NaNs exceed it
  constexpr int kSteps = 8;             // bisection afterwards
  const int32_t per_norm = (1 << 23) / max(wanted, 1);
  int32_t low = -1, high = kTop, probe = min(guess, kTop - 1);
  Cut cut{kTop, false};
  bool found = false;
#pragma unroll 1
  for (int step = 0;; ++step) {
    const int above = count(__int_as_float(probe));
    if (!found) {
      cut = {probe, above == wanted};
      (above > wanted ? low : high) = probe;
      if (!cut.exact && high - low <= 1) cut.at = high;
      found = cut.exact || high - low <= 1;
      probe += (above - wanted) * per_norm;
      if (step >= kSteps || probe <= low || probe >= high) probe = low + (high - low) / 2;
    }
    if (__all_sync(kAllLanes, found)) return cut;
  }
}

// Sets of channels, a bit each.
template <int kChannels>
struct ChannelSet {
  static constexpr int kWords = (kChannels + 31) / 32;
  uint32_t words[kWords];

  // has(i) for the lane's i-th channel: the row's set, in all its four lanes.
  template <typename Has>
  static __device__ __forceinline__ ChannelSet Of(Has has) {
    ChannelSet set{};
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kChannels / 4; ++i) {
      if (has(i)) set.words[i / 8] |= 1u << (i / 2 % 4 * 8 + i % 2);
    }
#pragma unroll
    for (uint32_t& word : set.words) {
      word <<= 2 * t;
      word |= __shfl_xor_sync(kAllLanes, word, 1);
      word |= __shfl_xor_sync(kAllLanes, word, 2);
    }
    return set;
  }
  __device__ __forceinline__ int Count() const {
    int count = 0;
#pragma unroll
    for (uint32_t word : words) count += __popc(word);
    return count;
  }
  // Leaves the lowest `count`.
  __device__ __forceinline__ void KeepLowest(int count) {
#pragma unroll
    for (uint32_t& word : words) {
      int here = __popc(word);
#pragma unroll 1
      for (; here > count; --here) word ^= 1u << (31 - __clz(word));
      count -= here;
    }
  }
};

// Which channels the row keeps. x: the lane's channels.
template <int kChannels, bool kSingle>
__device__ __forceinline__ ChannelSet<kChannels> ChooseChannels(const float (&x)[kChannels / 4],
                                                                const PackFormat& f,
                                                                int32_t& guess) {
  // Norms of the groups that the lane's channels are in: of single channels, or of pairs. Groups of
  // four are there twice, in neighbouring lanes.
  constexpr int kEach = kSingle ? 1 : 2, kNorms = kChannels / 4 / kEach;
  float norms[kNorms];
#pragma unroll
  for (int i = 0; i < kNorms; ++i) {
    norms[i] = fabsf(x[i * kEach]);
    if constexpr (kSingle) continue;
    norms[i] += fabsf(x[i * kEach + kEach - 1]);
    if (f.neighbours == 2) continue;
    // In channel order: the odd lane goes on where the even one ends.
    const float even = __shfl_xor_sync(kAllLanes, norms[i], 1);
    const float sum = even + fabsf(x[i * kEach]) + fabsf(x[i * kEach + kEach - 1]);
    const float odd = __shfl_xor_sync(kAllLanes, sum, 1);
    norms[i] = threadIdx.x % 2 != 0 ? sum : odd;
  }
  const auto exceeds = [&](int i, float value) { return !(norms[i] <= value); };
  const Cut cut = FindCut(f.keep / kEach, guess, [&](float value) {
    int above = 0;
#pragma unroll
    for (int i = 0; i < kNorms; ++i) above += exceeds(i, value) ? 1 : 0;
    return SumOfFour(above);
  });
  guess = cut.at;
  const float limit = __int_as_float(cut.at);
  auto set = ChannelSet<kChannels>::Of([&](int i) { return exceeds(i / kEach, limit); });
  if (__all_sync(kAllLanes, cut.exact)) return set;
  auto ties = ChannelSet<kChannels>::Of([&](int i) { return norms[i / kEach] == limit; });
  set.KeepLowest(f.keep);
  ties.KeepLowest(f.keep - set.Count());
#pragma unroll
  for (int w = 0; w < ChannelSet<kChannels>::kWords; ++w) set.words[w] |= ties.words[w];
  return set;
}

// Keeps one of every `neighbours` bits.
__device__ __forceinline__ uint32_t GroupBits(uint32_t x, int neighbours) {
  if (neighbours == 2) {
    x &= 0x55555555u;
    x = (x | x >> 1) & 0x33333333u;
    x = (x | x >> 2) & 0x0F0F0F0Fu;
    x = (x | x >> 4) & 0x00FF00FFu;
    return (x | x >> 8) & 0xFFFFu;
  }
  x &= 0x11111111u;
  x = (x | x >> 3) & 0x03030303u;
  x = (x | x >> 6) & 0x000F000Fu;
  return (x | x >> 12) & 0xFFu;
}

// Word `w` of a row's bitmap.
template <int kChannels>
__device__ __forceinline__ uint32_t BitmapWord(const ChannelSet<kChannels>& set, int w,
                                               int neighbours) {
  const int shift = neighbours / 2;  // log2(neighbours)
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < ChannelSet<kChannels>::kWords; ++i) {
    if (i >> shift != w) continue;
    const uint32_t bits = neighbours == 1 ? set.words[i] : GroupBits(set.words[i], neighbours);
    word |= bits << ((i & (neighbours - 1)) * (32 >> shift));
  }
  return word;
}

// 16 bits to shared memory if `wanted` is not 0, without a branch.
__device__ __forceinline__ void StoreIf(uint32_t wanted, uint32_t at, uint32_t value) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %0, 0;\n"
      "@p st.shared.u16 [%1], %2;\n"
      "}"
      :
      : "r"(wanted), "r"(at), "h"(static_cast<uint16_t>(value))
      : "memory");
}

// The row's bytes to `row`, in shared memory. Returns the sum of the squares of what is kept, of
// this lane's channels.
template <int kChannels>
__device__ __forceinline__ float WriteRow(const float (&x)[kChannels / 4],
                                          const ChannelSet<kChannels>& set, const PackFormat& f,
                                          char* row) {
  const int t = threadIdx.x % 4;
  for (int w = t; w < f.value_offset / 4; w += 4) {
    reinterpret_cast<uint32_t*>(row)[w] = BitmapWord(set, w, f.neighbours);
  }
  char* values = row + f.value_offset;
  auto base = static_cast<uint32_t>(__cvta_generic_to_shared(values));  // where the word's go
  float kept = 0;
#pragma unroll
  for (int i = 0; i < kChannels / 4; i += 2) {
    const uint32_t word = set.words[i / 8];
    const int bit = i / 2 % 4 * 8 + 2 * t;
    const uint32_t first = word >> bit & 1, second = word >> (bit + 1) & 1;
    const uint32_t at = base + 2 * __popc(word & ((1u << bit) - 1));
    const uint32_t pair = Element<__nv_bfloat16>::Pack(x[i], x[i + 1]);
    StoreIf(first, at, pair);
    StoreIf(second, at + 2 * first, pair >> 16);
    kept += (first != 0 ? x[i] * x[i] : 0) + (second != 0 ? x[i + 1] * x[i + 1] : 0);
    if (i % 8 == 6) base += 2 * __popc(word);
  }
  for (int i = f.keep + t; i < (f.stride - f.value_offset) / 2; i += 4) {
    reinterpret_cast<uint16_t*>(values)[i] = 0;
  }
  return kept;
}

// Eight rows to packed bytes at `row`, each lane's row's; what WriteRow returns.
template <int kChannels>
__device__ __forceinline__ float PackRow(const float (&x)[kChannels / 4], const PackFormat& f,
                                         int32_t& guess, char* row) {
  const auto set = f.neighbours == 1 ? ChooseChannels<kChannels, true>(x, f, guess)
                                     : ChooseChannels<kChannels, false>(x, f, guess);
  return WriteRow<kChannels>(x, set, f, row);
}

}  // namespace kvstrata::cuda
