#include "kernels/codec/packed_plans.h"

#include <algorithm>

#include "kernels/codec/head_loop.h"

namespace kvstrata {
namespace {

// One rotation: eigenvectors and eigenvalues of the covariance of `rows`; the sum of its squares.
double Rotation(const RecompressInput& input, const PagedRows& rows, Run tokens, float* vectors,
                std::vector<double>* values) {
  const auto dim = static_cast<size_t>(rows.dim);
  std::vector<double> covariance(dim * dim);
  const CovarianceWork sum{rows, tokens, covariance.data(), false};
  input.backend->covariance(&sum, 1, InlineExecutor());
  values->resize(dim);
  const EigenWork eigen{covariance.data(), rows.dim, values->data(), vectors};
  input.backend->eigen(&eigen, 1, InlineExecutor());
  double trace = 0;
  for (size_t c = 0; c < dim; ++c) trace += covariance[c * dim + c];
  return trace;
}

}  // namespace

Result<SegmentPlans> FindPlans(const RecompressInput& input, const Geometry& geometry,
                               const Plan& plan, Run tokens) {
  KVS_RETURN_IF_ERROR(CheckRawRows(input, geometry, tokens));
  const auto dim = static_cast<size_t>(geometry.head_dim);
  const size_t square = dim * dim, per_head = 2 * square + dim;
  SegmentPlans plans;
  plans.heads.resize(static_cast<size_t>(HeadCount(geometry)));
  plans.storage.resize(plans.heads.size() * per_head);
  const PageLayout layout = PageLayout::Of(geometry);
  const Status status = ForEachHead(input, geometry, [&](const HeadIndex& h) {
    float* r_k = plans.storage.data() + h.flat * per_head;
    float* r_v = r_k + square;
    std::vector<double> values;
    RotatedRows v = {ValuesOf(input.view.pages, layout, h.layer, h.kv_head), r_v, 0};
    v.energy = Rotation(input, v.rows, tokens, r_v, &values);
    RotatedRows k = {KeysOf(input.view.pages, layout, h.layer, h.kv_head), r_k, 0};
    k.energy = Rotation(input, k.rows, tokens, r_k, &values);
    std::ranges::transform(values, r_v + square, [](double x) { return static_cast<float>(x); });
    plans.heads[h.flat] = {r_k, r_v, r_v + square,
                           plan.search ? SearchStrategy(plan, k, v, tokens, *input.backend)
                                       : FixedStrategy(plan, geometry.head_dim)};
  });
  KVS_RETURN_IF_ERROR(status);
  return plans;
}

SegmentPlans PlansIn(const PackedExtent& extent) {
  SegmentPlans plans;
  for (const PackedHead& h : extent.heads) {
    plans.heads.push_back({h.r_k, h.r_v, h.eigenvalues, {h.keys.keep, h.keys.neighbours, h.block}});
  }
  return plans;
}

}  // namespace kvstrata
