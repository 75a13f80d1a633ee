// A decode step of plan sekv for step_bench.cc: append, scores of spans, the choice, attention.
//
// Spans and raw rows are those of a trace's surprisal (docs/traces.md) at alpha 2, over and over;
// factors of rank 16, or rows where those are smaller; every query head expands 2 % of the tokens'
// rows. Queries of a group are each their own, so that heads agree on spans by chance alone, or all
// the same.
#ifndef KVSTRATA_BENCH_CUDA_SPAN_STEP_H_
#define KVSTRATA_BENCH_CUDA_SPAN_STEP_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "bench/cuda/trace_surprisal.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/segment/span_rule.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"

namespace kvstrata::cuda {

class SpanStep {
 public:
  SpanStep(const std::vector<float>& surprisal, bool agree, int batch, int32_t tokens,
           int64_t rotated_bytes)
      : batch_(batch), tokens_(tokens), window_begin_(tokens - kWindow) {
    CutSpans(surprisal);
    layers_ = static_cast<int>(std::max<int64_t>(1, (rotated_bytes - 1) / BytesOf() + 1));
    Place();
    Fill();
    MakeTables();
    MakeQueries(agree);
    MakeScratch();
  }

  int layers() const { return layers_; }
  int stages() const { return static_cast<int>(OpsOf(0).size()); }
  // Bytes that a step of one layer must read, if the heads of a group agree.
  int64_t BytesOf() const {
    const int64_t rows = int64_t{kKvHeads} * kRow * (2 * raw_ + 2 * Spans() + 2 * kWindow);
    const int64_t scores = int64_t{kHeads} * Spans() * 4 * 5;  // norms, two scores, read again
    return batch_ * (rows + scores + FactorBytes() * Room() / std::max<int64_t>(spanned_, 1));
  }

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
  static constexpr int kKvHeads = 8, kGroup = 4, kHeads = kKvHeads * kGroup, kDim = 128;
  static constexpr int32_t kPage = 16, kWindow = 512, kRank = 16, kRoutes = 32;
  static constexpr int64_t kRow = kDim * 2;
  static constexpr int64_t kPageBytes = int64_t{2} * kKvHeads * kPage * kRow;
  static const CudaOps& Ops() { return *kvs_cuda_ops(); }

  int32_t Spans() const { return static_cast<int32_t>(spans_.size()); }
  int32_t Room() const { return tokens_ / 50; }
  int32_t Pages() const { return kWindow / kPage; }
  int64_t Heads() const { return int64_t{layers_} * kKvHeads; }
  static int32_t RankOf(int32_t n) { return kRank * (n + kDim) < n * kDim ? kRank : -1; }
  // Bytes of a head's keys, or of its values.
  static int64_t SideBytes(int32_t n) {
    if (RankOf(n) < 0) return n * kRow;
    return (int64_t{n} * kRank * 2 + 63) / 64 * 64 + kRank * kRow;
  }
  int64_t HeadFactors() const {
    int64_t bytes = 0;
    for (const kvstrata::Run& s : spans_) bytes += 2 * SideBytes(s.end - s.begin);
    return bytes;
  }
  int64_t FactorBytes() const { return kKvHeads * HeadFactors(); }

  void CutSpans(const std::vector<float>& surprisal) {
    const auto n = static_cast<int32_t>(surprisal.size());
    const double threshold = AnchorThreshold(surprisal, n, 2.0);
    const std::vector<kvstrata::Run> found = SpansIn(surprisal, {0, n}, threshold, 4);
    for (int32_t at = 0; at < window_begin_; at += n) {
      for (const kvstrata::Run& s : found) {
        if (at + s.end <= window_begin_) spans_.push_back({at + s.begin, at + s.end});
      }
    }
    for (const kvstrata::Run& s : spans_) spanned_ += s.end - s.begin;
    raw_ = static_cast<int32_t>(window_begin_ - spanned_);
  }

