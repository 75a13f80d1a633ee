// SPDX-License-Identifier: Apache-2.0
// Op buckets: the buckets of SentenceKV (docs/spec/sentencekv.md 3, 4, 7) of one sequence, in all
// layers: which kept tokens belong to a sentence, and their mean keys, kept as bf16 (ADR 15). Rare:
// at the end of a prompt, and where a generated sentence ends.
#pragma once

#include "kernels/cuda/batches/device_rows.h"
#include "kernels/plans/sentencekv/ops/sentence_table.h"

namespace kvstrata::cuda {

// Makes a prompt's table: kept tokens, buckets and their means. Kept are, in each row, `ranked`
// tokens (listed already, ascending; with `all` they are first, first + 1, ...) and the window
// behind them.
struct PromptBucketsBatch {
  DeviceRows keys;  // keys of the first layer, page_stride for one sequence
  int64_t key_layer_stride = 0;
  int32_t layers = 0;
  SentenceTable table;  // kept_stride >= ranked + the window's tokens
  int32_t ranked = 0, first = 0;
  bool all = false;
  Run window;                     // positions
  const int32_t* ends = nullptr;  // device [sentences], where each of the prompt's sentences ends
  int32_t sentences = 0;
};

// Sentences that are whole buckets: `whole` entries first, first + 1, ... and their means.
struct WholeBucketsBatch {
  static constexpr int32_t kMost = 32;  // in one call

  DeviceRows keys;
  int64_t key_layer_stride = 0;
  int32_t layers = 0;
  SentenceTable table;  // whole_stride >= first + count
  int32_t first = 0, count = 0;
  Run sentences[kMost];  // not empty
};

// The truth, means in double; all of the batch's memory, the table's included, is the host's.
void PromptBucketsRef(const PromptBucketsBatch& work);
void WholeBucketsRef(const WholeBucketsBatch& work);

}  // namespace kvstrata::cuda
