#include "kernels/codec/span_routing.h"

#include <algorithm>
#include <cmath>

#include "kernels/codec/head_loop.h"

namespace kvstrata {

Result<SpanRouting> PrincipalRouting(const RecompressInput& input, const Geometry& geometry,
                                     int32_t d_route) {
  const Run prompt = {0, input.prompt_tokens};
  KVS_RETURN_IF_ERROR(CheckRawRows(input, geometry, prompt));
  const auto dim = static_cast<size_t>(geometry.head_dim);
  SpanRouting routing;
  routing.d_route = std::min(d_route, geometry.head_dim);
  routing.routers = geometry.kv_heads;
  const size_t router = static_cast<size_t>(routing.d_route) * dim;
  routing.storage.resize(static_cast<size_t>(HeadCount(geometry)) * router);
  const PageLayout layout = PageLayout::Of(geometry);
  KVS_RETURN_IF_ERROR(ForEachHead(input, geometry, [&](const HeadIndex& h) {
    std::vector<double> covariance(dim * dim), values(dim);
    std::vector<float> vectors(dim * dim);
    const CovarianceWork sum{KeysOf(input.view.pages, layout, h.layer, h.kv_head), prompt,
                             covariance.data(), false};
    input.backend->covariance(&sum, 1, InlineExecutor());
    const EigenWork eigen{covariance.data(), geometry.head_dim, values.data(), vectors.data()};
    input.backend->eigen(&eigen, 1, InlineExecutor());
    std::copy_n(vectors.data(), router, routing.storage.data() + h.flat * router);
  }));
  routing.w = routing.storage.data();
  return routing;
}

SpanRouting TrainedRouting(const SpanParameters& parameters) {
  return {parameters.d_route, parameters.query_heads, parameters.w.data(), {}};
}

float InverseNorm(const float* w, int32_t d_route, const std::vector<BF16>& k) {
  double squares = 0;
  for (int32_t i = 0; i < d_route; ++i) {
    double dot = 0;
    for (const BF16 x : k) dot += double{*w++} * double{ToFloat(x)};
    squares += dot * dot;
  }
  return squares > 0 ? static_cast<float>(1 / std::sqrt(squares)) : 0.0f;
}

}  // namespace kvstrata
