// SPDX-License-Identifier: Apache-2.0
// The normaliser of each query head (docs/spec/planes.md, "A step", rule 3): which tokens are
// candidates, which groups are sampled, and what CTAs leave of them for the kernel that follows.
#pragma once

#include "kernels/ops/attend_planes/attend_planes_cuda.h"
#include "kernels/ops/attend_planes/fine_rows.cuh"

namespace kvstrata::cuda {

// A sequence's. Candidates are the tokens [start, stop); what is sealed besides is always fine.
struct PlanesLengths {
  int32_t tokens, groups, start, stop;

  __device__ static PlanesLengths Of(const AttendPlanesBatch& w, int sequence) {
    const int32_t tokens = w.tokens[sequence], groups = w.groups[sequence];  // 0 tokens: in full
    const int32_t sealed = kGroupTokens * groups, start = min(w.rule.sinks, sealed);
    return {tokens, groups, start, max(start, min(max(tokens - w.rule.recent, 0), sealed))};
  }
  __device__ bool IsCandidate(int32_t token) const { return token >= start && token < stop; }
  __device__ int32_t candidates() const { return stop - start; }
};

// Groups first, first + every, .. are sampled, `count` of them, which have so many candidates.
struct PlanesSample {
  int32_t first = 0, every = 1, count = 0, tokens = 0;

  __device__ static PlanesSample Of(const PlanesLengths& lengths, int32_t every) {
    PlanesSample sample;
    if (lengths.candidates() == 0) return sample;
    sample.Take(lengths, every);
    if (sample.tokens == 0) sample.Take(lengths, 1);
    return sample;
  }

 private:
  __device__ void Take(const PlanesLengths& lengths, int32_t each) {
    const int32_t begin = lengths.start / kGroupTokens, end = (lengths.stop - 1) / kGroupTokens + 1;
    const int32_t place = (each - 1) / 2;
    every = each;
    first = begin + (place + each - begin % each) % each;
    count = first < end ? (end - 1 - first) / each + 1 : 0;
    if (count == 0) return;
    const int32_t last = first + (count - 1) * each;
    tokens = count * kGroupTokens;
    if (first == begin) tokens -= lengths.start - begin * kGroupTokens;
    if (last == end - 1) tokens -= end * kGroupTokens - lengths.stop;
  }
};

// Octets of tokens, some of which are always fine. So many rows are as long a wait for one warp as
// a group is, and a window of 64 tokens has eight octets.
struct EdgeOctets {
  static constexpr int kTokens = 8, kOfGroup = kGroupTokens / kTokens;
  int32_t first_end, window_begin;  // those of sinks are [0, first_end)
  int32_t count;

  __device__ static EdgeOctets Of(const PlanesLengths& lengths) {
    const int32_t first_end = (lengths.start + kTokens - 1) / kTokens;
    const int32_t window_begin = max(lengths.stop / kTokens, first_end);
    return {first_end, window_begin, first_end + lengths.groups * kOfGroup - window_begin};
  }
  __device__ int32_t OctetOf(int32_t i) const {
    return i < first_end ? i : window_begin + i - first_end;
  }
  // Which of a lane's tokens (TokenOf) are in an octet of their group.
  __device__ static uint32_t BitsOf(int32_t octet) {
    const int32_t in_group = octet % kOfGroup;
    const bool has_some = static_cast<int32_t>(threadIdx.x % 32 / 8) == in_group / 2;
    return has_some ? 0xFu << in_group % 2 * 4 : 0;
  }
};
static_assert(EdgeOctets::kTokens <= kFineTile);

// What the first kernel reads: groups that are sampled, then groups of the window's octets.
struct SampleTasks {
  PlanesSample sample;
  EdgeOctets edges;
  int32_t first_octet;  // the window's, among the edges'
  int32_t count;

  __device__ static SampleTasks Of(const PlanesLengths& lengths, const PlanesSample& sample) {
    const EdgeOctets edges = EdgeOctets::Of(lengths);
    const int32_t first = min(edges.first_end, lengths.stop / EdgeOctets::kTokens);
    const int32_t tasks = sample.count + edges.count - first;
    return {sample, edges, first, lengths.candidates() == 0 ? 0 : tasks};
  }
  __device__ bool IsSampled(int32_t task) const { return task < sample.count; }
  __device__ int32_t OctetOf(int32_t task) const {
    return edges.OctetOf(first_octet + task - sample.count);
  }
  __device__ int32_t GroupOf(int32_t task) const {
    return IsSampled(task) ? sample.first + task * sample.every
                           : OctetOf(task) / EdgeOctets::kOfGroup;
  }
};

// What the second kernel reads, visit by visit of some warp: all groups, whose candidates it
// attends, then octets. Without candidates, all of each group at once.
struct PlanesVisits {
  EdgeOctets edges;
  int32_t groups;
  int32_t count;
  bool is_full;

