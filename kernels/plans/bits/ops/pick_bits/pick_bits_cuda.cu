// SPDX-License-Identifier: Apache-2.0
// The kernel of op pick_bits that chooses and proves, and the op.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>

#include "kernels/plans/bits/ops/pick_bits/list_chooser.cuh"

namespace kvstrata::cuda {
namespace {

// Writes the choice and returns true, or returns false where it is not proved; `reached`: a vote
// that `take` tokens reach then, or 0.
[[maybe_unused]] __device__ bool ChooseProved(ListChooser& chooser, const Aim& aim, int32_t take,
                                              int32_t* out, float* reached) {
  *reached = 0;
  if (chooser.AnyHuge()) return false;  // votes by such estimates say nothing
  // A token that was left out has less than this.
  const float left_out = aim.cut * chooser.MostRatio() * (1 + kSafety);
  // Votes up to here are those of all their weights; of others they are at most too small.
  const float most = kMostHalf / aim.scale * chooser.LeastRatio() * (1 - kSafety);
  // Each function is called from one place: inlined twice, the kernel would wait for its own code.
#pragma unroll 1
  for (const bool all : {false, true}) {
    if (chooser.Collect(all ? 0.0f : left_out) < take) continue;
    const Place last = chooser.FindLast(take);
    if (all) {
      *reached = VoteOf(last);
    } else if (VoteOf(last) < most) {
      chooser.Write(last, out);
      return true;
    }
  }
  return false;
}

// Grid (a cluster, kv_heads, batch): the choice, or what the second round needs.
__global__ __launch_bounds__(kWarps * 32) void ChooseKernel(const __grid_constant__ PickBitsBatch w,
                                                            const __grid_constant__ Kept kept) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ uint4 dynamic[];
  auto& s = *reinterpret_cast<ChooserMemory*>(dynamic);
  const int heads = w.vote.groups.kv_heads, sequence = blockIdx.z;
  const int list = sequence * heads + static_cast<int>(blockIdx.y),
            group = w.vote.query_heads / heads;
  const bool leads = blockIdx.x == 0 && threadIdx.x == 0;
  LetNextStart();
  // FilterKernel has started, so that all before the op is complete.
  const int32_t tokens = __ldcg(&w.vote.tokens[sequence]);
  const int32_t take = w.vote.rule.take;
  const Candidates units = CandidatesOf(w.vote.rule, tokens);
  const Aim& aim = kept.aims[list];
  ListChooser chooser(kept, aim, list, group, units, s);
  if (!units.full) chooser.ClearMarks();
  WaitForPrevious();
  if (tokens == kNoQuery) return;
  if (leads) {
    w.pick.counts[list] = units.full ? 0 : take;
    if (blockIdx.y == 0) {
      w.pick.sink_end[sequence] = units.full ? 0 : units.first;
      w.pick.recent_begin[sequence] = units.full ? 0 : units.last;
    }
  }
  Aim& second = kept.aims[heads * w.vote.batch + list];
  if (units.full || take <= 0) {
    if (leads) second.wanted = 0;
    return;
  }
  chooser.Begin();
  float reached;
  const bool proved = ChooseProved(chooser, aim, take, ListOf(w.pick, list), &reached);
  if (blockIdx.x == 0) {
    if (!proved && threadIdx.x < 8) second.log_sum[threadIdx.x] = chooser.log_sum(threadIdx.x);
    if (leads) {
      second.cut = reached * (1 - kSafety);
      second.scale = ScaleOf(second.cut, take, group);
      second.wanted = proved ? 0 : 1;
    }
  }
  MeetCluster();  // none ends while others read what it has
#endif
}

int TurnTokens(const VoteBatch& w) {
  const int group = std::max(w.groups.format.tokens, 1);
  return group % kBlockRows == 0 ? group : 2 * group;
}

// What `splits` CTAs a list keep, without addresses.
Kept KeptOf(const PickBitsBatch& work, int splits) {
  const VoteBatch& w = work.vote;
  Kept kept;
  kept.splits = splits;
  kept.quad = w.query_heads > 4 * w.groups.kv_heads ? 4 : 2;
  kept.turn_tokens = TurnTokens(w);
  const int turns =
      (w.candidate_stride + kept.turn_tokens - 1) / kept.turn_tokens + 1;  // two are cut
  const int warps = splits * kWarps;
  kept.room = (turns + warps - 1) / warps * ((kept.turn_tokens + kBlockRows - 1) / kBlockRows) *
              (kBlockRows / 4);
  return kept;
}

// The scratch: both rounds use the same.
struct Layout {
  Kept first, again;
  int64_t parts_at = 0, counts_at = 0, tokens_at = 0, weights_at = 0, bytes = 0;

