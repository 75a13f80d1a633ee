// SPDX-License-Identifier: Apache-2.0
// A CTA's share of the groups of one (sequence, KV head), in rounds: each warp scores some groups
// and leaves the strips that are to be read in shared memory; behind a barrier the warps deal all
// of these among them. Most groups leave nothing and some a lot, so a warp that finished its own
// groups' strips alone would keep the others waiting.
//
// Who attends what is a function of what was chosen, and so are the sums' bits.
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANES_ROUNDS_CUH_
#define KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANES_ROUNDS_CUH_

#include "kernels/cuda/warps/l2_prefetch.cuh"
#include "kernels/ops/attend_planes/group_choice.cuh"
#include "kernels/ops/attend_planes/strip_tile.cuh"

namespace kvstrata::cuda {

// A warp's shared memory.
template <int kDim, int kHeads>
struct RoundMemory {
  using Shape = GroupShape<kDim>;
  // Strips that a warp can leave in a round: at least a group's, as many as there is room for.
  static constexpr int kStrips = kDim == 64    ? (kHeads == 4 ? 12 : 6)
                                 : kDim == 128 ? (kHeads == 4 ? 11 : 5)
                                               : (kHeads == 4 ? 5 : 7);
  static_assert(kStrips >= kGroupStrips);
  union Buffer {
    StripTile<kDim> tile;
    uint4 codes[2][2 * Shape::kWords][32];  // [visit % 2][2 u + L][lane]
  };
  Buffer buffers[2];                     // the second has codes while groups are scored
  uint4 scales[2][Shape::kScalePieces];  // [visit % 2], minima [kDim], then steps
  DeferredStrip<kDim, kHeads> strips[kStrips];
  float fine_weights[kFineTile][kHeads];
  float o[kHeads][kDim];  // sums of weighted values
  float m[kHeads], l[kHeads];
};

template <int kDim, int kHeads, int kWarps, int kForm>
class PlanesRounds {
 public:
  using Memory = RoundMemory<kDim, kHeads>;
  using Shape = GroupShape<kDim>;
  using Strips = LaneStrip<kDim, kHeads>;

  // Visits first, first + step, .. of this warp, whose memory is one of kWarps. Copies of the first
  // two begin here. counts: [kWarps], in shared memory.
  __device__ PlanesRounds(const PlanesItem<kDim>& item, const PlanesVisits& visits, Memory* warps,
                          int32_t* counts, int first, int step)
      : item_(item),
        visits_(visits),
        warps_(warps),
        memory_(warps[threadIdx.x / 32]),
        counts_(counts),
        policy_(ReadOncePolicy()),
        first_(first),
        step_(step),
        own_(first < visits.count ? (visits.count - first - 1) / step + 1 : 0) {
    const int most = (visits.count + step - 1) / step;  // of a warp
    const int rounds = max((most + kFirstRound - 1) / kFirstRound, 1);
    stop_ = min((most + rounds - 1) / rounds, own_);
    LookUp();
    for (int i = 0; i < 2; ++i) {
      AskKeys(i);
      CommitCopies();
    }
    const int lane = threadIdx.x % 32;
    for (int i = lane; i < kHeads * kDim; i += 32) memory_.o[i / kDim][i % kDim] = 0;
    __syncwarp();
  }

  // ones: 16 of them, fp16, in shared memory.
  __device__ __forceinline__ void Run(const SharedQuery<kDim>& query, const ItemRule& rule,
                                      const ItemReport& report, const uint4* ones) {
#pragma unroll 1
    for (bool again = true; again;) {
      left_ = 0;
      const int before = done_;
#pragma unroll 1
      while (done_ < stop_ && Visit(query, rule, report)) {
      }
      WaitForCopies<0>();
      if (threadIdx.x % 32 == 0) counts_[threadIdx.x / 32] = left_ + (done_ - before) * kVisit;
      again = __syncthreads_or(done_ < own_);
      const int upto = CountsUpTo(), total = __shfl_sync(kAllLanes, upto, 31);
      PlanRound(total / kVisit, total % kVisit);
      AttendStrips(upto % kVisit, total % kVisit, query, rule, ones);
      if (again) __syncthreads();
    }
  }

