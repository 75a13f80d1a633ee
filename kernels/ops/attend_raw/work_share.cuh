// SPDX-License-Identifier: Apache-2.0
// Which strips of a batch a CTA takes. An item is a (sequence, KV head).
//
// One sequence: the grid is [CTAs an item][KV heads], and those CTAs share the item evenly. CTAs
// that get no rows start last: they too wait for the memory, to find that out. Or, `by_heads`, it
// is [KV heads][CTAs an item], so that one head's CTAs start after the other's.
// Several: items in order make one row of strips, cut into equal shares, whatever the lengths; a
// share may begin and end inside items, and its CTA takes one task for each item it touches.
//
// An item that several CTAs share is merged by CTAs that need not wait long for the others, nor
// those for them: of one sequence the last ones, which start last, a share of the query heads each;
// of several the first one, whose last task it is, while for the others it is the first. A CTA
// posts at most two splits: slot 2 * cta is of its first item, 2 * cta + 1 of a later one.
#pragma once

#include "kernels/ops/attend_raw/attended_rows.cuh"

namespace kvstrata::cuda {

// A CTA's warps take strips in turn: shares of whole rounds lose no warp's time, and fewer shares
// are merged sooner.
inline constexpr int32_t kRoundStrips = 4;

// Strips of a share, where `strips` are to be shared by at most `ctas`, which three to an SM run at
// once. Half a round (half a strip a warp) is best as long as that takes half of them.
__device__ __forceinline__ int32_t ShareStrips(int32_t strips, int32_t ctas) {
  if (strips <= ctas) return kRoundStrips / 2;
  return (CeilDivide(strips, ctas) + kRoundStrips - 1) / kRoundStrips * kRoundStrips;
}

// floor(i * total / parts) for 0 <= i <= parts <= 1024, with the one division that depends on the
// lengths. The rest is exact in floats: i * rest < 2^20, and the half keeps it off whole numbers.
__device__ __forceinline__ int32_t PartBegin(int32_t total, int32_t parts, int32_t i) {
  const auto each = static_cast<int32_t>(static_cast<uint32_t>(total) / parts);
  const int32_t rest = total - each * parts;
  const float inverse = __fdividef(1.0f, static_cast<float>(parts));
  return i * each + static_cast<int32_t>((static_cast<float>(i * rest) + 0.5f) * inverse);
}

// How strips are cut among workers.
struct Cut {
  int32_t strips, workers;

  // With as many workers for each item, shares of equally long items end where items end, and no
  // CTA needs a second task: worth an eighth of the workers.
  static __device__ __forceinline__ Cut Of(int32_t strips, int32_t items, int32_t ctas) {
    const int32_t each = ctas / items;
    if (each * items * 8 >= ctas * 7) {
      const int32_t item_strips = CeilDivide(strips, items);
      return {strips, items * CeilDivide(item_strips, ShareStrips(item_strips, each))};
    }
    return {strips, CeilDivide(strips, ShareStrips(strips, ctas))};
  }
  __device__ __forceinline__ int32_t Begin(int32_t worker) const {
    return PartBegin(strips, workers, worker);
  }
  // The last worker that begins at `strip` or before: estimated, then put right.
  __device__ __forceinline__ int32_t Owner(int32_t strip) const {
    const int64_t goal = int64_t{strip + 1} * workers;
    auto worker = static_cast<int32_t>(__fdividef(static_cast<float>(goal), strips));
    while (int64_t{worker} * strips >= goal) --worker;
    while (int64_t{worker + 1} * strips < goal) ++worker;
    return worker;
  }
};

// The CTAs that share an item.
struct Sharers {
  int32_t first, count;
  bool first_is_later;  // the item is not the first of CTA `first`

  static __device__ __forceinline__ Sharers Of(const Cut& cut, int32_t item_begin,
                                               int32_t item_end) {
    const int32_t first = cut.Owner(item_begin);
    return {first, cut.Owner(item_end - 1) - first + 1, cut.Begin(first) < item_begin};
  }
  __device__ __forceinline__ int32_t Slot(int32_t i) const {
    return 2 * (first + i) + (i == 0 && first_is_later ? 1 : 0);
  }
};

// What a CTA does next, in shared memory.
struct CtaTask {
  AttendedRows rows;
  Sharers sharers;
  int32_t cta;             // its number; where there is one sequence, those of a KV head follow
                           // each other
  int32_t sequence, head;  // -1: nothing
  int32_t begin, end;      // strips of the item
  int32_t step;            // from a round of the CTA's to its next
  // A shared item: this CTA merges query heads merger, merger + mergers, ...; -1: none.
  int32_t merger, mergers;
  // With several sequences: strips of the batch.
  Cut cut;
  int32_t item_begin, share_end;

