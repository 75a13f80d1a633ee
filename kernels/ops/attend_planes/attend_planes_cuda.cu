// SPDX-License-Identifier: Apache-2.0
// The CTAs of an item (a sequence and a KV head) share its groups: warp after warp over all of
// them, so that what is read at one time lies side by side. How many CTAs an item has is what its
// sample says of its work.
//
// Floor on an H200 (4.2 TB/s), 8 KV heads x 128: 128K tokens are 42 MB of keys, 38 MB of values
// where no strip is left out, and 25 MB for each percent that is fine: 19 us, half of the strips
// left out 14 us. Issue: 16,384 groups of 350 instructions by 528 schedulers: 6 us. Where strips
// are read a group takes 350 more, and up to eight fine tokens of it 370.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/attend_planes/attend_planes_cuda.h"
#include "kernels/ops/attend_planes/full_groups.cuh"
#include "kernels/ops/attend_planes/planes_shares.cuh"
#include "kernels/ops/attend_planes/planes_warp.cuh"
#include "kernels/ops/merge/shared_item.cuh"

namespace kvstrata::cuda {
namespace {

// As many warps on an SM as shared memory and registers have room for. Two CTAs there are of
// different heads, of which one may have less to do than the other.
template <int kDim, int kHeads>
struct CtaShape {
  static constexpr int kCtasOfSm = kDim == 128 ? 2 : 1;
  static constexpr int kWarps = kDim == 64 ? 16 : kDim == 128 ? 6 : kHeads == 4 ? 8 : 6;
  static constexpr int kThreads = kWarps * 32;
};

struct Arguments {
  AttendPlanesBatch work;
  float scale;      // with log2(e)
  float relative;   // what a logit loses besides L_h - log2(N), so that 2^6 is fine
  float read_from;  // ItemRule's
  // In the workspace: what CTAs leave of attention [CTAs of the grid][group], what the first kernel
  // leaves of an item.
  Partials splits;
  float4* samples;    // [ctas of an item][rows]
  float* tops;        // [items], SampledTops each
  float* references;  // [items][8], what logits of heads are relative to, times log2(e)
  float* costs;       // [items]
  uint4* queries;     // [items], a SharedQuery each

  __host__ __device__ int32_t items() const { return work.batch * work.planes.kv_heads; }
  __host__ __device__ int64_t rows() const { return int64_t{items()} * work.group; }
};

// Where everything is fine.
template <int kDim>
struct FullShape {
  static constexpr int kCtasOfSm = 1;
  static constexpr int kWarps = kDim == 64 ? 16 : kDim == 128 ? 12 : 6;
  static constexpr int kThreads = kWarps * 32;
};

// Warp: a warp's memory.
template <int kDim, int kHeads, typename Warp = WarpMemory<kDim, kHeads>,
          typename Shape = CtaShape<kDim, kHeads>>
struct CtaMemory {
  union {
    SharedQuery<kDim> query;
    float o[kHeads][kDim];  // the item's sums, at the end
  };
  uint4 ones[2];
  float reference[kHeads];
  float m[kHeads], l[kHeads];
  int cost;
  bool is_last;
  Warp warps[Shape::kWarps];
};

// A CTA's item, and its place among those that share it.
struct CtaPlace {
  int head, sequence;
  int64_t item, first_row;
  CtaShare share;
  int warp, warps;  // among all that share the item

  template <int kWarps>
  __device__ static CtaPlace Of(const AttendPlanesBatch& w, const CtaShare& share) {
    const int head = share.item % w.planes.kv_heads, sequence = share.item / w.planes.kv_heads;
    return {head,
            sequence,
            share.item,
            int64_t{share.item} * w.group,
            share,
            static_cast<int>(share.cta * kWarps + threadIdx.x / 32),
            share.ctas * kWarps};
  }
  // In a grid (ctas, items).
  template <int kWarps>
  __device__ static CtaPlace Of(const AttendPlanesBatch& w) {
    const auto item = static_cast<int>(blockIdx.y), ctas = static_cast<int>(gridDim.x);
    return Of<kWarps>(w, {item, static_cast<int>(blockIdx.x), ctas, item * ctas});
  }
};

// Queries to shared memory, by the first warp: all of an item's CTAs read the same kilobyte of the
// L2. Barrier afterwards.
template <int kDim>
__device__ __forceinline__ void LoadQuery(const Arguments& a, const CtaPlace& place,
                                          SharedQuery<kDim>& to) {
  if (threadIdx.x >= 32) return;
  const AttendPlanesBatch& w = a.work;
  const int64_t first =
      place.sequence * w.q_stride + int64_t{place.head} * w.group * kDim;  // elements
  to.Store(LaneQueryPairs<kDim, 2>::Load(w.q, w.q_dtype, first, w.group), a.scale);
}

// The same as the kernel before has left it.
template <int kDim>
struct KeptQuery {
  static constexpr int kPieces = sizeof(SharedQuery<kDim>) / 16;

