#include "kernels/codec/codec.h"

#include "kernels/codec/lowrank_recompressor.h"
#include "kernels/codec/packed_recompressor.h"
#include "kernels/plan_needs.h"
#include "kernels/plan_rows.h"

namespace kvstrata {
namespace {

constexpr std::string_view kKeepRawNames[] = {"auto", "no", "host"};

using Rows = RowsOf<&Plan::stored>;
constexpr PlanOption kRows[] = {
    Rows::Number<&StoredOptions::max_loss, kShare>("max_loss"),
    Rows::Name<&StoredOptions::keep_raw, kKeepRawNames>("keep_raw"),
};

}  // namespace

constinit const OptionTable kStoredTable = {kRows};

std::string_view NameOf(KeepRaw k) { return kKeepRawNames[static_cast<size_t>(k)]; }

std::unique_ptr<Recompressor> NewRecompressor(const Plan& plan, const Geometry& geometry,
                                              std::shared_ptr<const SpanParameters> parameters) {
  switch (plan.codec) {
    case CodecKind::kPacked:
      return NewPackedRecompressor(plan, geometry);
    case CodecKind::kLowRank:
      return NewSpanRecompressor(plan, geometry, std::move(parameters));
    case CodecKind::kRaw:
      break;
  }
  return nullptr;
}

uint32_t CodecNeeds(const Plan& plan) {
  switch (plan.codec) {
    case CodecKind::kPacked:
      return kNeedPrefillDone;
    case CodecKind::kLowRank:
      return kNeedPrefillDone | kNeedSurprisal;
    case CodecKind::kRaw:
      break;
  }
  return 0;
}

}  // namespace kvstrata
