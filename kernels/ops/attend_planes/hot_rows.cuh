// SPDX-License-Identifier: Apache-2.0
// Copies on the GPU of lower rows that lie on the host (HotRows), for the warp that has a group: it
// alone reads and writes the group's tags and copies in a launch, so nothing is locked. Where
// copies lie in blocks, which sequences share, it is the warp that was first to claim them. A
// claim is the launch's number, so none is given back.
//
// Tags of a group are asked for before it is scored. Rows that it has are read from the copies,
// others from the host; those take places when they have arrived: empty ones, else of rows that
// have not been fine for longest, and never of one that is fine now.
#pragma once

#include "kernels/cuda/warps/fragments.cuh"
#include "kernels/ops/attend_planes/attend_planes_cuda.h"
#include "kernels/ops/attend_planes/planes_item.cuh"

namespace kvstrata::cuda {

// All rows are read where they lie.
struct NoHotRows {
  static constexpr bool kIsOn = false;
  template <typename Item>
  __device__ void AskTags(int, const Item&) {}
  __device__ void PassBy() {}
  __device__ void Begin(uint64_t) {}
  __device__ void Take(int, const uint8_t*, int, int) {}
  template <int kPieces>
  __device__ void Keep(int, const uint4 (*)[kPieces]) {}
};

// What of a warp's copies is in its shared memory.
struct HotItem {
  uint64_t tags, copies;  // the item's; in blocks: the offset of its record, and nothing
  int32_t groups;         // that there is room for
  int32_t rows, row_bytes;
  uint32_t launch;            // in blocks: what claims
  uint32_t hits;              // bytes that copies had
  uint8_t places[kFineTile];  // the tile's rows', which take one
};

// A tag: the token's number in its group, and in two bits how fresh the copy is: 3 fine in the last
// launch that had fine tokens in the group, 2 in the one before, 1 in an older one, 0 there is
// none.
template <bool kInBlocks>
class HotRowSet {
 public:
  static constexpr bool kIsOn = true;

  // For KV head `head` of a sequence. By a warp; `item` is its own.
  __device__ HotRowSet(const AttendPlanesBatch& w, int sequence, int head, int row_bytes,
                       HotItem* item)
      : item_(*item), lane_(threadIdx.x % 32) {
    if (kInBlocks && lane_ == 0) {
      item_.tags = static_cast<uint64_t>(w.planes.hot_offset + head * w.planes.hot_head_stride);
      item_.rows = w.hot.rows;
      item_.row_bytes = row_bytes;
      item_.launch = *w.hot.launch;
      item_.hits = 0;
    } else if (lane_ == 0) {
      const HotSequence& of = w.hot.sequences[sequence];
      const int64_t first = (w.hot.first_head + head) * of.groups * w.hot.rows;
      item_ = {of.tags + first,
               of.copies + first * row_bytes,
               of.tags == 0 ? 0 : static_cast<int32_t>(of.groups),
               w.hot.rows,
               row_bytes,
               0,
               0,
               {}};
    }
    __syncwarp();
  }

  // The tags of the group that is begun next. item: PlanesItem.
  template <typename Item>
  __device__ __forceinline__ void AskTags(int group, const Item& item) {
    next_tag_ = kPassedBy;
    if constexpr (kInBlocks) {
      const uint64_t record = RecordIn(item.UpperBlock(group));
      if (lane_ == 0) claimed_ = atomicExch(reinterpret_cast<uint32_t*>(record), item_.launch);
      next_tag_ = lane_ < item_.rows ? __ldcg(TagIn(record)) : 0;
    } else if (group < item_.groups) {
      next_tag_ = lane_ < item_.rows ? __ldcg(TagOf(group)) : 0;
    }
  }
  // The next group's copies are left as they are.
  __device__ __forceinline__ void PassBy() { next_tag_ = kPassedBy; }
  // block: the group's, as its table has it.
  __device__ __forceinline__ void Begin(uint64_t block) {
    tag_ = next_tag_;
    if constexpr (kInBlocks) {
      record_ = RecordIn(block);
      if (__shfl_sync(kAllLanes, claimed_, 0) == item_.launch) tag_ = kPassedBy;
    }
  }

  // Where row `row` of a tile is read. `host`: its own address.
  __device__ __forceinline__ uint64_t Find(int group, int row, int token, uint64_t host) {
    const bool is_it = tag_ / kGroupTokens % 4 != 0 && tag_ % kGroupTokens == token;
    const uint32_t found = __ballot_sync(kAllLanes, is_it);
    if (found != 0) return CopyAt(group, __ffs(found) - 1);
    taken_ |= 1u << row;
    return host;
  }

