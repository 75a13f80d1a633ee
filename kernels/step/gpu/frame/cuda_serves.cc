// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/frame/cuda_serves.h"

#include <bit>

#include "kernels/step/gpu/frame/cuda_selector_rows.h"

namespace kvstrata {
namespace {

constexpr int32_t kGroupMax = 8;  // query heads a KV head: columns of one product

Status ModelUnserved(const std::string& what) {
  return Unimplemented("CUDA_MODEL", what + "; use backend simd");
}

Status ServesPlan(const Plan& plan) {
  const CudaSelectorRow& selector = *CudaSelectorRows()[static_cast<size_t>(plan.selector)];
  if ((selector.codecs & OverCodec(plan.codec)) == 0) {
    return PlanUnserved("codec",
                        "\"" + std::string(NameOf(plan.codec)) + "\" under selector \"" +
                            std::string(NameOf(plan.selector)) + "\"",
                        selector.missing);
  }
  KVS_RETURN_IF_ERROR(selector.serves(plan));
  const CudaCodecRow* const codec = kCudaCodecRows[static_cast<size_t>(plan.codec)];
  return codec == nullptr ? OkStatus() : codec->serves(plan);
}

Status ServesModel(const Geometry& geometry) {
  if (geometry.pre_rope()) {
    return ModelUnserved("keys stored before rotary embedding are not served on a GPU");
  }
  if (geometry.dtype != DType::kF16 && geometry.dtype != DType::kBF16) {
    return ModelUnserved("dtype " + std::string(NameOf(geometry.dtype)) +
                         " is not served on a GPU; bf16 and f16 are");
  }
  if (geometry.group() > kGroupMax) {
    return ModelUnserved(std::to_string(geometry.group()) +
                         " query heads a KV head are not served on a GPU; at most " +
                         std::to_string(kGroupMax) + " are");
  }
  return OkStatus();
}

}  // namespace

Status PlanUnserved(std::string_view key, std::string_view value, std::string_view missing) {
  return Unimplemented(
      "CUDA_PLAN", std::string(key) + " = " + std::string(value) +
                       " is not served on a GPU: " + std::string(missing) +
                       " is missing there; served are selectors full, window, minmax (quest), "
                       "cascade (chess), vote (tokenselect), bucket (sentencekv) and bits "
                       "over codec raw, block (mosaickv) and full over codec packed, with rest = "
                       "\"drop\", zoom over codec lowrank (sekv) and fine over codec planes "
                       "(strata); use one of them, or backend simd");
}

Status CudaIndexServes(const Plan& plan) {
  if (plan.index.rest != RestKind::kDrop) {
    return PlanUnserved("rest", "\"" + std::string(NameOf(plan.index.rest)) + "\"",
                        "op attend_coarse over rows of an index");
  }
  if (std::has_single_bit(static_cast<uint32_t>(plan.index.unit))) return OkStatus();
  return PlanUnserved("page", std::to_string(plan.index.unit),
                      "op attend_raw over pages that are no power of two");
}

Status CudaServes(const Plan& plan, const Geometry& geometry) {
  KVS_RETURN_IF_ERROR(ServesPlan(plan));
  return ServesModel(geometry);
}

}  // namespace kvstrata
