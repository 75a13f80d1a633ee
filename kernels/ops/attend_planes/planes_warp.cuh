// SPDX-License-Identifier: Apache-2.0
// A warp's share of the groups of one (sequence, KV head): it scores a group, finishes the one
// before it, whose values and fine rows have arrived by now, and chooses what to ask for.
#pragma once

#include "kernels/ops/attend_planes/attended_sums.cuh"
#include "kernels/ops/attend_planes/hot_rows.cuh"

namespace kvstrata::cuda {

// Hot: NoHotRows, or HotRowSet. Fine: FineByWeight, or FineByBits.
template <int kDim, int kHeads, typename Hot, typename Fine = FineByWeight>
class PlanesWarp {
 public:
  using Memory = WarpMemory<kDim, kHeads>;
  using Shape = GroupShape<kDim>;

  // Visits first, first + step, .. Copies of the first two begin here.
  __device__ PlanesWarp(const PlanesItem<kDim>& item, const PlanesVisits& visits, Memory* memory,
                        int first, int step, uint64_t policy, const Fine& fine)
      : item_(item),
        visits_(visits),
        memory_(*memory),
        copier_(memory, policy),
        fine_(fine),
        first_visit_(first),
        step_(step) {
    uint64_t blocks[2];
    for (int i = 0; i < 3; ++i) coming_[i] = visits.GroupOf(first + i * step);
    for (int i = 0; i < 2; ++i) blocks[i] = BlockOf(coming_[i]);  // both are asked for at once
    ahead_ = BlockOf(coming_[2]);
    for (int i = 0; i < 2; ++i) {
      if (coming_[i] >= 0) copier_.Keys(i, item.UpperIn(blocks[i], coming_[i]));
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
      const int group = coming_[0];
      GroupSums sums;
      if (group >= 0) {
        if (visits_.IsOctet(visit) || visits_.is_full) {
          hot.PassBy();
        } else {
          hot.AskTags(group, item_);
        }
        WaitForCopies<2>();
        __syncwarp();
        ScoreGroup(memory_, number, query, sums);
        __syncwarp();
        AskAhead(visit, number);
      }
      CommitCopies();
      if (strips_ != 0) Finish(query, rule, ones, hot);
      if (group < 0) break;
      ++visited_;
      group_ = group;
      slot_ = number % 4;
      if (visits_.IsOctet(visit)) {
        ChooseOctet(visits_.OctetOf(visit), rule, sums, hot);
      } else {
        Choose(rule, report, sums, hot);
      }
      CommitCopies();
    }
  }

  // Sums of the warp to its memory; afterwards the CTA may read them behind a barrier.
  __device__ __forceinline__ void Store(const ItemRule& rule) { attended_.Store(memory_, rule); }

  __device__ uint32_t fetched() const { return fetched_ + visited_ * Shape::kValueScales; }

 private:
  // Asks for the keys of the visit after the next one, and for where those of the one after that
  // lie.
  __device__ __forceinline__ void AskAhead(int visit, int number) {
    if (coming_[2] >= 0) copier_.Keys(number + 2, item_.UpperIn(ahead_, coming_[2]));
    coming_[0] = coming_[1];
    coming_[1] = coming_[2];
    coming_[2] = visits_.GroupOf(visit + 3 * step_);
    ahead_ = BlockOf(coming_[2]);
  }

  __device__ uint64_t BlockOf(int group) const { return group >= 0 ? item_.UpperBlock(group) : 0; }

  // The group's blocks come from the L2: asked for before they are needed.
  __device__ __forceinline__ void AskRuns() {
    upper_ = item_.UpperBlock(group_);
    lower_ = item_.LowerBlock(group_);
  }

  __device__ bool HasAlways(const PlanesLengths& lengths) const {
    const int first = group_ * kGroupTokens;
    return first < lengths.start || first + kGroupTokens > lengths.stop;
  }

