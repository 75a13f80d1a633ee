// SPDX-License-Identifier: Apache-2.0
// One part of a SpanLayer (span_layer.h) whose addresses are of host memory, in the layer of the
// batch: for refs.
#pragma once

#include "kernels/plans/sekv/ops/attend_lowrank/attend_lowrank.h"
#include "kernels/plans/sekv/ops/attend_spans/span_layer.h"

namespace kvstrata::cuda {

class HostSpanPart {
 public:
  HostSpanPart(const SpanLayer& layer, int sequence, int32_t part)
      : layer_(layer), part_(layer.parts[int64_t{sequence} * layer.part_stride + part]) {}

  int32_t count() const { return part_.span_count; }
  int32_t raw_count() const { return part_.raw_count; }
  int32_t Length(int32_t span) const {
    const auto* const run = reinterpret_cast<const int32_t*>(part_.spans) + 2 * int64_t{span};
    return run[1] - run[0];
  }
  const BF16* KeyMean(int kv_head, int32_t span) const { return Mean(part_.k_mean, kv_head, span); }
  const BF16* ValueMean(int kv_head, int32_t span) const {
    return Mean(part_.v_mean, kv_head, span);
  }
  float InverseNorm(int query_head, int32_t span) const {
    const int64_t row = int64_t{layer_.layer} * layer_.kv_heads * layer_.group + query_head;
    return reinterpret_cast<const float*>(part_.inverse_norms)[row * count() + span];
  }
  LowRankSpan Factors(int kv_head, int32_t span) const {
    const SpanFactors& e =
        reinterpret_cast<const SpanFactors*>(part_.entries)[Row(kv_head) * count() + span];
    return {Length(span), Side(e.k, Length(span), e.k_rank), Side(e.v, Length(span), e.v_rank)};
  }
  // The raw rows of a head, one behind the other.
  std::byte* Raw(bool values, int kv_head) const {
    const int64_t head = (int64_t{layer_.layer} * 2 + (values ? 1 : 0)) * layer_.kv_heads + kv_head;
    return reinterpret_cast<std::byte*>(part_.raw_rows) +
           head * raw_count() * layer_.head_dim * SizeOf(layer_.dtype);
  }

 private:
  int64_t Row(int kv_head) const { return int64_t{layer_.layer} * layer_.kv_heads + kv_head; }
  const BF16* Mean(uint64_t means, int kv_head, int32_t span) const {
    return reinterpret_cast<const BF16*>(means) + (Row(kv_head) * count() + span) * layer_.head_dim;
  }
  LowRankRows Side(uint64_t at, int32_t n, int32_t rank) const {
    const uint64_t left = part_.factors + at;
    if (rank < 0) return {reinterpret_cast<const BF16*>(left), nullptr, rank};
    const uint64_t bytes = static_cast<uint64_t>(n) * static_cast<uint64_t>(rank) * sizeof(BF16);
    return {reinterpret_cast<const BF16*>(left),
            reinterpret_cast<const BF16*>(part_.factors + (at + bytes + 63) / 64 * 64), rank};
  }

  const SpanLayer& layer_;
  const SpanPart& part_;
};

}  // namespace kvstrata::cuda
