#include "kernels/codec/codec.h"

#include "kernels/codec/lowrank_recompressor.h"
#include "kernels/codec/packed_recompressor.h"
#include "kernels/plan_needs.h"

namespace kvstrata {

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
