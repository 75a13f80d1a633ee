// SPDX-License-Identifier: Apache-2.0
// The decision of op reuse (reuse.h), by each CTA of a kernel for itself: reading 24 KB costs
// less than a kernel of its own in front.
#pragma once

#include "kernels/cuda/warps/float_bits.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/reuse/reuse.h"

namespace kvstrata::cuda {

struct CosineSums {
  double dot = 0, aa = 0, bb = 0;

  __device__ void Add(const float (&a)[8], const float (&b)[8]) {
    float ab = 0, a2 = 0, b2 = 0;
    for (int i = 0; i < 8; ++i) {
      ab += a[i] * b[i];
      a2 += a[i] * a[i];
      b2 += b[i] * b[i];
    }
    dot += ab;
    aa += a2;
    bb += b2;
  }
  // Sums over `lanes` neighbouring lanes, a power of two; all of them get the sums.
  __device__ void Reduce(int lanes) {
    for (int step = lanes / 2; step > 0; step /= 2) {
      dot += __shfl_xor_sync(~0u, dot, step);
      aa += __shfl_xor_sync(~0u, aa, step);
      bb += __shfl_xor_sync(~0u, bb, step);
    }
  }
  __device__ bool Reaches(double theta) const {
    const double norms = sqrt(aa) * sqrt(bb);
    return (norms > 0 ? dot / norms : 0) >= theta;
  }
};

// The queries of a sequence.
struct SequenceQuery {
  const void* q;
  DType dtype;
  int64_t at;  // its first element
  int32_t heads, head_dim;

  __device__ int64_t floats() const { return int64_t{heads} * head_dim; }
};

// A sequence's cache in a layer, by a CTA of kThreads. Every thread calls every function.
template <int kThreads>
class PickCache {
 public:
  // Reads what was there before the step.
  __device__ __forceinline__ PickCache(const Reuse& reuse, const CandidateRule& rule, int sequence,
                                       const SequenceQuery& query)
      : reuse_(reuse),
        rule_(rule),
        layout_{query.floats(), rule.take},
        sequence_(sequence),
        query_(query) {
    tokens_ = reuse.tokens[sequence];
    units_ = CandidatesOf(rule, tokens_);
    if (units_.full) return;
    cache_ = reinterpret_cast<char*>(reuse.caches[sequence]) + reuse.layer * layout_.layer_bytes();
    for (int i = 0; i < 2; ++i) made_[i] = *reinterpret_cast<const int32_t*>(PickAt(i));
    last_ = LastPick();
    if (last_ < 0) return;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int64_t at = ElementOf(piece);
      if (at < layout_.query_floats) LoadFloats(QueryOf(last_), DType::kF32, at, then_[piece]);
    }
  }

  // The tokens to vote with, or kNoQuery. `keeps`, in one CTA of the sequence: writes what follows.
  // Another CTA may read the counts of the picks before or after that: neither count in this step.
  __device__ __forceinline__ int32_t Decide(bool keeps) {
    if (units_.full) {
      if (keeps && threadIdx.x == 0) reuse_.voting[sequence_] = tokens_;
      return tokens_;
    }
    const bool hit = last_ >= 0 && reuse_.theta < 1 && IsAlike();
    if (keeps) Keep(hit);
    return hit ? kNoQuery : tokens_;
  }

 private:
  static constexpr int kPieces = 2;  // pieces of 8 floats that a thread reads ahead

  __device__ __forceinline__ static int64_t ElementOf(int piece) {
    return (int64_t{piece} * kThreads + threadIdx.x) * 8;
  }
  __device__ __forceinline__ char* PickAt(int pick) const {
    return cache_ + pick * layout_.pick_bytes();
  }
  __device__ __forceinline__ int32_t MadeAt(int pick) const {
    return pick == 0 ? made_[0] : made_[1];
  }
  __device__ __forceinline__ float* QueryOf(int pick) const {
    return reinterpret_cast<float*>(PickAt(pick) + layout_.query_at());
  }
  // The pick that counts in a step of `tokens_`; -1: none.
  __device__ __forceinline__ int LastPick() const {
    const bool has_first = made_[0] > 0 && made_[0] < tokens_;
    const bool has_second = made_[1] > 0 && made_[1] < tokens_;
    if (has_first && has_second) return made_[0] > made_[1] ? 0 : 1;
    return has_first ? 0 : has_second ? 1 : -1;
  }

