// SPDX-License-Identifier: Apache-2.0
// CudaPart: new tokens of one member of a step on a GPU, or of several members with one each, that
// one launch of every op serves. A prompt whose chunks select has a part for each.
#pragma once

#include <cstdint>

#include "kernels/plan/plan.h"

namespace kvstrata {

class CudaCodec;     // cuda_codec.h
class CudaSelector;  // cuda_selector.h

struct CudaPart {
  int32_t first = 0, count = 1;      // members
  int32_t new_tokens = 1;            // new tokens of each member
  int32_t begin = 0;                 // first of them among the member's new tokens
  bool selects = false;              // the prompt is complete and the plan selects, or has a codec
  bool observes = false;             // they are of a prompt whose last queries are kept
  bool prompt = false;               // a chunk of a prompt, with a selection of its own
  bool promotes = false;             // selects, and a member has pages in the host's memory
  bool measures = false;             // attended once more, for what it lost (cuda_shadow.h)
  bool idle = false;                 // all members of the step are shorter than their min_tokens
  int32_t list = 0;                  // first among the lists of its selector
  Plan plan;                         // plan of the members, where one of these is set
  CudaSelector* selector = nullptr;  // the same; null: selector full
  CudaCodec* codec = nullptr;        // where it selects, or raw rows are gone; null: raw rows
  bool operator==(const CudaPart&) const = default;
};

}  // namespace kvstrata
