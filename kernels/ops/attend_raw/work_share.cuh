// Which strips of a batch a CTA takes: items (sequence, KV head) in order make one row of strips,
// cut into equal shares. A share may begin and end inside items; an item that several CTAs share
// is merged by the last of them to finish.
//
// A CTA leaves at most two partials: of the item that its share begins in the middle of or holds
// whole the front of, and of the one it ends in. Slot 2 * cta is of its first item, 2 * cta + 1 of
// a later one.
#ifndef KVSTRATA_KERNELS_OPS_ATTEND_RAW_WORK_SHARE_CUH_
#define KVSTRATA_KERNELS_OPS_ATTEND_RAW_WORK_SHARE_CUH_

#include "kernels/ops/attend_raw/attended_rows.cuh"

namespace kvstrata::cuda {

// How strips are cut among workers: share w is [w, w + 1) * strips / workers, rounded down.
struct Cut {
  int32_t strips, workers;

  // A CTA of four warps is worth 4 strips, or 2 as long as every SM has but one CTA. An item that
  // begins or ends inside a share costs a second pass through everything that is not streaming:
  // with as many workers for each item, shares of equally long items end where items end.
  __device__ __forceinline__ Cut(int32_t all, int32_t items, int32_t ctas) : strips(all) {
    const int32_t wanted = all / 2 <= ctas / 3 ? all / 2 : all / 4;
    workers = min(max(wanted, 1), ctas);
    const int32_t even = workers - workers % items;
    if (even * 8 >= workers * 7) workers = even;
  }
  __device__ __forceinline__ int32_t Begin(int32_t worker) const {
    const int32_t each = strips / workers;
    return worker * each + worker * (strips - each * workers) / workers;
  }
  __device__ __forceinline__ int32_t Owner(int32_t strip) const {
    return static_cast<int32_t>((int64_t{strip + 1} * workers - 1) / strips);
  }
};

// The CTAs that share an item. Plain, so that a CTA may keep it in shared memory.
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

// Where a CTA starts.
struct ShareStart {
  int32_t strips;      // of the whole batch
  int32_t item;        // that holds the CTA's first strip
  int32_t item_begin;  // that item's first strip
};

// For all threads of a CTA of kThreads; ends with a barrier. `item` is -1 if there is no share.
// `rows`, in shared memory, becomes what that item attends.
template <int kThreads>
__device__ ShareStart FindShare(const RowSource& from, int32_t items, AttendedRows& rows) {
  __shared__ int32_t warp_strips[kThreads / 32];
  __shared__ ShareStart start;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, heads = from.layer.kv_heads;
  const int32_t each = (items + kThreads - 1) / kThreads;
  const int32_t first = min(static_cast<int32_t>(threadIdx.x) * each, items);
  const int32_t last = min(first + each, items);
  int32_t own = 0;
  for (int32_t i = first; i < last; ++i)
    own += AttendedRows::Of(from, i / heads, i % heads).strips();
  int32_t before = own;
  for (int step = 1; step < 32; step *= 2) {
    const int32_t x = __shfl_up_sync(kAllLanes, before, step);
    if (lane >= step) before += x;
  }
  if (lane == 31) warp_strips[warp] = before;
  if (threadIdx.x == 0) start.item = -1;
  before -= own;
  __syncthreads();
  int32_t all = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += warp_strips[w];
    all += warp_strips[w];
  }
  const Cut cut(all, items, gridDim.x);
  const int32_t begin = cut.Begin(blockIdx.x);
  if (static_cast<int32_t>(blockIdx.x) < cut.workers && begin >= before && begin < before + own) {
    for (int32_t i = first;; ++i) {
      const AttendedRows found = AttendedRows::Of(from, i / heads, i % heads);
      if (begin < before + found.strips()) {
        start = {all, i, before};
        rows = found;
        break;
      }
      before += found.strips();
    }
  }
  __syncthreads();
  return start;
}

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_KERNELS_OPS_ATTEND_RAW_WORK_SHARE_CUH_
