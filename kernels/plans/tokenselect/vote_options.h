// SPDX-License-Identifier: Apache-2.0
// Options of selector `vote` (docs/spec/tokenselect.md; defaults: paper), in tokens. Rows: vote.cc.
#pragma once

#include <cstdint>

namespace kvstrata {

struct VoteOptions {
  int32_t budget = 2048, sinks = 128, recent = 512;  // `k`, `n_init`, `n_local`
  double theta = 0.9;
  bool cosine_per_head = false;  // `cosine = "head"` (docs/spec/beyond.md 4)
  bool append_departed = false;
  int32_t max_pool = 1;
  bool scale = true;
  int32_t chunk = 512;  // tokens of a prompt's chunk

  bool operator==(const VoteOptions&) const = default;
};

}  // namespace kvstrata
