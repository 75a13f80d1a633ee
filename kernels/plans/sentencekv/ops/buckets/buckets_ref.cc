// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <span>
#include <vector>

#include "kernels/cuda/batches/host_batch.h"
#include "kernels/ops/elements.h"
#include "kernels/plans/sentencekv/ops/buckets/buckets.h"

namespace kvstrata::cuda {
namespace {

// The mean key of some tokens in a row of the table.
void WriteMean(const DeviceRows& keys, int64_t layer_stride, int64_t row,
               std::span<const int32_t> tokens, BF16* mean) {
  const int64_t head = row / keys.kv_heads * layer_stride + row % keys.kv_heads * keys.head_stride;
  std::vector<double> sum(static_cast<size_t>(keys.head_dim));
  for (const int32_t t : tokens) {
    const std::byte* const key = RowAt(keys, 0, head, t);
    for (int c = 0; c < keys.head_dim; ++c) {
      sum[static_cast<size_t>(c)] += ElementAt(key, keys.dtype, c);
    }
  }
  const auto count = static_cast<double>(tokens.size());
  std::ranges::transform(
      sum, mean, [count](double x) { return FromFloat<BF16>(static_cast<float>(x / count)); });
}

std::vector<int32_t> TokensOf(const Run& run) {
  std::vector<int32_t> tokens;
  for (int32_t t = run.begin; t < run.end; ++t) tokens.push_back(t);
  return tokens;
}

void CutRow(const PromptBucketsBatch& w, int64_t row) {
  int32_t* const kept = w.table.kept + row * w.table.kept_stride;
  int32_t* const firsts = w.table.firsts + row * (w.table.bucket_stride + 1);
  for (int32_t i = 0; w.all && i < w.ranked; ++i) kept[i] = w.first + i;
  const std::vector<int32_t> window = TokensOf(w.window);
  std::ranges::copy(window, kept + w.ranked);
  const auto count = w.ranked + static_cast<int32_t>(window.size());
  const std::span<const int32_t> ends(w.ends, static_cast<size_t>(w.sentences));
  int32_t buckets = 0;
  for (int32_t i = 0; i < count; ++i) {
    const auto sentence_of = [ends](int32_t token) {
      return std::ranges::upper_bound(ends, token);
    };
    if (i == 0 || sentence_of(kept[i]) != sentence_of(kept[i - 1])) firsts[buckets++] = i;
  }
  firsts[buckets] = count;
  w.table.counts[row] = buckets;
}

}  // namespace

void PromptBucketsRef(const PromptBucketsBatch& w) {
  for (int64_t row = 0; row < int64_t{w.layers} * w.keys.kv_heads; ++row) {
    CutRow(w, row);
    const int32_t* const kept = w.table.kept + row * w.table.kept_stride;
    const int32_t* const firsts = w.table.firsts + row * (w.table.bucket_stride + 1);
    for (int32_t i = 0; i < w.table.counts[row]; ++i) {
      WriteMean(w.keys, w.key_layer_stride, row, {kept + firsts[i], kept + firsts[i + 1]},
                w.table.means + (row * w.table.bucket_stride + i) * w.keys.head_dim);
    }
  }
}

void WholeBucketsRef(const WholeBucketsBatch& w) {
  const int64_t rows = int64_t{w.layers} * w.keys.kv_heads;
  for (int32_t i = 0; i < w.count; ++i) {
    const Run sentence = w.sentences[i];
    const int64_t bucket = w.first + i;
    w.table.whole[2 * bucket] = sentence.begin;
    w.table.whole[2 * bucket + 1] = sentence.end;
    const std::vector<int32_t> tokens = TokensOf(sentence);
    for (int64_t row = 0; row < rows; ++row) {
      WriteMean(w.keys, w.key_layer_stride, row, tokens,
                w.table.whole_means + (bucket * rows + row) * w.keys.head_dim);
    }
  }
}

}  // namespace kvstrata::cuda
