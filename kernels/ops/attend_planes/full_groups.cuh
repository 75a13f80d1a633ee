// SPDX-License-Identifier: Apache-2.0
// A warp's share of the groups of one (sequence, KV head) where everything is fine: all digits of
// all keys and values, as one stream.
//
// A key's digits make fp16 numbers 2^-24 times their code, which meet 64 times query times step on
// tensor cores. Values' plane 0 is attended as coarse_values.cuh does it; lower digits, which lie
// by token and not by channel, in sums of their own, with the same weights. While keys of a group
// are scored its values are under way, and the other way round.
#pragma once

#include "kernels/cuda/warps/exp2.cuh"
#include "kernels/ops/attend_planes/lower_values.cuh"

namespace kvstrata::cuda {

// A warp's shared memory.
template <int kDim, int kHeads>
struct alignas(kLineBytes) FullMemory {
  using Shape = GroupShape<kDim>;
  static constexpr int kHalfRowPieces = kDim * 3 / 4 / 16;  // half a lower row's, 16 bytes each
  CodeBlocks<kDim> codes;                                   // keys'
  KeyScales<kDim> scales;
  CodeBlocks<kDim> values;
  uint4 value_scales[kGroupTokens / 4];
  uint4 value_rows[kGroupTokens * kHalfRowPieces];  // [token % 16][token / 16]
  union {
    uint4 key_rows[kGroupTokens * kHalfRowPieces];  // [TokenOf's i][lane / 4]
    float o[kHeads][kDim];                          // at the end: sums of weighted values
  };
  float m[kHeads], l[kHeads];
};

// Codes of 8 bits of 16 channels: at[m] has bytes of channels 0, 2, 1, 3 of a word of run m.
struct WholeCodes {
  uint32_t at[4];

  // A word of plane 2 has runs 0 and 2 in its nibbles, or 1 and 3. Planes 0 and 1 are joined to
  // such words first, which is half of the work: two runs at once.
  __device__ __forceinline__ static WholeCodes Of(uint32_t plane0, uint32_t plane1,
                                                  const uint32_t (&plane2)[2]) {
    constexpr uint32_t kHighPairs = 0xCCCCCCCCu, kHighNibbles = 0xF0F0F0F0u;
    const uint32_t even = SelectBits(kHighPairs, plane0 << 2, plane1);
    const uint32_t odd = SelectBits(kHighPairs, plane0, plane1 >> 2);
    return {{SelectBits(kHighNibbles, even << 4, plane2[0]),
             SelectBits(kHighNibbles, odd << 4, plane2[1]),
             SelectBits(kHighNibbles, even, plane2[0] >> 4),
             SelectBits(kHighNibbles, odd, plane2[1] >> 4)}};
  }
};

// Every second byte of a word as a half word.
__device__ __forceinline__ uint32_t EvenBytes(uint32_t x) { return x & 0x00FF00FF; }
__device__ __forceinline__ uint32_t OddBytes(uint32_t x) { return __byte_perm(x, 0, 0x4341); }

template <int kDim, int kHeads>
class FullGroups {
 public:
  using Memory = FullMemory<kDim, kHeads>;
  using Shape = GroupShape<kDim>;

  // Groups first, first + step, .. below `groups`. Copies of the first begin here.
  __device__ FullGroups(const PlanesItem<kDim>& item, Memory* memory, int first, int step,
                        int groups)
      : item_(item),
        memory_(*memory),
        policy_(ReadOncePolicy()),
        form_{item.has_last_plane, item.row_bytes},
        first_(first),
        step_(step),
        groups_(groups) {
    if (first < groups) {
      upper_ = item.Upper(first);
      lower_ = item.Lower(first);
      AskKeys();
    }
    CommitCopies();
  }

