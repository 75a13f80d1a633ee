// SPDX-License-Identifier: Apache-2.0
// Which candidates are fine by a share of the tokens (docs/spec/planes.md, "A step", rule 4), in
// kernels between the sample and attention: scores of all candidates and their sums, masses, op
// pick, and a bit for each token that was picked. How many are picked is made from lengths on the
// device.
#pragma once

#include "kernels/ops/attend_planes/sample_kernel.cuh"
#include "kernels/ops/pick/pick_cuda.h"

namespace kvstrata::cuda {

// Scores, times log2(e), of candidates among a lane's own tokens of a group: to their sums and to
// `rows`, of the lane's heads. A null row is no head's.
template <int kHeads>
__device__ __forceinline__ void KeepScores(const PlanesLengths& lengths, int group,
                                           const LaneFactors& factors, const FineForm& form,
                                           const GroupSums& sums, float* const (&rows)[2],
                                           PowerSum (&of_scores)[2]) {
  const OwnSums<kHeads> own(sums);
  const int first = group * kGroupTokens + TokenOf(threadIdx.x % 32, own.first());
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    const float base = fmaf(form.RoundingOf(factors.base[head]), sums.squares[head],
                            sums.Base(factors, head, kCoarseCentre));
    const CandidateLogits<kHeads> scores(lengths, first, own, head, factors.code[head], base);
    scores.AddTo(of_scores[head]);
    if (rows[head] == nullptr) continue;
#pragma unroll
    for (int i = 0; i < scores.kCount; i += 4) {
      *reinterpret_cast<float4*>(rows[head] + first + TokenOf(0, i)) = {
          scores.at[i], scores.at[i + 1], scores.at[i + 2], scores.at[i + 3]};
    }
  }
}

// Scores of all candidates, and what they sum to of each CTA in place of what the sample has left.
// Grid (ctas, items).
template <int kDim, int kHeads>
__global__ void __launch_bounds__(CtaShape<kDim, kHeads>::kThreads,
                                  CtaShape<kDim, kHeads>::kCtasOfSm)
    ScoreKernel(const __grid_constant__ PlanesArguments a) {
  constexpr int kWarps = CtaShape<kDim, kHeads>::kWarps;
  alignas(kLineBytes) extern __shared__ uint4 dynamic[];
  auto& shared = *reinterpret_cast<CtaMemory<kDim, kHeads>*>(dynamic);
  const AttendPlanesBatch& w = a.work;
  WaitForPrevious();
  LetNextStart();
  const auto place = CtaPlace::Of<kWarps>(w);
  const PlanesLengths lengths = PlanesLengths::Of(w, place.sequence);
  if (lengths.candidates() == 0) return;
  KeptQuery<kDim>::Load(a, place.item, shared.query, threadIdx.x, kWarps * 32);
  const auto item = PlanesItem<kDim>::Of(w.planes, place.sequence, place.head);
  auto& memory = shared.warps[threadIdx.x / 32];
  const PlanesCopier<kDim, kHeads> copier(&memory);
  const int end = (lengths.stop - 1) / kGroupTokens + 1;
  int group = lengths.start / kGroupTokens + place.warp, number = 0;
  if (group < end) copier.Keys(0, item.Upper(group));
  CommitCopies();
  __syncthreads();
  const LaneFactors factors = shared.query.Factors();
  const FineForm form{item.has_last_plane, item.row_bytes};
  float* rows[2];
  for (int i = 0; i < 2; ++i) {
    const int head = static_cast<int>(threadIdx.x % 4 * 2 + i) % kHeads;
    rows[i] = head < w.group ? a.share.scores + (place.first_row + head) * a.tokens() : nullptr;
  }
  SampleSums sums_of_cta;
#pragma unroll 1
  for (; group < end; group += place.warps, ++number) {
    const int next = group + place.warps;
    if (next < end) copier.Keys(number + 1, item.Upper(next));
    CommitCopies();
    WaitForCopies<1>();
    __syncwarp();
    GroupSums sums;
    ScoreGroup(memory, number, shared.query, sums);
    KeepScores<kHeads>(lengths, group, factors, form, sums, rows, sums_of_cta.sampled);
    __syncwarp();
  }
  sums_of_cta.template Keep<kHeads>(memory.sums);
  AddBytes(w.report.fetched, place.item, number * GroupShape<kDim>::kValueScales);
  KeepSamples<kHeads, kWarps>(a, place, shared.warps);
}

// log2 of the sum of exp2 of a row's scores, of what `ctas` CTAs have left. By a warp.
__device__ inline float LogSumOfScores(const PlanesArguments& a, int ctas, int64_t row) {
  PowerSum sum;
  for (int i = threadIdx.x % 32; i < ctas; i += 32) {
    const float4 part = a.samples[i * a.rows() + row];
    sum.Add(part.z, part.w);
  }
  sum.AddOverLanes(1);
  return sum.m + log2f(sum.l);
}

