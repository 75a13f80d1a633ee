// SPDX-License-Identifier: Apache-2.0
// The SegmentPacker of the host: a Backend's ops, parallel over heads.
#include <algorithm>
#include <numeric>

#include "kernels/codec/head_loop.h"
#include "kernels/plans/mosaickv/ops/packed_ops.h"
#include "kernels/plans/mosaickv/packed_places.h"
#include "kernels/plans/mosaickv/segment_packer.h"

namespace kvstrata {
namespace {

class OnHost final : public SegmentPacker {
 public:
  bool Packs(const RecompressInput&, const Geometry&, const Plan&, Run) const override {
    return true;
  }
  Result<SegmentPlans> FindPlans(const RecompressInput& input, const Geometry& geometry,
                                 const Plan& plan, Run tokens) const override;
  Result<PackedBytes> PackRange(const RecompressInput& input, const Geometry& geometry,
                                const Plan& plan, const SegmentPlans& plans,
                                const PackedRange& range,
                                std::span<const double> recent) const override;
  Result<PackedBytes> Join(const Geometry& geometry,
                           std::span<const PackedExtent> extents) const override;
};

// One rotation: eigenvectors and eigenvalues of the covariance of `rows`; the sum of its squares.
double Rotation(const RecompressInput& input, const PagedRows& rows, Run tokens, float* vectors,
                std::vector<double>* values) {
  const auto dim = static_cast<size_t>(rows.dim);
  std::vector<double> covariance(dim * dim);
  const CovarianceWork sum{rows, tokens, covariance.data(), false};
  OpsOf<PackedOps>(input.backend->packed).covariance(&sum, 1, InlineExecutor());
  values->resize(dim);
  const EigenWork eigen{covariance.data(), rows.dim, values->data(), vectors};
  input.backend->eigen(&eigen, 1, InlineExecutor());
  double trace = 0;
  for (size_t c = 0; c < dim; ++c) trace += covariance[c * dim + c];
  return trace;
}

void CopyRotations(const HeadPlan& plan, const PackedEntry& e, size_t dim, PackedPlaces* out) {
  std::memcpy(out->At<float>(e.r_k), plan.r_k, dim * dim * sizeof(float));
  std::memcpy(out->At<float>(e.r_v), plan.r_v, dim * dim * sizeof(float));
  std::memcpy(out->At<float>(e.eigenvalues), plan.eigenvalues, dim * sizeof(float));
}

// Runs of `length` tokens, the last one longer where what is left makes no run.
std::vector<Run> RunsOf(Run tokens, int32_t length) {
  std::vector<Run> runs;
  for (int32_t t = tokens.begin; t + length <= tokens.end; t += length) {
    runs.push_back({t, t + length});
  }
  if (runs.empty()) return {tokens};
  runs.back().end = tokens.end;
  return runs;
}

// Keys, values and block keys of one head. Adds the relative errors of its rows to errors [runs].
void PackHead(const RecompressInput& input, const Geometry& geometry, const HeadIndex& h,
              const HeadPlan& plan, std::span<const Run> runs, PackedPlaces* out, double* errors) {
  const PageLayout layout = PageLayout::Of(geometry);
  const PackedEntry& e = out->entry(h.flat);
  const Run tokens = {runs.front().begin, runs.back().end};
  RotatePackWork keys;
  keys.rows = KeysOf(input.view.pages, layout, h.layer, h.kv_head);
  keys.r = plan.r_k;
  keys.format = out->format(h.flat);
  RotatePackWork values = keys;
  values.rows = ValuesOf(input.view.pages, layout, h.layer, h.kv_head);
  values.r = plan.r_v;
  std::vector<double> lost(2 * runs.size());
  std::vector<RotatePackWork> works;
  for (size_t i = 0; i < runs.size(); ++i) {
    const int64_t at = (runs[i].begin - tokens.begin) * keys.format.stride;
    keys.run = values.run = runs[i];
    keys.out = out->At<std::byte>(e.keys) + at;
    values.out = out->At<std::byte>(e.values) + at;
    keys.relative_error = &lost[2 * i];
    values.relative_error = &lost[2 * i + 1];
    works.push_back(keys);
    works.push_back(values);
  }
  RotatePackWork blocks = keys;
  blocks.run = tokens;
  blocks.block = e.block;
  blocks.out = out->At<std::byte>(e.blocks);
  blocks.relative_error = nullptr;
  works.push_back(blocks);
  OpsOf<PackedOps>(input.backend->packed)
      .rotate_pack(works.data(), static_cast<int64_t>(works.size()), InlineExecutor());
  for (size_t i = 0; i < runs.size(); ++i) errors[i] += lost[2 * i] + lost[2 * i + 1];
}

// Appends `rows` rows from one place of an extent to another.
void Append(const PackedRows& from, int64_t rows, std::byte** to) {
  std::memcpy(*to, from.data, static_cast<size_t>(rows * from.stride));
  *to += rows * from.stride;
}

Result<SegmentPlans> OnHost::FindPlans(const RecompressInput& input, const Geometry& geometry,
                                       const Plan& plan, Run tokens) const {
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
                           plan.packed.search
                               ? SearchStrategy(plan.packed, k, v, tokens, *input.backend)
                               : FixedStrategy(plan.packed, geometry.head_dim)};
  });
  KVS_RETURN_IF_ERROR(status);
  return plans;
}

