// SPDX-License-Identifier: Apache-2.0
// A decode step of plan sekv for step_bench.cc: append, scores of spans, the choice, attention.
//
// Spans and raw rows are those of a trace's surprisal (docs/traces.md) at alpha 2, over and over;
// factors of rank 16, or rows where those are smaller; every query head expands 2 % of the tokens'
// rows. Queries of a group are each their own, so that heads agree on spans by chance alone, or all
// the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "bench/cuda/span_shape.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/plans/sekv/ops/span_cuda_ops.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"

namespace kvstrata::cuda::sekv {

inline const CudaOps& Ops() { return *kvs_cuda_ops(); }
inline const SpanOps& OpsOfSpans() { return kvstrata::OpsOf<SpanOps>(Ops().lowrank); }

// Extents of random bytes, one of all layers for each sequence, and pages of the windows.
struct SpanMemory {
  SpanMemory(Rng& rng, const SpanShape& shape, int batch, int layers)
      : heads(int64_t{layers} * kKvHeads),
        k_mean(Reserve(heads * shape.count() * kRow)),
        v_mean(Reserve(heads * shape.count() * kRow)),
        raw_rows(Reserve(2 * heads * shape.raw() * kRow)),
        factors(Reserve(heads * shape.HeadFactors())),
        extents(static_cast<size_t>(extent_bytes * batch)),
        window(RandomElements(
            rng, DType::kBF16,
            static_cast<size_t>(int64_t{batch} * layers * (kWindow / kPage) * kPageBytes / 2))) {
    const std::vector<std::byte> block = RandomElements(rng, DType::kBF16, (1 << 20) - 3);
    for (size_t at = 0; at < extents.size(); at += block.size()) {
      Check(cudaMemcpy(extents.get() + at, block.data(),
                       std::min(block.size(), extents.size() - at), cudaMemcpyHostToDevice),
            "fill");
    }
  }
  int64_t Reserve(int64_t bytes) {
    return std::exchange(extent_bytes, extent_bytes + (bytes + 127) / 128 * 128);
  }
  uint64_t ExtentOf(int b) const {
    return extents.address() + static_cast<uint64_t>(b * extent_bytes);
  }

  int64_t extent_bytes = 0;
  const int64_t heads;                              // heads of all layers
  const int64_t k_mean, v_mean, raw_rows, factors;  // begin there in an extent
  DeviceArray<std::byte> extents, window;
};

// What the ops find a batch's spans, rows and pages by.
struct SpanTables {
  SpanTables(const SpanShape& shape, const SpanMemory& memory, int batch, int layers)
      : bounds(shape.spans()),
        norms(std::vector<float>(static_cast<size_t>(int64_t{layers} * kHeads * shape.count()),
                                 0.1f)),
        counts(All(batch, 1)),
        rooms(All(batch, shape.room())),
        begins(All(batch, 0)),
        lengths(All(batch, kWindow)) {
    std::vector<SpanFactors> factors;
    auto at = static_cast<uint64_t>(memory.factors);
    for (int64_t head = 0; head < memory.heads; ++head) {
      for (const kvstrata::Run& s : shape.spans()) {
        const int32_t n = s.end - s.begin;
        const auto side = static_cast<uint64_t>(SpanShape::SideBytes(n));
        factors.push_back({at, at + side, SpanShape::RankOf(n), SpanShape::RankOf(n), 0});
        at += 2 * side;
      }
    }
    entries = DeviceArray<SpanFactors>(factors);
    std::vector<SpanPart> of_sequences;
    for (int b = 0; b < batch; ++b) {
      const uint64_t base = memory.ExtentOf(b);
      of_sequences.push_back(
          {bounds.address(), base + static_cast<uint64_t>(memory.k_mean),
           base + static_cast<uint64_t>(memory.v_mean), norms.address(), entries.address(), base,
           base + static_cast<uint64_t>(memory.raw_rows), shape.count(), shape.raw(), 0, 0, 0, 0});
      of_sequences.back().PutBehind(nullptr);
    }
    parts = DeviceArray<SpanPart>(of_sequences);
    std::vector<uint64_t> addresses;
    for (int64_t i = 0; i < int64_t{batch} * layers * (kWindow / kPage); ++i) {
      addresses.push_back(memory.window.address() + static_cast<uint64_t>(i * kPageBytes));
    }
    pages = DeviceArray<uint64_t>(addresses);
  }
  static std::vector<int32_t> All(int batch, int32_t x) {
    return std::vector<int32_t>(static_cast<size_t>(batch), x);
  }

  DeviceArray<SpanFactors> entries;
  DeviceArray<kvstrata::Run> bounds;
  DeviceArray<float> norms;
  DeviceArray<SpanPart> parts;
  DeviceArray<uint64_t> pages;
  DeviceArray<int32_t> counts, rooms, begins, lengths;
};

// Queries, and routers as large as makes relevance vary by more than ln n does.
struct SpanInputs {
  SpanInputs(Rng& rng, bool agree, int batch, int layers) {
    std::vector<std::byte> elements =
        RandomElements(rng, DType::kBF16, static_cast<size_t>(batch * kHeads * kDim));
    for (size_t head = 0; agree && head < static_cast<size_t>(batch * kHeads); ++head) {
      std::copy_n(elements.begin() + static_cast<int64_t>(head / kGroup * kGroup) * kRow, kRow,
                  elements.begin() + static_cast<int64_t>(head) * kRow);
    }
    q = DeviceArray<std::byte>(elements);
    std::vector<float> weights(static_cast<size_t>(layers * kKvHeads * kRoutes * kDim));
    for (float& x : weights) x = Normal(rng) / 2;
    w = DeviceArray<float>(weights);
    tau = DeviceArray<float>(std::vector<float>(static_cast<size_t>(layers * kHeads), 0));
    routers = DeviceArray<SpanRouter>(std::vector<SpanRouter>(
        static_cast<size_t>(batch), {w.address(), tau.address(), kKvHeads, kRoutes}));
  }

