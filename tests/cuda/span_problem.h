// SPDX-License-Identifier: Apache-2.0
// A layer of plan sekv on the device, on fresh random inputs, and calls of its ops. All that is not
// to be read is 0xFF (span_case.h), pages before the window too; so is every output before it is
// written.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/plans/sekv/ops/span_cuda_ops.h"
#include "tests/cuda/span_case.h"

namespace kvstrata::cuda {

// What the device has of a batch's layer, as the ops take it.
struct SpanArrays {
  DeviceArray<std::byte> q, page_bytes;
  DeviceArray<uint64_t> pages;
  DeviceArray<float> w, tau;
  DeviceArray<SpanPart> parts;
  DeviceArray<SpanRouter> routers;
  DeviceArray<int32_t> counts, room, tokens, window;
};

// What the ops write.
struct SpanOutputs {
  SpanOutputs() = default;
  // stride: of a row of scores.
  SpanOutputs(const SpanCase& c, size_t batch, size_t stride)
      : relevance(batch * static_cast<size_t>(c.kv_heads * c.group) * stride),
        coarse(relevance.size()),
        lse(relevance.size() / stride),
        list_counts(batch * static_cast<size_t>(c.kv_heads)),
        chosen(relevance.size() / 32),
        list(list_counts.size() * kSpanPieces * stride),
        counters(std::vector<uint32_t>(list_counts.size(), 0)),
        out(lse.size() * static_cast<size_t>(c.dim * SizeOf(c.out_dtype))) {}

  DeviceArray<float> relevance, coarse, lse, workspace;
  DeviceArray<int32_t> list_counts;
  DeviceArray<uint32_t> chosen, list, counters;
  DeviceArray<std::byte> out;
};

// One layer of a batch, its queries and pages, and everything on the device.
class SpanProblem {
 public:
  // ahead: of all three ops (launch.cuh); all inputs are complete before the first.
  SpanProblem(Rng& rng, const SpanCase& c, bool ahead = false) : case_(c), ahead_(ahead) {
    for (const auto& sequence : c.parts) {
      auto& parts = parts_.emplace_back();
      int32_t spans = 0;
      for (const SpanPartShape& shape : sequence) {
        parts.emplace_back(rng, c, shape).Upload();
        spans += shape.spans;
      }
      part_stride_ = std::max(part_stride_, static_cast<int32_t>(parts.size()));
      span_stride_ = std::max(span_stride_, (spans + 31) / 32 * 32);
      window_begin_.push_back(Below(rng, 3 * kPage));
      tokens_.push_back(window_begin_.back() + 1 + Below(rng, 4 * kPage));
    }
    span_stride_ += 32;
    DrawQueries(rng);
    DrawPages(rng);
    Upload();
  }

  ScoreSpansBatch Scores() const {
    return {Layer(), Queries(), outputs_.relevance.get(), outputs_.coarse.get(), ahead_};
  }
  ExpandSpansBatch Expansion() const {
    return {Layer(),
            batch(),
            outputs_.relevance.get(),
            outputs_.coarse.get(),
            arrays_.room.get(),
            outputs_.list.get(),
            outputs_.list_counts.get(),
            outputs_.chosen.get(),
            outputs_.counters.get(),
            ahead_};
  }
  AttendSpansBatch Attention() const {
    AttendSpansBatch w;
    w.layer = Layer();
    w.queries = Queries();
    w.coarse = outputs_.coarse.get();
    w.list = outputs_.list.get();
    w.counts = outputs_.list_counts.get();
    w.pages = {arrays_.pages.get(), page_stride_, kPage, case_.kv_heads,
               case_.dim,           case_.dtype,  0,     HeadsBytes(),
               HeadBytes(),         RowBytes()};
    w.window_begin = arrays_.window.get();
    w.tokens = arrays_.tokens.get();
    w.to = {outputs_.out.get(), case_.out_dtype, outputs_.lse.get()};
    w.counters = outputs_.counters.get();
    w.workspace = outputs_.workspace.get();
    w.ahead = ahead_;
    return w;
  }
  void Enqueue(Stream stream) const {
    Check(OpsOf<SpanOps>(kvs_cuda_ops()->lowrank).score_spans(Scores(), stream), "score_spans");
    Check(OpsOf<SpanOps>(kvs_cuda_ops()->lowrank).expand_spans(Expansion(), stream),
          "expand_spans");
    Check(OpsOf<SpanOps>(kvs_cuda_ops()->lowrank).attend_spans(Attention(), stream),
          "attend_spans");
  }
  // Another step: a longer window and another room, known to the device alone.
  void Go(Rng& rng) {
    for (int b = 0; b < batch(); ++b) {
      auto& tokens = tokens_[static_cast<size_t>(b)];
      tokens = std::min(tokens + 1 + Below(rng, 5), page_stride_ * kPage);
      case_.room[static_cast<size_t>(b)] = Below(rng, 400);
    }
    arrays_.tokens.Write(tokens_);
    arrays_.room.Write(case_.room);
  }
  int batch() const { return static_cast<int>(parts_.size()); }

