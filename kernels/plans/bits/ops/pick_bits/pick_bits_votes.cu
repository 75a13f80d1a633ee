// SPDX-License-Identifier: Apache-2.0
// The kernels of op pick_bits that score: of a sample, of all, and of all again where it is needed.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/warps/warp_sums.cuh"
#include "kernels/plans/bits/ops/pick_bits/cluster_bins.cuh"
#include "kernels/plans/bits/ops/pick_bits/kept_tokens.cuh"
#include "kernels/plans/bits/ops/pick_bits/list_chooser.cuh"

namespace kvstrata::cuda {
namespace {

// A vote by an estimate that is far too small, and what one of its heads has at least.
constexpr float kHuge = 0x1p60f, kHugeExponent = 56;
constexpr int kSampleTokens = 8192;
// Votes of a sample are counted in bins of an eighth of an octave, from 2^-125 to 8.
[[maybe_unused]] constexpr int kBinShift = 20, kFirstBin = 16;

// Exponents of a lane's tokens and two queries: x[tile][i] of token 4g + i / 2, query i % 2. In
// groups up to 4 the lane's only tile is number t / 2 of the block.
template <bool kWide>
struct LaneExponents {
  static constexpr int kTiles = kWide ? 2 : 1;
  float x[kTiles][8];

