// SPDX-License-Identifier: Apache-2.0
// The op's first kernel: from sampled groups and what is always fine it makes what logits of each
// head are compared with, and says what of the GPU an item is to have in the second one.
#pragma once

#include "kernels/cuda/warps/last_arrival.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/attend_planes/hot_rows.cuh"
#include "kernels/ops/attend_planes/planes_ctas.cuh"

namespace kvstrata::cuda {

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
  KeepSums(memory, base, OwnSums<kHeads>(sums));
  __syncwarp();
  float logits[2];
  FineLogits(memory, 0, form, memory.scales[number % 4], query, factors, logits);
  for (int head = 0; head < 2; ++head) {
    if (static_cast<int>(threadIdx.x % 32 / 4) < count) sampled.always[head].Add(logits[head], 1);
  }
}

// The CTA's share of what makes normalisers, to samples[cta][row].
template <int kHeads, int kWarps, typename Warps>
__device__ __forceinline__ void KeepSamples(const PlanesArguments& a, const CtaPlace& place,
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
__device__ __forceinline__ void FindReferences(const PlanesArguments& a, const CtaPlace& place,
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
__device__ __forceinline__ void AddCosts(const PlanesArguments& a, const CtaPlace& place,
                                         int sampled, const float* reference, int& cost) {
  const auto& tops = reinterpret_cast<const SampledTops<kHeads>*>(a.tops)[place.item];
  int own = 0;
  for (int i = threadIdx.x; i < SampledTops<kHeads>::Kept(sampled); i += blockDim.x) {
    own += GroupCost::Of(tops.at[i], reference, a.read_from);
  }
  if (own != 0) atomicAdd(&cost, own);
}

// The last of the item's CTAs: what the next kernel has to know of it.
template <int kDim, int kHeads, int kWarps>
__device__ __forceinline__ void FinishSample(const PlanesArguments& a, const CtaPlace& place,
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

// The query to all warps, and to the next kernel.
template <int kDim, int kWarps>
__device__ __forceinline__ void ShareQuery(const PlanesArguments& a, const CtaPlace& place,
                                           SharedQuery<kDim>& query) {
  LoadQuery<kDim>(a, place, query);
  __syncthreads();
  if (place.share.cta != 0) return;
  KeptQuery<kDim>::Store(a, place.item, query, threadIdx.x, kWarps * 32);
}

// Grid (ctas, items).
template <int kDim, int kHeads>
__global__ void __launch_bounds__(CtaShape<kDim, kHeads>::kThreads,
                                  CtaShape<kDim, kHeads>::kCtasOfSm)
    SampleKernel(const __grid_constant__ PlanesArguments a) {
  constexpr int kWarps = CtaShape<kDim, kHeads>::kWarps;
  alignas(kLineBytes) extern __shared__ uint4 dynamic[];
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
  ShareQuery<kDim, kWarps>(a, place, shared.query);
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
    if (tasks.IsSampled(task)) {
      float top[2];
      sampled.template AddSampled<kHeads>(lengths, group * kGroupTokens, factors, form, sums, top);
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
  AddBytes(w.report.fetched, place.item, fetched + number * GroupShape<kDim>::kValueScales);
  KeepSamples<kHeads, kWarps>(a, place, shared.warps);
  FinishSample<kDim, kHeads, kWarps>(a, place, lengths, sample, shared);
}

}  // namespace kvstrata::cuda
