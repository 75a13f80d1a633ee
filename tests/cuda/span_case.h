// SPDX-License-Identifier: Apache-2.0
// Cases of the ops of plan sekv (score_spans, attend_spans), and the arrays of one part with spans
// (span_layer.h), drawn at random. All that is not to be read is 0xFF: other layers, factors of
// spans that no head has chosen.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_ops.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"
#include "tests/cuda/seed.h"

namespace kvstrata::cuda {

inline constexpr int kLayers = 2, kLayer = 1, kPage = 32;

struct SpanPartShape {
  int32_t spans = 0, raw = 0;
};

struct SpanCase {
  int dim = 128, group = 4, kv_heads = 2;
  DType dtype = DType::kBF16;
  std::vector<std::vector<SpanPartShape>> parts = {};  // each sequence's
  int32_t longest = 40;                                // tokens of a span
  int32_t rank_max = 32;           // 0: all raw; ranks are drawn up to it, some -1
  std::vector<int32_t> room = {};  // each sequence's
  float tau = 0;
  bool trained = true;  // a router for each query head; else none, and no norms
  DType out_dtype = DType::kF32;
  bool equal_scores = false;
  float norm = 0.05f;  // norm of scores, and up to three times as much
};

inline std::string Describe(const SpanCase& c) {
  std::string text = "d" + std::to_string(c.dim) + " G" + std::to_string(c.group) + " Hkv" +
                     std::to_string(c.kv_heads) + " dtype" + std::to_string(int(c.dtype)) + " r" +
                     std::to_string(c.rank_max) + " longest" + std::to_string(c.longest) + " parts";
  for (size_t b = 0; b < c.parts.size(); ++b) {
    for (const SpanPartShape& p : c.parts[b]) {
      text += " " + std::to_string(p.spans) + "/" + std::to_string(p.raw);
    }
    text += " room " + std::to_string(c.room[b]) + ";";
  }
  return text + " seed " + std::to_string(TestSeed());
}

inline uint64_t Aligned(uint64_t at) { return (at + 63) / 64 * 64; }

// The arrays of a part, in one piece of memory that begins with 0xFF.
class HostSpans {
 public:
  HostSpans(Rng& rng, const SpanCase& c, SpanPartShape shape) : case_(c), shape_(shape) {
    const auto heads = static_cast<uint64_t>(kLayers * c.kv_heads);
    const auto row = static_cast<uint64_t>(c.dim * 2), spans = static_cast<uint64_t>(shape.spans);
    spans_ = Reserve(spans * 8);
    k_mean_ = Reserve(heads * spans * row);
    v_mean_ = Reserve(heads * spans * row);
    norms_ = Reserve(heads * static_cast<uint64_t>(c.group) * spans * 4);
    entries_ = Reserve(heads * spans * sizeof(SpanFactors));
    raw_ = Reserve(2 * heads * static_cast<uint64_t>(shape.raw) * row);
    int32_t at = 0;
    for (int32_t u = 0; u < shape.spans; ++u) {
      at += Below(rng, 3);
      const int32_t n = 1 + Below(rng, c.longest);
      At<int32_t>(spans_)[2 * u] = at;
      At<int32_t>(spans_)[2 * u + 1] = at += n;
    }
    for (int h = 0; h < c.kv_heads; ++h) Fill(rng, h);
    Fill(rng, DType::kBF16, k_mean(0), int64_t{c.kv_heads} * shape.spans * c.dim);
    Fill(rng, DType::kBF16, v_mean(0), int64_t{c.kv_heads} * shape.spans * c.dim);
    Fill(rng, c.dtype, raw(0, 0), int64_t{2} * c.kv_heads * shape.raw * c.dim);
    if (c.equal_scores) std::fill_n(k_mean(0), c.kv_heads * shape.spans * c.dim * 2, std::byte{0});
    for (int h = 0; c.trained && h < c.kv_heads * c.group; ++h) {
      for (int32_t u = 0; u < shape.spans; ++u)
        norms(h)[u] = c.norm * (1 + 0.02f * float(Below(rng, 99)));
    }
  }

