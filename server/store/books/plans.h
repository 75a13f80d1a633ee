// SPDX-License-Identifier: Apache-2.0
// Plans: what a plan's text is to this daemon: named plans of its configuration, presets, what of
// them depends on the model, and codecs with the parameters that they name.
//
// Thread-safety: all methods, from any thread; not under the store's lock, because a codec's
// parameters may have to be read. Errors: PLAN_* (kernels/plan/plan.h), PARAMETERS_*
// (parameters.h).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/sync.h"
#include "kernels/pages/page_view.h"
#include "kernels/plan/plan.h"
#include "server/store/options/parameters.h"
#include "server/store/options/store_fwd.h"
#include "server/store/options/store_lock.h"
#include "server/store/options/store_options.h"

namespace kvstrata {

class Plans {
 public:
  using Named = std::map<std::string, Plan, std::less<>>;

  // PLAN_NAMED_INVALID.
  static Result<Named> Parse(const StoreOptions& options);
  Plans(const StoreOptions& options, Named named);

  // Those of the configuration from now on; sequences keep the plans that they have.
  void SetNamed(Named named) KVS_EXCLUDES(mu_);
  // Named plans of the configuration, then presets.
  Result<Plan> ResolvePlan(std::string_view text) const KVS_EXCLUDES(mu_);
  // What a sequence of that geometry gets for a plan; PLAN_* of one that cannot serve it.
  Result<Plan> PlanFor(const Plan& named, const Geometry& geometry) const;
  // From how many tokens on choosing is predicted to be faster, of a sequence that is decoded alone
  // (kernels/step/break_even.h); 0: the plan never chooses.
  uint32_t BreakEven(const Plan& plan, const Geometry& geometry) const;
  // The codec's part of a new sequence; none for raw. May read files, if `files` says so.
  Result<std::optional<CodecState>> NewCodec(const Plan& plan, const Geometry& geometry,
                                             Files files) KVS_EXCLUDES(store_lock);

 private:
  const StoreOptions& options_;
  mutable Mutex mu_;
  Named named_ KVS_GUARDED_BY(mu_);
  ParameterFiles parameters_;
};

}  // namespace kvstrata
