// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>

#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/pick/cluster_exchange.cuh"
#include "kernels/ops/pick/global_exchange.cuh"
#include "kernels/ops/pick/list_picker.cuh"
#include "kernels/ops/pick/pick_cuda.h"

namespace kvstrata::cuda {
namespace {

// Keys that a CTA holds in shared memory; longer lists are for several CTAs, unless the caller says
// otherwise: one that holds more may not start beside the CTAs of the op before.
constexpr int kKeysOfOneCta = 10240;
// Longer lists are for more CTAs than a cluster has: 2048 of 128K in 10.0 us with 64 of them, 13.0
// with a cluster's 8; 512 of 16K x 8 in 5.9 with clusters, 10.6 with a CTA each (H200).
constexpr int kKeysOfCluster = kPickKeysOfCta;
// CTAs of clusters an SM, above which a list that one CTA can hold gets one: lists then keep the
// device busy without help.
constexpr int kClusterCtasOfSm = 2;
constexpr int kThreadsMin = kScanThreads, kThreadsMax = kPickWarpsMax * 32;

// Grid (CTAs a list, lists). room: keys that shared memory has room for.
template <typename Exchange>
__device__ __forceinline__ void PickFromList(const PickBatch& w, const Exchange& exchange,
                                             PickerMemory& memory, int32_t room) {
  const int list = blockIdx.y, sequence = list / w.groups;
  for (int i = threadIdx.x; i < kPasses * kBins / 4; i += blockDim.x) {
    reinterpret_cast<int4*>(memory.histogram)[i] = {0, 0, 0, 0};
  }
  __syncthreads();
  if (!w.ahead) WaitForPrevious();
  const int32_t tokens = w.tokens[sequence];
  CandidateRule rule = w.rule;
  int32_t take = w.rule.take;
  if (w.takes != nullptr) take = w.takes[w.take_each ? list : sequence];
  if (!w.take_each) rule.take = take;
  WaitForPrevious();
  LetNextStart();
  // The CTAs of a list see the same: all return, or all meet.
  if (tokens == kNoQuery) return;
  const Candidates units = CandidatesOf(rule, tokens);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    w.counts[list] = units.full ? 0 : take;
    if (list % w.groups == 0) {
      w.sink_end[sequence] = units.full ? 0 : units.first * w.rule.unit_tokens;
      w.recent_begin[sequence] = units.full ? 0 : units.last * w.rule.unit_tokens;
    }
  }
  if (units.full || take <= 0) return;
  const ListKeys keys(w, list, units.count(), exchange.cta(), exchange.ctas(), memory.keys, room);
  int32_t* out = w.lists != nullptr ? reinterpret_cast<int32_t*>(w.lists[list])
                                    : w.units + int64_t{list} * w.list_stride;
  ListPicker<Exchange>(keys, exchange, take, units.first, out, memory).Pick();
}

__device__ PickerMemory& Memory() {
  extern __shared__ uint4 dynamic[];
  return *reinterpret_cast<PickerMemory*>(dynamic);
}

// A CTA a list, or several that run at once.
__global__ __launch_bounds__(kThreadsMax) void PickKernel(const __grid_constant__ PickBatch w,
                                                          ListScratch* scratch, uint32_t* segments,
                                                          int32_t room) {
  const int64_t segment = int64_t{blockIdx.y} * gridDim.x * GlobalExchange::kCandidates;
  const GlobalExchange exchange(scratch + blockIdx.y, segments + segment, Memory());
  PickFromList(w, exchange, Memory(), room);
}

// A cluster a list.
__global__ __launch_bounds__(kThreadsMax) void PickByClusterKernel(
    const __grid_constant__ PickBatch w, int32_t room) {
#if __CUDA_ARCH__ >= 900
  PickFromList(w, ClusterExchange(Memory()), Memory(), room);
#endif
}

// How a batch is divided.
struct Division {
  bool cluster = false;
  int ctas = 1;  // a list
  int threads = kThreadsMin;
  int32_t room = kKeysOfOneCta;
};

// More warps where a CTA has many keys to go through.
int ThreadsFor(const PickBatch& w, int ctas) {
  return w.score_stride / ctas > 4096 ? kThreadsMax : kThreadsMin;
}

int Lists(const PickBatch& w) { return w.batch * w.groups; }

Division ByCluster(const PickBatch& w) {
  const int threads = ThreadsFor(w, kClusterCtas), warps = threads / 32;
  const int per_warp = ListKeys::PerWarp(w.score_stride, kClusterCtas * warps);
  return {true, kClusterCtas, threads, per_warp * warps};
}

bool ClusterCan(const PickBatch& w) {
  return DeviceAttribute(cudaDevAttrComputeCapabilityMajor) >= 9 &&
         ByCluster(w).room <= kPickKeysOfCta;
}

// Whether lists that one CTA can hold are enough to keep a device of clusters busy.
bool OneCtaSuffices(const PickBatch& w) {
  return w.score_stride <= kPickKeysOfCta &&
         int64_t{Lists(w)} * kClusterCtas >
             int64_t{kClusterCtasOfSm} * DeviceAttribute(cudaDevAttrMultiProcessorCount);
}

// Several CTAs a list pay where one cannot hold it; all of them must run at once.
int CtasThroughMemory(const PickBatch& w) {
  constexpr int kKeysPerCta = 2048;
  const int resident = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  const int most = std::clamp(resident / Lists(w), 1, kPickCtasMax);
  if (w.ctas_per_list > 0) return std::min(w.ctas_per_list, most);
  return w.score_stride <= kKeysOfOneCta ? 1 : std::min(most, w.score_stride / kKeysPerCta);
}

Division WithCtas(const PickBatch& w, int ctas) {
  const bool much = ctas == 1 && w.score_stride > kKeysOfOneCta;
  return {false, ctas, ThreadsFor(w, ctas), much ? kPickKeysOfCta : kKeysOfOneCta};
}

Division Divide(const PickBatch& w) {
  if (w.exchange == PickExchange::kCluster) return ByCluster(w);
  const bool by_shape = w.exchange == PickExchange::kByShape && w.ctas_per_list == 0;
  if (!by_shape || !ClusterCan(w)) return WithCtas(w, CtasThroughMemory(w));
  if (w.score_stride <= kKeysOfOneCta || OneCtaSuffices(w)) return WithCtas(w, 1);
  return w.score_stride <= kKeysOfCluster ? ByCluster(w) : WithCtas(w, CtasThroughMemory(w));
}

size_t SharedBytes(int32_t room) { return sizeof(PickerMemory) + room * sizeof(uint32_t); }

// CTAs that meet: cooperative, or clusters.
template <typename... Args>
int LaunchTogether(void (*kernel)(Args...), const cudaLaunchAttribute& together, dim3 grid,
                   const Division& division, Stream stream, Args... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0] = together;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(division.threads);
  config.dynamicSmemBytes = SharedBytes(division.room);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = DeviceAttribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Lists whose counters lie at the beginning of the scratch.
int32_t ScratchLists(const PickBatch& w) { return std::max(w.scratch_lists, Lists(w)); }

int LaunchClusters(const PickBatch& w, dim3 grid, const Division& division, Stream stream) {
  const int most = static_cast<int>(SharedBytes(kPickKeysOfCta));
  if (const int error = AllowShared(PickByClusterKernel, most); error != 0) return error;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kClusterCtas, 1, 1};
  return LaunchTogether(PickByClusterKernel, cluster, grid, division, stream, w, division.room);
}

