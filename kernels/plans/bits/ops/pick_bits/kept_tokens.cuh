// SPDX-License-Identifier: Apache-2.0
// What the kernels of op pick_bits leave each other.
#pragma once

#include "kernels/ops/pick/cluster_exchange.cuh"
#include "kernels/ops/vote/bits_blocks.cuh"
#include "kernels/plans/bits/ops/pick_bits/pick_bits_cuda.h"

namespace kvstrata::cuda {

// A CTA's dynamic shared memory: 227 KB, less what kernels have besides.
inline constexpr int kSharedMost = 226 << 10;

// By what a list's tokens are kept. Scores are times log2(e).
struct Aim {
  float log_sum[8];  // log sum by head, estimated; +inf for one that is not there
  float cut;         // a quad is kept with a vote of at least this
  float scale;       // factor of the weights that are kept
  int32_t wanted;    // whether there is a second round: not where the first has proved its choice
  int32_t unused;
};

// What weights are multiplied with before they become fp16, which are 2^-14 to 2^16 with all their
// bits: those of the cut are near the lower end, as a vote that is chosen may be far above it. No
// `take` tokens have a vote above heads / take.
__device__ inline float ScaleOf(float cut, int take, int heads) {
  return cut > 0x1p-110f ? 0x1p-12f / cut
                         : kWeightScale / 2 * static_cast<float>(take) / static_cast<float>(heads);
}

// A head's part of a CTA: the sum of 2^(score - log_sum), and the largest exponent if it is a huge
// one, else -inf.
struct HeadPart {
  float sum, huge;
};

// A quad is four tokens that follow each other. Each warp that reads codes has a run of turns
// (bits_blocks.cuh), the runs of a list one after the other, and a segment for what it keeps of
// them, in order: of a quad the weights as fp16, 2^(score - log_sum) times the scale, [two
// heads][4 tokens][head], and its first token. So segments side by side hold tokens side by side.
struct Kept {
  int32_t splits = 0;         // CTAs of a list
  int32_t room = 0;           // quads of a segment: all that its warp may see
  int32_t quad = 0;           // pieces of 16 bytes of a quad
  int32_t turn_tokens = 0;    // tokens of a turn
  Aim* aims = nullptr;        // [2 rounds][lists]
  HeadPart* parts = nullptr;  // [lists][splits][8]
  int32_t* counts = nullptr;  // [lists][splits][kWarps]
  int32_t* tokens = nullptr;  // [lists][splits][kWarps][room]
  uint4* weights = nullptr;   // [lists][splits][kWarps][room][quad]
};

// The run of one warp of a list: whole turns, of which the first and the last may be cut.
struct TurnRuns {
  int first_turn, turns;  // the first warp's first; how many each warp has

  __device__ static TurnRuns Of(const Kept& kept, Candidates units) {
    const int first = units.first / kept.turn_tokens, warps = kept.splits * kWarps;
    const int all = (units.last + kept.turn_tokens - 1) / kept.turn_tokens - first;
    return {first, (all + warps - 1) / warps};
  }
  // The first turn of a warp, counted over the list's CTAs.
  __device__ int FirstOf(int warp) const { return first_turn + warp * turns; }
};

// Clusters of kClusterCtas CTAs of kWarps warps, one to a list.
template <typename... Args>
int LaunchClusters(void (*kernel)(Args...), int kv_heads, int batch, int shared_bytes,
                   Stream stream, Args... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kClusterCtas, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kClusterCtas, kv_heads, batch);
  config.blockDim = dim3(kWarps * 32);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  if (const int error = AllowShared(kernel, shared_bytes); error != 0) return error;
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Kernels of pick_bits_votes.cu. LaunchAgain: with what is kept of kClusterCtas CTAs a list.
int LaunchSample(const PickBitsBatch& work, const Kept& kept, Stream stream);
int LaunchFilter(const PickBitsBatch& work, const Kept& kept, Stream stream);
int LaunchAgain(const PickBitsBatch& work, const Kept& kept, int choose_bytes, Stream stream);

}  // namespace kvstrata::cuda
