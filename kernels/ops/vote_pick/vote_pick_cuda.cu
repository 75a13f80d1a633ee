#include <algorithm>
#include <cstddef>

#include "kernels/cuda/launch.cuh"
#include "kernels/ops/pick/cluster_exchange.cuh"
#include "kernels/ops/pick/global_exchange.cuh"
#include "kernels/ops/pick/launch_together.cuh"
#include "kernels/ops/pick/list_picker.cuh"
#include "kernels/ops/vote_pick/vote_keys.cuh"
#include "kernels/ops/vote_pick/vote_pick_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kPickThreads = kPickWarpsMax * 32;

struct PickMemory {
  VoteKeysMemory votes;
  PickerMemory picker;
};

// Grid (CTAs, kv_heads, batch), the CTAs of a list taking 8 blocks in turn, the last ones first:
// those whose weights the first kernel wrote last are in the L2 still. Thread i sums row i % 16 of
// block i / 16.
__global__ __launch_bounds__(kSumWarps *
                             32) void CountVotesKernel(const __grid_constant__ VoteBatch w,
                                                       const Scratch scratch, const Tally tally) {
  __shared__ int32_t histogram[kBins];
  __shared__ float2 totals[kHeadsOfList];
  for (int i = threadIdx.x; i < kBins; i += kSumWarps * 32) histogram[i] = 0;
  WaitForPrevious();
  LetNextStart();
  const Candidates units = CandidatesOf(w.rule, w.tokens[blockIdx.z]);
  if (units.full) return;
  const int count = (units.last + kBlockRows - 1) / kBlockRows - units.first / kBlockRows;
  const int64_t sequence = blockIdx.z, list = sequence * w.output_rows + blockIdx.y;
  const int heads = w.query_heads / w.output_rows, first_head = heads * blockIdx.y;
  HeadTotals(scratch, sequence, w.query_heads, first_head, heads, totals);
  if (blockIdx.x == 0 && threadIdx.x < heads) {
    tally.totals[sequence * w.query_heads + first_head + threadIdx.x] = totals[threadIdx.x];
  }
  const int row = threadIdx.x % 16, step = static_cast<int>(gridDim.x) * kSumBlocks;
  const uint32_t half = 0xFFFFu << (threadIdx.x & 16);  // the block's lanes
  int left = count - 1 - static_cast<int>(blockIdx.x) * kSumBlocks - threadIdx.x / 16;
  for (; left >= 0; left -= step) {
    const int64_t cell = (sequence * scratch.blocks + left) * w.query_heads + first_head;
    const auto* weights = reinterpret_cast<const uint2*>(scratch.weights + cell * kBlockRows) + row;
    const RowVotes votes = SumHeads<kHeadsOfList>(weights, scratch.block_max + cell, totals, heads);
    uint32_t best = kAbsent;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t key = KeyOf(votes.at[j]);
      atomicAdd(&histogram[BinOf(key)], 1);
      best = max(best, key);
    }
#pragma unroll
    for (int lanes = 8; lanes > 0; lanes /= 2) {
      best = max(best, __shfl_xor_sync(half, best, lanes));
    }
    if (row == 0) tally.best[list * scratch.blocks + left] = best;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kSumWarps * 32) {
    if (histogram[i] != 0) atomicAdd(&tally.histogram[list * kBins + i], histogram[i]);
  }
}

// The least key of the bin that holds the last vote to be taken. By all threads, with a barrier at
// the end; the picker's memory is zero again.
__device__ uint32_t LeastKey(const int32_t* histogram, int32_t take, PickerMemory& s) {
  int4* const bins = reinterpret_cast<int4*>(s.histogram[0]);
  for (int i = threadIdx.x; i < kBins / 4; i += blockDim.x) {
    bins[i] = reinterpret_cast<const int4*>(histogram)[i];
  }
  __syncthreads();
  const Digit found = FindDigit(s.histogram[0], take, s.group_sums[0], &s.found[0]);
  __syncthreads();
  for (int i = threadIdx.x; i < kBins / 4; i += blockDim.x) bins[i] = {};
  return LeastOf(static_cast<int>(found.digit));
}