  // A bit for each of the lane's tokens that is no candidate.
  __device__ __forceinline__ uint32_t AlwaysOf(const PlanesLengths& lengths) const {
    const int first = group_ * kGroupTokens;
    uint32_t always = 0;
    if (!HasAlways(lengths)) return 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int token = first + TokenOf(threadIdx.x % 32, i);
      if (!lengths.IsCandidate(token)) always |= 1u << i;
    }
    return always;
  }

  __device__ __forceinline__ int List(uint32_t chosen, const ItemRule& rule, const GroupSums& sums,
                                      const OwnSums<kHeads>& own) {
    float base[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      base[head] = sums.Base(rule.factors, head, rule.form.centre()) - rule.reference[head];
    }
    KeepSums(memory_, base, own);
    return ListTokens(memory_, chosen);
  }

  // A bit for each strip that has a lane of its keys in `lanes`.
  __device__ __forceinline__ static uint32_t StripsOf(uint32_t lanes) {
    return ((lanes & 0xFF) != 0 ? 1 : 0) | ((lanes & 0xFF00) != 0 ? 2 : 0) |
           ((lanes & 0xFF0000) != 0 ? 4 : 0) | ((lanes & 0xFF000000) != 0 ? 8 : 0);
  }

  // Rules 4 and 5: which candidates of the group are fine and which strips are read. Asks for both.
  // Without candidates: all of it is. Nothing is of most groups, where that is all there is to do.
  __device__ __forceinline__ void Choose(const ItemRule& rule, const ItemReport& report,
                                         const GroupSums& sums, Hot& hot) {
    const OwnSums<kHeads> own(sums);
    float base[2], score[2];
    bool is_read = false, has_fine = false;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      base[head] = sums.Base(rule.factors, head, kCoarseCentre) - rule.reference[head];
      score[head] = fmaf(rule.rounding[head], sums.squares[head], base[head]);
      const float best = fmaf(own.Top(head), rule.factors.code[head], score[head]);
      is_read |= !(best < rule.read_from);
      has_fine |= best >= kFineFrom;
    }
    uint32_t listed = 0, fine = 0, read = 0;
    if constexpr (Fine::kIsBits) {
      listed = visits_.is_full ? 0 : fine_.Of(group_);
      has_fine = listed != 0;
    }
    count_ = 0;
    strips_ = 0;
    if (__any_sync(kAllLanes, is_read || has_fine) || HasAlways(rule.lengths)) {
      AskRuns();
      const uint32_t always = AlwaysOf(rule.lengths);
      const uint32_t chosen = Fine::kIsBits && !visits_.is_full
                                  ? listed & ~always
                                  : ChosenOf(rule, always, has_fine, score, own);
      if (__any_sync(kAllLanes, chosen != 0)) count_ = List(chosen, rule, sums, own);
      fine = chosen | always;
      read = StripsOf(__ballot_sync(kAllLanes, is_read || fine != 0));
      // Octets have what is always fine.
      const bool has_others = visits_.is_full || !__all_sync(kAllLanes, always == 0xFF);
      strips_ = has_others ? read : 0;
      Ask(hot);
      if (strips_ != 0) Weigh(rule, base, always, own);
    }
    if (report.IsWanted()) report.Write(group_, fine, read);
  }

  // A bit for each of the lane's own tokens whose lower rows are asked for. score: what scores are
  // besides the coarse sums.
  __device__ __forceinline__ uint32_t ChosenOf(const ItemRule& rule, uint32_t always, bool has_fine,
                                               const float (&score)[2],
                                               const OwnSums<kHeads>& own) const {
    if (visits_.is_full) return always;
    if (!__any_sync(kAllLanes, has_fine)) return 0;
    uint32_t chosen = 0;
#pragma unroll
    for (int i = 0; i < own.kCount; ++i) {
      const bool is_fine = (fmaf(own.at[i][0], rule.factors.code[0], score[0]) >= kFineFrom) |
                           (fmaf(own.at[i][1], rule.factors.code[1], score[1]) >= kFineFrom);
      chosen |= is_fine ? 1u << i : 0;
    }
    chosen |= __shfl_xor_sync(kAllLanes, chosen, 1);
    if (kHeads > 4) chosen |= __shfl_xor_sync(kAllLanes, chosen, 2);
    return chosen << own.first() & ~always;
  }

  // What is always fine of an octet, and nothing else of the group.
  __device__ __forceinline__ void ChooseOctet(int octet, const ItemRule& rule,
                                              const GroupSums& sums, Hot& hot) {
    AskRuns();
    count_ =
        List(AlwaysOf(rule.lengths) & EdgeOctets::BitsOf(octet), rule, sums, OwnSums<kHeads>(sums));
    strips_ = count_ == 0 ? 0 : 1u << octet % EdgeOctets::kOfGroup / 2;
    Ask(hot);
    if (strips_ != 0) StripWeights{}.Store(memory_);
  }

  __device__ __forceinline__ void Ask(Hot& hot) {
    if (strips_ == 0) return;
    copier_.Values(strips_, item_.UpperIn(upper_, group_));
    fetched_ += __popc(strips_) * (Shape::kStripBytes + 4 * kStripTokens);
    if (count_ == 0) return;
    __syncwarp();
    hot.Begin(upper_);
    lower_ = item_.LowerIn(lower_, group_);
    copier_.Rows(0, min(count_, kFineTile), lower_, item_.row_bytes, group_, hot);
    hot.Take(group_, memory_.fine, 0, count_);
    fetched_ += count_ * item_.row_bytes;
  }

  // Coarse weights of the group, 0 of tokens that are `always` fine and where strips are left out;
  // those of other fine tokens are put in their place when their rows have arrived. They are
  // relative to the reference and what that was raised by.
  __device__ __forceinline__ void Weigh(const ItemRule& rule, const float (&base)[2],
                                        uint32_t always, const OwnSums<kHeads>& own) {
    const bool is_read = strips_ >> (threadIdx.x % 32 / 8) & 1;
    if constexpr (Fine::kIsBits) {  // coarse tokens may weigh anything
      float top[2];
      for (int head = 0; head < 2; ++head) {
        const float best = own.Top(head, is_read ? always : 0xFF);
        top[head] = fmaf(best, rule.factors.code[head], base[head]);
      }
      attended_.FitLogits(memory_, top);
    }
    const float even = is_read ? base[0] - attended_.raised(0) : -INFINITY;
    const float odd = is_read ? base[1] - attended_.raised(1) : -INFINITY;
    uint32_t weights[own.kCount];
#pragma unroll
    for (int i = 0; i < own.kCount; ++i) {
      weights[i] = Element<__half>::Pack(Exp2(fmaf(own.at[i][0], rule.factors.code[0], even)),
                                         Exp2(fmaf(own.at[i][1], rule.factors.code[1], odd)));
    }
    if (HasAlways(rule.lengths)) {
#pragma unroll
      for (int i = 0; i < own.kCount; ++i) {
        if ((always >> own.first() >> i & 1) != 0) weights[i] = 0;
      }
    }
    __syncwarp();
    StripWeights::Store(memory_, weights);
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
        copier_.Rows(first, count, lower_, item_.row_bytes, group_, hot);
        CommitCopies();
        hot.Take(group_, memory_.fine, first, count_);
        WaitForCopies<0>();
        __syncwarp();
      }
      hot.Keep(group_, memory_.rows);
      float logits[2];
      FineLogits(memory_, first, rule.form, memory_.scales[slot_], query, rule.factors, logits);
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
  [[no_unique_address]] const Fine fine_;
  const int first_visit_, step_;
  // What the visit of a group has left to do: the strips that are read (none: nothing), tokens that
  // are listed, and where its scales are.
  uint32_t strips_ = 0;
  int count_ = 0, group_ = 0, slot_ = 0;
  uint64_t upper_ = 0, lower_ = 0;  // its blocks; then, where rows are asked for, its lower run
  AttendedSums<kDim, kHeads> attended_;
  int coming_[3];         // groups of this visit and the next ones; -1: there is none
  uint64_t ahead_ = 0;    // the block of the last of them
  uint32_t visited_ = 0;  // groups
  uint32_t fetched_ = 0;  // bytes, but for keys
};

}  // namespace kvstrata::cuda