  __device__ LaneExponents(const float (&c)[kBlockTiles][2][4], const float (&factor)[2],
                           const float (&minus)[2]) {
#pragma unroll
    for (int i = 0; i < 8 * kTiles; ++i) {
      x[i / 8][i % 8] = fmaf(c[i / 8][i / 4 % 2][i % 4], factor[i % 2], minus[i % 2]);
    }
  }
};

// The votes of tokens 4g + 2 (t % 2) and the next in tile t / 2: two of the quad that lanes t with
// the same t / 2 share. p: weights, as exponents are.
template <bool kWide>
__device__ void SumVotes(const float (&p)[kWide ? 2 : 1][8], float (&votes)[2]) {
  const bool second = (threadIdx.x & 2) != 0, odd = (threadIdx.x & 1) != 0;
  float four[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    four[i] = p[0][2 * i] + p[0][2 * i + 1];
    if constexpr (kWide) {
      const float other = p[1][2 * i] + p[1][2 * i + 1];
      const float sent = __shfl_xor_sync(~0u, second ? four[i] : other, 2);
      four[i] = (second ? other : four[i]) + sent;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sent = __shfl_xor_sync(~0u, odd ? four[i] : four[2 + i], 1);
    votes[i] = (odd ? four[2 + i] : four[i]) + sent;
  }
}

struct ListPlace {
  int head, sequence, list, group;

  __device__ static ListPlace Of(const VoteBatch& w) {
    const int head = blockIdx.y, sequence = blockIdx.z;
    return {head, sequence, sequence * w.groups.kv_heads + head, w.query_heads / w.groups.kv_heads};
  }
  __device__ int64_t FirstElement(const VoteBatch& w, int dim) const {
    return (int64_t{sequence} * w.query_heads + head * group) * dim;
  }
};

struct BlockRange {
  int begin, end;  // whole blocks

  __device__ static BlockRange Of(Candidates units) {
    return {units.first / kBlockRows * kBlockRows,
            (units.last + kBlockRows - 1) / kBlockRows * kBlockRows};
  }
};

template <int kDim, bool kWide>
struct SampleMemory {
  // Blocks of a warp at most: what shared memory has room for beside the rings.
  static constexpr int kBlocks = kDim == 256 && kWide ? 3 : 4;
  static constexpr int kValues = kWide ? 16 : 8;
  float exponents[kWarps][kBlocks][kValues][32];
  float2 of_warps[8][kWarps];  // maximum and sum of each head
  int32_t tokens_of_warps[kWarps];
  int2 of_cta[8];  // the same, as bits; others of the cluster read it
  int32_t tokens_of_cta;
  float log_sum[8];
  ClusterBins bins;
};

// How many turns there are to one that is sampled: a power of two. blocks: of a warp at most.
[[maybe_unused]] __device__ int SampledOf(int candidates, int blocks) {
  const int most = kClusterCtas * kWarps * blocks * kBlockRows;
  int every = 1;
  while (candidates / every > most || (candidates / every > kSampleTokens && every < 64)) {
    every *= 2;
  }
  return every;
}

// The maximum of eight lanes that follow each other and the sum by it, in all of them.
[[maybe_unused]] __device__ float2 JoinEight(float max, float sum) {
  float top = max;
  for (int step = 1; step < 8; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  sum *= Exp2(max - Softmax::Shift(top));
  for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
  return {top, sum};
}
[[maybe_unused]] __device__ int32_t SumOfEight(int32_t x) {
  for (int step = 1; step < 8; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// What this part of the sampled votes reach: the lower edge of a bin. 0 where that is the lowest
// bin, or the part is more than all. By all threads of a CTA.
[[maybe_unused]] __device__ float VoteOfPart(ClusterBins& bins, float part, int32_t all) {
  const float rank = part * static_cast<float>(all) + 1;
  if (!(rank <= static_cast<float>(all))) return 0;
  const uint32_t bin = bins.Find(static_cast<int32_t>(rank)).digit;
  __syncthreads();  // all have read it
  return bin > 0 ? __uint_as_float((bin + kFirstBin) << kBinShift) : 0.0f;
}

// What a warp has scored of the sample; its exponents are in SampleMemory.
struct WarpSample {
  int blocks = 0, tokens = 0;
  float most[2] = {-INFINITY, -INFINITY};  // the largest of each of the lane's queries
};

template <int kDim, int kBits, bool kWide>
__device__ WarpSample ScoreSample(const LaneQueryPairs<kDim, kBits>& query,
                                  const float (&factor)[2], int group, Candidates units, int end,
                                  BlockScorer<kDim, kBits, SomeTurns>* scorer,
                                  SampleMemory<kDim, kWide>& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float none[2] = {0, 0};
  WarpSample own;
#pragma unroll 1  // few blocks: what is unrolled would wait for its own code
  for (; own.blocks < s.kBlocks; ++own.blocks) {
    float c[kBlockTiles][2][4];
    const int token = scorer->Next(query, group, end, c);
    if (token >= end) break;
    Mask(c, token, units);
    own.tokens += min(token + kBlockRows, units.last) - max(token, units.first);
    if constexpr (!kWide) JoinColumns(c);
    const LaneExponents<kWide> e(c, factor, none);
#pragma unroll
    for (int i = 0; i < s.kValues; ++i) {
      const float x = e.x[i / 8][i % 8];
      own.most[i % 2] = fmaxf(own.most[i % 2], x);
      s.exponents[warp][own.blocks][i][lane] = x;
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  return own;
}

// Maxima and sums of the heads, and how many tokens: of the warp, then of the CTA.
template <int kDim, bool kWide>
__device__ void SumSample(const WarpSample& own, SampleMemory<kDim, kWide>& s) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const float top = AcrossRows(own.most[q], kWide, [](float a, float b) { return fmaxf(a, b); });
    const float shift = Softmax::Shift(top);
    float sum = 0;
#pragma unroll 1
    for (int b = 0; b < own.blocks; ++b) {
#pragma unroll
      for (int i = q; i < s.kValues; i += 2) sum += Exp2(s.exponents[warp][b][i][lane] - shift);
    }
    sum = AcrossRows(sum, kWide, [](float a, float b) { return a + b; });
    if (lane < (kWide ? 4 : 2)) s.of_warps[LaneQuery(lane, kWide) + q][warp] = {top, sum};
  }
  if (lane == 0) s.tokens_of_warps[warp] = own.tokens;
  __syncthreads();
  static_assert(kWarps == 8 && kClusterCtas == 8);
  if (thread >= 8 * kWarps) return;
  const float2 part = s.of_warps[thread / 8][thread % 8];
  const float2 all = JoinEight(part.x, part.y);
  const int32_t tokens = SumOfEight(s.tokens_of_warps[thread % 8]);
  if (thread % 8 == 0) s.of_cta[thread / 8] = {__float_as_int(all.x), __float_as_int(all.y)};
  if (thread == 0) s.tokens_of_cta = tokens;
}

// The estimates, of what the cluster's CTAs have. Barriers at both ends.
template <int kDim, bool kWide>
__device__ void EstimateSums(int candidates, int group, SampleMemory<kDim, kWide>& s) {
  MeetCluster();
  if (const int thread = threadIdx.x; thread < 8 * kClusterCtas) {
    const int head = thread / 8;
    const int2 part = LoadFromCta(&s.of_cta[head], thread % 8);
    const int32_t seen = SumOfEight(LoadFromCta(&s.tokens_of_cta, thread % 8));
    const float2 all = JoinEight(__int_as_float(part.x), __int_as_float(part.y));
    // The largest weight counts once: a token that holds most of the sum is the only one of its
    // kind, and an estimate that is too large is what the proof does not forgive.
    const float times = static_cast<float>(candidates) / static_cast<float>(max(seen, 1));
    if (thread % 8 == 0) {
      s.log_sum[head] = head < group ? all.x + log2f(fmaxf(all.y - 1, 0.0f) * times + 1) : INFINITY;
    }
  }
  __syncthreads();
}

// The votes by the estimates, into the cluster's bins.
template <int kDim, bool kWide>
__device__ void CountSample(int blocks, SampleMemory<kDim, kWide>& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, query = LaneQuery(lane, kWide);
  const float minus[2] = {s.log_sum[query], s.log_sum[query + 1]};
#pragma unroll 1
  for (int b = 0; b < blocks; ++b) {
    float p[kWide ? 2 : 1][8], votes[2];
#pragma unroll
    for (int i = 0; i < s.kValues; ++i) {
      p[i / 8][i % 8] = Exp2(s.exponents[warp][b][i][lane] - minus[i % 2]);
    }
    SumVotes<kWide>(p, votes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // Tokens that do not count have 0 and the lowest bin, as those of no weight.
      const int bin = static_cast<int>(__float_as_uint(votes[i]) >> kBinShift) - kFirstBin;
      s.bins.Count(min(max(bin, 0), ClusterBins::kCount - 1));
    }
  }
}

// By all threads of one CTA. all: votes in the cluster's bins.
template <int kDim, bool kWide>
__device__ void WriteAim(int take, int candidates, float margin, int group, int32_t all,
                         SampleMemory<kDim, kWide>& s, Aim* aim) {
  const float part = static_cast<float>(take) / static_cast<float>(candidates);
  const float cut = VoteOfPart(s.bins, margin * part, all);
  // Where all are kept, weights near the last vote that is chosen are to have all their bits.
  const float scaled_by = cut > 0 ? cut : VoteOfPart(s.bins, part, all) / 4;
  if (threadIdx.x < 8) aim->log_sum[threadIdx.x] = s.log_sum[threadIdx.x];
  if (threadIdx.x == 0) {
    aim->cut = cut;
    aim->scale = ScaleOf(scaled_by, max(take, 1), group);
    aim->wanted = 1;
  }
}

// Grid (a cluster, kv_heads, batch): the Aim of the first round.
template <int kDim, int kBits, bool kWide>
__global__ __launch_bounds__(kWarps * 32) void SampleKernel(const __grid_constant__ VoteBatch w,
                                                            const __grid_constant__ GroupOffsets f,
                                                            const __grid_constant__ Turns turns,
                                                            Aim* aims, float margin) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ uint4 dynamic[];
  auto* const rings = reinterpret_cast<BitsRing<kDim, kBits>*>(dynamic);
  auto* const ring = rings + threadIdx.x / 32;
  auto& s = *reinterpret_cast<SampleMemory<kDim, kWide>*>(rings + kWarps);
  const ListPlace at = ListPlace::Of(w);
  s.bins.Clear();
  if (!w.ahead) WaitForPrevious();
  const Candidates units = CandidatesOf(w.rule, w.tokens[at.sequence]);
  if (units.full) {  // in all CTAs of the cluster alike
    if (w.ahead) WaitForPrevious();
    LetNextStart();
    return;
  }
  const BlockRange range = BlockRange::Of(units);
  const SomeTurns some{range.begin / (turns.group_tokens * turns.groups),
                       SampledOf(units.count(), s.kBlocks)};
  BlockCopier<kDim, kBits, SomeTurns> copier(
      w.groups, f, turns, at.sequence, at.head,
      BlockWalk<SomeTurns>(turns, some, range.begin, range.end), units.last, ring);
  BlockScorer<kDim, kBits, SomeTurns> scorer(f, ring, &copier);
  if (w.ahead) WaitForPrevious();
  LetNextStart();  // all that was before is complete: FilterKernel reads what it has left
  const auto query =
      LaneQueryPairs<kDim, kBits>::Load(w.q, w.q_dtype, at.FirstElement(w, kDim), at.group);
  float factor[2];
  query.Factors(w.scale * kLog2E, factor);
  const WarpSample own = ScoreSample(query, factor, at.group, units, range.end, &scorer, s);
  SumSample(own, s);
  EstimateSums(units.count(), at.group, s);
  CountSample(own.blocks, s);
  const int32_t all = s.bins.Share();
  if (blockIdx.x == 0) {
    WriteAim(w.rule.take, units.count(), margin, at.group, all, s, &aims[at.list]);
  }
  MeetCluster();  // the first CTA has read what the others have
#endif
}

// Keeps quads of a warp.
template <bool kWide>
class QuadKeeper {
 public:
  __device__ QuadKeeper(const Kept& kept, int list, const float (&factor)[2])
      : room_(kept.room), factor_{factor[0], factor[1]} {
    const int lane = threadIdx.x % 32;
    const int64_t segment = (int64_t{list} * kept.splits + blockIdx.x) * kWarps + threadIdx.x / 32;
    tokens_ = kept.tokens + segment * kept.room;
    weights_ = kept.weights + segment * kept.room * kQuad + lane % kQuad;
    bit_ = kWide ? lane & ~3 : lane & ~1;
    first_ = lane / 4 * 4 + (kWide ? 0 : (lane & 2) / 2 * kTileTokens);
  }

  // By what it keeps from here on.
  __device__ void Take(const Aim& aim) {
    const int query = LaneQuery(threadIdx.x % 32, kWide);
    cut_ = aim.cut, scale_ = aim.scale;
    for (int q = 0; q < 2; ++q) minus_[q] = -aim.log_sum[query + q];
  }

  // c: as of JoinColumns. base: what is to be added to it, joined as well. token: the block's
  // first.
  __device__ void Keep(const float (&c)[kBlockTiles][2][4], const float (&base)[2], int token) {
    const float minus[2] = {fmaf(base[0], factor_[0], minus_[0]),
                            fmaf(base[1], factor_[1], minus_[1])};
    const LaneExponents<kWide> e(c, factor_, minus);
    float p[kTiles][8], votes[2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 8; ++i) p[tile][i] = Exp2(e.x[tile][i]);
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        sum_[q] += p[tile][q] + p[tile][2 + q] + (p[tile][4 + q] + p[tile][6 + q]);
      }
    }
    SumVotes<kWide>(p, votes);
    const float vote = fmaxf(votes[0], votes[1]);
    const uint32_t reach = __ballot_sync(~0u, vote >= cut_);
    if (reach == 0) return;
    const uint32_t quads = (reach | reach >> 1) & 0x55555555u;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int bit = bit_ + 2 * tile;
      if ((quads >> bit & 1) == 0) continue;
      const int at = count_ + __popc(quads & ((1u << bit) - 1));
      if (at >= room_) continue;  // never
      uint4 halves;
      halves.x = Pair(p[tile][0], p[tile][1]), halves.y = Pair(p[tile][2], p[tile][3]);
      halves.z = Pair(p[tile][4], p[tile][5]), halves.w = Pair(p[tile][6], p[tile][7]);
      weights_[at * kQuad] = halves;
      if (threadIdx.x % kQuad == 0) tokens_[at] = token + first_ + tile * kTileTokens;
    }
    count_ += __popc(quads);
    if (__any_sync(~0u, vote > kHuge)) {
#pragma unroll
      for (int i = 0; i < 8 * kTiles; ++i) {
        const float x = e.x[i / 8][i % 8];
        if (x > kHugeExponent) huge_[i % 2] = fmaxf(huge_[i % 2], x);
      }
    }
  }

  __device__ int count() const { return count_; }
  // Over all lanes.
  __device__ HeadPart Part(int q) const {
    return {AcrossRows(sum_[q], kWide, [](float a, float b) { return a + b; }),
            AcrossRows(huge_[q], kWide, [](float a, float b) { return fmaxf(a, b); })};
  }

 private:
  static constexpr int kTiles = kWide ? 2 : 1, kQuad = kWide ? 4 : 2;

  __device__ uint32_t Pair(float a, float b) const {
    return BitsOf(__floats2half2_rn(a * scale_, b * scale_));
  }

  const int room_;
  const float factor_[2];
  float minus_[2] = {}, cut_ = 0, scale_ = 0;
  int32_t* tokens_;
  uint4* weights_;  // this lane's piece of the first quad
  int bit_;         // this lane's quad in the mask of those that reach the cut; first tile's
  int first_;       // its first token in the block
  int count_ = 0;
  float sum_[2] = {}, huge_[2] = {-INFINITY, -INFINITY};
};

// Keeps quads of this warp's run of a list's tokens, and the sums of the CTA. ready(): the aim is
// there, asked when the first block has been scored. of_warps: [kWarps][8], shared.
template <int kDim, int kBits, bool kWide, bool kWhole, typename Ready>
__device__ void FilterRun(const VoteBatch& w, const GroupOffsets& f, const Turns& turns,
                          const Kept& kept, const Aim& aim, const ListPlace& at, Candidates units,
                          BitsRing<kDim, kBits>* ring, HeadPart (*of_warps)[8], Ready ready) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int of_list = static_cast<int>(blockIdx.x) * kWarps + warp;
  const BlockRange range = BlockRange::Of(units);
  const TurnRuns runs = TurnRuns::Of(kept, units);
  const int end = min(range.end, runs.FirstOf(of_list + 1) * kept.turn_tokens);
  BlockCopier<kDim, kBits, AllTurns, kWhole> copier(
      w.groups, f, turns, at.sequence, at.head,
      BlockWalk<AllTurns, kWhole>(turns, AllTurns{runs.FirstOf(of_list)}, 0, 1, range.begin, end),
      units.last, ring);
  BlockScorer<kDim, kBits, AllTurns, kWhole> scorer(f, ring, &copier);
  const auto query =
      LaneQueryPairs<kDim, kBits>::Load(w.q, w.q_dtype, at.FirstElement(w, kDim), at.group);
  float factor[2];
  query.Factors(w.scale * kLog2E, factor);
  QuadKeeper<kWide> keeper(kept, at.list, factor);
  for (bool first = true;; first = false) {
    float c[kBlockTiles][2][4];
    const int token = scorer.Next(query, kWide ? 8 : 4, end, c);
    if (first) {
      ready();
      keeper.Take(aim);
    }
    if (token >= end) break;
    if (token < units.first || token + kBlockRows > units.last) Mask(c, token, units);
    if constexpr (!kWide) JoinColumns(c);
    float base[2] = {};
    if constexpr (kWhole) scorer.template JoinBase<kWide>(base);
    keeper.Keep(c, base, token);
  }