  // By threads first, first + step, ..
  __device__ static void Store(const Arguments& a, int64_t item, const SharedQuery<kDim>& query,
                               int first, int step) {
    for (int i = first; i < kPieces; i += step) {
      a.queries[item * kPieces + i] = reinterpret_cast<const uint4*>(&query)[i];
    }
  }
  __device__ static void Load(const Arguments& a, int64_t item, SharedQuery<kDim>& query, int first,
                              int step) {
    for (int i = first; i < kPieces; i += step) {
      reinterpret_cast<uint4*>(&query)[i] = __ldcg(a.queries + item * kPieces + i);
    }
  }
};

// Asks for lower rows of what is always fine of an octet, but for sinks, and lists it. Returns how
// many they are.
template <int kDim, int kHeads>
__device__ __forceinline__ int AskAlways(const PlanesItem<kDim>& item, int octet,
                                         const PlanesLengths& lengths,
                                         WarpMemory<kDim, kHeads>& memory) {
  const int lane = threadIdx.x % 32, token = EdgeOctets::kTokens * octet + lane;
  const bool is_always = lane < EdgeOctets::kTokens && token >= lengths.stop;
  const uint32_t always = __ballot_sync(kAllLanes, is_always);
  if (is_always) {
    memory.fine[__popc(always & ((1u << lane) - 1))] = static_cast<uint8_t>(token % kGroupTokens);
  }
  __syncwarp();
  NoHotRows hot;
  PlanesCopier<kDim, kHeads>(&memory).Rows(0, __popc(always),
                                           item.Lower(octet / EdgeOctets::kOfGroup), item.row_bytes,
                                           octet / EdgeOctets::kOfGroup, hot);
  return __popc(always);
}

// Their logits: `count` are listed, and their rows have arrived.
template <int kDim, int kHeads>
__device__ __forceinline__ void AddAlways(const PlanesItem<kDim>& item, int count,
                                          const LaneFactors& factors,
                                          const SharedQuery<kDim>& query, int number,
                                          WarpMemory<kDim, kHeads>& memory, const GroupSums& sums,
                                          SampleSums& sampled) {
  const FineForm form{item.has_last_plane, item.row_bytes};
  const float base[2] = {sums.Base(factors, 0, form.centre()),
                         sums.Base(factors, 1, form.centre())};
  KeepSums(memory, base, sums);
  __syncwarp();
  float logits[2];
  FineLogits(memory, 0, form, memory.Steps(number % 4), query, factors, logits);
  for (int head = 0; head < 2; ++head) {
    if (static_cast<int>(threadIdx.x % 32 / 4) < count) sampled.always[head].Add(logits[head], 1);
  }
}

// The CTA's share of what makes normalisers, to samples[cta][row].
template <int kHeads, int kWarps, typename Warps>
__device__ __forceinline__ void KeepSamples(const Arguments& a, const CtaPlace& place,
                                            Warps& warps) {
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int head = threadIdx.x / 32; head < a.work.group; head += kWarps) {
    PowerSum always, sampled;
    if (lane < kWarps) {
      const float(*const kept)[kHeads] = warps[lane].sums;
      always = {kept[0][head], kept[1][head]};
      sampled = {kept[2][head], kept[3][head]};
    }
    always.AddOverLanes(1);
    sampled.AddOverLanes(1);
    if (lane != 0) continue;
    a.samples[place.share.cta * a.rows() + place.first_row + head] = {always.m, always.l, sampled.m,
                                                                      sampled.l};
  }
}

// What logits of each head are relative to. By the first warps; barrier afterwards.
template <int kHeads, int kWarps>
__device__ __forceinline__ void FindReferences(const Arguments& a, const CtaPlace& place,
                                               const PlanesLengths& lengths,
                                               const PlanesSample& sample, float* reference) {
  for (int head = threadIdx.x / 32; head < kHeads; head += kWarps) {
    float of_head = INFINITY;  // a head that is not there weighs nothing
    if (head < a.work.group) {
      of_head = LogNormaliser(a.samples, place.share.ctas, a.work.with, a.rows(),
                              place.first_row + head, lengths, sample) -
                log2f(static_cast<float>(max(lengths.tokens, 1))) + a.relative;
    }
    if (threadIdx.x % 32 != 0) continue;
    reference[head] = of_head;
    a.references[8 * place.item + head] = of_head;
  }
}

// An estimate of the item's work, where references are known. Barriers around it.
template <int kHeads>
__device__ __forceinline__ void AddCosts(const Arguments& a, const CtaPlace& place, int sampled,
                                         const float* reference, int& cost) {
  const auto& tops = reinterpret_cast<const SampledTops<kHeads>*>(a.tops)[place.item];
  int own = 0;
  for (int i = threadIdx.x; i < SampledTops<kHeads>::Kept(sampled); i += blockDim.x) {
    own += GroupCost::Of(tops.at[i], reference, a.read_from);
  }
  if (own != 0) atomicAdd(&cost, own);
}

// A warp's, to a count of the item's.
__device__ __forceinline__ void AddBytes(uint64_t* counts, int64_t item, uint64_t bytes) {
  if (counts == nullptr || threadIdx.x % 32 != 0) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(counts + item), bytes);
}

