// SPDX-License-Identifier: Apache-2.0
// Strips that are read, of any groups of one (sequence, KV head): what is left of them to do when
// their groups are scored, and tiles of up to four of them, which a warp does at once.
//
// A tile is like a group of four strips whose scales of keys differ: token 16 t + i is token i of
// strip t, which lanes of t have in hand.
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_TILE_CUH_
#define KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_TILE_CUH_

#include "kernels/cuda/warps/exp2.cuh"
#include "kernels/ops/attend_planes/coarse_values.cuh"
#include "kernels/ops/attend_planes/fine_rows.cuh"

namespace kvstrata::cuda {

// A strip that is read, in shared memory.
template <int kDim, int kHeads>
struct DeferredStrip {
  uint4 weights[2][kHeads];            // coarse ones (StripWeights)
  float logits[kStripTokens][kHeads];  // of fine tokens, but for lower digits
  uint4 steps[kDim / 8];               // of its group's keys, where a token is fine
  uint64_t upper, lower;               // addresses: its group's upper run, its first lower row
  uint32_t in_group;                   // 0 .. 3
  uint32_t fine;                       // a bit for each token
};

// What a warp has in shared memory of a tile.
template <int kDim>
struct StripTile {
  uint4 values[GroupShape<kDim>::kPieces][32];  // [k][4 g + t]
  uint4 value_scales[kGroupTokens / 4];         // minima [64], then steps
  uint4 rows[kFineTile * kDim * 3 / 2 / 16];    // lower rows of fine tokens
  uint64_t lower[kGroupStrips];                 // first lower rows
  uint8_t fine[kGroupTokens];                   // numbers of fine tokens

  __device__ const char* Row(int i, int row_bytes) const {
    return reinterpret_cast<const char*>(rows) + i * row_bytes;
  }
  __device__ __half ValueMinimum(int token) const {
    return reinterpret_cast<const __half*>(value_scales)[token];
  }
  __device__ __half ValueStep(int token) const { return ValueMinimum(kGroupTokens + token); }

  // Lower rows of fine tokens number first .. first + count - 1, at most kFineTile. By a warp.
  __device__ __forceinline__ void CopyRows(int first, int count, int row_bytes, uint64_t policy) {
    constexpr int kLanes = kDim / 8;  // a row's
    const int lane = threadIdx.x % 32, piece = lane % kLanes;
    if (16 * piece >= row_bytes) return;
#pragma unroll 1
    for (int row = lane / kLanes; row < count; row += 32 / kLanes) {
      const uint32_t token = fine[first + row];
      CopyOfSector(&rows[row * row_bytes / 16 + piece],
                   lower[token / kStripTokens] + token % kStripTokens * row_bytes + 16 * piece,
                   policy);
    }
  }
};

// Strip t of a tile, in lanes of t. Without it there is none.
template <int kDim, int kHeads>
struct LaneStrip {
  const DeferredStrip<kDim, kHeads>* all;  // the CTA's first
  uint32_t bytes = 0;                      // from there to this one
  bool exists = false;
  int fine = 0;  // tokens, of all strips of the tile

  __device__ __forceinline__ const DeferredStrip<kDim, kHeads>& At(uint32_t offset) const {
    return *reinterpret_cast<const DeferredStrip<kDim, kHeads>*>(
        reinterpret_cast<const char*>(all) + offset);
  }

