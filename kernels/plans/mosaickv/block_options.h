// SPDX-License-Identifier: Apache-2.0
// Options of selector `block` (docs/spec/mosaickv.md). Rows: block.cc.
#pragma once

#include <cstdint>

namespace kvstrata {

struct BlockOptions {
  int32_t recent = 32;  // `n_recent`, over codec raw: always attended, rounded out to whole blocks
  double share = 0.1;   // tokens in chosen blocks, among all
  bool group_softmax = false;  // as of minmax

  bool operator==(const BlockOptions&) const = default;
};

}  // namespace kvstrata