  for (int q = 0; q < 2; ++q) {
    const HeadPart part = keeper.Part(q);
    if (lane < (kWide ? 4 : 2)) of_warps[warp][LaneQuery(lane, kWide) + q] = part;
  }
  const int64_t cta = int64_t{at.list} * kept.splits + blockIdx.x;
  if (lane == 0) kept.counts[cta * kWarps + warp] = keeper.count();
  __syncthreads();
  if (static_cast<int>(threadIdx.x) >= at.group) return;
  HeadPart sum{0, -INFINITY};
  for (int i = 0; i < kWarps; ++i) {
    sum.sum += of_warps[i][threadIdx.x].sum;
    sum.huge = fmaxf(sum.huge, of_warps[i][threadIdx.x].huge);
  }
  kept.parts[cta * 8 + threadIdx.x] = sum;
}

// Grid (splits, kv_heads, batch). SampleKernel lets it start when all before the op is complete, so
// that only the aim is waited for: codes are on the way and scored while the sample is looked at.
template <int kDim, int kBits, bool kWide, bool kWhole>
__global__ __launch_bounds__(kWarps * 32, kDim == 256 ? 1 : 2) void FilterKernel(
    const __grid_constant__ VoteBatch w, const __grid_constant__ GroupOffsets f,
    const __grid_constant__ Turns turns, const __grid_constant__ Kept kept) {
  extern __shared__ uint4 dynamic[];
  __shared__ HeadPart of_warps[kWarps][8];
  auto* const ring = reinterpret_cast<BitsRing<kDim, kBits>*>(dynamic) + threadIdx.x / 32;
  const ListPlace at = ListPlace::Of(w);
  LetNextStart();
  const Candidates units = CandidatesOf(w.rule, __ldcg(&w.tokens[at.sequence]));
  if (units.full) return WaitForPrevious();
  FilterRun<kDim, kBits, kWide, kWhole>(w, f, turns, kept, kept.aims[at.list], at, units, ring,
                                        of_warps, [] { WaitForPrevious(); });
}

// Grid (a cluster, kv_heads, batch): the second round of lists whose choice was not proved. A list
// is one cluster's, which is slow, and rare; the others cost no more than a kernel that returns.
template <int kDim, int kBits, bool kWide>
__global__ __launch_bounds__(kWarps *
                             32) void AgainKernel(const __grid_constant__ PickBitsBatch work,
                                                  const __grid_constant__ GroupOffsets f,
                                                  const __grid_constant__ Turns turns,
                                                  const __grid_constant__ Kept kept) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ uint4 dynamic[];
  __shared__ HeadPart of_warps[kWarps][8];
  const VoteBatch& w = work.vote;
  const ListPlace at = ListPlace::Of(w);
  LetNextStart();
  // FilterKernel has started, so that all before the op is complete.
  const int32_t tokens = __ldcg(&w.tokens[at.sequence]);
  WaitForPrevious();
  const Candidates units = CandidatesOf(w.rule, tokens);
  const Aim& aim = kept.aims[w.groups.kv_heads * w.batch + at.list];
  if (tokens == kNoQuery || units.full || aim.wanted == 0) return;
  FilterRun<kDim, kBits, kWide, false>(
      w, f, turns, kept, aim, at, units,
      reinterpret_cast<BitsRing<kDim, kBits>*>(dynamic) + threadIdx.x / 32, of_warps, [] {});
  asm volatile("cp.async.wait_all;" ::: "memory");  // the ring's room is the chooser's now
  __threadfence();
  __syncthreads();
  MeetCluster();
  ListChooser chooser(kept, aim, at.list, at.group, units,
                      *reinterpret_cast<ChooserMemory*>(dynamic));
  chooser.ClearMarks();
  chooser.Begin();
  // By exact sums: what was left out is below a vote that `take` tokens reach.
  int32_t count = 0;
#pragma unroll 1
  for (const float floor : {aim.cut * (1 - 4 * kSafety), 0.0f}) {
    if (count < w.rule.take) count = chooser.Collect(floor);
  }
  const int32_t take = min(w.rule.take, count);
  if (take > 0) chooser.Write(chooser.FindLast(take), ListOf(work.pick, at.list));
  MeetCluster();  // none ends while others read what it has
#endif
}