  // Asks for it. Barrier of the warp before; nothing is committed.
  __device__ __forceinline__ void Ask(StripTile<kDim>& tile, int row_bytes, uint64_t policy) {
    using Shape = GroupShape<kDim>;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const auto& strip = At(bytes);
    uint32_t mask = 0;
    uint4& scales = tile.value_scales[8 * (g / 2 % 2) + 2 * t + g % 2];
    if (exists) {
      mask = strip.fine;
      const uint32_t number = strip.in_group;
      const uint64_t from = strip.upper + Shape::kValueCodes + Shape::kStripBytes * number + 16 * g;
#pragma unroll
      for (int k = 0; k < Shape::kPieces; ++k) {
        CopyOfSector(&tile.values[k][lane], from + 128 * k, policy);
      }
      if (g < 4) {
        const uint32_t at = 16 * (8 * (g / 2) + 2 * number + g % 2);
        CopyOfSector(&scales, strip.upper + Shape::kValueScales + at, policy);
      }
    } else if (g < 4) {
      scales = {0, 0, 0, 0};
    }
    const int own = __popc(mask);
    int before = 0;
    fine = 0;
#pragma unroll
    for (int other = 0; other < kGroupStrips; ++other) {
      const int count = __shfl_sync(kAllLanes, own, other);
      if (other < t) before += count;
      fine += count;
    }
    if (fine == 0) return;
    if (g == 0) tile.lower[t] = strip.lower;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * g + i;
      if ((mask >> token & 1) == 0) continue;
      tile.fine[before + __popc(mask & ((1u << token) - 1))] =
          static_cast<uint8_t>(kStripTokens * t + token);
    }
    __syncwarp();
    tile.CopyRows(0, min(fine, kFineTile), row_bytes, policy);
  }

  __device__ __forceinline__ StripWeights Weights() const {
    StripWeights out{};
    if (!exists) return out;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint4 four = At(bytes).weights[pair][threadIdx.x % 32 / 4 % kHeads];
#pragma unroll
      for (int m = 0; m < 4; ++m) out.at[pair][m] = PartOf(four, m);
    }
    return out;
  }
};

// Four codes of lower digits: bytes of channels 0, 2, 1, 3 of a word of run m.
__device__ __forceinline__ uint32_t LowerCodes(uint32_t plane1, uint32_t plane2, int m) {
  const uint32_t high = m < 2 ? plane1 << (4 - 2 * m) : plane1 >> (2 * m - 4);
  return (high & 0x30303030u) | (plane2 >> 4 * (m / 2) & 0x0F0F0F0Fu);
}

// Two codes, which are low bytes of half words, times their steps.
__device__ __forceinline__ uint32_t StepsTimes(uint32_t codes, __half2 step) {
  const __half2 x = __hadd2(HalvesOf((codes & 0x00FF00FFu) | 0x64006400u), __float2half2_rn(-1024));
  return BitsOf(__hmul2(x, step));
}

// Logits of fine token first + g of a tile, whose rows have arrived, for heads 2t and 2t + 1.
// Beyond the list they are anything.
template <int kDim, int kHeads>
__device__ __forceinline__ void TileLogits(const StripTile<kDim>& tile,
                                           const LaneStrip<kDim, kHeads>& strips, int first,
                                           const FineForm& form, const SharedQuery<kDim>& query,
                                           const LaneFactors& factors, float (&logits)[2]) {
  constexpr int kWords = GroupShape<kDim>::kWords;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int token = tile.fine[(first + g) % kGroupTokens] % kGroupTokens;
  const auto& strip = strips.At(__shfl_sync(kAllLanes, strips.bytes, token / kStripTokens));
  LanePairs<kDim, 2> steps;
  steps.Load(reinterpret_cast<const char*>(strip.steps), t);
  const auto* const row =
      reinterpret_cast<const uint32_t*>(tile.Row(g, form.row_bytes)) + kWords * t;
  uint32_t plane1[kWords], plane2[2][kWords];
#pragma unroll
  for (int u = 0; u < kWords; ++u) {
    plane1[u] = row[u];
    plane2[0][u] = form.has_last_plane ? row[kDim / 16 + u] : 0;
    plane2[1][u] = form.has_last_plane ? row[kDim / 8 + u] : 0;
  }
  float c[2][4] = {};
#pragma unroll
  for (int quad = 0; quad < SharedQuery<kDim>::kQuads; ++quad) {
    const uint4 q = query.plain[quad][lane];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int word = 2 * quad + i, m = word / kWords, u = word % kWords;
      const uint32_t codes = LowerCodes(plane1[u], plane2[m % 2][u], m);
      MmaM16N8K16<__half>(c[i], StepsTimes(codes, steps.at[m][u][0]), 0,
                          StepsTimes(codes >> 8, steps.at[m][u][1]), 0, i == 0 ? q.x : q.y,
                          i == 0 ? q.z : q.w);
    }
  }
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    logits[head] = fmaf(c[0][head] + c[1][head], factors.base[head],
                        strip.logits[token % kStripTokens][(2 * t + head) % kHeads]);
  }
}