  DeviceArray<std::byte> q;  // its first heads serve as keys and values too
  DeviceArray<float> w, tau;
  DeviceArray<SpanRouter> routers;
};

// What the ops leave for each other, and the output. The workspace of attention is its caller's.
struct SpanScratch {
  SpanScratch(const SpanShape& shape, int batch)
      : relevance(static_cast<size_t>(batch * kHeads * shape.stride())),
        coarse(relevance.size()),
        workspace(0),
        list_counts(static_cast<size_t>(batch * kKvHeads)),
        chosen(relevance.size() / 32),
        list(list_counts.size() * static_cast<size_t>(shape.stride()) * kSpanPieces),
        counters(std::vector<uint32_t>(list_counts.size(), 0)),
        output(static_cast<size_t>(batch * kHeads * kDim)) {}

  DeviceArray<float> relevance, coarse, workspace;
  DeviceArray<int32_t> list_counts;
  DeviceArray<uint32_t> chosen, list, counters;
  DeviceArray<BF16> output;
};

class SpanStep {
 public:
  SpanStep(const std::vector<float>& surprisal, bool agree, int batch, int32_t tokens,
           int64_t rotated_bytes)
      : batch_(batch),
        shape_(surprisal, tokens),
        layers_(static_cast<int>(std::max<int64_t>(1, (rotated_bytes - 1) / BytesOf() + 1))),
        memory_(rng_, shape_, batch, layers_),
        tables_(shape_, memory_, batch, layers_),
        inputs_(rng_, agree, batch, layers_),
        scratch_(shape_, batch) {
    scratch_.workspace = DeviceArray<float>(
        static_cast<size_t>(OpsOfSpans().attend_spans_workspace_bytes(Attend(0)) / 4));
  }

  int layers() const { return layers_; }
  // Bytes that a step of one layer must read, if the heads of a group agree.
  int64_t BytesOf() const { return batch_ * shape_.BytesRead(); }

  // The ops of a layer, in their order.
  std::vector<std::function<int(Stream)>> OpsOf(int layer) const {
    return {[=, this](Stream s) { return Ops().append(Append(layer), s); },
            [=, this](Stream s) {
              return OpsOfSpans().score_spans(
                  {Layer(layer), Queries(), scratch_.relevance.get(), scratch_.coarse.get(), true},
                  s);
            },
            [=, this](Stream s) {
              return OpsOfSpans().expand_spans(
                  {Layer(layer), batch_, scratch_.relevance.get(), scratch_.coarse.get(),
                   tables_.rooms.get(), scratch_.list.get(), scratch_.list_counts.get(),
                   scratch_.chosen.get(), scratch_.counters.get(), true},
                  s);
            },
            [=, this](Stream s) { return OpsOfSpans().attend_spans(Attend(layer), s); }};
  }
  const DeviceArray<BF16>& output() const { return scratch_.output; }

 private:
  static constexpr int32_t kPages = kWindow / kPage;

  SpanLayer Layer(int layer) const {
    return {tables_.parts.get(),
            tables_.counts.get(),
            inputs_.routers.get(),
            1,
            shape_.stride(),
            layer,
            kKvHeads,
            kGroup,
            kDim,
            DType::kBF16};
  }
  SpanQueries Queries() const {
    return {inputs_.q.get(), kHeads * kRow, batch_, 1 / std::sqrt(float{kDim})};
  }
  PagedLayer Window(int layer) const {
    return {tables_.pages.get() + int64_t{layer} * batch_ * kPages,
            kPages,
            kPage,
            kKvHeads,
            kDim,
            DType::kBF16,
            0,
            kPageBytes / 2,
            kPage * kRow,
            kRow};
  }
  AppendBatch Append(int layer) const {
    AppendBatch w;
    w.layer = Window(layer);
    w.batch = w.rows_max = batch_;
    w.tokens = tables_.lengths.get();
    w.k = w.v = {inputs_.q.get(), kHeads * kRow, kRow, DType::kBF16};
    w.next_reads_ahead = true;
    return w;
  }
  AttendSpansBatch Attend(int layer) const {
    AttendSpansBatch w;
    w.layer = Layer(layer);
    w.queries = Queries();
    w.coarse = scratch_.coarse.get();
    w.list = scratch_.list.get();
    w.counts = scratch_.list_counts.get();
    w.pages = Window(layer);
    w.window_begin = tables_.begins.get();
    w.tokens = tables_.lengths.get();
    w.to = {scratch_.output.get(), DType::kBF16, nullptr};
    w.counters = scratch_.counters.get();
    w.workspace = scratch_.workspace.get();
    w.ahead = true;
    return w;
  }

  Rng rng_{std::random_device{}()};
  const int batch_;
  const SpanShape shape_;
  const int layers_;
  const SpanMemory memory_;
  const SpanTables tables_;
  const SpanInputs inputs_;
  SpanScratch scratch_;
};

}  // namespace kvstrata::cuda::sekv
