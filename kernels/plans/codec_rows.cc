// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "kernels/codec/codec.h"
#include "kernels/codec/extent_bytes.h"
#include "kernels/plan/plan_needs.h"
#include "kernels/plan/plan_rows.h"

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

constexpr Codec kRaw = {};
#define KVS_CODEC_ROW(Kind, name, built) KVS_OF_##built(&k##Kind##Codec),
constexpr const Codec* kCodecs[] = {&kRaw, KVS_CODECS(KVS_CODEC_ROW)};  // by CodecKind

}  // namespace

constinit const OptionTable kStoredTable = {kRows};

std::string_view NameOf(KeepRaw k) { return kKeepRawNames[static_cast<size_t>(k)]; }

const Codec& CodecOf(const Plan& plan) { return *kCodecs[static_cast<size_t>(plan.codec)]; }

std::unique_ptr<Recompressor> NewRecompressor(const Plan& plan, const Geometry& geometry,
                                              ParametersPtr parameters) {
  const Codec& codec = CodecOf(plan);
  if (!codec.stores()) return nullptr;
  return codec.recompressor(plan, geometry, std::move(parameters));
}

Result<ParametersPtr> ParseParameters(std::span<const std::byte> file, const std::string& name,
                                      const Geometry& geometry, const Plan& plan) {
  const Codec& codec = CodecOf(plan);
  if (codec.parameters == nullptr) return ParametersPtr();
  return codec.parameters(file, name, geometry, plan);
}

Result<GpuPackers> NewGpuPackers(const cuda::CudaOps& ops, int device) {
  GpuPackers packers;
  for (const Codec* const codec : kCodecs) {
    std::unique_ptr<GpuPacker>& packer = packers.by_codec.emplace_back();
    if (codec == nullptr || codec->gpu_packer == nullptr) continue;
    KVS_ASSIGN_OR_RETURN(packer, codec->gpu_packer(ops, device));
  }
  return packers;
}

int64_t DescriptionBytes(std::span<const std::byte> front, int64_t bytes) {
  int64_t end = kExtentFrontBytes;
  for (const Codec* const codec : kCodecs) {
    if (codec == nullptr || !codec->stores()) continue;
    end = std::max(end, codec->arrays_end(ExtentFront(front, bytes)));
  }
  return std::min(bytes, end);
}

uint32_t CodecNeeds(const Plan& plan) { return CodecOf(plan).needs; }

}  // namespace kvstrata
