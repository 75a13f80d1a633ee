#include "kernels/codec/codec.h"

#include "kernels/codec/packed_recompressor.h"

namespace kvstrata {

std::unique_ptr<Recompressor> NewRecompressor(const Plan& plan, const Geometry& geometry,
                                              std::shared_ptr<const SpanParameters> parameters) {
  (void)parameters;
  switch (plan.codec) {
    case CodecKind::kPacked:
      return NewPackedRecompressor(plan, geometry);
    default:
      break;
  }
  return nullptr;
}

}  // namespace kvstrata
