#include "kernels/backend.h"

#include <cstdlib>
#include <string>

#include "kernels/simd_target.h"

namespace kvstrata {
namespace {

constexpr Backend kBackends[] = {
    {"simd", AppendSimd, SummarizeSimd, ScoreSimd, TopKSimd, AttendRawSimd, MergeSimd,
     RotatePackSimd, CovarianceSimd, EigenSimd, SvdSimd, ScoreTokensSimd, VoteSimd},
    {"ref", AppendRef, SummarizeRef, ScoreRef, TopKRef, AttendRawRef, MergeRef, RotatePackRef,
     CovarianceRef, EigenRef, SvdRef, ScoreTokensRef, VoteRef},
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
