// What CudaStep serves.
#include <bit>
#include <string>

#include "kernels/step/cuda_step.h"

namespace kvstrata {
namespace {

constexpr int32_t kGroupMax = 8;  // query heads a KV head: columns of one product

Status PlanUnserved(std::string_view key, std::string_view value) {
  return Unimplemented(
      "CUDA_PLAN", std::string(key) + " = " + std::string(value) +
                       " is not served on a GPU; served there are selectors full, window, "
                       "minmax (quest, strata), cascade (chess), vote (tokenselect) and "
                       "bucket (sentencekv) over codec raw, block (mosaickv) and full over "
                       "codec packed, with rest = \"drop\", and zoom over codec lowrank (sekv); "
                       "use one of them, or backend simd");
}

Status ModelUnserved(const std::string& what) {
  return Unimplemented("CUDA_MODEL", what + "; use backend simd");
}

bool IsPowerOfTwo(int32_t n) { return std::has_single_bit(static_cast<uint32_t>(n)); }

}  // namespace

Status CudaServes(const Plan& plan, const Geometry& geometry) {
  const bool of_units =
      plan.selector == SelectorKind::kMinMax || plan.selector == SelectorKind::kCascade;
  const bool of_spans = plan.codec == CodecKind::kLowRank;
  const bool packed = plan.codec == CodecKind::kPacked;
  // What the selectors' ops choose: blocks of packed rows, spans, or anything of raw rows.
  const bool served =
      packed     ? plan.selector == SelectorKind::kBlock || plan.selector == SelectorKind::kFull
      : of_spans ? plan.selector == SelectorKind::kZoom
                 : plan.selector != SelectorKind::kBlock;
  if (!served) {
    return PlanUnserved("codec", "\"" + std::string(NameOf(plan.codec)) + "\" under selector \"" +
                                     std::string(NameOf(plan.selector)) + "\"");
  }
  if (!of_spans && plan.index.rest != RestKind::kDrop) {
    return PlanUnserved("rest", "\"" + std::string(NameOf(plan.index.rest)) + "\"");
  }
  if (of_units && !IsPowerOfTwo(plan.index.unit)) {
    return PlanUnserved("page", std::to_string(plan.index.unit) + " (no power of two)");
  }
  if (plan.selector == SelectorKind::kCascade &&
      plan.cascade.pruning != CascadeOptions::Pruning::kTop) {
    return PlanUnserved("cascade", "\"literal\"");
  }
  if (plan.selector == SelectorKind::kCascade && plan.cascade.centred) {
    return PlanUnserved("centred", "true");
  }
  if (plan.selector == SelectorKind::kBucket && plan.bucket.keep_rest) {
    return PlanUnserved("keep_rest", "true");
  }
  if (plan.selector == SelectorKind::kBucket && plan.bucket.per_query_head) {
    return PlanUnserved("per_query_head", "true");
  }
  if (plan.selector == SelectorKind::kVote && plan.vote.max_pool > 1) {
    return PlanUnserved("max_pool", std::to_string(plan.vote.max_pool));
  }
  if (plan.selector == SelectorKind::kVote && !plan.vote.scale) {
    return PlanUnserved("scale", "false");  // op vote keeps weights down to e^-20 of a block's
  }
  if (packed && plan.packed.search) {
    return PlanUnserved("strategy", "\"search\"");  // blocks of a layer's heads differ
  }
  if (packed && plan.block.group_softmax) {
    return PlanUnserved("group", "\"softmax\"");  // op score_packed takes the group's maximum
  }
  if (geometry.pre_rope()) {
    return ModelUnserved("keys stored before rotary embedding are not served on a GPU");
  }
  if (geometry.dtype == DType::kF32) {
    return ModelUnserved("dtype f32 is not served on a GPU; bf16 and f16 are");
  }
  if (geometry.group() > kGroupMax) {
    return ModelUnserved(std::to_string(geometry.group()) +
                         " query heads a KV head are not served on a GPU; at most " +
                         std::to_string(kGroupMax) + " are");
  }
  return OkStatus();
}

}  // namespace kvstrata