// The list of this CTA.
__device__ VoteList ListOf(const VoteBatch& w, const Scratch& scratch, const Tally& tally,
                           Candidates units) {
  const int list = blockIdx.y, sequence = list / w.output_rows, head = list % w.output_rows;
  VoteList out;
  out.heads = w.query_heads / w.output_rows;
  out.query_heads = w.query_heads;
  const int64_t first = int64_t{sequence} * scratch.blocks * w.query_heads + head * out.heads;
  out.weights = reinterpret_cast<const uint2*>(scratch.weights + first * kBlockRows);
  out.block_max = scratch.block_max + first;
  out.best = tally.best + int64_t{list} * scratch.blocks;
  out.units = units;
  out.first_block = units.first / kBlockRows;
  out.blocks = (units.last + kBlockRows - 1) / kBlockRows - out.first_block;
  return out;
}

// Grid (CTAs a list, lists).
template <typename Exchange>
__device__ __forceinline__ void PickVotes(const VotePickBatch& w, const Scratch& scratch,
                                          const Tally& tally, const Exchange& exchange,
                                          PickMemory& memory) {
  const int list = blockIdx.y, sequence = list / w.vote.output_rows;
  for (int i = threadIdx.x; i < kPasses * kBins / 4; i += blockDim.x) {
    reinterpret_cast<int4*>(memory.picker.histogram)[i] = {};
  }
  WaitForPrevious();
  LetNextStart();
  // The CTAs of a list see the same: all return, or all meet.
  const Candidates units = CandidatesOf(w.vote.rule, w.vote.tokens[sequence]);
  const int32_t take = w.vote.rule.take;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    w.pick.counts[list] = units.full ? 0 : take;
    if (list % w.vote.output_rows == 0) {
      w.pick.sink_end[sequence] = units.full ? 0 : units.first;
      w.pick.recent_begin[sequence] = units.full ? 0 : units.last;
    }
  }
  if (units.full || take <= 0) return;
  if (threadIdx.x == 0) memory.votes.list = ListOf(w.vote, scratch, tally, units);
  const int heads = w.vote.query_heads / w.vote.output_rows;
  if (threadIdx.x < heads) {
    memory.votes.totals[threadIdx.x] = tally.totals[int64_t{list} * heads + threadIdx.x];
  }
  const uint32_t low = LeastKey(tally.histogram + int64_t{list} * kBins, take, memory.picker);
  const VoteKeys keys(low, exchange.cta(), exchange.ctas(), memory.votes);
  int32_t* const out = w.pick.units + int64_t{list} * w.pick.list_stride;
  ListPicker<Exchange, VoteKeys>(keys, exchange, take, out, memory.picker).Pick();
}

__device__ PickMemory& Memory() {
  extern __shared__ uint4 dynamic[];
  return *reinterpret_cast<PickMemory*>(dynamic);
}

// A CTA a list, or several that run at once.
__global__ __launch_bounds__(kPickThreads) void PickVotesKernel(
    const __grid_constant__ VotePickBatch w, const __grid_constant__ Scratch scratch,
    const Tally tally, ListScratch* lists, uint32_t* segments) {
  const int64_t segment = int64_t{blockIdx.y} * gridDim.x * GlobalExchange::kCandidates;
  const GlobalExchange exchange(lists + blockIdx.y, segments + segment, Memory().picker);
  PickVotes(w, scratch, tally, exchange, Memory());
}

// A cluster a list.
__global__ __launch_bounds__(kPickThreads) void PickVotesByClusterKernel(
    const __grid_constant__ VotePickBatch w, const __grid_constant__ Scratch scratch,
    const Tally tally) {
#if __CUDA_ARCH__ >= 900
  PickVotes(w, scratch, tally, ClusterExchange(Memory().picker), Memory());
#endif
}

bool HasClusters() { return DeviceAttribute(cudaDevAttrComputeCapabilityMajor) >= 9; }

int Lists(const VotePickBatch& w) { return w.vote.batch * w.vote.kv_heads(); }

int CtasOfList(const VotePickBatch& w) {
  if (HasClusters()) return kClusterCtas;
  const int resident = DeviceAttribute(cudaDevAttrMultiProcessorCount);
  return std::clamp(resident / std::max(Lists(w), 1), 1, kClusterCtas);
}

