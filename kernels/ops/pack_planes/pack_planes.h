// SPDX-License-Identifier: Apache-2.0
// Op pack_planes: the keys and values of one group of tokens of one (layer, KV head) in nested bits
// (docs/spec/planes.md, "Storage"). Op unpack_planes: such a group as rows again.
//
// The arithmetic is fp32, each operation rounded once, in an order that the page fixes. So a
// group's bytes are a function of its rows alone, and unpacked rows of its bytes alone. Elements
// that are not finite count as the page says: no group has a NaN.
//
// Work items are independent. Cost: values are rotated, dim log2(dim) additions a row.
#pragma once

#include "kernels/cpu/executor.h"
#include "kernels/ops/pack_planes/planes_format.h"
#include "kernels/pages/page_view.h"

namespace kvstrata {

struct PackPlanesWork {
  PagedRows keys, values;      // keys after rotary embedding; of one dtype, and format.dim
  int32_t begin = 0;           // the group is the positions [begin, begin + format.tokens)
  PlanesFormat format;         // REQUIRES: IsValid()
  std::byte* upper = nullptr;  // [format.upper_bytes()], aligned to 4; all of it is written
  std::byte* lower = nullptr;  // [format.lower_bytes()], aligned to 4; all of it is written
};

struct UnpackPlanesWork {
  PlanesFormat format;  // REQUIRES: IsValid()
  const std::byte* upper = nullptr;
  const std::byte* lower = nullptr;
  float* keys = nullptr;    // [format.tokens][dim], by all planes that are stored
  float* values = nullptr;  // [format.tokens][dim], rotated back
};

void PackPlanesRef(const PackPlanesWork* work, int64_t n, Executor& executor);
void PackPlanesSimd(const PackPlanesWork* work, int64_t n, Executor& executor);
void UnpackPlanesRef(const UnpackPlanesWork* work, int64_t n, Executor& executor);

}  // namespace kvstrata
