// SPDX-License-Identifier: Apache-2.0
// A decode step of plan mosaickv for step_bench.cc, as a captured one is: score the block keys of
// packed segments, pick blocks, attend the update buffer with the new row, attend the blocks and
// merge. The buffer is not flushed.
//
// Preset format: segments of 64K tokens, 32 of 96 channels, blocks of 8 tokens. The number of
// blocks to take is that of 6.25 % of the tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "kernels/plans/mosaickv/ops/packed_cuda_ops.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/packed_rows.h"

namespace kvstrata::cuda::mosaickv {

inline constexpr int kKvHeads = 8, kGroup = 4, kHeads = kKvHeads * kGroup, kDim = 128;
inline constexpr int kKeep = 32, kBlock = 8;
inline constexpr int32_t kSegment = 65536, kPage = 16, kBuffer = 32, kBufferPages = kBuffer / kPage;
inline constexpr int64_t kRow = 80;  // bytes of a packed row
inline constexpr int64_t kPageBytes = int64_t{2} * kKvHeads * kPage * kDim * 2;
inline const CudaOps& Ops() { return *kvs_cuda_ops(); }
inline const PackedOps& OpsOfPacked() { return kvstrata::OpsOf<PackedOps>(Ops().packed); }

// How many sequences of how many tokens, in as many layers as are gone through in turn.
struct PackedShape {
  int batch;
  int32_t tokens;
  int layers;

  int64_t taken_blocks() const { return tokens / 16 / kBlock; }
  int64_t segments() const { return (tokens + kSegment - 1) / kSegment; }
  int64_t segment_tokens() const { return std::min(tokens, kSegment); }
  int64_t segment_bytes() const {
    return kRow * (2 * segment_tokens() + segment_tokens() / kBlock);
  }
  int64_t lists() const { return int64_t{batch} * kKvHeads; }
  int32_t score_stride() const { return tokens / kBlock; }
};

// Packed segments [layers][batch][segments][kv_heads] and pages of the update buffers, the same
// random rows over and over, and the tables of both.
struct PackedMemory {
  PackedMemory(Rng& rng, const PackedShape& shape)
      : arrays(shape.segments() * kKvHeads * shape.batch * shape.layers),
        rows(static_cast<size_t>(arrays * shape.segment_bytes())),
        rotations(static_cast<size_t>(2 * arrays * kDim * kDim)),
        buffer(RandomElements(rng, DType::kBF16,
                              static_cast<size_t>(int64_t{shape.batch} * shape.layers *
                                                  kBufferPages * kPageBytes / 2))),
        segment_counts(std::vector<int32_t>(static_cast<size_t>(shape.batch),
                                            static_cast<int32_t>(shape.segments()))) {
    Repeat(RandomPackedRows(rng, PackedFormat(kDim, kKeep, 1, true), 262139), &rows);
    Repeat(RandomRotation(rng, kDim), &rotations);
    MakeTables(shape);
  }
  template <typename T>
  static void Repeat(const std::vector<T>& values, DeviceArray<T>* to) {
    for (size_t at = 0; at < to->size(); at += values.size()) {
      Check(
          cudaMemcpy(to->get() + at, values.data(),
                     std::min(values.size(), to->size() - at) * sizeof(T), cudaMemcpyHostToDevice),
          "fill");
    }
  }
  void MakeTables(const PackedShape& shape) {
    std::vector<PackedSegment> segments;
    for (int64_t i = 0; i < arrays; ++i) {
      const auto at = rows.address() + static_cast<uint64_t>(i * shape.segment_bytes());
      const auto r = rotations.address() + static_cast<uint64_t>(i * 2 * kDim * kDim * 4);
      const auto side = static_cast<uint64_t>(shape.segment_tokens() * kRow);
      const int64_t segment = i / kKvHeads % shape.segments();
      segments.push_back({r, r + kDim * kDim * 4, at, at + side, at + 2 * side,
                          static_cast<int32_t>(shape.segment_tokens()),
                          static_cast<int32_t>(segment * kSegment / kBlock), kKeep, 1, kBlock, 0});
    }
    table = DeviceArray<PackedSegment>(segments);
    std::vector<uint64_t> addresses;
    for (int64_t i = 0; i < int64_t{shape.batch} * shape.layers * kBufferPages; ++i) {
      addresses.push_back(buffer.address() + static_cast<uint64_t>(i * kPageBytes));
    }
    pages = DeviceArray<uint64_t>(addresses);
  }

  const int64_t arrays;
  DeviceArray<std::byte> rows;
  DeviceArray<float> rotations;
  DeviceArray<std::byte> buffer;
  DeviceArray<int32_t> segment_counts;
  DeviceArray<PackedSegment> table;
  DeviceArray<uint64_t> pages;
};

// What the ops leave for each other, and the output. Sizes of the workspaces are the ops' to say.
struct PackedScratch {
  explicit PackedScratch(const PackedShape& shape)
      : buffered(std::vector<int32_t>(static_cast<size_t>(shape.batch), kBuffer)),
        blocks(std::vector<int32_t>(static_cast<size_t>(shape.batch), shape.tokens / kBlock)),
        units(static_cast<size_t>(shape.lists() * shape.taken_blocks())),
        counts(static_cast<size_t>(shape.lists())),
        sink(static_cast<size_t>(shape.batch)),
        recent(static_cast<size_t>(shape.batch)),
        scores(static_cast<size_t>(shape.lists() * shape.score_stride())),
        partial(static_cast<size_t>(shape.batch * kHeads * (kDim + 2))),
        counters(std::vector<uint32_t>(static_cast<size_t>(shape.lists()), 0)),
        output(static_cast<size_t>(shape.batch * kHeads * kDim)) {}

