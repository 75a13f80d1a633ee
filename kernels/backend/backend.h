// SPDX-License-Identifier: Apache-2.0
// Backend: the ops of one implementation in one table. `ref` accumulates in double and is the
// truth; `simd` is Highway with run-time dispatch. `cuda` joins as a third column.
//
// Any backend can be forced: KVSTRATA_BACKEND in the environment, `backend` in the daemon's
// configuration, kvs_attach_options.backend in a client. Tables live for the process; thread-safe.
#pragma once

#include <span>
#include <string_view>

#include "base/status.h"
#include "kernels/ops/append/append.h"
#include "kernels/ops/attend_coarse/attend_coarse.h"
#include "kernels/ops/attend_planes/attend_planes.h"
#include "kernels/ops/attend_raw/attend_raw.h"
#include "kernels/ops/eigen/eigen.h"
#include "kernels/ops/merge/merge.h"
#include "kernels/ops/pack_planes/pack_planes.h"
#include "kernels/ops/pick/pick.h"
#include "kernels/ops/plan_ops.h"
#include "kernels/ops/quantise_keys/quantise_keys.h"
#include "kernels/ops/score/score.h"
#include "kernels/ops/score_bits/score_bits.h"
#include "kernels/ops/summarize/summarize.h"
#include "kernels/ops/vote/vote.h"

namespace kvstrata {

struct Backend {
  std::string_view name;
  bool (*append)(const AppendWork*, int64_t, Executor&);
  void (*summarize)(const SummarizeWork*, int64_t, Executor&);
  void (*score)(const ScoreWork*, int64_t, Executor&);
  void (*top_k)(const PickWork&);
  void (*attend_raw)(const AttendWork*, int64_t, Executor&);
  void (*merge)(const MergeWork*, int64_t, Executor&);
  void (*attend_coarse)(const AttendCoarseWork*, int64_t, Executor&);
  void (*eigen)(const EigenWork*, int64_t, Executor&);
  void (*score_tokens)(const ScoreTokensWork*, int64_t, Executor&);
  void (*vote)(const VoteWork&, Executor&);
  void (*quantise_keys)(const QuantiseKeysWork*, int64_t, Executor&);
  void (*score_bits)(const ScoreBitsWork*, int64_t, Executor&);
  void (*pack_planes)(const PackPlanesWork*, int64_t, Executor&);
  void (*attend_planes)(const AttendPlanesWork*, int64_t, Executor&);
  // Those of these codecs alone, in the folders of sekv and mosaickv.
  const PlanOps* lowrank;
  const PlanOps* packed;
};

// All that this build has and this CPU runs, best first.
std::span<const Backend> Backends();

// The backend of that name; "" is KVSTRATA_BACKEND, or else the best one.
// INVALID_ARGUMENT BACKEND_UNKNOWN names what there is.
Result<const Backend*> FindBackend(std::string_view name);

}  // namespace kvstrata