  // Sums of the warp to its memory; afterwards the CTA may read them behind a barrier.
  __device__ __forceinline__ void Store(const ItemRule& rule) {
    const int lane = threadIdx.x % 32;
    const float(&raised)[2] = sums_.raised();
    float l[2];
    sums_.Weights(l);
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      if (lane >= kHeads / 2) continue;
      memory_.m[2 * lane + head] = l[head] == 0 ? -INFINITY : rule.reference[head] + raised[head];
      memory_.l[2 * lane + head] = l[head];
    }
  }

  __device__ uint32_t fetched() const { return fetched_; }

 private:
  static constexpr int kFirstRound = 12, kRound = 24;  // visits of a warp, at most
  static constexpr int kVisit = 1 << 16;               // a visit, in counts of visits and strips

  // How many visits there were and strips were left by the warps up to number `lane`.
  __device__ __forceinline__ int CountsUpTo() const {
    const int lane = threadIdx.x % 32;
    int upto = lane < kWarps ? counts_[lane] : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kAllLanes, upto, step);
      if (lane >= step) upto += before;
    }
    return upto;
  }

  // The next round: visits that leave two thirds of the strips that there is room for, if they
  // leave as many each as those of this round did.
  __device__ __forceinline__ void PlanRound(int visits, int strips) {
    constexpr int kLeast = Memory::kStrips / kGroupStrips;  // that is room for
    const int fit = Memory::kStrips * 2 / 3 * visits / max(strips, 1);
    const int left = own_ - done_, most = min(max(fit, kLeast), kRound);
    const int rounds = max((left + most - 1) / most, 1);
    stop_ = done_ + (left + rounds - 1) / rounds;
  }

  // Where the groups of this round lie, one a lane: it takes a wait for the L2 and much arithmetic.
  __device__ __forceinline__ void LookUp() {
    looked_up_ = done_;
    const int number = done_ + static_cast<int>(threadIdx.x % 32);
    if (number >= stop_) return;
    lane_group_ = visits_.GroupOf(first_ + number * step_);
    lane_upper_ = item_.Upper(lane_group_);
    lane_lower_ = item_.Lower(lane_group_);
  }

  // Keys of the warp's visit `number`, if that is one of this round.
  __device__ __forceinline__ void AskKeys(int number) {
    if (number >= stop_) return;
    CopyKeys<kDim>(memory_.buffers[1].codes[number % 2], memory_.scales[number % 2],
                   __shfl_sync(kAllLanes, lane_upper_, number - looked_up_), policy_);
    fetched_ += Shape::kValueScales;
  }

  // Scores the next group, whose keys are the oldest copy but one, and leaves its strips. False: no
  // room for them.
  __device__ __forceinline__ bool Visit(const SharedQuery<kDim>& query, const ItemRule& rule,
                                        const ItemReport& report) {
    const int visit = first_ + done_ * step_;
    const int group = __shfl_sync(kAllLanes, lane_group_, done_ - looked_up_);
    WaitForCopies<1>();
    __syncwarp();
    const char* const minima = reinterpret_cast<const char*>(memory_.scales[done_ % 2]);
    GroupSums sums;
    ScoreKeys<kDim>(memory_.buffers[1].codes[done_ % 2], minima, minima + 2 * kDim, query, sums);
    if (!ChooseStrips(visit, group, rule, report, sums)) return false;
    __syncwarp();
    AskKeys(done_ + 2);
    CommitCopies();
    ++done_;
    return true;
  }

  __device__ __forceinline__ bool ChooseStrips(int visit, int group, const ItemRule& rule,
                                               const ItemReport& report, const GroupSums& sums) {
    const uint32_t always = AlwaysOf(rule.lengths, group);
    if (visits_.IsOctet(visit)) {
      const int octet = visits_.edges.OctetOf(visit);
      const uint32_t chosen = always & EdgeOctets::BitsOf(octet);
      if (!__any_sync(kAllLanes, chosen != 0)) return true;
      return Leave(1u << octet % EdgeOctets::kOfGroup / 2, chosen, StripWeights{}, rule, sums);
    }
    float base[2];
    uint32_t chosen;
    const uint32_t strips = Choose(rule, visits_.is_full, always, sums, base, chosen);
    report.Write(group, chosen | always, strips);
    if (strips == 0 || (!visits_.is_full && __all_sync(kAllLanes, always == 0xFF))) return true;
    return Leave(strips, chosen, Weigh(rule.factors, base, chosen | always, strips, sums), rule,
                 sums);
  }

  // Leaves the strips of the group. chosen: the lane's fine tokens. False: no room for them.
  __device__ __forceinline__ bool Leave(uint32_t strips, uint32_t chosen,
                                        const StripWeights& weights, const ItemRule& rule,
                                        const GroupSums& sums) {
    const int count = __popc(strips);
    if (left_ + count > Memory::kStrips) return false;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, own = lane / 8;
    const auto place = [&](int strip) { return left_ + __popc(strips & ((1u << strip) - 1)); };
    if (g < kHeads && (strips >> t & 1) != 0) {
      auto& to = memory_.strips[place(t)];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        to.weights[pair][g] = {weights.at[pair][0], weights.at[pair][1], weights.at[pair][2],
                               weights.at[pair][3]};
      }
    }
    uint32_t fine = 0;
    const uint32_t fine_lanes = __ballot_sync(kAllLanes, chosen != 0);
    if (fine_lanes != 0) {
      fine = ((chosen & 0xF) | (chosen & 0xF0) << 4) << 4 * (g % 2);
      fine |= __shfl_xor_sync(kAllLanes, fine, 4);
      LeaveLogits(chosen, place(own), rule, sums);
      LeaveSteps(StripsOf(fine_lanes), place);
    }
    const uint64_t upper = __shfl_sync(kAllLanes, lane_upper_, done_ - looked_up_);
    const uint64_t lower = __shfl_sync(kAllLanes, lane_lower_, done_ - looked_up_);
    if ((strips >> own & 1) != 0) {
      if (lane % 8 == 0) {
        auto& to = memory_.strips[place(own)];
        to.upper = upper;
        to.lower = lower + kStripTokens * own * item_.row_bytes;
        to.in_group = own;
        to.fine = fine;
      }
      if (kForm == 2) PrefetchStrip(upper, lower, chosen);
    }
    left_ += count;
    fetched_ += count * (Shape::kStripBytes + 4 * kStripTokens);
    return true;
  }

  // Logits of the lane's fine tokens, but for lower digits.
  __device__ __forceinline__ void LeaveLogits(uint32_t chosen, int place, const ItemRule& rule,
                                              const GroupSums& sums) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    if (chosen == 0 || 2 * t >= kHeads) return;
    float base[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      base[head] = sums.Base(rule.factors, head, rule.form.centre()) - rule.reference[head];
    }
    auto& to = memory_.strips[place].logits;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if ((chosen >> i & 1) == 0) continue;
      *reinterpret_cast<float2*>(&to[TokenOf(lane, i) % kStripTokens][2 * t]) = {
          fmaf(sums.Of(i, 0), rule.factors.code[0], base[0]),
          fmaf(sums.Of(i, 1), rule.factors.code[1], base[1])};
    }
  }

  template <typename Place>
  __device__ __forceinline__ void LeaveSteps(uint32_t strips, const Place& place) {
    constexpr int kPieces = kDim / 8;
    const uint4* const steps = memory_.scales[done_ % 2] + kPieces;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < kGroupStrips * kPieces; i += 32) {
      const int strip = i / kPieces, piece = i % kPieces;
      if ((strips >> strip & 1) != 0) memory_.strips[place(strip)].steps[piece] = steps[piece];
    }
  }

  // To the L2, where it will be asked for behind the barrier. By lanes of strips that are read.
  __device__ __forceinline__ void PrefetchStrip(uint64_t upper, uint64_t lower, uint32_t chosen) {
    const int lane = threadIdx.x % 32, own = lane / 8;
    const uint64_t scales = upper + Shape::kValueScales + 2 * kStripTokens * own;
    if (lane % 8 == 1) {
      PrefetchToL2(upper + Shape::kValueCodes + Shape::kStripBytes * own, Shape::kStripBytes);
    }
    if (lane % 8 == 2) PrefetchToL2(scales, 2 * kStripTokens);
    if (lane % 8 == 3) PrefetchToL2(scales + 2 * kGroupTokens, 2 * kStripTokens);
    if (lane % 4 != 0 || chosen == 0) return;
#pragma unroll 1
    for (uint32_t bits = chosen; bits != 0; bits &= bits - 1) {
      const int token = TokenOf(lane, __ffs(static_cast<int>(bits)) - 1);
      PrefetchToL2(lower + token * item_.row_bytes, item_.row_bytes);
    }
  }

  // What all warps left, in tiles that are dealt among them. Asks for the keys of the next round.
  __device__ __forceinline__ void AttendStrips(int upto, int total, const SharedQuery<kDim>& query,
                                               const ItemRule& rule, const uint4* ones) {
    const int deals = (total + kGroupStrips * kWarps - 1) / (kGroupStrips * kWarps);
    const int size = max((total + kWarps * deals - 1) / max(kWarps * deals, 1), 1);
    const int warp = threadIdx.x / 32, tiles = (total + size - 1) / size;
    const int count = warp < tiles ? (tiles - warp - 1) / kWarps + 1 : 0;
    if (count == 0 || kForm == 3) {
      LookUp();
      AskKeys(done_);
      CommitCopies();
      AskKeys(done_ + 1);
      CommitCopies();
      return;
    }
    ValueSums<kDim> values;
    Strips strips = AskTile(warp * size, size, total, upto, memory_.buffers[(count - 1) % 2].tile);
    CommitCopies();
    LookUp();
#pragma unroll 1
    for (int left = count - 1, tile = warp;; --left) {
      Strips next{};
      tile += kWarps;
      // Behind the next tile or two copies of keys the ones before are complete.
      if (left > 0) {
        next = AskTile(tile * size, size, total, upto, memory_.buffers[(left - 1) % 2].tile);
      } else {
        AskKeys(done_);
      }
      CommitCopies();
      if (left == 0) AskKeys(done_ + 1);
      CommitCopies();
      WaitForCopies<2>();
      __syncwarp();
      AttendTile(memory_.buffers[left % 2].tile, strips, query, rule, ones, values);
      __syncwarp();
      if (left == 0) break;
      strips = next;
    }
    sums_.AddCoarse(memory_.o, values);
    __syncwarp();
  }

  // Strips first .. of all that were left, at most `size` of them. upto: how many the warps up to
  // number `lane` left.
  __device__ __forceinline__ Strips AskTile(int first, int size, int total, int upto,
                                            StripTile<kDim>& tile) {
    Strips strips{warps_->strips};
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kGroupStrips; ++i) {
      const int number = first + i;
      const int owner = __popc(__ballot_sync(kAllLanes, lane < kWarps && upto <= number));
      const int before = __shfl_sync(kAllLanes, upto, max(owner - 1, 0));
      if (lane % 4 != i || i >= size || number >= total) continue;
      const int index = number - (owner == 0 ? 0 : before);
      strips.bytes = owner * static_cast<uint32_t>(sizeof(Memory)) +
                     index * static_cast<uint32_t>(sizeof(DeferredStrip<kDim, kHeads>));
      strips.exists = true;
    }
    strips.Ask(tile, item_.row_bytes, policy_);
    return strips;
  }

  __device__ __forceinline__ void AttendTile(StripTile<kDim>& tile, const Strips& strips,
                                             const SharedQuery<kDim>& query, const ItemRule& rule,
                                             const uint4* ones, ValueSums<kDim>& values) {
    values.Add(tile, strips.Weights(), ones);
    fetched_ += strips.fine * item_.row_bytes;
#pragma unroll 1
    for (int first = 0; first < strips.fine; first += kFineTile) {
      const int count = min(strips.fine - first, kFineTile);
      if (first > 0) {  // more than were asked for
        __syncwarp();
        tile.CopyRows(first, count, item_.row_bytes, policy_);
        CommitCopies();
        WaitForCopies<0>();
        __syncwarp();
      }
      float logits[2];
      TileLogits(tile, strips, first, rule.form, query, rule.factors, logits);
      sums_.AddFine(memory_.o, memory_.fine_weights, tile, first, count, rule.form, logits);
    }
  }

  const PlanesItem<kDim>& item_;
  const PlanesVisits& visits_;
  Memory* const warps_;
  Memory& memory_;
  int32_t* const counts_;
  const uint64_t policy_;
  const int first_, step_, own_;  // visits: the first, from one to the next, how many
  int stop_;                      // where the visits of this round end
  int done_ = 0;                  // visits
  // Where groups of this round lie: those of visit number looked_up_ + lane.
  int looked_up_ = 0, lane_group_ = 0;
  uint64_t lane_upper_ = 0, lane_lower_ = 0;
  int left_ = 0;  // strips of this round
  TileSums<kDim, kHeads> sums_;
  uint32_t fetched_ = 0;  // bytes
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANES_ROUNDS_CUH_
