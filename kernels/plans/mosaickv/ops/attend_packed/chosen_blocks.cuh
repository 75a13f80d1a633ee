// SPDX-License-Identifier: Apache-2.0
// The chosen blocks of one (sequence, KV head), how they are shared by CTAs, and where those lie
// that a CTA has under way. In shared memory, by all threads of a CTA.
#pragma once

#include "kernels/plans/mosaickv/ops/attend_packed/rotated_queries.cuh"

namespace kvstrata::cuda {

inline constexpr int kLeastBlocks = 8;  // blocks of a share, at least

// The blocks that are attended, in order.
struct ChosenBlocks {
  const int32_t* list;   // in global memory
  const int32_t* units;  // the same, where it is read
  int32_t sink_end, listed, recent_begin, blocks;

  static __device__ __forceinline__ ChosenBlocks Of(const DeviceSelection& s, int sequence,
                                                    int head, int32_t blocks) {
    ChosenBlocks c{nullptr, nullptr, 0, 0, 0, blocks};
    if (s.unit_tokens == 0) return c;
    const int64_t list = int64_t{sequence} * s.groups + head;
    c.list = c.units = s.units + list * s.list_stride;
    c.listed = min(max(s.counts[list], 0), s.list_stride);
    c.sink_end = min(max(s.sink_end[sequence], 0), blocks);
    c.recent_begin = min(max(s.recent_begin[sequence], c.sink_end), blocks);
    return c;
  }
  // Reads the list in `room` of `entries` from now on, where it has that: a search takes many
  // reads, one after the other. All of it is asked for, before its length is known. Barrier
  // afterwards.
  __device__ __forceinline__ void Stage(int32_t list_stride, int32_t* room, int32_t entries) {
    if (list == nullptr || list_stride > entries) return;
    const auto threads = static_cast<int32_t>(blockDim.x);
#pragma unroll 8
    for (auto i = static_cast<int32_t>(threadIdx.x); i < list_stride; i += threads) {
      room[i] = list[i];
    }
    units = room;
  }
  // Where it was before.
  __device__ __forceinline__ void Unstage() { units = list; }
  __device__ __forceinline__ int32_t count() const {
    return sink_end + listed + blocks - recent_begin;
  }
  __device__ __forceinline__ int32_t At(int32_t i) const {
    if (i < sink_end) return i;
    i -= sink_end;
    return i < listed ? units[i] : recent_begin + i - listed;
  }
  // How many lie before `block`. By whole warps.
  __device__ __forceinline__ int32_t Find(int32_t block) const {
    int32_t before = 0, left = block == 0 ? 0 : count();
    while (left > 0) {
      const int32_t step = (left + 31) / 32, probe = static_cast<int32_t>(threadIdx.x % 32) * step;
      const bool lower = probe < left && At(before + probe) < block;
      const int32_t lowers = __popc(__ballot_sync(kAllLanes, lower));
      if (lowers == 0) break;
      before += (lowers - 1) * step + 1;
      left = min(left - (lowers - 1) * step, step) - 1;
    }
    return before;
  }
};

// The chosen blocks cut into shares. Where shares a quarter larger suffice for it, none lies in two
// runs of segments that share rotations and formats: each run that it meets costs a CTA two
// rotations.
struct Shares {
  int32_t runs;
  uint16_t run_of[kSegmentsMax];    // each segment's run
  uint16_t begins[kSegmentsMax];    // the first segment of each
  int32_t first[kSegmentsMax + 1];  // each run's first chosen block, then the end
  int32_t count, each;              // shares, and blocks of one
  int32_t blocks;                   // blocks of all shares
  bool within;                      // runs

