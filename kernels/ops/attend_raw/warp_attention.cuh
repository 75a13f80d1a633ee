// SPDX-License-Identifier: Apache-2.0
// Attention of one warp over strips of rows. Every row goes from memory to registers in 16-byte
// pieces and from there into tensor cores:
//
//   scores   S[16 rows][8 heads] = K Q^T. A is K: lane (g, t) loads 8 channels of rows g and g + 8.
//            Channels of a product may come in any order if Q's come in the same.
//   weights  P = exp2(S - m), transposed in registers to the B of the next product.
//   output   O^T[channels][8 heads] += V^T P^T. A is V^T: lane (g, t) loads 8 channels of rows 2t,
//            2t + 1, 2t + 8, 2t + 9, and byte permutes pair the rows.
//
// With at most 8 query heads a KV head, no column is wasted. The keys of the next tile are asked
// for as soon as this tile's are used up, then the values: all but a small part of the time a warp
// has 8 KiB (head_dim 64: 4 KiB) in flight; 12 warps an SM. Asking the L2 for the next strip as
// well made everything 6 % slower.
#pragma once

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/attend_raw/attend_raw_cuda.h"
#include "kernels/ops/attend_raw/work_share.cuh"
#include "kernels/ops/merge/tile_softmax.cuh"

namespace kvstrata::cuda {

inline constexpr int kWarps = 4;
inline constexpr int kThreads = 32 * kWarps;
inline constexpr int kHeads = 8;      // query heads of a product
inline constexpr int kTileRows = 16;  // rows of a product
inline constexpr int kCtasMax = 640;

struct Arguments {
  RowSource rows;
  const std::byte* q;
  int64_t q_stride;
  float scale;  // with log2(e)
  int32_t batch, group;
  bool ahead, by_heads;  // the latter: work_share.cuh
  DeviceSource new_k, new_v;
  NotFiniteWords not_finite;
  KeptQueries kept;
  Partials with, partial;
  AttentionOutput to;
  uint4* split_o;   // [slots][group][head_dim / 4]: splits on their way (split_exchange.cuh)
  uint2* split_ml;  // [slots][group], m in powers of two
};

template <int kDim>
struct Shape {
  static constexpr int kChunk = kDim < 128 ? kDim : 128;  // channels of a tile in registers
  static constexpr int kChunks = kDim / kChunk;
  static constexpr int kKeyLoads = kChunk / 32;                    // a row and lane
  static constexpr int kValueLoads = kChunk / 64;                  // a row and lane
  static constexpr int kPieces = 2 * kKeyLoads + 4 * kValueLoads;  // 16 bytes of a tile, a lane's
  static constexpr int kColumns = kDim / 4;                        // float4 of a row
  static constexpr int kCtasPerSm = kDim == 256 ? 2 : kDim == 128 ? 3 : 4;
};

template <int kDim>
struct Shared {
  CtaTask task;
  float m[kWarps][kHeads], l[kWarps][kHeads];
  float new_score[kHeads];
  union {  // a warp's own, up to the barrier when all have their sums
    uint4 stash[Shape<kDim>::kPieces][32];  // by lane, while it attends
    alignas(16) float o[kHeads][kDim];
  } warps[kWarps];
  float4 part_o[kThreads];  // for a merge, by thread
  float2 part_ml[kThreads];
};

__device__ __forceinline__ uint64_t AddressOf(uint64_t lane_address, int lane) {
  return __shfl_sync(kAllLanes, lane_address, lane);
}

// Attention of one warp over its strips, for the query heads of one KV head.
template <typename T, int kDim>
class WarpAttention {
  using S = Shape<kDim>;

 public:
  __device__ __forceinline__ WarpAttention(const Arguments& a, Shared<kDim>& shared, int sequence,
                                           int kv_head)
      : lane_(threadIdx.x % 32),
        g_(lane_ / 4),
        t_(lane_ % 4),
        to_values_(a.rows.layer.value_offset - a.rows.layer.key_offset),
        scale_(a.scale),
        stash_(&shared.warps[threadIdx.x / 32].stash[0][lane_]),
        q_from_(a.q + sequence * a.q_stride + int64_t{kv_head * a.group + g_} * kDim * 2) {
    if (g_ >= a.group) q_from_ = nullptr;
  }

  // The second half of a warp's only strip waits in shared memory, so that all of its rows are on
  // their way at once.
  static constexpr bool kStashes = S::kChunks == 1;