  int64_t Reserve(int64_t bytes) {
    const int64_t at = bytes_;
    bytes_ += (bytes + 127) / 128 * 128;
    return at;
  }
  // One extent of all layers for each sequence.
  void Place() {
    k_mean_ = Reserve(Heads() * Spans() * kRow);
    v_mean_ = Reserve(Heads() * Spans() * kRow);
    raw_rows_ = Reserve(2 * Heads() * raw_ * kRow);
    factors_ = Reserve(Heads() * HeadFactors());
  }
  void Fill() {
    memory_ = DeviceArray<std::byte>(static_cast<size_t>(bytes_ * batch_));
    const std::vector<std::byte> block = RandomElements(rng_, DType::kBF16, (1 << 20) - 3);
    for (size_t at = 0; at < memory_.size(); at += block.size()) {
      Check(cudaMemcpy(memory_.get() + at, block.data(),
                       std::min(block.size(), memory_.size() - at), cudaMemcpyHostToDevice),
            "fill");
    }
    window_ = DeviceArray<std::byte>(
        RandomElements(rng_, DType::kBF16,
                       static_cast<size_t>(int64_t{batch_} * layers_ * Pages() * kPageBytes / 2)));
  }
  void MakeTables() {
    std::vector<SpanFactors> entries;
    uint64_t at = static_cast<uint64_t>(factors_);
    for (int64_t head = 0; head < Heads(); ++head) {
      for (const kvstrata::Run& s : spans_) {
        const int32_t n = s.end - s.begin;
        const auto side = static_cast<uint64_t>(SideBytes(n));
        entries.push_back({at, at + side, RankOf(n), RankOf(n), 0});
        at += 2 * side;
      }
    }
    entries_ = DeviceArray<SpanFactors>(entries);
    bounds_ = DeviceArray<kvstrata::Run>(spans_);
    norms_ = DeviceArray<float>(
        std::vector<float>(static_cast<size_t>(int64_t{layers_} * kHeads * Spans()), 0.1f));
    std::vector<SpanPart> parts;
    for (int b = 0; b < batch_; ++b) {
      const uint64_t base = memory_.address() + static_cast<uint64_t>(b * bytes_);
      parts.push_back({bounds_.address(), base + static_cast<uint64_t>(k_mean_),
                       base + static_cast<uint64_t>(v_mean_), norms_.address(), entries_.address(),
                       base, base + static_cast<uint64_t>(raw_rows_), Spans(), raw_, 0, 0, 0, 0});
      parts.back().PutBehind(nullptr);
    }
    parts_ = DeviceArray<SpanPart>(parts);
    std::vector<uint64_t> pages;
    for (int64_t i = 0; i < int64_t{batch_} * layers_ * Pages(); ++i) {
      pages.push_back(window_.address() + static_cast<uint64_t>(i * kPageBytes));
    }
    pages_ = DeviceArray<uint64_t>(pages);
    const auto all = [this](int32_t x) {
      return DeviceArray<int32_t>(std::vector<int32_t>(static_cast<size_t>(batch_), x));
    };
    counts_ = all(1);
    rooms_ = all(Room());
    begins_ = all(0);
    lengths_ = all(kWindow);
  }
  // Routers as large as makes relevance vary by more than ln n does.
  void MakeQueries(bool agree) {
    std::vector<std::byte> q =
        RandomElements(rng_, DType::kBF16, static_cast<size_t>(batch_ * kHeads * kDim));
    for (size_t head = 0; agree && head < static_cast<size_t>(batch_ * kHeads); ++head) {
      std::copy_n(q.begin() + static_cast<int64_t>(head / kGroup * kGroup) * kRow, kRow,
                  q.begin() + static_cast<int64_t>(head) * kRow);
    }
    q_ = DeviceArray<std::byte>(q);
    std::vector<float> w(static_cast<size_t>(Heads() * kRoutes * kDim));
    for (float& x : w) x = Normal(rng_) / 2;
    w_ = DeviceArray<float>(w);
    tau_ = DeviceArray<float>(std::vector<float>(static_cast<size_t>(layers_ * kHeads), 0));
    routers_ = DeviceArray<SpanRouter>(std::vector<SpanRouter>(
        static_cast<size_t>(batch_), {w_.address(), tau_.address(), kKvHeads, kRoutes}));
  }
  void MakeScratch() {
    const auto rows = static_cast<size_t>(batch_ * kHeads);
    const auto items = static_cast<size_t>(batch_ * kKvHeads);
    const auto stride = static_cast<size_t>(Stride());
    relevance_ = DeviceArray<float>(rows * stride);
    coarse_ = DeviceArray<float>(rows * stride);
    chosen_ = DeviceArray<uint32_t>(rows * stride / 32);
    list_ = DeviceArray<uint32_t>(items * stride * kSpanPieces);
    list_counts_ = DeviceArray<int32_t>(items);
    counters_ = DeviceArray<uint32_t>(std::vector<uint32_t>(items, 0));
    output_ = DeviceArray<BF16>(rows * kDim);
    workspace_ =
        DeviceArray<float>(static_cast<size_t>(Ops().attend_spans_workspace_bytes(Attend(0)) / 4));
  }