// The last of the item's CTAs: what the next kernel has to know of it.
template <int kDim, int kHeads, int kWarps>
__device__ __forceinline__ void FinishSample(const Arguments& a, const CtaPlace& place,
                                             const PlanesLengths& lengths,
                                             const PlanesSample& sample,
                                             CtaMemory<kDim, kHeads>& shared) {
  if (!ArrivesLast(a.work.counters + place.item, place.share.ctas, shared.is_last)) return;
  if (threadIdx.x == 0) shared.cost = 0;
  FindReferences<kHeads, kWarps>(a, place, lengths, sample, shared.reference);
  __syncthreads();
  AddCosts<kHeads>(a, place, sample.count, shared.reference, shared.cost);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const int kept = SampledTops<kHeads>::Kept(sample.count);
  const float each = kept == 0 ? GroupCost::kInFull : static_cast<float>(shared.cost) / kept;
  a.costs[place.item] = each * static_cast<float>(max(lengths.groups, 1));
}

// Grid (ctas, items).
template <int kDim, int kHeads>
__global__ void __launch_bounds__(CtaShape<kDim, kHeads>::kThreads,
                                  CtaShape<kDim, kHeads>::kCtasOfSm)
    SampleKernel(const __grid_constant__ Arguments a) {
  constexpr int kWarps = CtaShape<kDim, kHeads>::kWarps;
  extern __shared__ uint4 dynamic[];
  auto& shared = *reinterpret_cast<CtaMemory<kDim, kHeads>*>(dynamic);
  const AttendPlanesBatch& w = a.work;
  LetNextStart();
  if (!w.ahead) WaitForPrevious();
  const auto place = CtaPlace::Of<kWarps>(w);
  auto& memory = shared.warps[threadIdx.x / 32];
  const auto item = PlanesItem<kDim>::Of(w.planes, place.sequence, place.head);
  const PlanesLengths lengths = PlanesLengths::Of(w, place.sequence);
  const PlanesSample sample = PlanesSample::Of(lengths, w.rule.sample);
  const SampleTasks tasks = SampleTasks::Of(lengths, sample);
  const PlanesCopier<kDim, kHeads> copier(&memory);
  int task = place.warp, number = 0, always = 0;
  if (task < tasks.count) copier.Keys(0, item.Upper(tasks.GroupOf(task)));
  if (task < tasks.count && !tasks.IsSampled(task)) {
    always = AskAlways(item, tasks.OctetOf(task), lengths, memory);
  }
  CommitCopies();
  if (w.ahead) WaitForPrevious();
  LoadQuery<kDim>(a, place, shared.query);
  __syncthreads();
  if (place.share.cta == 0) {
    KeptQuery<kDim>::Store(a, place.item, shared.query, threadIdx.x, kWarps * 32);
  }
  const LaneFactors factors = shared.query.Factors();
  const FineForm form{item.has_last_plane, item.row_bytes};
  auto& tops = reinterpret_cast<SampledTops<kHeads>*>(a.tops)[place.item];
  SampleSums sampled;
  uint64_t fetched = 0;
#pragma unroll 1
  for (; task < tasks.count; task += place.warps, ++number) {
    const int next = task + place.warps, group = tasks.GroupOf(task);
    if (next < tasks.count) copier.Keys(number + 1, item.Upper(tasks.GroupOf(next)));
    CommitCopies();
    WaitForCopies<1>();
    __syncwarp();
    GroupSums sums;
    ScoreGroup(memory, number, shared.query, sums);
    fetched += GroupShape<kDim>::kValueScales;
    if (tasks.IsSampled(task)) {
      float top[2];
      sampled.AddSampled(lengths, group * kGroupTokens, factors, sums, top);
      for (int head = 0; head < 2; ++head) {
        top[head] = fmaf(form.RoundingOf(factors.base[head]), sums.squares[head], top[head]);
      }
      tops.Keep(task, sample.count, top);
    } else {
      if (number > 0) {
        always = AskAlways(item, tasks.OctetOf(task), lengths, memory);
        CommitCopies();
        WaitForCopies<0>();
        __syncwarp();
      }
      AddAlways(item, always, factors, shared.query, number, memory, sums, sampled);
      fetched += item.row_bytes * always;
    }
    __syncwarp();
  }
  sampled.Keep(memory.sums);
  AddBytes(w.report.fetched, place.item, fetched);
  KeepSamples<kHeads, kWarps>(a, place, shared.warps);
  FinishSample<kDim, kHeads, kWarps>(a, place, lengths, sample, shared);
}

