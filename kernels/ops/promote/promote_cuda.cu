// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/batches/powers_of_two.h"
#include "kernels/cuda/warps/last_arrival.cuh"
#include "kernels/cuda/warps/launch.cuh"
#include "kernels/ops/attend_raw/attended_rows.cuh"
#include "kernels/ops/promote/promote_cuda.h"

namespace kvstrata::cuda {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
// 16-byte pieces of a thread on their way over the bus.
constexpr int kPiecesInFlight = 4;
// Candidates that a thread looks up at once.
constexpr int kLookUps = 4;
// CTAs of all lists, which share the copies: with 1 MB on its way 49.5 GB/s of 55. Twice as many
// make steps that miss nothing 0.3 us longer.
constexpr int32_t kCopyingCtas = 32, kCtasOfAList = 16;

struct Arguments {
  RowSource rows;
  const int32_t* committed;
  uint64_t layer_bytes;
  uint32_t layer_index;
  uint32_t* counters;
};

// The pages that a (sequence, KV head) attends, as candidates in order of position.
struct AttendedPages {
  const int32_t* units;
  int32_t sinks, listed, recent;  // candidates of each kind
  int32_t first_recent;           // page
  int32_t complete;               // pages
  int32_t pages_of_unit_shift;    // for units larger than a page
  int32_t units_of_page_shift;    // for smaller ones

  static __device__ __forceinline__ AttendedPages Of(const RowSource& from, int sequence, int head,
                                                     int32_t committed) {
    const AttendedRows r = AttendedRows::Of(from, sequence, head);
    const int32_t page_shift = from.page_shift, unit_shift = from.unit_shift;
    AttendedPages p{};
    if (r.recent_begin <= r.sink_end) return p;
    p.units = r.units;
    p.pages_of_unit_shift = max(unit_shift - page_shift, 0);
    p.units_of_page_shift = max(page_shift - unit_shift, 0);
    p.sinks = CeilDivide(r.sink_end, 1 << page_shift);
    p.first_recent = max(r.recent_begin >> page_shift, p.sinks);
    p.complete = committed >> page_shift;
    p.recent = max(p.complete - p.first_recent, 0);
    p.listed = (r.listed >> unit_shift) << p.pages_of_unit_shift;
    return p;
  }
  __device__ __forceinline__ int32_t count() const { return sinks + listed + recent; }
  // -1: none that could be in the cache, or the candidate before is the same.
  __device__ __forceinline__ int32_t Page(int32_t i) const {
    if (i >= count()) return -1;
    int32_t page = i;
    if (i >= sinks + listed) {
      page = first_recent + i - sinks - listed;
    } else if (i >= sinks) {
      page = ListedPage(i - sinks);
    }
    return page < complete ? page : -1;
  }

 private:
  __device__ __forceinline__ int32_t ListedPage(int32_t i) const {
    const int32_t unit = i >> pages_of_unit_shift;
    const int32_t inside = i & ((1 << pages_of_unit_shift) - 1);
    const int32_t page = ((units[unit] << pages_of_unit_shift) >> units_of_page_shift) + inside;
    const bool again =
        units_of_page_shift > 0 && unit > 0 && units[unit - 1] >> units_of_page_shift == page;
    return again || page < sinks || page >= first_recent ? -1 : page;
  }
};

// The cache of one (sequence, KV head) in the layer.
struct HotRow {
  uint64_t* entries;
  const uint64_t* pages;
  uint64_t slots;       // slots of the layer
  uint64_t key_offset;  // from an entry to the layer, and so to the slot
  uint64_t layer_bytes;
  int32_t* owners;
  int32_t* stamps;
  int32_t slot_count;

  static constexpr int32_t kMissing = -1, kOnDevice = -2;