  explicit Layout(const PickBitsBatch& work) {
    const VoteBatch& w = work.vote;
    constexpr int kCtasOfSm = 2;
    const int64_t lists = int64_t{w.groups.kv_heads} * w.batch;
    const int turns = w.candidate_stride / TurnTokens(w) + 1;
    first = KeptOf(work,
                   SplitsOfWave(kCtasOfSm, static_cast<int>(lists), (turns + kWarps - 1) / kWarps));
    again = KeptOf(work, kClusterCtas);
    const auto most = [&](auto of) { return std::max<int64_t>(of(first), of(again)); };
    parts_at = 2 * lists * static_cast<int64_t>(sizeof(Aim));
    const auto splits = most([](const Kept& k) { return k.splits; });
    counts_at = parts_at + lists * splits * 8 * static_cast<int64_t>(sizeof(HeadPart));
    tokens_at = counts_at + lists * splits * kWarps * 4;
    const auto quads = lists * most([](const Kept& k) { return k.splits * kWarps * k.room; });
    weights_at = (tokens_at + quads * 4 + 15) / 16 * 16;
    bytes = weights_at + quads * first.quad * 16;
  }
  Kept At(Kept kept, void* scratch) const {
    auto* const at = static_cast<std::byte*>(scratch);
    kept.aims = reinterpret_cast<Aim*>(at);
    kept.parts = reinterpret_cast<HeadPart*>(at + parts_at);
    kept.counts = reinterpret_cast<int32_t*>(at + counts_at);
    kept.tokens = reinterpret_cast<int32_t*>(at + tokens_at);
    kept.weights = reinterpret_cast<uint4*>(at + weights_at);
    return kept;
  }
  // Words of marks that a CTA of a cluster needs.
  static int MarksOf(const Kept& kept) { return kept.splits * kept.room * 4 / 32; }
  static int ChooseBytes(const Kept& kept) {
    return static_cast<int>(sizeof(ChooserMemory)) + 4 * MarkAt(MarksOf(kept));
  }
  bool fits() const { return std::max(MarksOf(first), MarksOf(again)) <= kMarkWords; }
};

bool IsValid(const PickBitsBatch& work) {
  const VoteBatch& w = work.vote;
  const QuantisedGroup& f = w.groups.format;
  return f.IsValid() && f.tokens % kTileTokens == 0 && w.groups.block_groups >= 1 &&
         w.groups.kv_heads >= 1 && w.query_heads % w.groups.kv_heads == 0 &&
         w.query_heads <= 8 * w.groups.kv_heads && w.output_rows == w.groups.kv_heads &&
         w.rule.unit_tokens == 1 && w.rule.recent_tokens >= f.tokens && w.scratch != nullptr &&
         w.reuse.caches == nullptr && w.always == nullptr && work.pick.list_stride >= w.rule.take &&
         work.pick.takes == nullptr;
}

}  // namespace

int64_t PickBitsScratchBytes(const PickBitsBatch& work) {
  if (DeviceAttribute(cudaDevAttrComputeCapabilityMajor) < 9) return 0;
  const Layout layout(work);
  return layout.fits() ? layout.bytes : 0;
}

int PickBitsCuda(const PickBitsBatch& work, Stream stream) {
  const VoteBatch& w = work.vote;
  if (w.batch == 0) return cudaSuccess;
  if (!IsValid(work) || PickBitsScratchBytes(work) == 0) return cudaErrorInvalidValue;
  const Layout layout(work);
  const Kept first = layout.At(layout.first, w.scratch), again = layout.At(layout.again, w.scratch);
  if (const int error = LaunchSample(work, first, stream); error != 0) return error;
  if (const int error = LaunchFilter(work, first, stream); error != 0) return error;
  const int error = LaunchClusters(ChooseKernel, w.groups.kv_heads, w.batch,
                                   Layout::ChooseBytes(first), stream, work, first);
  return error != 0 ? error : LaunchAgain(work, again, Layout::ChooseBytes(again), stream);
}

}  // namespace kvstrata::cuda
