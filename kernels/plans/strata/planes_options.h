// SPDX-License-Identifier: Apache-2.0
// Options of codec `planes` and of selector `fine` over it (docs/spec/planes.md, "Options").
// Rows: planes_options.cc, fine.cc.
#pragma once

#include <cstdint>

#include "kernels/pages/tier.h"

namespace kvstrata {

struct FineOptions {
  double fine_above = 8;  // the weight from which on a token is read finely, times N
  double share = 0;       // over 0: of all tokens, those that are, in place of `fine_above`
  double skip_below = 2;
  int32_t run = 1, sample = 16;
  int32_t sinks = 4, recent = 64;

  bool operator==(const FineOptions&) const = default;
};

struct PlanesOptions {
  int32_t keep = 8, unit = 64;  // bits of a code, tokens of a group
  // Where lower runs lie, kDevice: where upper ones do; rows of a group of which a GPU keeps copies
  // where they lie on the host.
  Tier lower = Tier::kDevice;
  int32_t hot = 8;
  // A prompt that a tier has opens when its upper runs are here.
  bool open_on_upper = false;

  bool operator==(const PlanesOptions&) const = default;
};

}  // namespace kvstrata