int Launch(const PickBatch& w, const Division& division, Stream stream) {
  const dim3 grid(division.ctas, Lists(w));
  if (division.cluster) return LaunchClusters(w, grid, division, stream);
  const int most = static_cast<int>(SharedBytes(kPickKeysOfCta));
  if (const int error = AllowShared(PickKernel, most); error != 0) return error;
  auto* scratch = static_cast<ListScratch*>(w.scratch);
  auto* segments = reinterpret_cast<uint32_t*>(scratch + ScratchLists(w));
  if (division.ctas == 1) {
    return LaunchDependent(PickKernel, grid, division.threads, SharedBytes(division.room), stream,
                           w, scratch, segments, division.room);
  }
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  return LaunchTogether(PickKernel, cooperative, grid, division, stream, w, scratch, segments,
                        division.room);
}

}  // namespace

int64_t PickScratchBytes(const PickBatch& w) {
  const Division division = Divide(w);
  if (division.cluster || division.ctas == 1) return 16;
  return ScratchLists(w) * int64_t{sizeof(ListScratch)} + int64_t{Lists(w)} * division.ctas *
                                                              GlobalExchange::kCandidates *
                                                              int64_t{sizeof(uint32_t)};
}

int PickCuda(const PickBatch& w, Stream stream) {
  if (w.batch == 0) return cudaSuccess;
  const bool known = w.dtype == DType::kF32 || w.dtype == DType::kBF16;
  if (!known || w.score_stride % 8 != 0 || w.list_stride < w.rule.take || w.scratch == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (w.exchange == PickExchange::kCluster && !ClusterCan(w)) return cudaErrorInvalidValue;
  return Launch(w, Divide(w), stream);
}

}  // namespace kvstrata::cuda
