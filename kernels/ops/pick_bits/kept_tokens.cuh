// What the kernels of op pick_bits leave each other.
#ifndef KVSTRATA_KERNELS_OPS_PICK_BITS_KEPT_TOKENS_CUH_
#define KVSTRATA_KERNELS_OPS_PICK_BITS_KEPT_TOKENS_CUH_

#include "kernels/ops/pick_bits/pick_bits_cuda.h"
#include "kernels/ops/vote/bits_blocks.cuh"

namespace kvstrata::cuda {

// By what a list's tokens are kept. Scores are times log2(e).
struct Aim {
  float log_sum[8];  // of each head, estimated; +inf for one that is not there
  float cut;         // a quad is kept with a vote of at least this
  float scale;       // of weights that are kept
  int32_t wanted;    // 0: the second kernel has nothing to do
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

// A quad is four tokens that follow each other. Each warp of the second kernel has a segment: of a
// quad the weights as fp16, 2^(score - log_sum) times the scale, [two heads][4 tokens][head], and
// its first token.
struct Kept {
  int32_t splits = 0;         // CTAs of a list
  int32_t warps = 0;          // of a list
  int32_t room = 0;           // quads of a segment: all that its warp may see
  int32_t quad = 0;           // pieces of 16 bytes of a quad
  Aim* aims = nullptr;        // [2 rounds][lists]
  HeadPart* parts = nullptr;  // [lists][splits][8]
  int32_t* counts = nullptr;  // [lists][warps]
  int32_t* tokens = nullptr;  // [lists][warps][room]
  uint4* weights = nullptr;   // [lists][warps][room][quad]
};

// Kernels of pick_bits_votes.cu.
int LaunchSample(const PickBitsBatch& work, const Kept& kept, Stream stream);
int LaunchFilter(const PickBitsBatch& work, const Kept& kept, int round, Stream stream);

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_PICK_BITS_KEPT_TOKENS_CUH_