  // The warp's strips of the rounds at begin, begin + step, ... below `end`: one of four; where
  // there are but two in all, half of one. Waits for the kernel before: behind the first loads of
  // rows, or ahead of them where that kernel may write one.
  __device__ __forceinline__ void Run(const RowSource& from, const AttendedRows& rows, int sequence,
                                      int kv_head, int32_t begin, int32_t end, int32_t step) {
    const int warp = threadIdx.x / 32;
    const bool halves = 2 * (end - begin) <= kWarps;
    const int32_t first = begin + (halves ? warp / 2 : warp);
    if (first >= end || rows.tokens == 0) return WaitForPrevious();
    RowStream stream(from, rows, sequence, kv_head, first, step, end);
    const int row = halves ? warp % 2 * kTileRows : 0;
    if (!from.newest_apart && rows.MayHoldNewest(first)) WaitForPrevious();
    LoadKeys(stream.key, row, 0);
    LoadValues(stream.key, row, 0);
    const bool stashes = kStashes && !halves && first + step >= end;
    if (stashes) {
      StashTile(stream.key, kTileRows);
    } else if (!halves && lane_ >= kTileRows) {
      PrefetchRow(stream.key);
    }
    LetNextStart();
    WaitForPrevious();
    LoadQueries();
    if (halves) {
      return Tile(stream.present >> row & 0xFFFFu, stream.key, row, stream.key, row, false);
    }
    if (stashes) {
      Tile(stream.present & 0xFFFFu, stream.key, 0, stream.key, 0, false);
      TakeStash();
      return Tile(stream.present >> kTileRows, stream.key, 0, stream.key, 0, false);
    }
    for (int32_t strip = first; strip < end; strip += step) {
      const uint64_t key = stream.key;
      const uint32_t present = stream.present;
      Tile(present & 0xFFFFu, key, 0, key, kTileRows, true);
      stream.Advance();
      Tile(present >> kTileRows, key, kTileRows, stream.key, 0, strip + step < end);
    }
  }

  __device__ __forceinline__ void SumWeights() { softmax_.SumWeights(); }
  // Maxima, sums, and the output relative to the maxima.
  __device__ __forceinline__ void Store(Shared<kDim>& shared, int warp, int group) const {
    __syncwarp();  // the stash is used up
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = 2 * t_ + i;
      if (g_ == 0) {
        shared.m[warp][head] = softmax_.m[i];
        shared.l[warp][head] = softmax_.l[i];
      }
      if (head >= group) continue;
#pragma unroll
      for (int j = 0; j < kDim / 64; ++j) {
        auto* const o = reinterpret_cast<float4*>(&shared.warps[warp].o[head][64 * j + 8 * g_]);
        const auto* x = &softmax_.o[4 * j];
        o[0] = {x[0][i], x[0][2 + i], x[1][i], x[1][2 + i]};
        o[1] = {x[2][i], x[2][2 + i], x[3][i], x[3][2 + i]};
      }
    }
  }

