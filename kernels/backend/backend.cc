// SPDX-License-Identifier: Apache-2.0
#include "kernels/backend/backend.h"

#include <cstdlib>
#include <string>

#include "kernels/cpu/simd_target.h"
#include "kernels/plan/built_plans.h"
#include "kernels/plans/mosaickv/ops/packed_ops.h"
#include "kernels/plans/sekv/ops/span_ops.h"

namespace kvstrata {
namespace {

constexpr Backend kBackends[] = {
    {.name = "simd",
     .append = AppendSimd,
     .summarize = SummarizeSimd,
     .score = ScoreSimd,
     .top_k = TopKSimd,
     .attend_raw = AttendRawSimd,
     .merge = MergeSimd,
     .attend_coarse = AttendCoarseSimd,
     .eigen = EigenSimd,
     .score_tokens = ScoreTokensSimd,
     .vote = VoteSimd,
     .quantise_keys = QuantiseKeysSimd,
     .score_bits = ScoreBitsSimd,
     .pack_planes = PackPlanesSimd,
     .attend_planes = AttendPlanesSimd,
     .lowrank = KVS_OF_SEKV(&kSpanSimd),
     .packed = KVS_OF_MOSAICKV(&kPackedSimd)},
    {.name = "ref",
     .append = AppendRef,
     .summarize = SummarizeRef,
     .score = ScoreRef,
     .top_k = TopKRef,
     .attend_raw = AttendRawRef,
     .merge = MergeRef,
     .attend_coarse = AttendCoarseRef,
     .eigen = EigenRef,
     .score_tokens = ScoreTokensRef,
     .vote = VoteRef,
     .quantise_keys = QuantiseKeysRef,
     .score_bits = ScoreBitsRef,
     .pack_planes = PackPlanesRef,
     .attend_planes = AttendPlanesRef,
     .lowrank = KVS_OF_SEKV(&kSpanRef),
     .packed = KVS_OF_MOSAICKV(&kPackedRef)},
};

}  // namespace

std::span<const Backend> Backends() {
  const std::span<const Backend> all = kBackends;
  return AvailableSimdTargets().empty() ? all.subspan(1) : all;
}

Result<const Backend*> FindBackend(std::string_view name) {
  std::string_view wanted = name;
  if (wanted.empty()) {
    if (const char* env = std::getenv("KVSTRATA_BACKEND"); env != nullptr) wanted = env;
  }
  if (wanted.empty()) return &Backends().front();
  std::string known;
  for (const Backend& backend : Backends()) {
    if (backend.name == wanted) return &backend;
    known += known.empty() ? "" : ", ";
    known += backend.name;
  }
  return InvalidArgument("BACKEND_UNKNOWN",
                         std::string(name.empty() ? "KVSTRATA_BACKEND" : "backend") + " is '" +
                             std::string(wanted) + "'; allowed: " + known);
}

}  // namespace kvstrata
