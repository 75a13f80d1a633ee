// SPDX-License-Identifier: Apache-2.0
// The quads that were kept of a list, as a CTA of the list's cluster reads them: those of an eighth
// of its segments, so of tokens that follow each other, whatever segment a quad is in.
#pragma once

#include "kernels/plans/bits/ops/pick_bits/chooser_memory.cuh"
#include "kernels/plans/bits/ops/pick_bits/kept_tokens.cuh"

namespace kvstrata::cuda {

class KeptQuads {
 public:
  __device__ KeptQuads(const Kept& kept, int list, Candidates units, ChooserMemory& s)
      : kept_(kept),
        units_(units),
        first_segment_((list * kClusterCtas + static_cast<int>(blockIdx.x)) * kept.splits),
        s_(s) {}

  // Where segments end, of counts that the kernel before has left. By a whole warp.
  __device__ void FindEnds() const {
    int32_t before = 0;
    for (int first = 0; first < kept_.splits; first += 32) {
      const int i = first + static_cast<int>(threadIdx.x);
      const int32_t quads = i < kept_.splits ? kept_.counts[first_segment_ + i] : 0;
      const int32_t end = before + WarpInclusiveSum(quads);
      if (i < kept_.splits) s_.ends[i] = end;
      before = __shfl_sync(~0u, end, 31);
    }
  }

  // visit(counts, places) of each quad, by whole warps; counts: a bit for each place that is a
  // candidate with a vote of at least `floor`. kAtOnce: loads of a lane under way. REQUIRES: a
  // barrier behind FindEnds and behind what writes the weights of heads.
  template <int kAtOnce, typename Visitor>
  __device__ void Visit(float floor, Visitor visit) const {
    const int32_t quads = s_.ends[kept_.splits - 1];
    const int stride = static_cast<int>(blockDim.x), lane = threadIdx.x % 32;
    for (int base = threadIdx.x; base - lane < quads; base += stride * kAtOnce) {
      uint4 pieces[kAtOnce][2];
      int tokens[kAtOnce];
      int64_t at[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int quad = base + j * stride;
        tokens[j] = -4, at[j] = 0;
        pieces[j][0] = pieces[j][1] = {};
        if (quad >= quads) continue;
        at[j] = PlaceInMemory(quad);
        tokens[j] = kept_.tokens[at[j]];
        pieces[j][0] = kept_.weights[at[j] * kept_.quad];
        pieces[j][1] = kept_.weights[at[j] * kept_.quad + 1];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (base - lane + j * stride >= quads) break;
        float votes[4] = {};
        Add(pieces[j][0], 0, votes);
        Add(pieces[j][1], 2, votes);
        if (kept_.quad == 4 && tokens[j] >= 0) {
          Add(kept_.weights[at[j] * 4 + 2], 4, votes);
          Add(kept_.weights[at[j] * 4 + 3], 6, votes);
        }
        uint32_t counts = 0;
        Place places[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int token = tokens[j] + i;
          places[i] = PlaceOf(votes[i], token);
          if (token >= units_.first && token < units_.last && votes[i] >= floor) counts |= 1u << i;
        }
        visit(counts, places);
      }
    }
  }

 private:
  static constexpr int kFirstStep = 256;
  static_assert(kSplitsMost <= 2 * kFirstStep);

  // Where the CTA's quad-th quad lies, counted over its segments.
  __device__ int64_t PlaceInMemory(int quad) const {
    int segment = 0;  // the first one that ends behind it
    for (int step = kFirstStep; step > 0; step /= 2) {
      const int next = segment + step;
      if (next < kept_.splits && s_.ends[next - 1] <= quad) segment = next;
    }
    const int before = segment > 0 ? s_.ends[segment - 1] : 0;
    return (int64_t{first_segment_} + segment) * kept_.room + (quad - before);
  }

  // The weights of two heads.
  __device__ void Add(const uint4& piece, int head, float (&votes)[4]) const {
    const uint32_t pairs[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __half22float2(reinterpret_cast<const __half2&>(pairs[i]));
      votes[i] += fminf(pair.x, kMostHalf) * s_.weights[head] +
                  fminf(pair.y, kMostHalf) * s_.weights[head + 1];
    }
  }

  const Kept& kept_;
  const Candidates units_;
  const int first_segment_;
  ChooserMemory& s_;
};

}  // namespace kvstrata::cuda