// Rotates a row back, of which a lane has kEach neighbouring channels. By a warp.
template <int kEach>
__device__ __forceinline__ void RotateBack(float (&x)[kEach]) {
#pragma unroll
  for (int stride = 1; stride < kEach; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if ((i & stride) != 0) continue;
      const float a = x[i], b = x[i + stride];
      x[i] = a + b;
      x[i + stride] = a - b;
    }
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const bool is_second = (threadIdx.x & step) != 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float other = __shfl_xor_sync(kAllLanes, x[i], step);
      x[i] = is_second ? other - x[i] : x[i] + other;
    }
  }
}

// A head's sums in shared memory to the output. By a warp.
template <int kDim>
__device__ __forceinline__ void StoreHead(const Arguments& a, int64_t row, float m, float l,
                                          float (&o)[kDim]) {
  const AttendPlanesBatch& w = a.work;
  constexpr int kEach = kDim / 32;
  float* const own = o + threadIdx.x % 32 * kEach;
  float x[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = own[i];
  RotateBack(x);
  const float size = rsqrtf(static_cast<float>(kDim));
#pragma unroll
  for (int i = 0; i < kEach; ++i) own[i] = x[i] * size;
  __syncwarp();
  for (int column = threadIdx.x % 32; column < kDim / 4; column += 32) {
    StoreResult(w.with, w.to, w.partial, a.rows(), row, kDim, column,
                {m, l, reinterpret_cast<const float4*>(o)[column]});
  }
}

// An item has 33 parts where a GPU has 132 SMs, 8 items and two CTAs each.
constexpr int kPartsAtOnce = 17;

// The item's sums, of all its CTAs in the last of them, to the output.
template <int kDim, int kHeads, typename Warp, typename Shape>
__device__ __forceinline__ void Finish(const Arguments& a, const CtaPlace& place,
                                       CtaMemory<kDim, kHeads, Warp, Shape>& shared) {
  const AttendPlanesBatch& w = a.work;
  const SharedItem item{w.group,
                        int64_t{place.share.first} * w.group,
                        w.group,
                        place.share.cta,
                        place.share.ctas,
                        a.splits,
                        w.counters + place.item};
  if (threadIdx.x == 0) shared.is_last = place.share.ctas == 1;
  __syncthreads();
  FinishItem<Shape::kThreads, kDim, kPartsAtOnce>(
      item,
      [&](int head, int column) {
        WeightedRow sum;
        for (int warp = 0; warp < Shape::kWarps; ++warp) {
          const auto& of_warp = shared.warps[warp];
          sum.Add(of_warp.m[head], of_warp.l[head],
                  reinterpret_cast<const float4*>(of_warp.o[head])[column]);
        }
        return sum;
      },
      [&](int64_t row, int column, const WeightedRow& sum) {
        const auto head = static_cast<int>(row - item.first_row);
        reinterpret_cast<float4*>(shared.o[head])[column] = sum.o;
        if (column != 0) return;
        shared.m[head] = sum.m;
        shared.l[head] = sum.l;
      },
      reinterpret_cast<WeightedRow*>(shared.warps), shared.is_last);
  if (!shared.is_last) return;
  __syncthreads();
  for (int head = threadIdx.x / 32; head < w.group; head += Shape::kWarps) {
    StoreHead<kDim>(a, place.first_row + head, shared.m[head], shared.l[head], shared.o[head]);
  }
}

// A warp's memory of AttendKernel.
template <int kDim, int kHeads, bool kHot>
using WarpMemoryOf =
    std::conditional_t<kHot, HotWarpMemory<kDim, kHeads>, WarpMemory<kDim, kHeads>>;

// Copies of a warp's lower rows, if it has any.
template <bool kHot, typename Memory>
__device__ __forceinline__ auto HotRowsOf(const AttendPlanesBatch& w, const CtaPlace& place,
                                          int row_bytes, Memory& memory) {
  if constexpr (kHot) {
    return HotRowSet(w.hot, place.sequence, place.head, row_bytes, &memory.hot);
  } else {
    return NoHotRows{};
  }
}

// Any grid of at least as many CTAs as there are items. kHot: AttendPlanesBatch::hot has copies.
template <int kDim, int kHeads, bool kHot>
__global__ void __launch_bounds__(CtaShape<kDim, kHeads>::kThreads,
                                  CtaShape<kDim, kHeads>::kCtasOfSm)
    AttendKernel(const __grid_constant__ Arguments a) {
  constexpr int kWarps = CtaShape<kDim, kHeads>::kWarps;
  extern __shared__ uint4 dynamic[];
  auto& shared =
      *reinterpret_cast<CtaMemory<kDim, kHeads, WarpMemoryOf<kDim, kHeads, kHot>>*>(dynamic);
  const AttendPlanesBatch& w = a.work;
  const uint64_t policy = ReadOncePolicy();
  WaitForPrevious();
  const auto place = CtaPlace::Of<kWarps>(w, CtaShare::Of(a.costs, a.items()));
  KeptQuery<kDim>::Load(a, place.item, shared.query, threadIdx.x, kWarps * 32);
  if (threadIdx.x < kHeads) {
    shared.reference[threadIdx.x] = __ldcg(a.references + 8 * place.item + threadIdx.x);
  }
  const auto item = PlanesItem<kDim>::Of(w.planes, place.sequence, place.head);
  ItemRule rule;
  rule.lengths = PlanesLengths::Of(w, place.sequence);
  rule.read_from = a.read_from;
  rule.form = {item.has_last_plane, item.row_bytes};
  const PlanesVisits visits = PlanesVisits::Of(rule.lengths);
  auto& memory = shared.warps[threadIdx.x / 32];
  auto hot = HotRowsOf<kHot>(w, place, item.row_bytes, memory);
  PlanesWarp<kDim, kHeads, decltype(hot)> warp(item, visits, &memory, place.warp, place.warps,
                                               policy);
  if (threadIdx.x < 2) shared.ones[threadIdx.x] = {0x3C003C00, 0x3C003C00, 0x3C003C00, 0x3C003C00};
  __syncthreads();
  rule.factors = shared.query.Factors();
  for (int head = 0; head < 2; ++head) {
    rule.rounding[head] = rule.form.RoundingOf(rule.factors.base[head]);
    rule.reference[head] = shared.reference[(threadIdx.x % 4 * 2 + head) % kHeads];
  }
  warp.Run(shared.query, rule, ItemReport::Of(w.report, place.item), shared.ones, hot);
  warp.Store(rule);
  AddBytes(w.report.fetched, place.item, warp.fetched());
  if constexpr (kHot) AddBytes(w.report.hot, place.item, hot.hits());
  __syncthreads();
  LetNextStart();
  Finish(a, place, shared);
}

// Where everything is fine. Grid (ctas, items).
template <int kDim, int kHeads>
__global__ void __launch_bounds__(FullShape<kDim>::kThreads, 1)
    FullKernel(const __grid_constant__ Arguments a) {
  constexpr int kWarps = FullShape<kDim>::kWarps;
  using Warp = FullMemory<kDim, kHeads>;
  extern __shared__ uint4 dynamic[];
  auto& shared = *reinterpret_cast<CtaMemory<kDim, kHeads, Warp, FullShape<kDim>>*>(dynamic);
  const AttendPlanesBatch& w = a.work;
  if (!w.ahead) WaitForPrevious();
  const auto place = CtaPlace::Of<kWarps>(w);
  const auto item = PlanesItem<kDim>::Of(w.planes, place.sequence, place.head);
  const int groups = w.groups[place.sequence];
  FullGroups<kDim, kHeads> full(item, &shared.warps[threadIdx.x / 32], place.warp, place.warps,
                                groups);
  if (w.ahead) WaitForPrevious();
  LoadQuery<kDim>(a, place, shared.query);
  if (threadIdx.x < 2) shared.ones[threadIdx.x] = {0x3C003C00, 0x3C003C00, 0x3C003C00, 0x3C003C00};
  __syncthreads();
  full.Run(shared.query, shared.query.Factors(), shared.ones);
  full.Store();
  const auto report = ItemReport::Of(w.report, place.item);
  for (int group = place.warp; group < groups; group += place.warps) {
    report.Write(group, 0xFF, 0xF);
    AddBytes(w.report.fetched, place.item,
             GroupShape<kDim>::kUpperBytes + kGroupTokens * item.row_bytes);
  }
  __syncthreads();
  LetNextStart();
  Finish(a, place, shared);
}

constexpr int kMostCtas = 1024;

// CTAs of all items: all that run at once, `ctas_of_sm` on an SM, and at least one each.
int32_t CtasOf(const AttendPlanesBatch& w, int ctas_of_sm) {
  const int64_t groups = int64_t{w.planes.block_stride} * w.planes.block_groups;
  const int64_t items = int64_t{w.batch} * w.planes.kv_heads;
  const int64_t most = items * std::max<int64_t>(groups / 4, 1);
  const auto wanted = static_cast<int>(std::min<int64_t>(most, kMostCtas));
  return std::max(static_cast<int>(items), SplitsOfWave(ctas_of_sm, 1, wanted));
}

// Pieces of a workspace, one after the other.
struct Workspace {
  uint64_t next;

  template <typename T>
  T* Take(int64_t count) {
    const uint64_t at = (next + 15) / 16 * 16;
    next = at + static_cast<uint64_t>(count) * sizeof(T);
    return reinterpret_cast<T*>(at);
  }
};

// ctas: of all items. Of the workspace it uses what AttendPlanesWorkspaceBytes counts.
Workspace Divide(const AttendPlanesBatch& w, int64_t ctas, Arguments& a) {
  Workspace from{reinterpret_cast<uint64_t>(w.workspace)};
  const int64_t rows = ctas * w.group, items = int64_t{w.batch} * w.planes.kv_heads;
  a.splits.o = from.Take<float>(rows * w.planes.format.dim);
  a.splits.m = from.Take<float>(rows);
  a.splits.l = from.Take<float>(rows);
  a.samples = from.Take<float4>(rows);
  a.tops = from.Take<float>(items * SampledTops<8>::kMost * kGroupStrips * (w.group <= 4 ? 4 : 8));
  a.references = from.Take<float>(items * 8);
  a.costs = from.Take<float>(items);
  a.queries = from.Take<uint4>(items * (w.planes.format.dim * 2 + 2));
  return from;
}

Arguments ArgumentsOf(const AttendPlanesBatch& w, int ctas) {
  Arguments a{};
  a.work = w;
  a.scale = w.scale * kLog2E;
  const auto fine = static_cast<float>(w.rule.fine_above);
  a.relative = std::log2(fine) - kFineFrom;
  a.read_from = kFineFrom + std::log2(static_cast<float>(w.rule.skip_below) / fine);
  Divide(w, ctas, a);
  return a;
}

bool IsValid(const AttendPlanesBatch& w) {
  const PlanesRule& r = w.rule;
  return w.planes.IsValid() && w.planes.format.tokens == kGroupTokens && w.batch >= 0 &&
         w.group >= 1 && w.group <= 8 && w.q_stride % 8 == 0 && w.scale > 0 &&
         (r.fine_above > 0 || (r.fine_above == 0 && r.share >= 1)) && r.run == 1 && r.sample >= 1 &&
         r.sinks >= 0 && r.recent >= 1 && r.skip_below >= 0 && w.with.parts >= 1 &&
         (w.hot.sequences == nullptr || (w.hot.rows >= 1 && w.hot.rows <= 32)) &&
         w.report.stride % kGroupTokens == 0 && (w.to.rows != nullptr || w.partial.o != nullptr);
}

// Launches one of the op's kernels, which takes shared memory of this type.
template <typename Shared>
int LaunchOne(void (*kernel)(Arguments), const Arguments& a, dim3 grid, int threads,
              Stream stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared));
  static_assert(kBytes <= 227 * 1024);
  if (const int error = AllowShared(kernel, kBytes); error != 0) return error;
  return LaunchDependent(kernel, grid, threads, kBytes, stream, a);
}

