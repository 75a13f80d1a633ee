// SPDX-License-Identifier: Apache-2.0
#include "kernels/codec/codec.h"
#include "kernels/plan/plan_needs.h"
#include "kernels/plan/plan_rows.h"
#include "kernels/plans/mosaickv/packed.h"
#include "kernels/plans/mosaickv/packed_recompressor.h"
#include "kernels/plans/planes/planes.h"
#include "kernels/plans/planes/planes_recompressor.h"
#include "kernels/plans/sekv/lowrank.h"
#include "kernels/plans/sekv/lowrank_recompressor.h"

namespace kvstrata {
namespace {

constexpr std::string_view kKeepRawNames[] = {"auto", "no", "host"};

// Planes have no milder form.
bool LimitsLoss(const Plan& plan) { return plan.codec != CodecKind::kPlanes; }

using Rows = RowsOf<&Plan::stored>;
constexpr PlanOption kRows[] = {
    Rows::Number<&StoredOptions::max_loss, kShare>("max_loss").If(LimitsLoss),
    Rows::Name<&StoredOptions::keep_raw, kKeepRawNames>("keep_raw"),
};

}  // namespace

constinit const OptionTable kStoredTable = {kRows};

std::string_view NameOf(KeepRaw k) { return kKeepRawNames[static_cast<size_t>(k)]; }

namespace {

template <typename Stored>
Result<std::unique_ptr<StoredRows>> Parse(const SequenceView& view, const Geometry& geometry) {
  KVS_ASSIGN_OR_RETURN(std::unique_ptr<StoredRows> stored, Stored::Parse(view, geometry));
  return stored;
}

constexpr std::string_view kSpanArrays[] = {"anchors", "raw",    "spans",     "k_mean",   "v_mean",
                                            "k_rank",  "v_rank", "k_longest", "v_longest"};
constexpr std::string_view kDeviceSpanArrays[] = {"anchors", "raw", "spans", "k_rank", "v_rank"};
constexpr std::string_view kPackedArrays[] = {"eigenvalues", "rotated_rows", "packed_rows",
                                              "segments", "strategies"};
constexpr std::string_view kDevicePackedArrays[] = {"segments", "strategies"};

constexpr Codec kRaw = {};
constexpr Codec kLowRank = {
    .needs = kNeedPrefillDone | kNeedSurprisal,
    .whole_units = true,
    .recompressor =
        [](const Plan& plan, const Geometry& geometry,
           std::shared_ptr<const SpanParameters> parameters) {
          return NewSpanRecompressor(plan, geometry, std::move(parameters));
        },
    .parse = Parse<SpanStorage>,
    .status = SpanStatus,
    .arrays = kSpanArrays,
    .device_arrays = kDeviceSpanArrays,
    .inspect = InspectSpans,
    .cost = SpanCost,
};
constexpr Codec kPacked = {
    .needs = kNeedPrefillDone,
    .recompressor =
        [](const Plan& plan, const Geometry& geometry, std::shared_ptr<const SpanParameters>) {
          return NewPackedRecompressor(plan, geometry);
        },
    .parse = Parse<PackedStorage>,
    .status = PackedStatus,
    .arrays = kPackedArrays,
    .device_arrays = kDevicePackedArrays,
    .inspect = InspectPacked,
    .cost = PackedCost,
};
constexpr std::string_view kPlanesArrays[] = {"upper", "lower"};
constexpr Codec kPlanes = {
    .needs = kNeedPrefillDone,
    .whole_units = true,
    .recompressor =
        [](const Plan& plan, const Geometry& geometry, std::shared_ptr<const SpanParameters>) {
          return NewPlanesRecompressor(plan, geometry);
        },
    .parse = Parse<PlanesStorage>,
    .status = [](const CodecProgress&) { return std::string(); },  // rows that wait are attended
    .arrays = kPlanesArrays,
    .inspect = InspectPlanes,
    .cost = PlanesCost,
};
constexpr const Codec* kCodecs[] = {&kRaw, &kLowRank, &kPacked, &kPlanes};  // by CodecKind

}  // namespace

const Codec& CodecOf(const Plan& plan) { return *kCodecs[static_cast<size_t>(plan.codec)]; }

std::unique_ptr<Recompressor> NewRecompressor(const Plan& plan, const Geometry& geometry,
                                              std::shared_ptr<const SpanParameters> parameters) {
  const Codec& codec = CodecOf(plan);
  if (!codec.stores()) return nullptr;
  return codec.recompressor(plan, geometry, std::move(parameters));
}

uint32_t CodecNeeds(const Plan& plan) { return CodecOf(plan).needs; }

}  // namespace kvstrata