  // ones: 16 of them, fp16, in shared memory.
  __device__ __forceinline__ void Run(const SharedQuery<kDim>& query, const LaneFactors& factors,
                                      const uint4* ones) {
#pragma unroll 1
    for (int group = first_; group < groups_; group += step_) {
      AskValues();
      CommitCopies();
      const bool has_next = group + step_ < groups_;
      if (has_next) {
        upper_ = item_.Upper(group + step_);
        lower_ = item_.Lower(group + step_);
      }
      WaitForCopies<1>();
      __syncwarp();
      float logits[2][8];
      Score(query, factors, logits);
      __syncwarp();
      if (has_next) AskKeys();
      CommitCopies();
      __syncwarp();  // Weigh transposes, for which lanes must be together
      const StripWeights weights = Weigh(logits);
      WaitForCopies<1>();
      __syncwarp();
      values_.Add(memory_, weights, ones);
      lower_values_.Add(memory_, weights, form_);
      __syncwarp();
    }
    WaitForCopies<0>();
  }

  // Sums of the warp to its memory.
  __device__ __forceinline__ void Store() {
    const int lane = threadIdx.x % 32;
    const float none[2] = {};
    float l[2];
    __syncwarp();
    values_.Store(memory_.o, form_.centre(), none, l);
    lower_values_.Store(memory_.o);
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      if (lane >= kHeads / 2) continue;
      memory_.m[2 * lane + head] = l[head] == 0 ? -INFINITY : top_[head];
      memory_.l[2 * lane + head] = l[head];
    }
  }

 private:
  static constexpr float kRoom = 6;  // log2 of a weight, at most

  // Halves of the rows of the group, in the order that lanes read them.
  template <typename SlotToken>
  __device__ __forceinline__ void AskRows(uint4* to, uint64_t from, const SlotToken& token_of) {
    const int pieces = item_.row_bytes / 32;
    constexpr int kLanes = kDim / 16;  // at least as many as there are pieces
    const int lane = threadIdx.x % 32, piece = lane % kLanes;
    if (piece >= pieces) return;
    // Unrolled for other dims, ptxas 13.0 makes LDGSTS with uniform offsets of it, which trap.
    constexpr int kUnrolled = kDim == 128 ? 4 : 1;
#pragma unroll kUnrolled
    for (int slot = lane / kLanes; slot < kGroupTokens; slot += 32 / kLanes) {
      CopyOfSector(&to[slot * pieces + piece], from + token_of(slot) * item_.row_bytes + 16 * piece,
                   policy_);
    }
  }

  __device__ __forceinline__ void AskKeys() {
    CopyKeys(memory_.codes, memory_.scales, upper_, policy_);
    AskRows(memory_.key_rows, lower_, [](int slot) { return TokenOf(4 * (slot % 8), slot / 8); });
  }

  __device__ __forceinline__ void AskValues() {
    const int lane = threadIdx.x % 32;
    memory_.values.Ask(
        upper_ + Shape::kValueCodes, 0xF,
        [policy = policy_](uint4* to, uint64_t from) { CopyOfRun(to, from, policy); });
    if (lane < kGroupTokens / 4) {
      CopyOfRun(&memory_.value_scales[lane], upper_ + Shape::kValueScales + 16 * lane, policy_);
    }
    AskRows(memory_.value_rows, lower_ + item_.row_bytes / 2,
            [](int slot) { return slot % kGroupStrips * kStripTokens + slot / kGroupStrips; });
  }

