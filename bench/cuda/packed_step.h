// A decode step of plan mosaickv for step_bench.cc, as a captured one is: score the block keys of
// packed segments, pick blocks, attend the update buffer with the new row, attend the blocks and
// merge. The buffer is not flushed.
//
// Preset format: segments of 64K tokens, 32 of 96 channels, blocks of 8 tokens. The number of
// blocks to take is that of 6.25 % of the tokens.
#ifndef KVSTRATA_BENCH_CUDA_PACKED_STEP_H_
#define KVSTRATA_BENCH_CUDA_PACKED_STEP_H_

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/packed_rows.h"

namespace kvstrata::cuda {

class PackedStep {
 public:
  static constexpr int kKvHeads = 8, kGroup = 4, kDim = 128, kKeep = 32, kBlock = 8;
  static constexpr int32_t kSegment = 65536, kPage = 16, kBuffer = 32,
                           kBufferPages = kBuffer / kPage;

  // Bytes that a step of one layer must read, without rotations.
  static int64_t BytesOf(int64_t batch, int64_t tokens) {
    return batch * kKvHeads * kRow * (tokens / kBlock + 2 * TakenBlocks(tokens) * kBlock);
  }

  PackedStep(int batch, int32_t tokens, int64_t rotated_bytes)
      : batch_(batch),
        tokens_(tokens),
        layers_(static_cast<int>(
            std::max<int64_t>(1, (rotated_bytes - 1) / BytesOf(batch, tokens) + 1))),
        arrays_(Segments() * kKvHeads * batch * layers_),
        memory_(static_cast<size_t>(arrays_ * SegmentBytes())),
        rotations_(static_cast<size_t>(2 * arrays_ * kDim * kDim)),
        buffer_(RandomElements(
            rng_, DType::kBF16,
            static_cast<size_t>(int64_t{batch} * layers_ * kBufferPages * kPageBytes / 2))),
        q_(RandomElements(rng_, DType::kBF16, static_cast<size_t>(batch * kHeads * kDim))),
        output_(static_cast<size_t>(batch * kHeads * kDim)),
        buffered_(std::vector<int32_t>(static_cast<size_t>(batch), kBuffer)),
        blocks_(std::vector<int32_t>(static_cast<size_t>(batch), tokens / kBlock)),
        scores_(static_cast<size_t>(Lists() * ScoreStride())),
        units_(static_cast<size_t>(Lists() * TakenBlocks(tokens))),
        counts_(static_cast<size_t>(Lists())),
        sink_(static_cast<size_t>(batch)),
        recent_(static_cast<size_t>(batch)),
        partial_(static_cast<size_t>(batch * kHeads * (kDim + 2))),
        counters_(std::vector<uint32_t>(static_cast<size_t>(Lists()), 0)) {
    FillRows();
    MakeTables();
    MakeScratch();
  }

  int layers() const { return layers_; }
  int stages() const { return static_cast<int>(OpsOf(0).size()); }

  // The first `stages` ops of every layer.
  int Enqueue(int stages, Stream stream) const {
    int error = 0;
    for (int layer = 0; layer < layers_ && error == 0; ++layer) {
      const auto ops = OpsOf(layer);
      for (int i = 0; i < stages && error == 0; ++i) error = ops[static_cast<size_t>(i)](stream);
    }
    return error;
  }
  bool Sound() const {
    const std::vector<BF16> out = output_.Read();
    return std::all_of(out.begin(), out.end(), [](BF16 x) { return std::isfinite(ToFloat(x)); });
  }

 private:
  static constexpr int kHeads = kKvHeads * kGroup;
  static constexpr int64_t kRow = 80;  // bytes of a packed row
  static constexpr int64_t kPageBytes = int64_t{2} * kKvHeads * kPage * kDim * 2;
  static const CudaOps& Ops() { return *kvs_cuda_ops(); }
  static int64_t TakenBlocks(int64_t tokens) { return tokens / 16 / kBlock; }
  int64_t Segments() const { return (tokens_ + kSegment - 1) / kSegment; }
  int64_t SegmentTokens() const { return std::min(tokens_, kSegment); }
  int64_t SegmentBytes() const { return kRow * (2 * SegmentTokens() + SegmentTokens() / kBlock); }
  int64_t Lists() const { return int64_t{batch_} * kKvHeads; }
  int32_t ScoreStride() const { return tokens_ / kBlock; }