  static __device__ __forceinline__ HotRow Of(const Arguments& a, const HotPages& hot, int head) {
    const int64_t row = a.rows.layer.hot_row + head;
    const auto slot_count = static_cast<uint64_t>(hot.slot_count);
    return {hot.entries + row * hot.page_stride,
            hot.pages,
            hot.slots + a.layer_index * slot_count * a.layer_bytes,
            static_cast<uint64_t>(a.rows.layer.key_offset),
            a.layer_bytes,
            hot.owners + row * hot.slot_count,
            hot.stamps + row * hot.slot_count,
            hot.slot_count};
  }
  __device__ __forceinline__ uint64_t Slot(int32_t slot) const {
    return slots + static_cast<uint64_t>(slot) * layer_bytes;
  }
  // Where the page's slice is; kOnDevice: the page is the GPU's own.
  __device__ __forceinline__ int32_t Find(int32_t page) const {
    if (page < 0) return kOnDevice;
    const uint64_t own = pages[page];
    const uint64_t inside = entries[page] + key_offset - slots;
    if ((own & kHostPage) == 0) return kOnDevice;
    return inside < static_cast<uint64_t>(slot_count) * layer_bytes
               ? static_cast<int32_t>(static_cast<uint32_t>(inside >> 4) /
                                      static_cast<uint32_t>(layer_bytes >> 4))
               : kMissing;
  }
};

struct Shared {
  uint32_t selected[kHotSlotsMax / 32];  // slots of this selection
  int32_t stamps[kHotSlotsMax];
  int32_t missing[kHotSlotsMax];  // pages
  uint16_t victims[kHotSlotsMax];
  int32_t sums[kWarps];
  int32_t counted;
  bool is_last;
};

__device__ __forceinline__ bool IsSelected(const Shared& shared, int32_t slot) {
  return (shared.selected[slot / 32] >> slot % 32 & 1) != 0;
}

// Calls emit(value(i), place) for the i below n of which value(i) >= 0, in order; places count from
// `place`, and none is from `limit` on. Returns the next place. For all threads.
template <typename Value, typename Emit>
__device__ int32_t Compact(int32_t n, int32_t place, int32_t limit, Shared& shared, Value value,
                           Emit emit) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll 1
  for (int32_t first = 0; first < n; first += kThreads) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x);
    const int32_t x = i < n ? value(i) : -1;
    const uint32_t kept = __ballot_sync(kAllLanes, x >= 0);
    if (lane == 0) shared.sums[warp] = __popc(kept);
    __syncthreads();
    int32_t at = place + __popc(kept & ((1u << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += shared.sums[w];
      place += shared.sums[w];
    }
    if (x >= 0 && at < limit) emit(x, at);
    __syncthreads();
  }
  return min(place, limit);
}

// How many slots of no page of this selection were selected at step `stamp` last, or before.
__device__ int32_t CountUpTo(int32_t stamp, int32_t slots, Shared& shared) {
  if (threadIdx.x == 0) shared.counted = 0;
  __syncthreads();
  int32_t own = 0;
  for (auto s = static_cast<int32_t>(threadIdx.x); s < slots; s += kThreads) {
    own += shared.stamps[s] <= stamp ? 1 : 0;
  }
  own = __reduce_add_sync(kAllLanes, own);
  if (threadIdx.x % 32 == 0 && own != 0) atomicAdd(&shared.counted, own);
  __syncthreads();
  const int32_t all = shared.counted;
  __syncthreads();
  return all;
}

// The slots for up to `wanted` pages, in shared.victims; returns their number.
__device__ int32_t ChooseVictims(const HotRow& row, int32_t wanted, int32_t now, Shared& shared) {
  for (auto s = static_cast<int32_t>(threadIdx.x); s < row.slot_count; s += kThreads) {
    shared.stamps[s] = IsSelected(shared, s) ? INT32_MAX : min(row.stamps[s], now);
  }
  __syncthreads();
  wanted = min(wanted, CountUpTo(now, row.slot_count, shared));
  int32_t low = 0, high = now;  // the least stamp up to which there are enough
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (CountUpTo(middle, row.slot_count, shared) >= wanted) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const auto slots = [&](int32_t first, int32_t last) {
    return [&shared, first, last](int32_t s) {
      return shared.stamps[s] >= first && shared.stamps[s] <= last ? s : -1;
    };
  };
  const auto take = [&shared](int32_t slot, int32_t place) {
    shared.victims[place] = static_cast<uint16_t>(slot);
  };
  const int32_t older = Compact(row.slot_count, 0, wanted, shared, slots(0, low - 1), take);
  return Compact(row.slot_count, older, wanted, shared, slots(low, low), take);
}