// How many candidates are fine: CeilShare, but for what always is.
__device__ inline int32_t TakeOf(double share, const PlanesLengths& lengths) {
  const auto fine = static_cast<int32_t>(ceil(share * lengths.tokens - 1e-9));
  return max(fine - (lengths.tokens - lengths.candidates()), 1);
}

inline constexpr int kShareThreads = 256;

// Masses of candidates, and what op pick is to take of them. Grid as ScoreKernel's.
__global__ void __launch_bounds__(kShareThreads)
    MassKernel(const __grid_constant__ PlanesArguments a) {
  const AttendPlanesBatch& w = a.work;
  WaitForPrevious();
  LetNextStart();
  const int64_t item = blockIdx.y;
  const int sequence = static_cast<int>(item) / w.planes.kv_heads;
  const PlanesLengths lengths = PlanesLengths::Of(w, sequence);
  const int candidates = lengths.candidates();
  if (item % w.planes.kv_heads == 0 && blockIdx.x == 0 && threadIdx.x == 0) {
    a.share.candidates[sequence] = candidates == 0 ? kNoQuery : candidates;
    a.share.takes[sequence] = TakeOf(w.rule.share, lengths);
  }
  if (candidates == 0) return;
  const int64_t first_row = item * w.group;
  float log_sums[8];
#pragma unroll
  for (int head = 0; head < 8; ++head) {
    if (head < w.group) {
      log_sums[head] = LogSumOfScores(a, static_cast<int>(gridDim.x), first_row + head);
    }
  }
  const int step = static_cast<int>(gridDim.x) * kShareThreads;
  for (int i = blockIdx.x * kShareThreads + threadIdx.x; i < candidates; i += step) {
    const float* const scores = a.share.scores + first_row * a.tokens() + lengths.start + i;
    float mass = 0;
#pragma unroll
    for (int head = 0; head < 8; ++head) {
      if (head < w.group) mass += Exp2(scores[head * a.tokens()] - log_sums[head]);
    }
    a.share.masses[int64_t{item} * a.tokens() + i] = mass;
  }
}

// How many numbers of an ascending list are below a limit.
__device__ inline int CountBelow(const int32_t* list, int count, int32_t limit) {
  int begin = 0;
  while (count > 0) {
    const int half = count / 2;
    const bool is_below = list[begin + half] < limit;
    begin += is_below ? half + 1 : 0;
    count = is_below ? count - half - 1 : half;
  }
  return begin;
}

// Bits of what was picked, a word a group. Grid (CTAs for all groups, items).
__global__ void __launch_bounds__(kShareThreads)
    BitsKernel(const __grid_constant__ PlanesArguments a) {
  const AttendPlanesBatch& w = a.work;
  WaitForPrevious();
  LetNextStart();
  const int64_t item = blockIdx.y;
  const int sequence = static_cast<int>(item) / w.planes.kv_heads;
  const int group = static_cast<int>(blockIdx.x * kShareThreads + threadIdx.x);
  const PlanesLengths lengths = PlanesLengths::Of(w, sequence);
  if (group >= lengths.groups || lengths.candidates() == 0) return;
  const int taken = a.share.takes[sequence];
  uint64_t bits = 0;
  if (taken >= lengths.candidates()) {  // op pick lists nothing
    bits = ~bits;
  } else {
    const int32_t* const list = a.share.list() + int64_t{item} * a.tokens();
    const int first = group * kGroupTokens - lengths.start;  // as op pick counts candidates
    int i = CountBelow(list, taken, first);
    for (; i < taken && list[i] < first + kGroupTokens; ++i) {
      bits |= uint64_t{1} << (list[i] - first);
    }
  }
  a.share.bits[int64_t{item} * (a.tokens() / kGroupTokens) + group] = bits;
}

// What op pick takes. A list is a CTA's or a cluster's: neither needs memory that is kept.
inline PickBatch PickOf(const PlanesArguments& a) {
  constexpr int32_t kOfCluster = 8 * kPickKeysOfCta;
  const ShareBuffers& share = a.share;
  PickBatch pick;
  pick.scores = share.masses;
  pick.score_stride = a.tokens();
  pick.batch = a.work.batch;
  pick.groups = a.work.planes.kv_heads;
  pick.tokens = share.candidates;
  pick.takes = share.takes;
  pick.units = share.list();
  pick.counts = share.counts;
  pick.sink_end = share.edges;
  pick.recent_begin = share.edges + a.work.batch;
  pick.list_stride = a.tokens();
  pick.scratch = share.scratch;
  if (a.tokens() > kOfCluster) {
    pick.ctas_per_list = 1;
  } else if (a.tokens() > kPickKeysOfCta) {
    pick.exchange = PickExchange::kCluster;
  }
  return pick;
}

}  // namespace kvstrata::cuda