  // Writes the same random rows over and over.
  void FillRows() {
    const std::vector<std::byte> rows =
        RandomPackedRows(rng_, PackedFormat(kDim, kKeep, 1, true), 262139);
    for (size_t at = 0; at < memory_.size(); at += rows.size()) {
      Check(cudaMemcpy(memory_.get() + at, rows.data(), std::min(rows.size(), memory_.size() - at),
                       cudaMemcpyHostToDevice),
            "fill");
    }
    const std::vector<float> r = RandomRotation(rng_, kDim);
    for (size_t at = 0; at < rotations_.size(); at += r.size()) {
      Check(cudaMemcpy(rotations_.get() + at, r.data(), r.size() * 4, cudaMemcpyHostToDevice),
            "fill");
    }
  }
  void MakeTables() {
    std::vector<PackedSegment> table;
    for (int64_t i = 0; i < arrays_; ++i) {
      const auto at = memory_.address() + static_cast<uint64_t>(i * SegmentBytes());
      const auto r = rotations_.address() + static_cast<uint64_t>(i * 2 * kDim * kDim * 4);
      const auto rows = static_cast<uint64_t>(SegmentTokens() * kRow);
      const int64_t segment = i / kKvHeads % Segments();
      table.push_back({r, r + kDim * kDim * 4, at, at + rows, at + 2 * rows,
                       static_cast<int32_t>(SegmentTokens()),
                       static_cast<int32_t>(segment * kSegment / kBlock), kKeep, 1, kBlock, 0});
    }
    table_ = DeviceArray<PackedSegment>(table);
    segment_counts_ = DeviceArray<int32_t>(
        std::vector<int32_t>(static_cast<size_t>(batch_), static_cast<int32_t>(Segments())));
    std::vector<uint64_t> pages;
    for (int64_t i = 0; i < int64_t{batch_} * layers_ * kBufferPages; ++i) {
      pages.push_back(buffer_.address() + static_cast<uint64_t>(i * kPageBytes));
    }
    pages_ = DeviceArray<uint64_t>(pages);
  }
  void MakeScratch() {
    workspace_ =
        DeviceArray<float>(static_cast<size_t>(Ops().attend_packed_workspace_bytes(Attend(0)) / 4));
    buffer_workspace_ = DeviceArray<std::byte>(std::vector<std::byte>(
        static_cast<size_t>(Ops().attend_raw_workspace_bytes(kGroup, kDim))));
    pick_scratch_ = DeviceArray<std::byte>(
        std::vector<std::byte>(static_cast<size_t>(Ops().pick_scratch_bytes(Pick()))));
  }

  std::vector<std::function<int(Stream)>> OpsOf(int layer) const {
    return {[=, this](Stream s) { return Ops().score_packed(Score(layer), s); },
            [=, this](Stream s) { return Ops().pick(Pick(), s); },
            [=, this](Stream s) { return Ops().attend_raw(AttendBuffer(layer), s); },
            [=, this](Stream s) { return Ops().attend_packed(Attend(layer), s); }};
  }
  PagedLayer Buffer(int layer) const {
    return {pages_.get() + int64_t{layer} * batch_ * kBufferPages,
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
    return {table_.get() + int64_t{layer} * batch_ * Segments() * kKvHeads,
            segment_counts_.get(),
            static_cast<int32_t>(Segments()),
            kKvHeads,
            kDim,
            true,
            kKeep};
  }
  PackedQueries Queries() const { return {q_.get(), DType::kBF16, kHeads * kDim, batch_, kGroup}; }
  float Scale() const { return 1 / std::sqrt(float{kDim}); }
  Partials BufferPart() const {
    float* m = partial_.get() + int64_t{batch_} * kHeads * kDim;
    return {m, m + int64_t{batch_} * kHeads, partial_.get(), 1};
  }

  AttendRawBatch AttendBuffer(int layer) const {
    AttendRawBatch w;
    w.layer = Buffer(layer);
    w.batch = batch_;
    w.group = kGroup;
    w.tokens = buffered_.get();
    w.q = q_.get();
    w.q_stride = kHeads * kDim * 2;
    w.scale = Scale();
    w.new_k = w.new_v = {q_.get(), kHeads * kDim * 2, kDim * 2, DType::kBF16};
    w.partial = BufferPart();
    w.ahead = true;
    w.workspace = buffer_workspace_.get();
    return w;
  }
  ScorePackedBatch Score(int layer) const {
    return {Packed(layer), Queries(), scores_.get(), ScoreStride(), 1, true};
  }
  PickBatch Pick() const {
    PickBatch w;
    w.scores = scores_.get();
    w.score_stride = ScoreStride();
    w.batch = batch_;
    w.groups = kKvHeads;
    w.rule = {1, 1, 0, static_cast<int32_t>(TakenBlocks(tokens_)), 0};
    w.tokens = blocks_.get();
    w.ahead = true;
    w.units = units_.get();
    w.counts = counts_.get();
    w.sink_end = sink_.get();
    w.recent_begin = recent_.get();
    w.list_stride = w.rule.take;
    w.scratch = pick_scratch_.get();
    return w;
  }
  AttendPackedBatch Attend(int layer) const {
    AttendPackedBatch w;
    w.layer = Packed(layer);
    w.queries = Queries();
    w.selection = {1,
                   kKvHeads,
                   static_cast<int32_t>(TakenBlocks(tokens_)),
                   units_.get(),
                   counts_.get(),
                   sink_.get(),
                   recent_.get()};
    w.scale = Scale();
    w.with = BufferPart();
    w.to = {output_.get(), DType::kBF16, nullptr};
    w.counters = counters_.get();
    w.workspace = workspace_.get();
    w.ahead = true;
    return w;
  }

  Rng rng_{std::random_device{}()};
  const int batch_;
  const int32_t tokens_;
  const int layers_;
  const int64_t arrays_;  // [layers][batch][segments][kv_heads]
  DeviceArray<std::byte> memory_;
  DeviceArray<float> rotations_;
  DeviceArray<std::byte> buffer_;  // pages of the update buffers
  DeviceArray<std::byte> q_;       // queries, whose first heads serve as keys and values too
  DeviceArray<BF16> output_;
  DeviceArray<int32_t> buffered_, blocks_;
  DeviceArray<float> scores_;
  DeviceArray<int32_t> units_, counts_, sink_, recent_;
  DeviceArray<float> partial_;
  DeviceArray<uint32_t> counters_;
  DeviceArray<PackedSegment> table_;
  DeviceArray<int32_t> segment_counts_;
  DeviceArray<uint64_t> pages_;
  DeviceArray<float> workspace_;
  DeviceArray<std::byte> buffer_workspace_;
  DeviceArray<std::byte> pick_scratch_;
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_BENCH_CUDA_PACKED_STEP_H_