  // The part of item (sequence, head) that lies between `from_strip` and share_end.
  __device__ __forceinline__ void Take(int sequence_, int head_, int32_t from_strip) {
    const int32_t item_end = item_begin + rows.strips();
    sequence = sequence_;
    head = head_;
    begin = from_strip - item_begin;
    end = min(share_end, item_end) - item_begin;
    step = kRoundStrips;
    sharers = Sharers::Of(cut, item_begin, item_end);
    merger = cta == sharers.first ? 0 : -1;
    mergers = 1;
  }
  __device__ __forceinline__ bool Merges(int head) const {
    return merger >= 0 && head % mergers == merger;
  }
};

// The only task of a CTA where there is one sequence.
__device__ __forceinline__ void OnlyTask(const RowSource& from, int group, bool by_heads,
                                         CtaTask& task) {
  if (threadIdx.x == 0) {
    const int head = by_heads ? blockIdx.y : blockIdx.x;
    const int32_t i = by_heads ? blockIdx.x : blockIdx.y, ctas = by_heads ? gridDim.x : gridDim.y;
    task.cta = head * ctas + i;
    task.rows = AttendedRows::Of(from, 0, head);
    const int32_t strips = task.rows.strips();
    const int32_t each = ShareStrips(strips, ctas), count = CeilDivide(strips, each);
    task.sequence = i < count ? 0 : -1;
    task.head = head;
    // Whole rounds are dealt out in turn, so that what runs at one time reads neighbouring pages:
    // up to 2 % faster than shares in one piece (bench/notes/cuda.md, "Where pages lie").
    const int32_t dealt = min(each, kRoundStrips);
    task.begin = i * dealt;
    task.end = dealt < kRoundStrips ? min(task.begin + dealt, strips) : strips;
    task.step = count * kRoundStrips;
    task.sharers = {head * ctas, count, false};
    task.mergers = min(group, count);
    task.merger = count - 1 - i < task.mergers ? count - 1 - i : -1;
  }
  __syncthreads();
}

// The first task where there are several. Every thread counts the strips of a run of items.
template <int kThreads>
__device__ __forceinline__ void FirstTask(const RowSource& from, int32_t items, CtaTask& task) {
  __shared__ int32_t warp_strips[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = from.layer.kv_heads;
  const int32_t each = (items + kThreads - 1) / kThreads;
  const int32_t first = min(static_cast<int32_t>(threadIdx.x) * each, items);
  const int32_t last = min(first + each, items);
  int32_t own = 0;
#pragma unroll 1
  for (int32_t i = first; i < last; ++i) {
    own += AttendedRows::Of(from, i / heads, i % heads).strips();
  }
  int32_t before = own;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t x = __shfl_up_sync(kAllLanes, before, step);
    if (lane >= step) before += x;
  }
  if (lane == 31) warp_strips[warp] = before;
  if (threadIdx.x == 0) {
    task.cta = blockIdx.x;
    task.sequence = -1;
  }
  before -= own;
  __syncthreads();
  int32_t all = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += warp_strips[w];
    all += warp_strips[w];
  }
  const Cut cut = Cut::Of(all, items, gridDim.x);
  const int32_t cta = blockIdx.x, begin = cut.Begin(cta);
  if (cta < cut.workers && begin >= before && begin < before + own) {
    task.cut = cut;
    task.share_end = cut.Begin(cta + 1);
#pragma unroll 1
    for (int32_t i = first;; ++i) {
      task.rows = AttendedRows::Of(from, i / heads, i % heads);
      task.item_begin = before;
      before += task.rows.strips();
      if (begin >= before) continue;
      task.Take(i / heads, i % heads, begin);
      break;
    }
  }
  __syncthreads();
}

// The next task of a share, if it goes on; false if not. For all threads.
__device__ __forceinline__ bool NextTask(const RowSource& from, CtaTask& task) {
  const int32_t strip = task.item_begin + task.end;
  if (strip >= task.share_end) return false;
  __syncthreads();  // `task` is read until here
  if (threadIdx.x == 0) {
    const bool last_head = task.head + 1 == from.layer.kv_heads;
    const int sequence = task.sequence + (last_head ? 1 : 0), head = last_head ? 0 : task.head + 1;
    task.rows = AttendedRows::Of(from, sequence, head);
    task.item_begin = strip;
    task.Take(sequence, head, strip);
  }
  __syncthreads();
  return true;
}

}  // namespace kvstrata::cuda
