// SPDX-License-Identifier: Apache-2.0
// The CTAs of an item (a sequence and a KV head) share its groups: warp after warp over all of
// them, so that what is read at one time lies side by side. How many CTAs an item has is what its
// sample says of its work.
//
// Floor on an H200 (4.2 TB/s), 8 KV heads x 128, 128K tokens: 42 MB of keys, 38 MB of values where
// no strip is left out, and 2 MB for each percent that is fine. With nothing fine that is 19 us,
// and 14 us with half of the strips left out. Issue at 1.8 GHz: 16,384 groups of 430 instructions
// by 528 schedulers are 7 us. Where strips are read a group takes 400 more, and up to eight fine
// tokens of it 350.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/attend_planes/attend_planes_cuda.h"
#include "kernels/ops/attend_planes/by_share/share_kernels.cuh"
#include "kernels/ops/attend_planes/full_groups.cuh"
#include "kernels/ops/attend_planes/planes_output.cuh"
#include "kernels/ops/attend_planes/planes_warp.cuh"

namespace kvstrata::cuda {
namespace {

// A warp's memory of AttendKernel.
template <int kDim, int kHeads, HotKind kHot>
using WarpMemoryOf = std::conditional_t<kHot != HotKind::kNone, HotWarpMemory<kDim, kHeads>,
                                        WarpMemory<kDim, kHeads>>;

// Copies of a warp's lower rows, if it has any.
template <HotKind kHot, typename Memory>
__device__ __forceinline__ auto HotRowsOf(const AttendPlanesBatch& w, const CtaPlace& place,
                                          int row_bytes, Memory& memory) {
  if constexpr (kHot != HotKind::kNone) {
    constexpr bool kInBlocks = kHot == HotKind::kInBlocks;
    return HotRowSet<kInBlocks>(w, place.sequence, place.head, row_bytes, &memory.hot);
  } else {
    return NoHotRows{};
  }
}

template <typename Fine>
__device__ __forceinline__ Fine FineOf(const PlanesArguments& a, int64_t item) {
  if constexpr (Fine::kIsBits) {
    return {a.share.bits + item * (a.tokens() / kGroupTokens)};
  } else {
    return {};
  }
}

// Any grid of at least as many CTAs as there are items. kHot: the copies of AttendPlanesBatch::hot.
template <int kDim, int kHeads, HotKind kHot, typename Fine>
__global__ void __launch_bounds__(CtaShape<kDim, kHeads>::kThreads,
                                  CtaShape<kDim, kHeads>::kCtasOfSm)
    AttendKernel(const __grid_constant__ PlanesArguments a) {
  constexpr int kWarps = CtaShape<kDim, kHeads>::kWarps;
  alignas(kLineBytes) extern __shared__ uint4 dynamic[];
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
  PlanesWarp<kDim, kHeads, decltype(hot), Fine> warp(item, visits, &memory, place.warp, place.warps,
                                                     policy, FineOf<Fine>(a, place.item));
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
  if constexpr (kHot != HotKind::kNone) AddBytes(w.report.hot, place.item, hot.hits());
  __syncthreads();
  LetNextStart();
  Finish(a, place, shared);
}

// Where everything is fine. Grid (ctas, items).
template <int kDim, int kHeads>
__global__ void __launch_bounds__(FullShape<kDim>::kThreads, 1)
    FullKernel(const __grid_constant__ PlanesArguments a) {
  constexpr int kWarps = FullShape<kDim>::kWarps;
  using Warp = FullMemory<kDim, kHeads>;
  alignas(kLineBytes) extern __shared__ uint4 dynamic[];
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

// How long all items take by `each` CTAs of every one, in what one CTA takes for an item.
double TurnsOf(int64_t items, int each, int at_once) {
  return static_cast<double>((items * each + at_once - 1) / at_once) / each;
}

// CTAs of all items, at least one each. Where an item has four and more of those that run at once,
// so many. Else whole CTAs would leave SMs idle, as 272 items where 264 run at once, which take two
// turns: items are cut into more parts than run at once, the fewest that are near the best.
int32_t CtasOf(const AttendPlanesBatch& w, int ctas_of_sm) {
  constexpr int kPartGroups = 4, kEnough = 4;
  const int64_t groups = int64_t{w.planes.block_stride} * w.planes.block_groups;
  const auto most = static_cast<int>(std::clamp<int64_t>(groups / kPartGroups, 1, kMostCtas));
  const int items = w.batch * w.planes.kv_heads;
  const int64_t parts = std::min<int64_t>(int64_t{items} * most, kMostCtas);
  const int at_once = SplitsOfWave(ctas_of_sm, 1, static_cast<int>(parts));
  if (at_once >= kEnough * items) return at_once;
  int best = 1;
  for (int each = 2; each <= most && items * each <= kMostCtas; ++each) {
    if (TurnsOf(items, each, at_once) < 0.93 * TurnsOf(items, best, at_once)) best = each;
  }
  return items * best;
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

bool IsByShare(const PlanesRule& rule) { return rule.fine_above == 0 && rule.share < 1; }

// ctas: of all items. Of the workspace it uses what AttendPlanesWorkspaceBytes counts. a: with its
// work.
Workspace Divide(const AttendPlanesBatch& w, int64_t ctas, PlanesArguments& a) {
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
  if (!IsByShare(w.rule)) return from;
  a.share.scores = from.Take<float>(a.rows() * a.tokens());
  a.share.masses = from.Take<float>(items * a.tokens());
  a.share.candidates = from.Take<int32_t>(w.batch);
  a.share.takes = from.Take<int32_t>(w.batch);
  a.share.counts = from.Take<int32_t>(items);
  a.share.edges = from.Take<int32_t>(int64_t{2} * w.batch);
  a.share.scratch = from.Take<uint4>(1);
  a.share.bits = from.Take<uint64_t>(items * (a.tokens() / kGroupTokens));
  return from;
}

// What references are made of where no weight makes a token fine: sums are raised where coarse
// tokens weigh more (AttendedSums).
constexpr double kUsualFine = 8;

PlanesArguments ArgumentsOf(const AttendPlanesBatch& w, int ctas) {
  PlanesArguments a{};
  a.work = w;
  a.scale = w.scale * kLog2E;
  const auto fine = static_cast<float>(IsByShare(w.rule) ? kUsualFine : w.rule.fine_above);
  a.relative = std::log2(fine) - kFineFrom;
  a.read_from = kFineFrom + std::log2(static_cast<float>(w.rule.skip_below) / fine);
  Divide(w, ctas, a);
  return a;
}

bool IsValid(const AttendPlanesBatch& w) {
  const PlanesRule& r = w.rule;
  return w.planes.IsValid() && w.planes.format.tokens == kGroupTokens && w.batch >= 0 &&
         w.group >= 1 && w.group <= 8 && w.q_stride % 8 == 0 && w.scale > 0 &&
         (r.fine_above > 0 || (r.fine_above == 0 && r.share > 0)) && r.run == 1 && r.sample >= 1 &&
         r.sinks >= 0 && r.recent >= 1 && r.skip_below >= 0 && w.with.parts >= 1 &&
         (!w.hot.IsThere() || (w.hot.rows >= 1 && w.hot.rows <= 32)) &&
         (w.hot.launch == nullptr ||
          (r.fine_above > 0 && w.planes.hot_offset != 0 && w.planes.format.dim <= 128)) &&
         w.report.stride % kGroupTokens == 0 && (w.to.rows != nullptr || w.partial.o != nullptr);
}

// Launches one of the op's kernels, which takes shared memory of this type.
template <typename Shared>
int LaunchOne(void (*kernel)(PlanesArguments), const PlanesArguments& a, dim3 grid, int threads,
              Stream stream) {
  constexpr int kBytes = static_cast<int>(sizeof(Shared));
  static_assert(kBytes <= 227 * 1024);
  if (const int error = AllowShared(kernel, kBytes); error != 0) return error;
  return LaunchDependent(kernel, grid, threads, kBytes, stream, a);
}

template <int kDim, int kHeads>
int LaunchFull(const AttendPlanesBatch& w, Stream stream) {
  using Shape = FullShape<kDim>;
  using OfFull = CtaMemory<kDim, kHeads, FullMemory<kDim, kHeads>, Shape>;
  const int items = w.batch * w.planes.kv_heads;
  const int each = CtasOf(w, Shape::kCtasOfSm) / items;
  return LaunchOne<OfFull>(FullKernel<kDim, kHeads>, ArgumentsOf(w, each * items),
                           dim3(each, items), Shape::kThreads, stream);
}

// What is fine by a share, to its bits. grid: the sample's.
template <int kDim, int kHeads>
int LaunchChoice(const PlanesArguments& a, dim3 grid, Stream stream) {
  using OfWarps = CtaMemory<kDim, kHeads>;
  int error = LaunchOne<OfWarps>(ScoreKernel<kDim, kHeads>, a, grid,
                                 CtaShape<kDim, kHeads>::kThreads, stream);
  if (error == 0) error = LaunchDependent(MassKernel, grid, kShareThreads, 0, stream, a);
  if (error == 0) error = PickCuda(PickOf(a), stream);
  if (error != 0) return error;
  const int groups = a.tokens() / kGroupTokens;
  return LaunchDependent(BitsKernel, dim3((groups + kShareThreads - 1) / kShareThreads, grid.y),
                         kShareThreads, 0, stream, a);
}

template <int kDim, int kHeads, typename Fine>
int LaunchAttend(const PlanesArguments& a, int ctas, Stream stream) {
  constexpr int kThreads = CtaShape<kDim, kHeads>::kThreads;
  const HotRows& hot = a.work.hot;
  if (hot.IsThere()) {
    using OfHotWarps = CtaMemory<kDim, kHeads, HotWarpMemory<kDim, kHeads>>;
    auto kernel = AttendKernel<kDim, kHeads, HotKind::kOfSequences, Fine>;
    if constexpr (kDim <= 128 && !Fine::kIsBits) {
      if (hot.launch != nullptr) kernel = AttendKernel<kDim, kHeads, HotKind::kInBlocks, Fine>;
    }
    return LaunchOne<OfHotWarps>(kernel, a, ctas, kThreads, stream);
  }
  return LaunchOne<CtaMemory<kDim, kHeads>>(AttendKernel<kDim, kHeads, HotKind::kNone, Fine>, a,
                                            ctas, kThreads, stream);
}

template <int kDim, int kHeads>
int Launch(const AttendPlanesBatch& w, Stream stream) {
  constexpr int kThreads = CtaShape<kDim, kHeads>::kThreads;
  using OfWarps = CtaMemory<kDim, kHeads>;
  const bool by_share = IsByShare(w.rule);
  if (w.rule.fine_above == 0 && !by_share) return LaunchFull<kDim, kHeads>(w, stream);
  const int items = w.batch * w.planes.kv_heads;
  const int ctas = CtasOf(w, CtaShape<kDim, kHeads>::kCtasOfSm);
  const PlanesArguments a = ArgumentsOf(w, ctas);
  const int each =
      std::max(SplitsOfWave(CtaShape<kDim, kHeads>::kCtasOfSm, items, ctas / items), 1);
  const dim3 grid(each, items);
  int error = LaunchOne<OfWarps>(SampleKernel<kDim, kHeads>, a, grid, kThreads, stream);
  if (error == 0 && by_share) error = LaunchChoice<kDim, kHeads>(a, grid, stream);
  if (error != 0) return error;
  return by_share ? LaunchAttend<kDim, kHeads, FineByBits>(a, ctas, stream)
                  : LaunchAttend<kDim, kHeads, FineByWeight>(a, ctas, stream);
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
  PlanesArguments unused{};
  unused.work = at_zero;
  const int64_t ctas = std::max<int64_t>(items, kMostCtas);
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
