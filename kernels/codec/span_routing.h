// Routers W of the spans of a sequence (spec/sekv.md 6): trained, or the principal directions of
// the prompt's keys. Private to kernels/codec.
#ifndef KVSTRATA_KERNELS_CODEC_SPAN_ROUTING_H_
#define KVSTRATA_KERNELS_CODEC_SPAN_ROUTING_H_

#include <vector>

#include "kernels/codec/codec.h"

namespace kvstrata {

struct SpanRouting {
  int32_t d_route = 0;
  int32_t routers = 0;         // of a layer: query_heads, or kv_heads when untrained
  const float* w = nullptr;    // [layers][routers][d_route][head_dim]
  std::vector<float> storage;  // of routers that were found, not given

  const float* Of(const Geometry& g, int layer, int query_head) const {
    const int32_t router = routers == g.query_heads ? query_head : query_head / g.group();
    return w + (int64_t{layer} * routers + router) * d_route * g.head_dim;
  }
};

// Top d_route eigenvectors of K^T K over the whole prompt, per layer and KV head. ABORTED,
// FAILED_PRECONDITION like every recompression.
Result<SpanRouting> PrincipalRouting(const RecompressInput& input, const Geometry& geometry,
                                     int32_t d_route);

// Those of the parameters, which must outlive it.
SpanRouting TrainedRouting(const SpanParameters& parameters);

// 1 / |W k|; 0 where |W k| is 0.
float InverseNorm(const float* w, int32_t d_route, const std::vector<BF16>& k);

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_CODEC_SPAN_ROUTING_H_