// What a warp sums of tiles, in its memory: values in o, and weights here. Relative to 2^raised of
// each head, since one token may weigh any number of times what the normaliser says.
template <int kDim, int kHeads>
class TileSums {
 public:
  // Fine tokens first .. first + count - 1, at most kFineTile. weights: room for theirs.
  __device__ __forceinline__ void AddFine(float (&o)[kHeads][kDim],
                                          float (&weights)[kFineTile][kHeads],
                                          const StripTile<kDim>& tile, int first, int count,
                                          const FineForm& form, const float (&logits)[2]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const bool exists = g < count;
    const bool beyond = logits[0] - raised_[0] > kRoom || logits[1] - raised_[1] > kRoom;
    if (__any_sync(kAllLanes, exists && beyond)) Raise(o, exists, logits);
    if (exists) {
      const float2 pair = {Exp2(logits[0] - raised_[0]), Exp2(logits[1] - raised_[1])};
      l_[0] += pair.x;
      l_[1] += pair.y;
      if (2 * t < kHeads) *reinterpret_cast<float2*>(&weights[g][2 * t]) = pair;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < (kQuads + 31) / 32; ++i) {
      const int quad = lane + 32 * i;
      if (quad >= kQuads) break;
      float4 sums[kHeads];
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        sums[head] = reinterpret_cast<const float4*>(o[head])[quad];
      }
#pragma unroll 2
      for (int row = 0; row < count; ++row) {
        const float4 value = FineValue<kDim>(tile, tile.fine[first + row], row, quad, form);
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          const float weight = weights[row][head];
          float4& x = sums[head];
          x = {fmaf(weight, value.x, x.x), fmaf(weight, value.y, x.y), fmaf(weight, value.z, x.z),
               fmaf(weight, value.w, x.w)};
        }
      }
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        reinterpret_cast<float4*>(o[head])[quad] = sums[head];
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void AddCoarse(float (&o)[kHeads][kDim],
                                            const ValueSums<kDim>& values) {
    const float factor[2] = {Exp2(-raised_[0]), Exp2(-raised_[1])};
    float l[2];
    values.Store(o, factor, l);
    if (threadIdx.x % 32 >= 4) return;
    l_[0] += l[0];
    l_[1] += l[1];
  }

  __device__ const float (&raised() const)[2] { return raised_; }
  // Over all lanes.
  __device__ void Weights(float (&l)[2]) const {
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      l[head] = l_[head];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) l[head] += __shfl_xor_sync(kAllLanes, l[head], step);
    }
  }

 private:
  static constexpr float kRoom = 60;
  static constexpr int kQuads = kDim / 4;

  // To the largest of the logits, where that is larger.
  __device__ __forceinline__ void Raise(float (&o)[kHeads][kDim], bool exists,
                                        const float (&logits)[2]) {
    float factor[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float top = exists ? fmaxf(raised_[head], logits[head]) : raised_[head];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
      }
      factor[head] = Exp2(raised_[head] - top);
      raised_[head] = top;
      l_[head] *= factor[head];
    }
    for (int head = 0; head < kHeads; ++head) {
      const float of_even = __shfl_sync(kAllLanes, factor[0], head / 2);
      const float of_odd = __shfl_sync(kAllLanes, factor[1], head / 2);
      for (int c = threadIdx.x % 32; c < kDim; c += 32) {
        o[head][c] *= head % 2 == 0 ? of_even : of_odd;
      }
    }
    __syncwarp();
  }

  float l_[2] = {}, raised_[2] = {};  // this lane's tokens, heads 2t and 2t + 1
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PLANES_STRIP_TILE_CUH_