  __device__ static PlanesVisits Of(const PlanesLengths& lengths) {
    const EdgeOctets edges = EdgeOctets::Of(lengths);
    const bool is_full = lengths.candidates() == 0;
    return {edges, lengths.groups, lengths.groups + (is_full ? 0 : edges.count), is_full};
  }
  __device__ bool IsOctet(int32_t visit) const { return visit >= groups; }
  __device__ int32_t OctetOf(int32_t visit) const { return edges.OctetOf(visit - groups); }
  // -1: there is none.
  __device__ int32_t GroupOf(int32_t visit) const {
    if (visit < groups) return visit;
    return visit < count ? OctetOf(visit) / EdgeOctets::kOfGroup : -1;
  }
};

// 2^m l, the sum of powers of two.
struct PowerSum {
  float m = -INFINITY, l = 0;

  __device__ void Add(float m2, float l2) {
    const float top = fmaxf(m, m2);
    l = WeightOf(m, top) * l + WeightOf(m2, top) * l2;
    m = top;
  }
  __device__ void AddOverLanes(int first_step) {
    float top = m;
    for (int step = first_step; step < 32; step *= 2) {
      top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, step));
    }
    l *= WeightOf(m, top);
    m = top;
    for (int step = first_step; step < 32; step *= 2) l += __shfl_xor_sync(kAllLanes, l, step);
  }
};

// Logits, times log2(e), of candidates among a lane's own tokens of a group, for one of its heads;
// -inf of others.
template <int kHeads>
struct CandidateLogits {
  static constexpr int kCount = OwnSums<kHeads>::kCount;
  float at[kCount];
  float top = -INFINITY;

  // first_token: the first of the lane's own. base: added to each.
  __device__ __forceinline__ CandidateLogits(const PlanesLengths& lengths, int32_t first_token,
                                             const OwnSums<kHeads>& own, int head, float code,
                                             float base) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const bool is_candidate = lengths.IsCandidate(first_token + TokenOf(0, i));
      at[i] = is_candidate ? fmaf(own.at[i][head], code, base) : -INFINITY;
      top = fmaxf(top, at[i]);
    }
  }
  __device__ __forceinline__ void AddTo(PowerSum& sums) const {
    const float shift = top == -INFINITY ? 0 : top;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum += Exp2(at[i] - shift);
    sums.Add(top, sum);
  }
};

// What a warp sums of its tasks, for this lane's two heads: logits of sampled candidates, and of
// what is always fine.
struct SampleSums {
  PowerSum always[2], sampled[2];

  // All candidates among a lane's own tokens. tops: their largest score.
  template <int kHeads>
  __device__ void AddSampled(const PlanesLengths& lengths, int32_t first_token,
                             const LaneFactors& factors, const FineForm& form,
                             const GroupSums& sums, float (&tops)[2]) {
    const OwnSums<kHeads> own(sums);
    const int32_t first = first_token + TokenOf(threadIdx.x % 32, own.first());
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      const CandidateLogits<kHeads> logits(lengths, first, own, head, factors.code[head],
                                           sums.Base(factors, head, kCoarseCentre));
      logits.AddTo(sampled[head]);
      tops[head] = fmaf(form.RoundingOf(factors.base[head]), sums.squares[head], logits.top);
    }
  }

  // One row of `kept` a quantity. Afterwards lanes of other g have them, too.
  template <int kHeads>
  __device__ void Keep(float (*kept)[kHeads]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      always[head].AddOverLanes(4);
      sampled[head].AddOverLanes(kHeads == 4 ? 2 : 4);  // OwnSums
      if (lane >= kHeads / 2) continue;
      kept[0][2 * lane + head] = always[head].m;
      kept[1][2 * lane + head] = always[head].l;
      kept[2][2 * lane + head] = sampled[head].m;
      kept[3][2 * lane + head] = sampled[head].l;
    }
  }
};

// L_h times log2(e), of query row `row`, by a whole warp. parts: [ctas][rows], what CTAs left.
__device__ inline float LogNormaliser(const float4* parts, int ctas, const Partials& raw,
                                      int64_t rows, int64_t row, const PlanesLengths& lengths,
                                      const PlanesSample& sample) {
  const int lane = threadIdx.x % 32;
  PowerSum all, sampled;
  for (int i = lane; i < raw.parts; i += 32) {
    all.Add(raw.m[i * rows + row] * kLog2E, raw.l[i * rows + row]);
  }
  for (int i = lane; sample.tokens > 0 && i < ctas; i += 32) {
    const float4 part = parts[i * rows + row];
    all.Add(part.x, part.y);
    sampled.Add(part.z, part.w);
  }
  all.AddOverLanes(1);
  sampled.AddOverLanes(1);
  if (sample.tokens > 0) {
    // The largest counts once.
    const float ratio =
        static_cast<float>(lengths.candidates()) / static_cast<float>(sample.tokens);
    const float rest = sampled.l - 1;
    all.Add(sampled.m, 1 + (rest < 0 ? 0 : rest) * ratio);
  }
  return all.m + log2f(all.l);
}

}  // namespace kvstrata::cuda