 protected:
  // What the device has, for refs; tables name what is here.
  struct HostArrays {
    std::vector<float> w, tau;
    std::vector<std::byte> queries, page_bytes;
    std::vector<uint64_t> pages;
    std::vector<SpanPart> parts;
    std::vector<SpanRouter> routers;
    std::vector<int32_t> counts;
  };

  int query_heads() const { return case_.kv_heads * case_.group; }
  int64_t RowBytes() const { return int64_t{case_.dim} * 2; }
  int64_t HeadBytes() const { return RowBytes() * kPage; }
  int64_t HeadsBytes() const { return HeadBytes() * case_.kv_heads; }
  float Scale() const { return 1.0f / std::sqrt(static_cast<float>(case_.dim)); }
  int32_t Spans(int b) const {
    int32_t spans = 0;
    for (const HostSpans& p : parts_[static_cast<size_t>(b)]) spans += p.spans();
    return spans;
  }
  SpanLayer Layer() const {
    return {arrays_.parts.get(), arrays_.counts.get(), arrays_.routers.get(),
            part_stride_,        span_stride_,         kLayer,
            case_.kv_heads,      case_.group,          case_.dim,
            case_.dtype};
  }
  // The same over the host's extents, for refs.
  SpanLayer HostLayer() const {
    SpanLayer layer = Layer();
    layer.parts = host_.parts.data();
    layer.counts = host_.counts.data();
    layer.routers = host_.routers.data();
    return layer;
  }
  SpanQueries Queries() const {
    return {arrays_.q.get(), query_heads() * RowBytes(), batch(), Scale()};
  }