 private:
  // Where a lane keeps piece i of a tile: what it copies it alone reads, so no barrier is needed.
  __device__ __forceinline__ static void Copy(uint4* to, uint64_t from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(
                     static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                 "l"(from)
                 : "memory");
  }
  __device__ __forceinline__ void StashTile(uint64_t key, int row) {
    uint4* to = stash_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t from = AddressOf(key, row + 8 * half + g_) + t_ * 16;
#pragma unroll
      for (int i = 0; i < S::kKeyLoads; ++i, to += 32) Copy(to, from + i * 64);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint64_t from =
          AddressOf(key, row + 2 * t_ + (r & 1) + 8 * (r >> 1)) + to_values_ + g_ * 16;
#pragma unroll
      for (int j = 0; j < S::kValueLoads; ++j, to += 32) Copy(to, from + j * 128);
    }
  }
  __device__ __forceinline__ void TakeStash() {
    asm volatile("cp.async.wait_all;" ::: "memory");
    const uint4* from = stash_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < S::kKeyLoads; ++i, from += 32) k_[half][i] = *from;
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int j = 0; j < S::kValueLoads; ++j, from += 32) v_[r][j] = *from;
    }
  }
  // Into the L2: the strip's other rows are on their way with the first ones.
  __device__ __forceinline__ void PrefetchRow(uint64_t key) const {
#pragma unroll
    for (int line = 0; line < kDim * 2; line += 128) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(key + line));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(key + to_values_ + line));
    }
  }
  __device__ __forceinline__ void LoadQueries() {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      q_[i] = q_from_ != nullptr ? reinterpret_cast<const uint4*>(q_from_)[4 * i + t_]
                                 : uint4{0, 0, 0, 0};
    }
  }
  // Rows [row, row + 16) of the strip at `key`, then asks for those at next_key.
  __device__ __forceinline__ void Tile(uint32_t present, uint64_t key, int row, uint64_t next_key,
                                       int next_row, bool has_next) {
    float s[4] = {0, 0, 0, 0};
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c) {
      AddScores(c, s);
      if (c + 1 < S::kChunks) {
        LoadKeys(key, row, c + 1);
      } else if (has_next) {
        LoadKeys(next_key, next_row, 0);
      }
    }
    uint32_t p0 = 0, p1 = 0;
    if (present != 0) softmax_.template Weigh<T>(present, scale_, s, p0, p1);
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c) {
      if (present != 0) AddValues(c, p0, p1);
      if (c + 1 < S::kChunks) {
        LoadValues(key, row, c + 1);
      } else if (has_next) {
        LoadValues(next_key, next_row, 0);
      }
    }
  }

  static __device__ __forceinline__ uint4 Load(uint64_t address) {
    return kDim < 128 ? LoadOnce128(address) : LoadOnce256(address);
  }
  __device__ __forceinline__ void LoadKeys(uint64_t key, int row, int chunk) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t from = AddressOf(key, row + 8 * half + g_) + chunk * 256 + t_ * 16;
#pragma unroll
      for (int i = 0; i < S::kKeyLoads; ++i) k_[half][i] = Load(from + i * 64);
    }
  }
  __device__ __forceinline__ void LoadValues(uint64_t key, int row, int chunk) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint64_t from = AddressOf(key, row + 2 * t_ + (r & 1) + 8 * (r >> 1)) + to_values_ +
                            chunk * 256 + g_ * 16;
#pragma unroll
      for (int j = 0; j < S::kValueLoads; ++j) v_[r][j] = Load(from + j * 128);
    }
  }

  // s[0..3]: rows g and g + 8, heads 2t and 2t + 1.
  __device__ __forceinline__ void AddScores(int chunk, float (&s)[4]) {
    float odd[4] = {0, 0, 0, 0};  // two chains of products instead of one twice as long
#pragma unroll
    for (int i = 0; i < S::kKeyLoads; ++i) {
      const uint4 a = k_[0][i], b = k_[1][i], q = q_[chunk * S::kKeyLoads + i];
      MmaM16N8K16<T>(s, a.x, b.x, a.y, b.y, q.x, q.y);
      MmaM16N8K16<T>(odd, a.z, b.z, a.w, b.w, q.z, q.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] += odd[i];
  }

  // Product e of a 64-channel piece j holds channels 64j + 8g + 2e (rows g) and the next (g + 8).
  __device__ __forceinline__ void AddValues(int chunk, uint32_t p0, uint32_t p1) {
#pragma unroll
    for (int j = 0; j < S::kValueLoads; ++j) {
      auto* o = &softmax_.o[4 * (chunk * S::kValueLoads + j)];
      const uint4 a = v_[0][j], b = v_[1][j], c = v_[2][j], d = v_[3][j];
      AddPair(o[0], a.x, b.x, c.x, d.x, p0, p1);
      AddPair(o[1], a.y, b.y, c.y, d.y, p0, p1);
      AddPair(o[2], a.z, b.z, c.z, d.z, p0, p1);
      AddPair(o[3], a.w, b.w, c.w, d.w, p0, p1);
    }
  }
  __device__ __forceinline__ static void AddPair(float (&o)[4], uint32_t a, uint32_t b, uint32_t c,
                                                 uint32_t d, uint32_t p0, uint32_t p1) {
    MmaM16N8K16<T>(o, LowHalves(a, b), HighHalves(a, b), LowHalves(c, d), HighHalves(c, d), p0, p1);
  }

  const int lane_, g_, t_;
  const int64_t to_values_;
  const float scale_;
  uint4* const stash_;       // the lane's
  const std::byte* q_from_;  // head g; null: there is none
  uint4 q_[kDim / 32];       // head g, channels 32i + 8t ..
  uint4 k_[2][S::kKeyLoads];
  uint4 v_[4][S::kValueLoads];
  TileSoftmax<kDim / 16> softmax_;  // products by AddValues
};

}  // namespace kvstrata::cuda