  // All rows of the tile that begins with the list's token `first` were looked for: those that were
  // not found take places. listed: all tokens of the group that are fine, [count].
  __device__ __forceinline__ void Take(int group, const uint8_t* listed, int first, int count) {
    const uint32_t missed = taken_;
    taken_ = 0;
    if (tag_ == kPassedBy) return;
    if (lane_ == 0) {
      item_.hits += (min(count - first, kFineTile) - __popc(missed)) * item_.row_bytes;
    }
    const uint32_t before = tag_;
    if (first == 0) Age(listed, count);
    if (missed != 0) GivePlaces(missed, listed + first);
    if (tag_ != before) *TagOf(group) = static_cast<uint8_t>(tag_);
    __syncwarp();
  }

  // They have arrived.
  template <int kPieces>
  __device__ __forceinline__ void Keep(int group, const uint4 (*rows)[kPieces]) {
    for (; taken_ != 0; taken_ &= taken_ - 1) {
      const int row = __ffs(taken_) - 1;
      if (16 * lane_ >= item_.row_bytes) continue;
      reinterpret_cast<uint4*>(CopyAt(group, item_.places[row]))[lane_] = rows[row][lane_];
    }
  }

  __device__ uint32_t hits() const { return item_.hits; }

 private:
  static constexpr uint32_t kFine = 3, kPassedBy = 4 * kGroupTokens;

  __device__ uint64_t RecordIn(uint64_t block) const {
    return FirstRunIn(block, static_cast<int64_t>(item_.tags));
  }
  __device__ uint8_t* TagIn(uint64_t record) const {
    return reinterpret_cast<uint8_t*>(record + sizeof(uint32_t) + lane_);
  }
  __device__ uint8_t* TagOf(int group) const {
    if constexpr (kInBlocks) return TagIn(record_);
    return reinterpret_cast<uint8_t*>(item_.tags + int64_t{group} * item_.rows + lane_);
  }
  __device__ uint64_t CopyAt(int group, int place) const {
    if constexpr (kInBlocks) return record_ + DevicePlanes::kHotTagBytes + place * item_.row_bytes;
    return item_.copies + (int64_t{group} * item_.rows + place) * item_.row_bytes;
  }

  __device__ __forceinline__ void Age(const uint8_t* listed, int count) {
    bool is_fine = false;
#pragma unroll 1
    for (int i = 0; i < count; ++i) is_fine |= listed[i] == tag_ % kGroupTokens;
    const uint32_t fresh = tag_ / kGroupTokens;
    if (fresh == 0) return;
    tag_ = (is_fine ? kFine : max(fresh - 1, 1)) * kGroupTokens + tag_ % kGroupTokens;
  }

  __device__ __forceinline__ void GivePlaces(uint32_t missed, const uint8_t* listed) {
    const uint32_t fresh = lane_ < item_.rows ? tag_ / kGroupTokens : kFine;
    const uint32_t empty = __ballot_sync(kAllLanes, fresh == 0);
    const uint32_t old = __ballot_sync(kAllLanes, fresh == 1);
    uint32_t taken = __ballot_sync(kAllLanes, fresh == kFine);
    for (; missed != 0 && taken != ~0u; missed &= missed - 1) {
      const uint32_t first = empty & ~taken, second = old & ~taken;
      const int place = __ffs(first != 0 ? first : second != 0 ? second : ~taken) - 1;
      const int row = __ffs(missed) - 1;
      taken |= 1u << place;
      taken_ |= 1u << row;
      if (lane_ == place) {
        item_.places[row] = static_cast<uint8_t>(place);
        tag_ = kFine * kGroupTokens + listed[row];
      }
    }
  }

  HotItem& item_;
  const int lane_;
  uint32_t tag_ = kPassedBy, next_tag_ = kPassedBy;  // the lane's copy's
  uint32_t taken_ = 0;    // rows of the tile that were not found; then those that take a place
  uint64_t record_ = 0;   // in blocks: of the group that was begun
  uint32_t claimed_ = 0;  // lane 0: by whom the next group's was
};

// Which copies there are.
enum class HotKind : uint8_t { kNone, kOfSequences, kInBlocks };

// A warp's shared memory, with copies.
template <int kDim, int kHeads>
struct HotWarpMemory : WarpMemory<kDim, kHeads> {
  HotItem hot;
};

}  // namespace kvstrata::cuda