// Where the parts of the scratch begin. The first is op vote's.
struct Places {
  explicit Places(const VotePickBatch& w) : blocks(ScratchShape(w.vote).blocks) {
    const int64_t lists = Lists(w);
    histogram = (ScratchShape(w.vote).bytes + 15) / 16 * 16;
    totals = histogram + lists * kBins * int64_t{sizeof(int32_t)};
    best = totals + int64_t{w.vote.batch} * w.vote.query_heads * int64_t{sizeof(float2)};
    bytes = best + lists * blocks * int64_t{sizeof(uint32_t)};
  }
  int64_t blocks;
  int64_t histogram = 0, totals = 0, best = 0, bytes = 0;
};

bool IsValid(const VotePickBatch& w) {
  return w.vote.of_groups() && w.vote.groups.kv_heads >= 1 &&
         w.vote.query_heads % w.vote.groups.kv_heads == 0 &&
         w.vote.query_heads <= kHeadsOfList * w.vote.groups.kv_heads &&
         w.vote.output_rows == w.vote.groups.kv_heads && w.vote.reuse.caches == nullptr &&
         w.vote.scratch != nullptr && w.pick.scratch != nullptr && w.pick.lists == nullptr &&
         w.pick.list_stride >= w.vote.rule.take;
}

int LaunchPick(const VotePickBatch& w, const Scratch& scratch, const Tally& tally, Stream stream) {
  constexpr int kBytes = sizeof(PickMemory);
  const dim3 grid(CtasOfList(w), Lists(w));
  if (HasClusters()) {
    if (const int error = AllowShared(PickVotesByClusterKernel, kBytes); error != 0) return error;
    return LaunchTogether(PickVotesByClusterKernel, ClusterOf(kClusterCtas), grid, kPickThreads,
                          kBytes, stream, w, scratch, tally);
  }
  if (const int error = AllowShared(PickVotesKernel, kBytes); error != 0) return error;
  auto* lists = static_cast<ListScratch*>(w.pick.scratch);
  auto* segments = reinterpret_cast<uint32_t*>(lists + std::max(w.pick.scratch_lists, Lists(w)));
  if (grid.x == 1) {
    return LaunchDependent(PickVotesKernel, grid, kPickThreads, kBytes, stream, w, scratch, tally,
                           lists, segments);
  }
  return LaunchTogether(PickVotesKernel, Cooperative(), grid, kPickThreads, kBytes, stream, w,
                        scratch, tally, lists, segments);
}

}  // namespace

int64_t VotePickScratchBytes(const VotePickBatch& w) { return Places(w).bytes; }

int64_t VotePickExchangeBytes(const VotePickBatch& w) {
  if (HasClusters() || CtasOfList(w) == 1) return 16;
  return std::max(w.pick.scratch_lists, Lists(w)) * int64_t{sizeof(ListScratch)} +
         int64_t{Lists(w)} * CtasOfList(w) * GlobalExchange::kCandidates *
             int64_t{sizeof(uint32_t)};
}

int VotePickCuda(const VotePickBatch& w, Stream stream) {
  if (w.vote.batch == 0 || w.vote.candidate_stride == 0) return cudaSuccess;
  if (!IsValid(w)) return cudaErrorInvalidValue;
  const Places places(w);
  auto* at = static_cast<std::byte*>(w.vote.scratch);
  const Tally tally{reinterpret_cast<int32_t*>(at + places.histogram),
                    reinterpret_cast<float2*>(at + places.totals),
                    reinterpret_cast<uint32_t*>(at + places.best)};
  Scratch scratch = Scratch::Of(w.vote);
  scratch.zeroed = reinterpret_cast<int4*>(tally.histogram);
  scratch.zeroed_of_head = kBins / 4;
  if (const int error = LaunchBitsWeights(w.vote, scratch, stream); error != 0) return error;
  const dim3 sums(
      std::clamp(kSumCtas / Lists(w), 1, (scratch.blocks + kSumBlocks - 1) / kSumBlocks),
      w.vote.output_rows, w.vote.batch);
  if (const int error = LaunchDependent(CountVotesKernel, sums, kSumWarps * 32, 0, stream, w.vote,
                                        scratch, tally);
      error != 0) {
    return error;
  }
  return LaunchPick(w, scratch, tally, stream);
}

}  // namespace kvstrata::cuda
