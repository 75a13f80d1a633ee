// SPDX-License-Identifier: Apache-2.0
// Trained SeKV parameters (docs/spec/sekv.md, "Training"), from one safetensors file. Private to
// sekv.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/codec/codec.h"

namespace kvstrata {

struct SpanParameters : CodecParameters {
  int32_t layers = 0, query_heads = 0, head_dim = 0, d_route = 0, r_max = 0;
  std::vector<float> w;    // [layers][query_heads][d_route][head_dim]
  std::vector<float> tau;  // [layers][query_heads]
  // [layers][query_heads], what relevance is divided by in place of |W k_mean|; empty: by that.
  std::vector<float> norm = {};
  // g_phi.{0,2,4}: weight [out][in], bias [out]; in = r_max + head_dim, 64, 64; out = 64, 64,
  // r_max.
  std::vector<float> weight[3], bias[3];
};

// Reads "W" [L, Hq, d', d], "tau" [L, Hq], "g_phi.0.weight", ... (f32), and perhaps "norm"
// [L, Hq]. d' is the plan's d_route; where that is 0, W's own, at most head_dim. Errors as
// ParseParameters.
Result<SpanParameters> ParseSpanParameters(std::span<const std::byte> file, const std::string& name,
                                           const Geometry& geometry, const Plan& plan);

}  // namespace kvstrata