  // The sums of a piece of the query, of heads together or, in all lanes of it, of each.
  __device__ __forceinline__ void AddPiece(int64_t at, const float (&then)[8], CosineSums& all,
                                           bool& each) const {
    CosineSums sums;
    const bool counts = at < layout_.query_floats;
    if (counts) {
      float now[8];
      LoadFloats(query_.q, query_.dtype, query_.at + at, now);
      sums.Add(now, then);
    }
    if (reuse_.per_head) {
      sums.Reduce(query_.head_dim / 8);
      each &= !counts || sums.Reaches(reuse_.theta);
    }
    all.dot += sums.dot;
    all.aa += sums.aa;
    all.bb += sums.bb;
  }
  // Every thread gets the same answer.
  __device__ __forceinline__ bool IsAlike() const {
    constexpr int kWarps = kThreads / 32;
    __shared__ CosineSums warps[kWarps];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    CosineSums all;
    bool each = true;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      AddPiece(ElementOf(piece), then_[piece], all, each);
    }
    for (int piece = kPieces; ElementOf(piece) - threadIdx.x * 8 < layout_.query_floats; ++piece) {
      float then[8] = {};
      const int64_t at = ElementOf(piece);
      if (at < layout_.query_floats) LoadFloats(QueryOf(last_), DType::kF32, at, then);
      AddPiece(at, then, all, each);
    }
    if (reuse_.per_head) return __syncthreads_and(each) != 0;
    all.Reduce(32);
    if (lane == 0) warps[warp] = all;
    __syncthreads();
    all = warps[lane % kWarps];
    all.Reduce(kWarps);
    return all.Reaches(reuse_.theta);
  }

  __device__ __forceinline__ void Keep(bool hit) const {
    const int pick = hit ? last_ : last_ == 0 ? 1 : 0;
    if (!hit) KeepQuery(QueryOf(pick));
    if (threadIdx.x != 0) return;
    reuse_.voting[sequence_] = hit ? kNoQuery : tokens_;
    reuse_.lists[sequence_] = reinterpret_cast<uint64_t>(PickAt(pick) + layout_.list_at());
    if (!hit) {
      *reinterpret_cast<int32_t*>(PickAt(pick)) = tokens_;
      return;
    }
    if (MadeAt(1 - pick) >= tokens_) {  // a step that was given up made it
      *reinterpret_cast<int32_t*>(PickAt(1 - pick)) = 0;
    }
    reuse_.counts[sequence_] = layout_.take;
    reuse_.sink_end[sequence_] = units_.first;
    reuse_.recent_begin[sequence_] =
        reuse_.append_departed ? CandidatesOf(rule_, MadeAt(pick)).last : units_.last;
  }
  __device__ __forceinline__ void KeepQuery(float* to) const {
    for (int piece = 0; ElementOf(piece) < layout_.query_floats; ++piece) {
      const int64_t at = ElementOf(piece);
      float x[8];
      LoadFloats(query_.q, query_.dtype, query_.at + at, x);
      auto* out = reinterpret_cast<float4*>(to + at);
      out[0] = {x[0], x[1], x[2], x[3]};
      out[1] = {x[4], x[5], x[6], x[7]};
    }
  }

  const Reuse& reuse_;
  const CandidateRule& rule_;
  const PickCacheLayout layout_;
  const int sequence_;
  const SequenceQuery query_;
  int32_t tokens_ = 0;
  Candidates units_;
  char* cache_ = nullptr;
  int32_t made_[2] = {};
  int last_ = -1;
  float then_[kPieces][8] = {};
};

}  // namespace kvstrata::cuda
