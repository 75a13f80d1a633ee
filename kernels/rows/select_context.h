// SPDX-License-Identifier: Apache-2.0
// SelectContext: a sequence as its selector sees it, and the ops it may use.
//
// Plain data, valid during a call. Any thread.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/backend/backend.h"
#include "kernels/pages/page_view.h"
#include "kernels/pages/sequence_view.h"

namespace kvstrata {

class StoredRows;  // stored_rows.h

// What a selector may use.
struct SelectContext {
  const Geometry* geometry = nullptr;
  PageLayout layout;
  const IndexLayout* index = nullptr;
  SequenceView view;
  const Backend* backend = nullptr;
  Executor* executor = nullptr;
  // Entropy in nats per position, NaN where none was reported; as long as what was reported.
  std::span<const float> entropy;
  std::span<const float> surprisal;    // the same, nats
  int32_t surprisal_held = 0;          // leading positions whose surprisal is known elsewhere
  std::span<const uint8_t> boundary;   // 1: this token ends a sentence
  int32_t prompt_tokens = -1;          // length of the prompt; -1 until prefill_done
  const StoredRows* stored = nullptr;  // what the extents hold; null: all rows are on pages
};

}  // namespace kvstrata
