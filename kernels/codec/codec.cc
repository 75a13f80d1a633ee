#include "kernels/codec/codec.h"

#include "kernels/codec/lowrank_recompressor.h"
#include "kernels/codec/packed_recompressor.h"

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

}  // namespace kvstrata