template <int kDim, int kHeads>
int Launch(const AttendPlanesBatch& w, Stream stream) {
  constexpr int kThreads = CtaShape<kDim, kHeads>::kThreads;
  using OfWarps = CtaMemory<kDim, kHeads>;
  const int items = w.batch * w.planes.kv_heads;
  if (w.rule.fine_above == 0) {
    using Shape = FullShape<kDim>;
    using OfFull = CtaMemory<kDim, kHeads, FullMemory<kDim, kHeads>, Shape>;
    const int each = CtasOf(w, Shape::kCtasOfSm) / items;
    return LaunchOne<OfFull>(FullKernel<kDim, kHeads>, ArgumentsOf(w, each * items),
                             dim3(each, items), Shape::kThreads, stream);
  }
  const int ctas = CtasOf(w, CtaShape<kDim, kHeads>::kCtasOfSm);
  const Arguments a = ArgumentsOf(w, ctas);
  const int error = LaunchOne<OfWarps>(SampleKernel<kDim, kHeads>, a, dim3(ctas / items, items),
                                       kThreads, stream);
  if (error != 0) return error;
  if (w.hot.sequences != nullptr) {
    using OfHotWarps = CtaMemory<kDim, kHeads, HotWarpMemory<kDim, kHeads>>;
    return LaunchOne<OfHotWarps>(AttendKernel<kDim, kHeads, true>, a, ctas, kThreads, stream);
  }
  return LaunchOne<OfWarps>(AttendKernel<kDim, kHeads, false>, a, ctas, kThreads, stream);
}

template <int kDim>
int Launch(const AttendPlanesBatch& w, Stream stream) {
  return w.group <= 4 ? Launch<kDim, 4>(w, stream) : Launch<kDim, 8>(w, stream);
}

}  // namespace

int64_t AttendPlanesWorkspaceBytes(const AttendPlanesBatch& w) {
  const int64_t items = int64_t{w.batch} * w.planes.kv_heads;
  AttendPlanesBatch at_zero = w;
  at_zero.workspace = nullptr;
  Arguments unused{};
  const int64_t ctas = std::max<int64_t>(items, SplitsOfWave(2, 1, kMostCtas));
  return static_cast<int64_t>(Divide(at_zero, ctas, unused).next);
}

int AttendPlanesCuda(const AttendPlanesBatch& w, Stream stream) {
  if (!IsValid(w)) return cudaErrorInvalidValue;
  if (w.batch == 0) return cudaSuccess;
  switch (w.planes.format.dim) {
    case 64:
      return Launch<64>(w, stream);
    case 128:
      return Launch<128>(w, stream);
    default:
      return Launch<256>(w, stream);
  }
}

}  // namespace kvstrata::cuda