  DeviceArray<int32_t> buffered, blocks;             // lengths: of the buffers, of the packed rows
  DeviceArray<int32_t> units, counts, sink, recent;  // which blocks are taken
  DeviceArray<float> scores, partial, workspace;
  DeviceArray<std::byte> buffer_workspace, pick_scratch;
  DeviceArray<uint32_t> counters;
  DeviceArray<BF16> output;
};

class PackedStep {
 public:
  // Bytes that a step of one layer must read, without rotations.
  static int64_t BytesOf(int64_t batch, int64_t tokens) {
    return batch * kKvHeads * kRow * (tokens / kBlock + 2 * (tokens / 16 / kBlock) * kBlock);
  }

  PackedStep(int batch, int32_t tokens, int64_t rotated_bytes)
      : shape_{batch, tokens,
               static_cast<int>(
                   std::max<int64_t>(1, (rotated_bytes - 1) / BytesOf(batch, tokens) + 1))},
        memory_(rng_, shape_),
        q_(RandomElements(rng_, DType::kBF16, static_cast<size_t>(batch * kHeads * kDim))),
        scratch_(shape_) {
    scratch_.workspace = DeviceArray<float>(
        static_cast<size_t>(OpsOfPacked().attend_packed_workspace_bytes(Attend(0)) / 4));
    scratch_.buffer_workspace = DeviceArray<std::byte>(std::vector<std::byte>(
        static_cast<size_t>(Ops().attend_raw_workspace_bytes(kGroup, kDim))));
    scratch_.pick_scratch = DeviceArray<std::byte>(
        std::vector<std::byte>(static_cast<size_t>(Ops().pick_scratch_bytes(Pick()))));
  }

  int layers() const { return shape_.layers; }

  // The ops of a layer, in their order.
  std::vector<std::function<int(Stream)>> OpsOf(int layer) const {
    return {[=, this](Stream s) { return OpsOfPacked().score_packed(Score(layer), s); },
            [=, this](Stream s) { return Ops().pick(Pick(), s); },
            [=, this](Stream s) { return Ops().attend_raw(AttendBuffer(layer), s); },
            [=, this](Stream s) { return OpsOfPacked().attend_packed(Attend(layer), s); }};
  }
  const DeviceArray<BF16>& output() const { return scratch_.output; }

 private:
  PagedLayer Buffer(int layer) const {
    return {memory_.pages.get() + int64_t{layer} * shape_.batch * kBufferPages,
            kBufferPages,
            kPage,
            kKvHeads,
            kDim,
            DType::kBF16,
            0,
            kPageBytes / 2,
            int64_t{kPage} * kDim * 2,
            kDim * 2};
  }
  PackedLayer Packed(int layer) const {
    return {memory_.table.get() + int64_t{layer} * shape_.batch * shape_.segments() * kKvHeads,
            memory_.segment_counts.get(),
            static_cast<int32_t>(shape_.segments()),
            kKvHeads,
            kDim,
            true,
            kKeep};
  }
  PackedQueries Queries() const {
    return {q_.get(), DType::kBF16, kHeads * kDim, shape_.batch, kGroup};
  }
  float Scale() const { return 1 / std::sqrt(float{kDim}); }
  Partials BufferPart() const {
    float* m = scratch_.partial.get() + int64_t{shape_.batch} * kHeads * kDim;
    return {m, m + int64_t{shape_.batch} * kHeads, scratch_.partial.get(), 1};
  }

  AttendRawBatch AttendBuffer(int layer) const {
    AttendRawBatch w;
    w.layer = Buffer(layer);
    w.batch = shape_.batch;
    w.group = kGroup;
    w.tokens = scratch_.buffered.get();
    w.q = q_.get();
    w.q_stride = kHeads * kDim * 2;
    w.scale = Scale();
    w.new_k = w.new_v = {q_.get(), kHeads * kDim * 2, kDim * 2, DType::kBF16};
    w.partial = BufferPart();
    w.ahead = true;
    w.workspace = scratch_.buffer_workspace.get();
    return w;
  }
  ScorePackedBatch Score(int layer) const {
    return {Packed(layer), Queries(), scratch_.scores.get(), shape_.score_stride(), 1, true};
  }
  PickBatch Pick() const {
    PickBatch w;
    w.scores = scratch_.scores.get();
    w.score_stride = shape_.score_stride();
    w.batch = shape_.batch;
    w.groups = kKvHeads;
    w.rule = {1, 1, 0, static_cast<int32_t>(shape_.taken_blocks()), 0};
    w.tokens = scratch_.blocks.get();
    w.ahead = true;
    w.units = scratch_.units.get();
    w.counts = scratch_.counts.get();
    w.sink_end = scratch_.sink.get();
    w.recent_begin = scratch_.recent.get();
    w.list_stride = w.rule.take;
    w.scratch = scratch_.pick_scratch.get();
    return w;
  }
  AttendPackedBatch Attend(int layer) const {
    AttendPackedBatch w;
    w.layer = Packed(layer);
    w.queries = Queries();
    w.selection = {1,
                   kKvHeads,
                   static_cast<int32_t>(shape_.taken_blocks()),
                   scratch_.units.get(),
                   scratch_.counts.get(),
                   scratch_.sink.get(),
                   scratch_.recent.get()};
    w.scale = Scale();
    w.with = BufferPart();
    w.to = {scratch_.output.get(), DType::kBF16, nullptr};
    w.counters = scratch_.counters.get();
    w.workspace = scratch_.workspace.get();
    w.ahead = true;
    return w;
  }

  Rng rng_{std::random_device{}()};
  const PackedShape shape_;
  const PackedMemory memory_;
  const DeviceArray<std::byte> q_;  // queries, whose first heads serve as keys and values too
  PackedScratch scratch_;
};

}  // namespace kvstrata::cuda::mosaickv