  int32_t spans() const { return shape_.spans; }
  int32_t raw_count() const { return shape_.raw; }
  int32_t Length(int32_t u) const {
    return At<int32_t>(spans_)[2 * u + 1] - At<int32_t>(spans_)[2 * u];
  }
  std::byte* k_mean(int h) const { return At<std::byte>(k_mean_) + Head(h) * spans() * RowBytes(); }
  std::byte* v_mean(int h) const { return At<std::byte>(v_mean_) + Head(h) * spans() * RowBytes(); }
  float* norms(int query_head) const {
    return At<float>(norms_) +
           (int64_t{kLayer} * case_.kv_heads * case_.group + query_head) * spans();
  }
  std::byte* raw(int of_value, int h) const {
    return At<std::byte>(raw_) +
           ((int64_t{kLayer} * 2 + of_value) * case_.kv_heads + h) * raw_count() * RowBytes();
  }
  void Poison(int h, int32_t u) {
    const SpanFactors e = Entry(h, u);
    for (const auto& [at, rank] : {std::pair{e.k, e.k_rank}, {e.v, e.v_rank}}) {
      std::fill_n(At<std::byte>(at), Bytes(Length(u), rank), std::byte{0xFF});
    }
  }
  void Upload() {
    if (device_.size() != bytes_.size()) device_ = DeviceArray<std::byte>(bytes_.size());
    device_.Write(bytes_);
  }
  // The part behind `before`, on the device and here.
  SpanPart Device(const SpanPart* before) const { return PartAt(device_.address(), before); }
  SpanPart Host(const SpanPart* before) const {
    return PartAt(reinterpret_cast<uint64_t>(bytes_.data()), before);
  }

 private:
  SpanPart PartAt(uint64_t at, const SpanPart* before) const {
    SpanPart part = {at + spans_,
                     at + k_mean_,
                     at + v_mean_,
                     at + norms_,
                     at + entries_,
                     at,
                     at + raw_,
                     spans(),
                     raw_count(),
                     0,
                     0,
                     0,
                     0};
    part.PutBehind(before);
    return part;
  }
  int64_t RowBytes() const { return int64_t{case_.dim} * 2; }
  int64_t Head(int h) const { return int64_t{kLayer} * case_.kv_heads + h; }
  template <typename T>
  T* At(uint64_t offset) const {
    return reinterpret_cast<T*>(const_cast<std::byte*>(bytes_.data()) + offset);
  }
  SpanFactors& Entry(int h, int32_t u) const {
    return At<SpanFactors>(entries_)[Head(h) * spans() + u];
  }
  uint64_t Reserve(uint64_t bytes) {
    const uint64_t at = bytes_.size();
    bytes_.resize(Aligned(at + bytes + 1), std::byte{0xFF});
    return at;
  }
  uint64_t Bytes(int32_t n, int32_t rank) const {
    if (rank < 0) return static_cast<uint64_t>(n * RowBytes());
    return Aligned(static_cast<uint64_t>(n) * static_cast<uint64_t>(rank) * 2) +
           static_cast<uint64_t>(rank * RowBytes());
  }
  static void Fill(Rng& rng, DType dtype, std::byte* to, int64_t count, float scale = 1) {
    for (int64_t i = 0; i < count; ++i) StoreFloat(to + 2 * i, dtype, scale * Normal(rng));
  }
  void Fill(Rng& rng, int h) {
    for (int32_t u = 0; u < spans(); ++u) {
      SpanFactors e{0, 0, Rank(rng, u), Rank(rng, u), 0};
      for (auto [at, rank] : {std::pair{&e.k, e.k_rank}, {&e.v, e.v_rank}}) {
        *at = Reserve(Bytes(Length(u), rank));
        if (rank < 0) {
          Fill(rng, DType::kBF16, At<std::byte>(*at), int64_t{Length(u)} * case_.dim);
          continue;
        }
        Fill(rng, DType::kBF16, At<std::byte>(*at), int64_t{Length(u)} * rank,
             1 / std::sqrt(static_cast<float>(rank)));
        Fill(rng, DType::kBF16,
             At<std::byte>(Aligned(*at + static_cast<uint64_t>(Length(u) * rank * 2))),
             int64_t{rank} * case_.dim);
      }
      Entry(h, u) = e;
    }
  }
  int32_t Rank(Rng& rng, int32_t u) const {
    const int32_t most = std::min({Length(u), case_.dim, case_.rank_max});
    return most == 0 || Below(rng, 3) == 0 ? -1 : most - Below(rng, std::min(most, 4));
  }

  const SpanCase case_;
  const SpanPartShape shape_;
  std::vector<std::byte> bytes_;
  uint64_t spans_, k_mean_, v_mean_, norms_, entries_, raw_;
  DeviceArray<std::byte> device_;
};

}  // namespace kvstrata::cuda
