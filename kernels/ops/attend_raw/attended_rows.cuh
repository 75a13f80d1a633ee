// SPDX-License-Identifier: Apache-2.0
// Which rows a (sequence, KV head) attends, as strips of 32, and where they lie: one row a lane.
//
// Strips are counted through the sinks, then the list, then the recent rows; each of the three is
// padded to whole strips. Recent rows start at a multiple of 32, so that their tiles lie in pages.
#pragma once

#include "kernels/cuda/batches/batch.h"
#include "kernels/cuda/warps/fragments.cuh"
#include "kernels/cuda/warps/mma_m16n8k16.cuh"

namespace kvstrata::cuda {

inline constexpr int kStripRows = 32;

// The attended rows of all sequences, with what the host knows worked out.
struct RowSource {
  PagedLayer layer;
  DeviceSelection selection;
  const int32_t* tokens;      // device [batch]
  int32_t page_shift;         // log2(page_tokens)
  int32_t unit_shift;         // log2(unit_tokens)
  bool newest_apart = false;  // each sequence's newest row is not on its page
};

__device__ __forceinline__ int32_t CeilDivide(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a + b - 1) / static_cast<uint32_t>(b));
}

__device__ __forceinline__ int32_t StripsFor(int32_t rows) {
  return (rows + kStripRows - 1) / kStripRows;
}

// The rows of one (sequence, KV head). Plain, so that a CTA may keep it in shared memory.
struct AttendedRows {
  int32_t tokens, sink_end, recent_begin;  // on pages
  int32_t newest;                          // the position of a row that is not; -1: none
  int32_t listed;                          // rows of the list
  int32_t sink_strips, list_strips;        // before the recent rows
  const int32_t* units;

  static __device__ __forceinline__ AttendedRows Of(const RowSource& from, int sequence, int head) {
    const DeviceSelection& s = from.selection;
    const int selected = s.shared ? 0 : sequence;
    const int list = selected * s.groups + (s.groups == 1 ? 0 : head);
    AttendedRows r;
    r.tokens = max(from.tokens[sequence], 0);
    r.newest = from.newest_apart ? r.tokens - 1 : -1;
    if (r.newest >= 0) r.tokens = r.newest;
    r.sink_end = s.sink_end == nullptr ? 0 : min(max(s.sink_end[selected], 0), r.tokens);
    r.recent_begin = s.recent_begin == nullptr ? r.sink_end : s.recent_begin[selected];
    r.recent_begin = min(max(r.recent_begin, r.sink_end), r.tokens);
    r.units = s.lists != nullptr ? reinterpret_cast<const int32_t*>(s.lists[list])
                                 : s.units + int64_t{list} * s.list_stride;
    r.listed =
        s.unit_tokens == 0 ? 0 : min(max(s.counts[list], 0), s.list_stride) << from.unit_shift;
    r.sink_strips = StripsFor(r.sink_end);
    r.list_strips = StripsFor(r.listed);
    return r;
  }

  // At least one, so that someone writes the output of a sequence that attends nothing.
  __device__ __forceinline__ int32_t strips() const {
    return max(sink_strips + list_strips + StripsFor(tokens - FirstRecent()), 1);
  }
  __device__ __forceinline__ bool MayHoldNewest(int32_t strip) const {
    return strip == strips() - 1 || recent_begin == tokens;
  }
  // The row of `lane` in `strip`; -1: none.
  __device__ __forceinline__ int32_t Position(const RowSource& from, int32_t strip,
                                              int lane) const {
    int32_t row = strip * kStripRows + lane;
    if (strip < sink_strips) return row < sink_end ? row : -1;
    row -= sink_strips * kStripRows;
    if (strip < sink_strips + list_strips) return ListedPosition(from, row);
    row += FirstRecent() - list_strips * kStripRows;
    return row >= recent_begin && row < tokens ? row : -1;
  }

 private:
  __device__ __forceinline__ int32_t FirstRecent() const {
    return recent_begin / kStripRows * kStripRows;
  }
  __device__ __forceinline__ int32_t ListedPosition(const RowSource& from, int32_t row) const {
    if (row >= listed) return -1;
    const int32_t inside = row & (from.selection.unit_tokens - 1);
    const int32_t position = (units[row >> from.unit_shift] << from.unit_shift) + inside;
    return position >= sink_end && position < recent_begin ? position : -1;
  }
};

// Where a KV head of a sequence finds its pages.
__device__ __forceinline__ const uint64_t* PagesOf(const PagedLayer& layer, int sequence,
                                                   int head) {
  const uint64_t* const shared = layer.pages + int64_t{sequence} * layer.page_stride;
  if (layer.hot == nullptr) return shared;
  const HotPages& hot = layer.hot[sequence];
  return hot.entries == nullptr ? shared
                                : hot.entries + int64_t{layer.hot_row + head} * hot.page_stride;
}

// The addresses of a warp's strips, made ahead: while strip n is used, the page of n + 1 and the
// list entry of n + 2 are on their way. Every lane holds one row's key.
class RowStream {
 public:
  // Strips first, first + step, ...; none is used from `end` on.
  __device__ __forceinline__ RowStream(const RowSource& from, const AttendedRows& rows,
                                       int sequence, int head, int32_t first, int32_t step,
                                       int32_t end)
      : from_(from),
        rows_(rows),
        pages_(PagesOf(from.layer, sequence, head)),
        offset_(from.layer.key_offset + head * from.layer.head_stride),
        stride_(static_cast<int32_t>(from.layer.slot_stride)),
        strip_(first),
        step_(step),
        end_(end),
        lane_(threadIdx.x % 32) {
    position_ = NextPosition();
    FetchPage();
    position_ = NextPosition();
    Advance();
  }

  // The current strip: the key of row `lane` (another row of the strip where there is none), its
  // position (-1: none), and which lanes have a row.
  uint64_t key;
  int32_t position;
  uint32_t present;

  __device__ __forceinline__ void Advance() {
    key = page_ + slot_bytes_;
    position = found_;
    present = next_present_;
    FetchPage();
    position_ = NextPosition();
  }

 private:
  __device__ __forceinline__ int32_t NextPosition() {
    const int32_t position = strip_ < end_ ? rows_.Position(from_, strip_, lane_) : -1;
    strip_ += step_;
    return position;
  }
  // Lanes without a row take that of another lane: what they read is weighed with 0, and must not
  // be NaN. A strip without any row reads row 0, which exists, and weighs nothing.
  __device__ __forceinline__ void FetchPage() {
    found_ = position_;
    next_present_ = __ballot_sync(kAllLanes, position_ >= 0);
    const int32_t spare = __shfl_sync(kAllLanes, position_, __ffs(next_present_ | (1u << 31)) - 1);
    const int32_t position = max(position_ >= 0 ? position_ : spare, 0);
    const int32_t page = position >> from_.page_shift;
    page_ = pages_[page] + offset_;
    slot_bytes_ = (position - (page << from_.page_shift)) * stride_;
  }

  const RowSource& from_;
  const AttendedRows& rows_;
  const uint64_t* pages_;
  int64_t offset_;
  int32_t stride_;
  int32_t strip_, step_, end_;
  int lane_;
  int32_t position_;    // position in strip n + 2
  int32_t found_ = -1;  // for strip n + 1, as the next two
  uint64_t page_ = 0;
  int32_t slot_bytes_ = 0;
  uint32_t next_present_ = 0;
};

}  // namespace kvstrata::cuda