  // Called by one warp; a barrier must follow.
  __device__ __forceinline__ void FindRuns(const SegmentTable& segments) {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int at = 0; at < segments.count; at += 32) {
      const int i = at + lane;
      const bool real = i < segments.count, opens = real && (i == 0 || !segments.Continues(i));
      const uint32_t opening = __ballot_sync(kAllLanes, opens);
      const int run = before + __popc(opening & (~0u >> (31 - lane))) - 1;
      if (real) run_of[i] = static_cast<uint16_t>(run);
      if (opens) begins[run] = static_cast<uint16_t>(i);
      before += __popc(opening);
    }
    if (lane == 0) runs = before;
  }
  // Called by all threads; has a barrier in between.
  __device__ __forceinline__ void Cut(const ChosenBlocks& chosen, const SegmentTable& segments) {
    const int warps = static_cast<int>(blockDim.x / 32);
    for (int i = threadIdx.x / 32; i <= runs; i += warps) {
      first[i] = i == runs ? chosen.count() : chosen.Find(segments.at[begins[i]].first_block);
    }
    __syncthreads();
    const auto ctas = static_cast<int32_t>(gridDim.x);
    const int32_t even = max((chosen.count() + ctas - 1) / ctas, kLeastBlocks);
    int32_t size = even, needed = In(size);
    while (needed > ctas && size <= even + even / 4) {
      size += max(even / 16, 1);
      needed = In(size);
    }
    if (threadIdx.x != 0) return;
    within = needed <= ctas;
    each = within ? size : even;
    count = within ? needed : (chosen.count() + even - 1) / even;
    blocks = chosen.count();
  }
  // The blocks [x, y) of a share.
  __device__ __forceinline__ int2 At(int32_t share) const {
    if (!within) return {share * each, min((share + 1) * each, blocks)};
    int i = 0;
    for (; share >= Of(i, each); ++i) share -= Of(i, each);
    const int32_t begin = first[i] + share * each;
    return {begin, min(begin + each, first[i + 1])};
  }

 private:
  __device__ __forceinline__ int32_t Of(int run, int32_t size) const {
    return (first[run + 1] - first[run] + size - 1) / size;
  }
  __device__ __forceinline__ int32_t In(int32_t size) const {
    int32_t sum = 0;
    for (int i = threadIdx.x % 32; i < runs; i += 32) sum += Of(i, size);
    return __reduce_add_sync(kAllLanes, sum);
  }
};

// Where chosen blocks under way lie, one a thread.
template <int kMost>
struct BlockPlaces {
  static constexpr uint16_t kNoRun = kSegmentsMax;
  uint64_t keys[kMost];    // rows' address; lowest four bits: how many the block has, less one
  uint64_t values[kMost];  // rows' address
  uint16_t runs[kMost];    // kNoRun: there is no such block

  __device__ __forceinline__ void Set(int i, int32_t block, const SegmentTable& segments,
                                      const Shares& shares, int stored_channels) {
    runs[i] = kNoRun;
    if (block >= segments.blocks()) return;
    const int segment = segments.Holding(block);
    const PackedSegment& s = segments.at[segment];
    const int32_t first = (block - s.first_block) * s.block, rows = min(s.rows - first, s.block);
    const int64_t from =
        int64_t{first} * RowFormat::Of(stored_channels, s.keep, s.neighbours).stride();
    keys[i] = s.keys + from + static_cast<uint64_t>(rows - 1);
    values[i] = s.values + from;
    runs[i] = shares.run_of[segment];
  }
};

// The rows of consecutive BlockPlaces of one run of segments, as tiles of 32.
struct TileRows {
  const uint64_t* keys;
  const uint64_t* values;
  int32_t count;  // blocks
  int32_t block_shift;

  static __device__ __forceinline__ int32_t RowsOf(uint64_t key) {
    return static_cast<int32_t>(key & 15) + 1;
  }
  __device__ __forceinline__ int32_t tiles() const {
    return ((count << block_shift) + kTileRows - 1) / kTileRows;
  }
  // Whether the lane's row of a tile is one.
  __device__ __forceinline__ bool Has(int32_t tile) const {
    const int32_t i = tile * kTileRows + static_cast<int32_t>(threadIdx.x % kTileRows);
    const int32_t entry = i >> block_shift, inside = i & ((1 << block_shift) - 1);
    return entry < count && inside < RowsOf(keys[min(entry, count - 1)]);
  }
};

}  // namespace kvstrata::cuda