  void DrawQueries(Rng& rng) {
    const auto count = static_cast<size_t>(batch() * query_heads() * case_.dim);
    host_.queries = RandomElements(rng, case_.dtype, count);
    arrays_.q = DeviceArray<std::byte>(host_.queries);
    routers_ = case_.trained ? query_heads() : 0;
    d_route_ = 1 + Below(rng, std::min(case_.dim, 48));
    host_.w.resize(static_cast<size_t>(kLayers * routers_ * d_route_ * case_.dim), std::nanf(""));
    for (size_t i = host_.w.size() / kLayers; i < host_.w.size(); ++i) host_.w[i] = Normal(rng);
    host_.tau.assign(static_cast<size_t>(kLayers * query_heads()), std::nanf(""));
    std::fill_n(host_.tau.begin() + kLayer * query_heads(), query_heads(), case_.tau);
  }
  // Pages [keys, values][kv_heads][kPage][dim]; what lies before the window is poison.
  void DrawPages(Rng& rng) {
    for (const int32_t n : tokens_) page_stride_ = std::max(page_stride_, n / kPage + 2);
    const auto count = static_cast<size_t>(batch() * page_stride_);
    const auto bytes = static_cast<size_t>(2 * HeadsBytes());
    host_.page_bytes.assign(count * bytes, std::byte{0xFF});
    for (int b = 0; b < batch(); ++b) {
      for (int32_t t = window_begin_[static_cast<size_t>(b)]; t < page_stride_ * kPage; ++t) {
        for (int h = 0; h < 2 * case_.kv_heads; ++h) {
          std::byte* const row = HostPage(b, t / kPage) + h * HeadBytes() + t % kPage * RowBytes();
          for (int c = 0; c < case_.dim; ++c) StoreFloat(row + 2 * c, case_.dtype, Normal(rng));
        }
      }
    }
    arrays_.page_bytes = DeviceArray<std::byte>(host_.page_bytes);
    std::vector<uint64_t> addresses;
    for (size_t i = 0; i < count; ++i) {
      addresses.push_back(arrays_.page_bytes.address() + i * bytes);
      host_.pages.push_back(reinterpret_cast<uint64_t>(host_.page_bytes.data()) + i * bytes);
    }
    arrays_.pages = DeviceArray<uint64_t>(addresses);
  }
  std::byte* HostPage(int b, int32_t page) const {
    return const_cast<std::byte*>(host_.page_bytes.data()) +
           (int64_t{b} * page_stride_ + page) * 2 * HeadsBytes();
  }
  void Upload() {
    std::vector<SpanPart> table(static_cast<size_t>(batch() * std::max(part_stride_, 1)));
    std::vector<SpanRouter> routers;
    host_.parts = table;
    arrays_.w = DeviceArray<float>(host_.w);
    arrays_.tau = DeviceArray<float>(host_.tau);
    for (int b = 0; b < batch(); ++b) {
      const SpanPart *before = nullptr, *host_before = nullptr;
      for (size_t i = 0; i < parts_[static_cast<size_t>(b)].size(); ++i) {
        const HostSpans& part = parts_[static_cast<size_t>(b)][i];
        SpanPart& to = table[static_cast<size_t>(b * part_stride_) + i];
        to = part.Device(before);
        before = &to;
        SpanPart& host = host_.parts[static_cast<size_t>(b * part_stride_) + i];
        host = part.Host(host_before);
        host_before = &host;
      }
      host_.counts.push_back(static_cast<int32_t>(parts_[static_cast<size_t>(b)].size()));
      routers.push_back({arrays_.w.address(), arrays_.tau.address(), routers_, d_route_});
      host_.routers.push_back({reinterpret_cast<uint64_t>(host_.w.data()),
                               reinterpret_cast<uint64_t>(host_.tau.data()), routers_, d_route_});
    }
    arrays_.parts = DeviceArray<SpanPart>(table);
    arrays_.counts = DeviceArray<int32_t>(host_.counts);
    arrays_.routers = DeviceArray<SpanRouter>(routers);
    arrays_.room = DeviceArray<int32_t>(case_.room);
    arrays_.tokens = DeviceArray<int32_t>(tokens_);
    arrays_.window = DeviceArray<int32_t>(window_begin_);
    outputs_ = SpanOutputs(case_, parts_.size(), static_cast<size_t>(span_stride_));
    AttendSpansBatch w;
    w.layer = Layer();
    w.queries = Queries();
    outputs_.workspace = DeviceArray<float>(static_cast<size_t>(
        OpsOf<SpanOps>(kvs_cuda_ops()->lowrank).attend_spans_workspace_bytes(w) / 4));
  }

  SpanCase case_;
  const bool ahead_;
  std::vector<std::vector<HostSpans>> parts_;
  int32_t part_stride_ = 0, span_stride_ = 0, page_stride_ = 0;
  std::vector<int32_t> window_begin_, tokens_;
  int routers_ = 0, d_route_ = 0;
  HostArrays host_;
  SpanArrays arrays_;
  SpanOutputs outputs_;
};

}  // namespace kvstrata::cuda
