// SPDX-License-Identifier: Apache-2.0
// A warp's share of the groups of one (sequence, KV head): it scores a group, finishes the one
// before it, whose values and fine rows have arrived by now, and chooses what to ask for.
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANES_WARP_CUH_
#define KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANES_WARP_CUH_

#include "kernels/ops/attend_planes/attended_sums.cuh"
#include "kernels/ops/attend_planes/hot_rows.cuh"

namespace kvstrata::cuda {

// Hot: NoHotRows, or HotRowSet.
template <int kDim, int kHeads, typename Hot>
class PlanesWarp {
 public:
  using Memory = WarpMemory<kDim, kHeads>;
  using Shape = GroupShape<kDim>;

  // Visits first, first + step, .. Copies of the first two begin here.
  __device__ PlanesWarp(const PlanesItem<kDim>& item, const PlanesVisits& visits, Memory* memory,
                        int first, int step)
      : item_(item),
        visits_(visits),
        memory_(*memory),
        copier_(memory),
        first_visit_(first),
        step_(step) {
    uint64_t blocks[2];
    for (int i = 0; i < 2; ++i)
      blocks[i] = BlockOf(first + i * step);  // both are asked for at once
    ahead_ = BlockOf(first + 2 * step);
    for (int i = 0; i < 2; ++i) {
      const int visit = first + i * step;
      if (visit < visits.count) copier_.Keys(i, item.UpperIn(blocks[i], visits.GroupOf(visit)));
      CommitCopies();
    }
    CommitCopies();  // in place of values
    const int lane = threadIdx.x % 32;
    if (lane < kGroupTokens / 4) memory->value_scales[lane] = {0, 0, 0, 0};
    __syncwarp();
  }

  // ones: 16 of them, fp16, in shared memory.
  __device__ __forceinline__ void Run(const SharedQuery<kDim>& query, const ItemRule& rule,
                                      const ItemReport& report, const uint4* ones, Hot& hot) {
#pragma unroll 1
    for (int visit = first_visit_, number = 0;; visit += step_, ++number) {
      const bool is_visit = visit < visits_.count;
      GroupSums sums;
      if (is_visit) {
        if (visits_.IsOctet(visit) || visits_.is_full) {
          hot.PassBy();
        } else {
          hot.AskTags(visits_.GroupOf(visit));
        }
        WaitForCopies<2>();
        __syncwarp();
        ScoreGroup(memory_, number, query, sums);
        __syncwarp();
        const int later = visit + 2 * step_;
        if (later < visits_.count) {
          copier_.Keys(number + 2, item_.UpperIn(ahead_, visits_.GroupOf(later)));
        }
        ahead_ = BlockOf(later + step_);
      }
      CommitCopies();
      if (strips_ != 0) Finish(query, rule, ones, hot);
      if (!is_visit) break;
      group_ = visits_.GroupOf(visit);
      slot_ = number % 4;
      if (visits_.IsOctet(visit)) {
        ChooseOctet(visits_.edges.OctetOf(visit), rule, sums, hot);
      } else {
        Choose(rule, report, sums, hot);
      }
      CommitCopies();
    }
  }

  // Sums of the warp to its memory; afterwards the CTA may read them behind a barrier.
  __device__ __forceinline__ void Store(const ItemRule& rule) { attended_.Store(memory_, rule); }

  __device__ uint32_t fetched() const { return fetched_; }

 private:
  __device__ uint64_t BlockOf(int visit) const {
    return visit < visits_.count ? item_.UpperBlock(visits_.GroupOf(visit)) : 0;
  }

  // A bit for each of the lane's tokens that is no candidate.
  __device__ __forceinline__ uint32_t AlwaysOf(const PlanesLengths& lengths) const {
    const int first = group_ * kGroupTokens;
    uint32_t always = 0;
    if (first >= lengths.start && first + kGroupTokens <= lengths.stop) return 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int token = first + TokenOf(threadIdx.x % 32, i);
      if (!lengths.IsCandidate(token)) always |= 1u << i;
    }
    return always;
  }