  std::vector<std::function<int(Stream)>> OpsOf(int layer) const {
    return {[=, this](Stream s) { return Ops().append(Append(layer), s); },
            [=, this](Stream s) {
              return Ops().score_spans(
                  {Layer(layer), Queries(), relevance_.get(), coarse_.get(), true}, s);
            },
            [=, this](Stream s) {
              return Ops().expand_spans(
                  {Layer(layer), batch_, relevance_.get(), coarse_.get(), rooms_.get(), list_.get(),
                   list_counts_.get(), chosen_.get(), counters_.get(), true},
                  s);
            },
            [=, this](Stream s) { return Ops().attend_spans(Attend(layer), s); }};
  }
  int32_t Stride() const { return (Spans() + 31) / 32 * 32; }
  SpanLayer Layer(int layer) const {
    return {parts_.get(), counts_.get(), routers_.get(), 1,    Stride(),
            layer,        kKvHeads,      kGroup,         kDim, DType::kBF16};
  }
  SpanQueries Queries() const {
    return {q_.get(), kHeads * kRow, batch_, 1 / std::sqrt(float{kDim})};
  }
  PagedLayer Window(int layer) const {
    return {pages_.get() + int64_t{layer} * batch_ * Pages(),
            Pages(),
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
    w.tokens = lengths_.get();
    w.k = w.v = {q_.get(), kHeads * kRow, kRow, DType::kBF16};
    w.next_reads_ahead = true;
    return w;
  }
  AttendSpansBatch Attend(int layer) const {
    AttendSpansBatch w;
    w.layer = Layer(layer);
    w.queries = Queries();
    w.coarse = coarse_.get();
    w.list = list_.get();
    w.counts = list_counts_.get();
    w.pages = Window(layer);
    w.window_begin = begins_.get();
    w.tokens = lengths_.get();
    w.to = {output_.get(), DType::kBF16, nullptr};
    w.counters = counters_.get();
    w.workspace = workspace_.get();
    w.ahead = true;
    return w;
  }

  Rng rng_{std::random_device{}()};
  const int batch_;
  const int32_t tokens_, window_begin_;
  std::vector<kvstrata::Run> spans_;
  int64_t spanned_ = 0;
  int32_t raw_ = 0;
  int layers_ = 1;
  int64_t bytes_ = 0, k_mean_ = 0, v_mean_ = 0, raw_rows_ = 0, factors_ = 0;
  DeviceArray<std::byte> memory_, window_, q_;  // q_: its first heads serve as keys and values too
  DeviceArray<SpanFactors> entries_;
  DeviceArray<kvstrata::Run> bounds_;
  DeviceArray<float> norms_, w_, tau_, relevance_, coarse_, workspace_;
  DeviceArray<SpanPart> parts_;
  DeviceArray<SpanRouter> routers_;
  DeviceArray<uint64_t> pages_;
  DeviceArray<int32_t> counts_, rooms_, begins_, lengths_, list_counts_;
  DeviceArray<uint32_t> chosen_, list_, counters_;
  DeviceArray<BF16> output_;
};

}  // namespace kvstrata::cuda

#endif  // KVSTRATA_BENCH_CUDA_SPAN_STEP_H_
