// SPDX-License-Identifier: Apache-2.0
// Work on every (layer, KV head) of a sequence, cancelled between two of them, and whether the raw
// rows for it are there. Private to codecs.
//
// Threads: fn runs on the executor's; it must not call its ParallelFor (ops get InlineExecutor).
#pragma once

#include <functional>

#include "kernels/codec/codec.h"

namespace kvstrata {

struct HeadIndex {
  int layer = 0, kv_head = 0;
  size_t flat = 0;  // layer * kv_heads + kv_head
};

inline int64_t HeadCount(const Geometry& g) { return int64_t{g.layers} * g.kv_heads; }

// ABORTED when input.cancelled became true meanwhile; fn has then not run for all.
Status ForEachHead(const RecompressInput& input, const Geometry& geometry,
                   const std::function<void(const HeadIndex&)>& fn);

// FAILED_PRECONDITION RAW_ROWS_GONE unless all raw pages of `tokens` are there.
Status CheckRawRows(const RecompressInput& input, const Geometry& geometry, Run tokens);

// Whether the sequence is long enough for its plan to compress it: N, which counts the token that
// the next step brings, has reached min_tokens (docs/spec/README.md).
inline bool ReachesMinimum(const RecompressInput& input, const Plan& plan) {
  return input.view.tokens >= plan.min_tokens - 1;
}

// Raw bytes of a number of tokens, all layers and heads.
inline int64_t RawBytes(const Geometry& g, int64_t tokens) {
  return tokens * 2 * g.layers * g.kv_heads * g.row_bytes();
}

// Drafts that leave the first `count` extents of the view as they are.
std::vector<ExtentDraft> KeepFirst(const SequenceView& view, int32_t count);

// The rows that need be raw no more, for tokens [0, end) held by extents: all but those that the
// plan's index still wants, and none before the prompt is complete, because prefill attends to the
// raw rows and its answer must not depend on when a worker came by.
std::vector<Run> ReleasedRows(const RecompressInput& input, int32_t end);

}  // namespace kvstrata