  // A bit for each whose coarse sum is at least `from`, of any head.
  __device__ __forceinline__ static uint32_t AboveOf(const float (&from)[2],
                                                     const GroupSums& sums) {
    uint32_t above = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const bool is_above = (sums.Of(i, 0) >= from[0]) | (sums.Of(i, 1) >= from[1]);
      above |= is_above ? 1u << i : 0;
    }
    above |= __shfl_xor_sync(kAllLanes, above, 1);
    return above | __shfl_xor_sync(kAllLanes, above, 2);
  }

  __device__ __forceinline__ int List(uint32_t chosen, const ItemRule& rule,
                                      const GroupSums& sums) {
    float base[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      base[head] = sums.Base(rule.factors, head, rule.form.centre()) - rule.reference[head];
    }
    return ListTokens(memory_, chosen, rule.factors, base, sums);
  }

  // A bit for each strip that has a lane of its keys in `lanes`.
  __device__ __forceinline__ static uint32_t StripsOf(uint32_t lanes) {
    return ((lanes & 0xFF) != 0 ? 1 : 0) | ((lanes & 0xFF00) != 0 ? 2 : 0) |
           ((lanes & 0xFF0000) != 0 ? 4 : 0) | ((lanes & 0xFF000000) != 0 ? 8 : 0);
  }

  // Rules 4 and 5: which candidates of the group are fine and which strips are read. Asks for both.
  // Without candidates: all of it is.
  __device__ __forceinline__ void Choose(const ItemRule& rule, const ItemReport& report,
                                         GroupSums& sums, Hot& hot) {
    float base[2], from[2];
    bool is_read = false, has_fine = false;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      base[head] = sums.Base(rule.factors, head, kCoarseCentre) - rule.reference[head];
      from[head] = (kFineFrom - base[head]) * rule.of_logit[head];
      float top = sums.Of(0, head);
#pragma unroll
      for (int i = 1; i < 8; ++i) top = fmaxf(top, sums.Of(i, head));
      is_read |= !(fmaf(top, rule.factors.code[head], base[head]) < rule.read_from);
      has_fine |= top >= from[head];
    }
    const uint32_t always = AlwaysOf(rule.lengths);
    uint32_t chosen = visits_.is_full ? always : 0;
    if (__any_sync(kAllLanes, has_fine) && !visits_.is_full) {
      chosen = AboveOf(from, sums) & ~always;
    }
    count_ = 0;
    if (__any_sync(kAllLanes, chosen != 0)) count_ = List(chosen, rule, sums);
    strips_ = StripsOf(__ballot_sync(kAllLanes, is_read || (chosen | always) != 0));
    report.Write(group_, chosen | always, strips_);
    if (!visits_.is_full && __all_sync(kAllLanes, always == 0xFF)) strips_ = 0;
    Ask(hot);
    if (strips_ != 0) Weigh(rule.factors, base, chosen | always, sums);
  }

  // What is always fine of an octet, and nothing else of the group.
  __device__ __forceinline__ void ChooseOctet(int octet, const ItemRule& rule,
                                              const GroupSums& sums, Hot& hot) {
    count_ = List(AlwaysOf(rule.lengths) & EdgeOctets::BitsOf(octet), rule, sums);
    strips_ = count_ == 0 ? 0 : 1u << octet % EdgeOctets::kOfGroup / 2;
    Ask(hot);
    if (strips_ != 0) StripWeights{}.Store(memory_);
  }

  __device__ __forceinline__ void Ask(Hot& hot) {
    fetched_ += Shape::kValueScales;
    if (strips_ == 0) return;
    copier_.Values(strips_, item_.Upper(group_));
    fetched_ += __popc(strips_) * (Shape::kStripBytes + 4 * kStripTokens);
    if (count_ == 0) return;
    __syncwarp();
    hot.Begin();
    copier_.Rows(0, min(count_, kFineTile), item_.Lower(group_), item_.row_bytes, group_, hot);
    hot.Take(group_, memory_.fine, 0, count_);
    fetched_ += count_ * item_.row_bytes;
  }

  // Coarse weights of the group, 0 of tokens that are `fine` and where strips are left out. They
  // are relative to the reference and what that was raised by.
  __device__ __forceinline__ void Weigh(const LaneFactors& factors, const float (&base)[2],
                                        uint32_t fine, const GroupSums& sums) {
    const bool is_read = strips_ >> (threadIdx.x % 32 / 8) & 1;
    const float even = is_read ? base[0] - attended_.raised(0) : -INFINITY;
    const float odd = is_read ? base[1] - attended_.raised(1) : -INFINITY;
    uint32_t weights[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      weights[i / 4][i % 4] =
          Element<__half>::Pack(Exp2(fmaf(sums.Of(i, 0), factors.code[0], even)),
                                Exp2(fmaf(sums.Of(i, 1), factors.code[1], odd)));
    }
    if (__any_sync(kAllLanes, fine != 0)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if ((fine >> i & 1) != 0) weights[i / 4][i % 4] = 0;
      }
    }
    StripWeights::Of(weights).Store(memory_);
  }

  // Attends the strips of the group that was chosen from last.
  __device__ __forceinline__ void Finish(const SharedQuery<kDim>& query, const ItemRule& rule,
                                         const uint4* ones, Hot& hot) {
    WaitForCopies<1>();
    __syncwarp();
    attended_.FitSteps(memory_);
#pragma unroll 1
    for (int first = 0; first < count_; first += kFineTile) {
      const int count = min(count_ - first, kFineTile);
      if (first > 0) {  // more than were asked for
        __syncwarp();
        copier_.Rows(first, count, item_.Lower(group_), item_.row_bytes, group_, hot);
        CommitCopies();
        hot.Take(group_, memory_.fine, first, count_);
        WaitForCopies<0>();
        __syncwarp();
      }
      hot.Keep(group_, memory_.rows);
      float logits[2];
      FineLogits(memory_, first, rule.form, memory_.Steps(slot_), query, rule.factors, logits);
      attended_.AddFine(memory_, first, count, rule.form, logits);
    }
    __syncwarp();
    attended_.AddStrips(memory_, ones);
    __syncwarp();
  }

  const PlanesItem<kDim>& item_;
  const PlanesVisits& visits_;
  Memory& memory_;
  const PlanesCopier<kDim, kHeads> copier_;
  const int first_visit_, step_;
  // What the visit of a group has left to do: the strips that are read (none: nothing), tokens that
  // are listed, and where its scales are.
  uint32_t strips_ = 0;
  int count_ = 0, group_ = 0, slot_ = 0;
  AttendedSums<kDim, kHeads> attended_;
  uint64_t ahead_ = 0;    // the block of the visit whose keys are asked for next
  uint32_t fetched_ = 0;  // bytes
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_PLANES_PLANES_WARP_CUH_