// This CTA's share of the slices of `count` pages.
__device__ void CopySlices(const Arguments& a, const HotRow& row, int head, int32_t count,
                           const Shared& shared) {
  const PagedLayer& layer = a.rows.layer;
  const uint64_t of_head = head * layer.head_stride;
  const uint64_t to_values = layer.value_offset - layer.key_offset;
  const auto pieces = static_cast<uint32_t>(layer.head_stride / 16);  // pieces of keys or values
  const uint32_t all = count * 2 * pieces, step = gridDim.x * kThreads;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * kThreads + threadIdx.x; first < all;
       first += step * kPiecesInFlight) {
    uint64_t from[kPiecesInFlight], to[kPiecesInFlight];
    uint4 x[kPiecesInFlight];
#pragma unroll
    for (int j = 0; j < kPiecesInFlight; ++j) {
      const uint32_t i = min(first + j * step, all - 1);
      const uint32_t half = i / pieces, slice = half / 2;
      const uint64_t at = of_head + (half % 2) * to_values + uint64_t{i % pieces} * 16;
      from[j] = (row.pages[shared.missing[slice]] & ~kHostPage) + row.key_offset + at;
      to[j] = row.Slot(shared.victims[slice]) + at;
    }
#pragma unroll
    for (int j = 0; j < kPiecesInFlight; ++j) {
      if (first + j * step < all) x[j] = LoadOnce128(from[j]);
    }
#pragma unroll
    for (int j = 0; j < kPiecesInFlight; ++j) {
      if (first + j * step < all) *reinterpret_cast<uint4*>(to[j]) = x[j];
    }
  }
}

// The slots' new owners.
__device__ void Commit(const HotRow& row, int32_t count, int32_t now, const Shared& shared) {
  for (auto i = static_cast<int32_t>(threadIdx.x); i < count; i += kThreads) {
    const int32_t slot = shared.victims[i], page = shared.missing[i];
    const int32_t evicted = row.owners[slot] - 1;
    if (evicted >= 0) row.entries[evicted] = row.pages[evicted] & ~kHostPage;
    row.entries[page] = row.Slot(slot) - row.key_offset;
    row.owners[slot] = page + 1;
    row.stamps[slot] = now;
  }
}

// Stamps the slots that are selected; whether a page is missing. For all threads.
__device__ bool LookUp(const AttendedPages& attended, const HotRow& row, int32_t now) {
  bool missing = false;
#pragma unroll 1
  for (auto first = static_cast<int32_t>(threadIdx.x); first < attended.count();
       first += kThreads * kLookUps) {
    int32_t page[kLookUps], slot[kLookUps];
#pragma unroll
    for (int j = 0; j < kLookUps; ++j) page[j] = attended.Page(first + j * kThreads);
#pragma unroll
    for (int j = 0; j < kLookUps; ++j) slot[j] = row.Find(page[j]);
#pragma unroll
    for (int j = 0; j < kLookUps; ++j) {
      missing |= slot[j] == HotRow::kMissing;
      if (slot[j] >= 0 && blockIdx.x == 0) row.stamps[slot[j]] = now;
    }
  }
  return __syncthreads_or(missing);
}

__global__ void __launch_bounds__(kThreads) PromoteKernel(const __grid_constant__ Arguments a) {
  __shared__ Shared shared;
  LetNextStart();
  for (int i = threadIdx.x; i < kHotSlotsMax / 32; i += kThreads) shared.selected[i] = 0;
  const int heads = a.rows.layer.kv_heads;
  const int sequence = blockIdx.y / heads, head = blockIdx.y % heads;
  const HotPages hot = a.rows.layer.hot[sequence];
  const int32_t now = a.rows.tokens[sequence], committed = a.committed[sequence];
  WaitForPrevious();
  if (hot.entries == nullptr) return;
  const AttendedPages attended = AttendedPages::Of(a.rows, sequence, head, committed);
  const HotRow row = HotRow::Of(a, hot, head);
  if (!LookUp(attended, row, now)) return;

  const int32_t missing = Compact(
      attended.count(), 0, row.slot_count, shared,
      [&](int32_t i) {
        const int32_t page = attended.Page(i), slot = row.Find(page);
        if (slot >= 0) atomicOr(&shared.selected[slot / 32], 1u << slot % 32);
        return slot == HotRow::kMissing ? page : -1;
      },
      [&](int32_t page, int32_t place) { shared.missing[place] = page; });
  const int32_t count = ChooseVictims(row, missing, now, shared);
  CopySlices(a, row, head, count, shared);
  if (ArrivesLast(a.counters + blockIdx.y, gridDim.x, shared.is_last)) {
    Commit(row, count, now, shared);
  }
}