template <int kDim, int kBits, bool kWide>
int LaunchSampleOf(const PickBitsBatch& work, const Kept& kept, Stream stream) {
  const VoteBatch& w = work.vote;
  constexpr int kBytes = kWarps * static_cast<int>(sizeof(BitsRing<kDim, kBits>)) +
                         static_cast<int>(sizeof(SampleMemory<kDim, kWide>));
  static_assert(kBytes <= kSharedMost);
  return LaunchClusters(SampleKernel<kDim, kBits, kWide>, w.groups.kv_heads, w.batch, kBytes,
                        stream, w, GroupOffsets::Of(w.groups.format), Turns::Of(w.groups),
                        kept.aims, work.margin);
}

template <int kDim, int kBits, bool kWide, bool kWhole>
int LaunchFilterOf(const PickBitsBatch& work, const Kept& kept, Stream stream) {
  const VoteBatch& w = work.vote;
  constexpr int kBytes = kWarps * static_cast<int>(sizeof(BitsRing<kDim, kBits>));
  static_assert(kBytes <= kSharedMost);
  const auto kernel = FilterKernel<kDim, kBits, kWide, kWhole>;
  if (const int error = AllowShared(kernel, kBytes); error != 0) return error;
  const dim3 grid(kept.splits, w.groups.kv_heads, w.batch);
  return LaunchDependent(kernel, grid, kWarps * 32, kBytes, stream, w,
                         GroupOffsets::Of(w.groups.format), Turns::Of(w.groups), kept);
}