  // Logits of the lane's tokens for heads 2t and 2t + 1.
  __device__ __forceinline__ void Score(const SharedQuery<kDim>& query, const LaneFactors& factors,
                                        float (&logits)[2][8]) const {
    constexpr int kWords = Shape::kWords;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    GroupSums sums;
    SumOverChannels(memory_.scales, query, sums);
    LanePairs<kDim, 2> folded;
    FoldAll(memory_.scales, query, folded);
    const uint4* const codes = memory_.codes.Block(t) + KeyPiece();
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {  // tokens 2 tile and 2 tile + 1 of the lane's
      float c[2][4] = {};
#pragma unroll
      for (int u = 0; u < kWords; ++u) {
        const uint4 four = codes[16 * u + tile / 2 * 2];
        WholeCodes x[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto* const row = reinterpret_cast<const uint32_t*>(memory_.key_rows) +
                                  (8 * (2 * tile + i) + g) * (form_.row_bytes / 8) + kWords * t + u;
          const uint32_t plane2[2] = {form_.has_last_plane ? row[kDim / 16] : 0,
                                      form_.has_last_plane ? row[kDim / 8] : 0};
          x[i] = WholeCodes::Of(PartOf(four, 2 * (tile % 2) + i), row[0], plane2);
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          MmaM16N8K16<__half>(c[m % 2], EvenBytes(x[0].at[m]), EvenBytes(x[1].at[m]),
                              OddBytes(x[0].at[m]), OddBytes(x[1].at[m]),
                              BitsOf(folded.at[m][u][0]), BitsOf(folded.at[m][u][1]));
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        logits[i % 2][2 * tile + i / 2] = fmaf(c[0][i] + c[1][i], factors.code[i % 2] * (1.0f / 64),
                                               sums.Base(factors, i % 2, form_.centre()));
      }
    }
  }

  // 64 times query times step: a code of 8 bits counts 2^-24 in products.
  __device__ __forceinline__ static void FoldAll(const KeyScales<kDim>& scales,
                                                 const SharedQuery<kDim>& query,
                                                 LanePairs<kDim, 2>& folded) {
    constexpr int kWords = Shape::kWords;
    folded.Load(scales.Steps(), threadIdx.x % 4);
    const __half2 size = __float2half2_rn(64);
#pragma unroll
    for (int quad = 0; quad < SharedQuery<kDim>::kQuads; ++quad) {
      const uint4 four = query.plain[quad][threadIdx.x % 32];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = 2 * quad + i / 2;
        __half2& step = folded.at[word / kWords][word % kWords][i % 2];
        const uint32_t pair = PartOf(four, i / 2 + i % 2 * 2);  // first pairs of both words first
        step = __hmul2(step, __hmul2(HalvesOf(pair), size));
      }
    }
  }

  // Weights of the group, relative to a logit that is raised where one of them would be too large.
  __device__ __forceinline__ StripWeights Weigh(const float (&logits)[2][8]) {
    float top[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      top[head] = logits[head][0];
#pragma unroll
      for (int i = 1; i < 8; ++i) top[head] = fmaxf(top[head], logits[head][i]);
    }
    if (__any_sync(kAllLanes, top[0] > top_[0] + kRoom || top[1] > top_[1] + kRoom)) Raise(top);
    __syncwarp();
    uint32_t weights[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      weights[i / 4][i % 4] =
          Element<__half>::Pack(Exp2(logits[0][i] - top_[0]), Exp2(logits[1][i] - top_[1]));
    }
    return StripWeights::Of(weights);
  }

  __device__ __forceinline__ void Raise(float (&top)[2]) {
    float factor[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        top[head] = fmaxf(top[head], __shfl_xor_sync(kAllLanes, top[head], step));
      }
      top[head] = fmaxf(top[head], top_[head]);
      factor[head] = top_[head] == -INFINITY ? 0 : Exp2(top_[head] - top[head]);
      top_[head] = top[head];
    }
    values_.Scale(factor);
    lower_values_.Scale(factor);
  }

  const PlanesItem<kDim>& item_;
  Memory& memory_;
  const uint64_t policy_;
  const FineForm form_;
  const int first_, step_, groups_;
  uint64_t upper_ = 0, lower_ = 0;  // runs of the group whose keys are asked for last
  ValueSums<kDim> values_;
  LowerValueSums<kDim> lower_values_;
  float top_[2] = {-INFINITY, -INFINITY};  // what weights are relative to, of the lane's heads
};

}  // namespace kvstrata::cuda
