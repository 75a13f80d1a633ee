// SPDX-License-Identifier: Apache-2.0
// The codecs that the conformance suite of stored rows holds to kernels/rows/stored_rows.h, by
// name.
#pragma once

#include <span>
#include <string_view>

#include "kernels/codec/codec.h"

namespace kvstrata {

struct StoredCodec {
  std::string_view name;
  const Codec& codec;
  // A plan that attends with it all positions that its Step answers, and none as coarse rows.
  Plan plan;
  // What an output of attention may be off by, relatively, over rows that it may store so.
  double tolerance = 0;
  bool leaves_out = true;  // whether the plan chooses what it attends
};

std::span<const StoredCodec> StoredCodecs();

}  // namespace kvstrata
