// SPDX-License-Identifier: Apache-2.0
// Sealed groups of one (sequence, KV head) for a warp: where they lie, what of them is in the
// warp's shared memory, and the copies that bring it there.
//
// Lane 4g + t. Of a group of 64 tokens it alone uses
//   keys: words kWords t + u of the tokens of two chunks of four, 4 (g / 2) + 2 L + g % 2, L = 0,
//   1; values: strip t, channels 32 k + 4 g to 32 k + 4 g + 3, whatever k.
// So lanes of g = 2t and 2t + 1 have the keys of strip t, whose values lanes of that t have:
// transposing the matrix of logits (fragments.cuh) gives weights in the layout that values need.
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/warps/async_copy.cuh"
#include "kernels/ops/pack_planes/device_planes_cuda.h"
#include "kernels/ops/pack_planes/device_runs.cuh"

namespace kvstrata::cuda {

inline constexpr int kGroupTokens = 64;
inline constexpr int kGroupStrips = kGroupTokens / kStripTokens;
inline constexpr int kFineTile = 8;            // fine tokens that are done at once
inline constexpr float kCoarseCentre = 31.5f;  // a cell's of plane 0, in steps

template <int kDim>
struct GroupShape {
  static constexpr int kWords = kDim / 64;       // key words of a token that a lane has
  static constexpr int kPieces = kDim / 32;      // 16-byte pieces of value words that it has
  static constexpr int kQuads = 2 * kWords;      // four registers each, of a query's fragments
  static constexpr int kScalePieces = kDim / 4;  // 16 bytes each, of keys' minima and steps
  // A lower row's, in whole lines. What is between rows so that they lie in different banks gains
  // nothing, and a sector that comes to lie in two lines is read twice: 1.5 times the bytes of a
  // host's rows.
  static constexpr int kRowPieces = (kDim * 3 / 2 + 127) / 128 * 8;
  static constexpr int kKeyCodes = 4 * kDim;      // bytes, here and below: offsets in upper runs
  static constexpr int kValueScales = 20 * kDim;  // minima of 64 tokens, then steps
  static constexpr int kValueCodes = kValueScales + 4 * kGroupTokens;
  static constexpr int kUpperBytes = kValueCodes + 16 * kDim;
  static constexpr int kStripBytes = 4 * kDim;  // values' codes
  static constexpr PlanesFormat kFormat{kDim, kGroupTokens, 8};
  static_assert(kValueScales == kFormat.value_minimum() && kUpperBytes == kFormat.upper_bytes());
};

// Codes of plane 0 of a group in shared memory, as they lie in a run: four blocks, of what lanes of
// each t have of keys or of what strips have of values. A block is copied line by line, which takes
// a cycle for 128 bytes where scattered pieces take one each; what is between blocks keeps lanes of
// one load in banks of their own.
template <int kDim>
struct CodeBlocks {
  static constexpr int kEach = kDim / 4, kStride = kEach + 2;  // pieces of 16 bytes
  uint4 pieces[4 * kStride];

  // The first piece of block t.
  __device__ const uint4* Block(int t) const { return pieces + kStride * t; }

  // blocks: a bit for each that is copied. By a warp; nothing is committed.
  template <typename Copy>
  __device__ __forceinline__ void Ask(uint64_t from, uint32_t blocks, const Copy& copy) {
#pragma unroll
    for (int i = 0; i < 4 * kEach / 32; ++i) {
      const int piece = 32 * i + threadIdx.x % 32, block = piece / kEach;
      if ((blocks >> block & 1) == 0) continue;
      copy(&pieces[kStride * block + piece % kEach], from + 16 * piece);
    }
  }
};

// Minima and steps of a group's keys in shared memory. A load takes both, which lie in different
// banks.
template <int kDim>
struct KeyScales {
  static constexpr int kPieces = GroupShape<kDim>::kScalePieces, kShift = 4;
  uint4 pieces[kPieces + kShift];

  __device__ const char* Minima() const { return reinterpret_cast<const char*>(pieces); }
  __device__ const char* Steps() const { return Minima() + 2 * kDim + 16 * kShift; }

  __device__ __forceinline__ void Ask(uint64_t upper, uint64_t policy) {
#pragma unroll
    for (int i = 0; i < (kPieces + 31) / 32; ++i) {
      const int piece = 32 * i + threadIdx.x % 32;
      if (piece >= kPieces) continue;
      CopyOfRun(&pieces[piece + (piece < kPieces / 2 ? 0 : kShift)], upper + 16 * piece, policy);
    }
  }
};

// What a warp's shared memory is aligned to: copies of lines that lie 16 bytes beside that took 14
// % longer in full on an H200.
inline constexpr int kLineBytes = 128;

// A warp's shared memory. kHeads: query heads that it has room for, 4 or 8.
template <int kDim, int kHeads>
struct alignas(kLineBytes) WarpMemory {
  using Shape = GroupShape<kDim>;
  union {
    CodeBlocks<kDim> codes[2];  // [group % 2], keys'
    float o[kHeads][kDim];      // at the end: sums of weighted values
  };
  KeyScales<kDim> scales[4];  // [group % 4]
  CodeBlocks<kDim> values;
  uint4 value_scales[kGroupTokens / 4];      // minima [64], then steps; finite at all times
  uint4 rows[kFineTile][Shape::kRowPieces];  // lower rows of fine tokens
  // All tokens' coarse sums, where some are fine. Rows of eight tokens lie in banks of their own.
  float sums[kGroupTokens + kGroupTokens / 8][kHeads];
  float base[kHeads];            // added to what sums give, by head, with the centre of fine cells
  uint4 weights[2][4 * kHeads];  // StripWeights of lanes 4 head + strip
  uint8_t fine[kGroupTokens];    // numbers of fine tokens in the group
  float m[kHeads], l[kHeads];