// The largest mean of a run over its tokens, summed over heads.
double WorstOf(std::span<const Run> runs, std::span<const double> losses) {
  double worst = 0;
  for (size_t i = 0; i < runs.size(); ++i) {
    double sum = 0;
    for (size_t at = i; at < losses.size(); at += runs.size()) sum += losses[at];
    const double mean = sum / (runs[i].end - runs[i].begin);
    if (!(mean <= worst)) worst = mean;  // NaN is the worst
  }
  return worst;
}

Result<PackedBytes> OnHost::PackRange(const RecompressInput& input, const Geometry& geometry,
                                      const Plan& plan, const SegmentPlans& plans,
                                      const PackedRange& range,
                                      std::span<const double> recent) const {
  KVS_RETURN_IF_ERROR(CheckRawRows(input, geometry, range.tokens));
  const bool rotations = range.final && range.info.plan_begin == range.tokens.begin;
  PackedPlaces out(geometry, range.tokens, range.final, plan.packed.truncate, range.info);
  for (const HeadPlan& h : plans.heads) out.AddHead(h.strategy, rotations);
  out.Allocate();
  // Without a limit nobody asks for the losses of runs.
  const bool limited = plan.stored.max_loss < 1;
  const Run all = range.tokens;
  const std::vector<Run> runs = RunsOf(all, limited ? kLossRun : all.end - all.begin);
  std::vector<double> losses(plans.heads.size() * runs.size());  // [heads][runs]
  KVS_RETURN_IF_ERROR(ForEachHead(input, geometry, [&](const HeadIndex& h) {
    const HeadPlan& head = plans.heads[h.flat];
    if (rotations) {
      CopyRotations(head, out.entry(h.flat), static_cast<size_t>(geometry.head_dim), &out);
    }
    PackHead(input, geometry, h, head, runs, &out, losses.data() + h.flat * runs.size());
  }));
  const double rows = 2.0 * static_cast<double>(plans.heads.size());  // keys and values of a token
  out.NoteLoss(std::accumulate(losses.begin(), losses.end(), 0.0) / rows, recent);
  if (limited) out.NoteWorst(WorstOf(runs, losses) / rows);
  const PackedInfo info = out.info();
  return PackedBytes{out.Finish(), {}, info};
}

Result<PackedBytes> OnHost::Join(const Geometry& geometry,
                                 std::span<const PackedExtent> extents) const {
  PackedPlaces out = PackedPlaces::OfJoined(geometry, extents);
  out.Allocate();
  for (size_t h = 0; h < extents.back().heads.size(); ++h) {
    std::byte* keys = out.At<std::byte>(out.entry(h).keys);
    std::byte* values = out.At<std::byte>(out.entry(h).values);
    std::byte* blocks = out.At<std::byte>(out.entry(h).blocks);
    for (const PackedExtent& extent : extents) {
      Append(extent.heads[h].keys, extent.rows(), &keys);
      Append(extent.heads[h].values, extent.rows(), &values);
      Append(extent.heads[h].blocks, extent.rows() / extent.heads[h].block, &blocks);
    }
  }
  const PackedInfo info = out.info();
  return PackedBytes{out.Finish(), {}, info};
}

}  // namespace

const SegmentPacker& HostPacker() {
  static const OnHost packer;
  return packer;
}

}  // namespace kvstrata