template <int kDim, int kBits, bool kWide>
int LaunchAgainOf(const PickBitsBatch& work, const Kept& kept, int choose_bytes, Stream stream) {
  const VoteBatch& w = work.vote;
  constexpr int kRings = kWarps * static_cast<int>(sizeof(BitsRing<kDim, kBits>));
  static_assert(kRings <= kSharedMost);
  return LaunchClusters(AgainKernel<kDim, kBits, kWide>, w.groups.kv_heads, w.batch,
                        std::max(kRings, choose_bytes), stream, work,
                        GroupOffsets::Of(w.groups.format), Turns::Of(w.groups), kept);
}

// launch.template operator()<kDim, kBits, kWide>() of the work's shape.
template <typename Launch>
int ForShape(const VoteBatch& w, Launch launch) {
  const auto of_wide = [&]<int kDim, int kBits>() {
    return w.query_heads > 4 * w.groups.kv_heads ? launch.template operator()<kDim, kBits, true>()
                                                 : launch.template operator()<kDim, kBits, false>();
  };
#ifdef KVS_ONE_SHAPE
  return launch.template operator()<128, 2, false>();
#else
  const auto of_bits = [&]<int kDim>() {
    return w.groups.format.bits == 2   ? of_wide.template operator()<kDim, 2>()
           : w.groups.format.bits == 3 ? of_wide.template operator()<kDim, 3>()
                                       : of_wide.template operator()<kDim, 4>();
  };
  return w.groups.format.dim == 64    ? of_bits.template operator()<64>()
         : w.groups.format.dim == 128 ? of_bits.template operator()<128>()
                                      : of_bits.template operator()<256>();
#endif
}

}  // namespace

int LaunchSample(const PickBitsBatch& work, const Kept& kept, Stream stream) {
  return ForShape(work.vote, [&]<int kDim, int kBits, bool kWide>() {
    return LaunchSampleOf<kDim, kBits, kWide>(work, kept, stream);
  });
}

int LaunchFilter(const PickBitsBatch& work, const Kept& kept, Stream stream) {
  return ForShape(work.vote, [&]<int kDim, int kBits, bool kWide>() {
    // Groups of whole blocks have kernels of their own for the usual two bits.
    if constexpr (kBits == 2) {
      if (work.vote.groups.format.tokens % kBlockRows == 0) {
        return LaunchFilterOf<kDim, kBits, kWide, true>(work, kept, stream);
      }
    }
    return LaunchFilterOf<kDim, kBits, kWide, false>(work, kept, stream);
  });
}

int LaunchAgain(const PickBitsBatch& work, const Kept& kept, int choose_bytes, Stream stream) {
  return ForShape(work.vote, [&]<int kDim, int kBits, bool kWide>() {
    return LaunchAgainOf<kDim, kBits, kWide>(work, kept, choose_bytes, stream);
  });
}

}  // namespace kvstrata::cuda