  __device__ float* Sums(int token) { return sums[token + token / 8]; }
  __device__ const float* Sums(int token) const { return sums[token + token / 8]; }
  __device__ __half ValueMinimum(int token) const {
    return reinterpret_cast<const __half*>(value_scales)[token];
  }
  __device__ __half ValueStep(int token) const { return ValueMinimum(kGroupTokens + token); }
};

// Where the groups of one sequence and KV head lie.
template <int kDim>
struct PlanesItem {
  const uint64_t *upper, *lower;  // blocks of the sequence
  int64_t upper_offset, lower_offset;
  int32_t shift, in_block;  // groups of a block: 2^shift, and that - 1
  int32_t row_bytes;        // a token's lower row
  bool has_last_plane;

  __device__ static PlanesItem Of(const DevicePlanes& p, int sequence, int head) {
    const int64_t first = int64_t{sequence} * p.block_stride;
    return {p.upper.blocks + first,
            p.lower.blocks + first,
            p.upper.offset + head * p.upper.head_stride,
            p.lower.offset + head * p.lower.head_stride,
            31 - __clz(p.block_groups),
            p.block_groups - 1,
            p.format.keep == 8 ? kDim * 3 / 2 : kDim / 2,
            p.format.keep == 8};
  }
  // The first read of an entry comes from the L2: PlanesWarp asks for it a visit ahead.
  __device__ uint64_t UpperBlock(int group) const { return upper[group >> shift]; }
  __device__ uint64_t UpperIn(uint64_t block, int group) const {
    return FirstRunIn(block, upper_offset) +
           int64_t{group & in_block} * GroupShape<kDim>::kUpperBytes;
  }
  __device__ uint64_t Upper(int group) const { return UpperIn(UpperBlock(group), group); }
  __device__ uint64_t LowerBlock(int group) const { return lower[group >> shift]; }
  __device__ uint64_t LowerIn(uint64_t block, int group) const {
    return FirstRunIn(block, lower_offset) + int64_t{group & in_block} * kGroupTokens * row_bytes;
  }
  __device__ uint64_t Lower(int group) const { return LowerIn(LowerBlock(group), group); }
};

// Keys of a group, but for lower digits. By a warp; nothing is committed.
template <int kDim>
__device__ __forceinline__ void CopyKeys(CodeBlocks<kDim>& codes, KeyScales<kDim>& scales,
                                         uint64_t upper, uint64_t policy) {
  codes.Ask(upper + GroupShape<kDim>::kKeyCodes, 0xF,
            [policy](uint4* to, uint64_t from) { CopyOfRun(to, from, policy); });
  scales.Ask(upper, policy);
}

// The place in its block of a lane's words of keys: word u of chunk L is 16 u + 2 L pieces on.
__device__ __forceinline__ int KeyPiece() {
  const int g = threadIdx.x % 32 / 4;
  return 4 * (g / 2) + g % 2;
}

// Copies of a warp. Nothing is committed here.
template <int kDim, int kHeads>
struct PlanesCopier {
  using Shape = GroupShape<kDim>;
  WarpMemory<kDim, kHeads>* to;
  uint64_t policy;
  int lane;

  __device__ PlanesCopier(WarpMemory<kDim, kHeads>* memory, uint64_t policy = ReadOncePolicy())
      : to(memory), policy(policy), lane(threadIdx.x % 32) {}

  // number: the group's, of those that the warp takes.
  __device__ void Keys(int number, uint64_t upper) const {
    CopyKeys(to->codes[number % 2], to->scales[number % 4], upper, policy);
  }

  // strips: a bit for each that is read.
  __device__ void Values(uint32_t strips, uint64_t upper) const {
    to->values.Ask(upper + Shape::kValueCodes, strips,
                   [policy = policy](uint4* at, uint64_t from) { CopyOfSector(at, from, policy); });
    if (lane < kGroupTokens / 4 && (strips >> (lane % 8 / 2) & 1)) {
      CopyOfSector(&to->value_scales[lane], upper + Shape::kValueScales + 16 * lane, policy);
    }
  }

  // Rows of fine tokens number first .. first + count - 1 of a group, at most kFineTile. Hot:
  // hot_rows.cuh.
  template <typename Hot>
  __device__ void Rows(int first, int count, uint64_t lower, int row_bytes, int group,
                       Hot& hot) const {
    if constexpr (Hot::kIsOn) {
#pragma unroll 1
      for (int row = 0; row < count; ++row) {
        const int token = to->fine[first + row];
        const uint64_t from =
            hot.Find(group, row, token, lower + static_cast<uint32_t>(token * row_bytes));
        if (16 * lane >= row_bytes) continue;
        CopyOfSector(&to->rows[row][lane], from + 16 * lane, policy);
      }
      return;
    }
    constexpr int kLanes = kDim / 8;  // a row's
    const int piece = lane % kLanes;
#pragma unroll 1
    for (int row = lane / kLanes; row < count; row += 32 / kLanes) {
      if (16 * piece >= row_bytes) break;
      CopyOfSector(&to->rows[row][piece],
                   lower + static_cast<uint32_t>(to->fine[first + row] * row_bytes + 16 * piece),
                   policy);
    }
  }
};

}  // namespace kvstrata::cuda
