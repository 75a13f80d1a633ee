// SPDX-License-Identifier: Apache-2.0
#include "kernels/backend/backend.h"

#include <cstdlib>
#include <string>

#include "kernels/cpu/simd_target.h"

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
     .attend_packed = AttendPackedSimd,
     .score_packed = ScorePackedSimd,
     .rotate = RotateSimd,
     .attend_lowrank = AttendLowRankSimd,
     .attend_coarse = AttendCoarseSimd,
     .rotate_pack = RotatePackSimd,
     .covariance = CovarianceSimd,
     .eigen = EigenSimd,
     .svd = SvdSimd,
     .score_tokens = ScoreTokensSimd,
     .vote = VoteSimd,
     .quantise_keys = QuantiseKeysSimd,
     .score_bits = ScoreBitsSimd,
     .pack_planes = PackPlanesSimd,
     .attend_planes = AttendPlanesSimd},
    {.name = "ref",
     .append = AppendRef,
     .summarize = SummarizeRef,
     .score = ScoreRef,
     .top_k = TopKRef,
     .attend_raw = AttendRawRef,
     .merge = MergeRef,
     .attend_packed = AttendPackedRef,
     .score_packed = ScorePackedRef,
     .rotate = RotateRef,
     .attend_lowrank = AttendLowRankRef,
     .attend_coarse = AttendCoarseRef,
     .rotate_pack = RotatePackRef,
     .covariance = CovarianceRef,
     .eigen = EigenRef,
     .svd = SvdRef,
     .score_tokens = ScoreTokensRef,
     .vote = VoteRef,
     .quantise_keys = QuantiseKeysRef,
     .score_bits = ScoreBitsRef,
     .pack_planes = PackPlanesRef,
     .attend_planes = AttendPlanesRef},
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