constexpr int kRebasePages = 32, kRebaseThreads = 1024;  // a CTA's: a page a lane

__global__ void __launch_bounds__(kRebaseThreads)
    RebaseKernel(const __grid_constant__ RebaseBatch w) {
  WaitForPrevious();
  const HotPages& hot = w.hot;
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int32_t page = w.first + static_cast<int32_t>(blockIdx.x) * kRebasePages + lane;
  const uint64_t address = page < w.last ? w.pages[page] : 0;
  const bool changed = page < w.last && hot.pages[page] != address;
  __syncthreads();  // hot.pages is read until here
  if (!changed) return;
  const uint64_t layer_slots = static_cast<uint64_t>(hot.slot_count) * w.layer_bytes;
  for (int32_t row = warp; row < w.layers * w.kv_heads; row += kRebaseThreads / 32) {
    const auto layer = static_cast<uint64_t>(row / w.kv_heads);
    uint64_t* const entry = hot.entries + int64_t{row} * hot.page_stride + page;
    const uint64_t inside = *entry + layer * w.layer_bytes - (hot.slots + layer * layer_slots);
    *entry = address & ~kHostPage;
    if (inside >= layer_slots) continue;
    const int64_t slot = int64_t{row} * hot.slot_count +
                         static_cast<int64_t>(inside / static_cast<uint64_t>(w.layer_bytes));
    hot.owners[slot] = 0;
    hot.stamps[slot] = 0;
  }
  if (warp == 0) hot.pages[page] = address;
}

bool IsValid(const PromoteBatch& w) {
  const PagedLayer& l = w.layer;
  const DeviceSelection& s = w.selection;
  return l.hot != nullptr && l.kv_heads > 0 && IsPowerOfTwo(l.page_tokens) &&
         (s.unit_tokens == 0 || IsPowerOfTwo(s.unit_tokens)) && s.sink_end != nullptr &&
         s.recent_begin != nullptr && (s.groups == 1 || s.groups == l.kv_heads) &&
         l.head_stride % 16 == 0 && w.layer_bytes % 16 == 0 && w.layer_bytes > 0 &&
         w.layer_bytes < int64_t{1} << 24 && w.batch >= 0 && w.ctas_per_list >= 0 &&
         w.ctas_per_list <= 128;
}

}  // namespace

int PromoteCuda(const PromoteBatch& w, Stream stream) {
  if (!IsValid(w)) return cudaErrorInvalidValue;
  if (w.batch == 0) return cudaSuccess;
  Arguments a{};
  a.rows = {w.layer, w.selection, w.tokens, Log2(w.layer.page_tokens),
            Log2(w.selection.unit_tokens)};
  a.committed = w.committed;
  a.layer_bytes = static_cast<uint64_t>(w.layer_bytes);
  a.layer_index = static_cast<uint32_t>(w.layer.hot_row / w.layer.kv_heads);
  a.counters = w.counters;
  const int32_t lists = w.batch * w.layer.kv_heads;
  const int32_t ctas =
      w.ctas_per_list > 0 ? w.ctas_per_list : max(min(kCopyingCtas / lists, kCtasOfAList), 1);
  return LaunchDependent(PromoteKernel, dim3(ctas, lists), kThreads, 0, stream, a);
}

int RebaseCuda(const RebaseBatch& w, Stream stream) {
  if (w.hot.entries == nullptr || w.first < 0 || w.last > w.hot.page_stride || w.layers <= 0 ||
      w.kv_heads <= 0 || w.layer_bytes <= 0) {
    return cudaErrorInvalidValue;
  }
  if (w.first >= w.last) return cudaSuccess;
  const int32_t ctas = (w.last - w.first + kRebasePages - 1) / kRebasePages;
  return LaunchDependent(RebaseKernel, dim3(ctas), kRebaseThreads, 0, stream, w);
}

}  // namespace kvstrata::cuda
