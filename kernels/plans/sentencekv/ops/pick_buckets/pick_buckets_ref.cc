// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "kernels/ops/elements.h"
#include "kernels/ops/pick/pick.h"
#include "kernels/plans/sentencekv/ops/pick_buckets/pick_buckets.h"

namespace kvstrata::cuda {
namespace {

// The head of a sum of queries (sentence_table.h).
struct QuerySumHead {
  int32_t tokens, count;
};

// A list of the batch: one KV head of one sequence.
struct List {
  List(const PickBucketsBatch& w, int b, int h)
      : table(w.tables[b]),
        sequence(b),
        head(h),
        row(int64_t{w.layer} * w.kv_heads + h),
        at(int64_t{b} * w.kv_heads + h),
        window(w.recent_begin[b]),
        is_ready(w.queries_from[b] >= 0),
        picks(is_ready && window != 0) {
    if (!picks) return;
    listed = table.bucket_stride > 0 ? table.counts[row] : 0;
    count = listed + w.whole[b];
  }
  // Where a bucket's tokens begin, and how many it supplies below the window.
  BucketScore Unscored(int32_t bucket) const {
    if (bucket >= listed) {
      const int32_t* const run = table.whole + 2 * int64_t{bucket - listed};
      return {0, std::clamp(window - run[0], 0, run[1] - run[0]), run[0], 0};
    }
    const int32_t* const firsts = table.firsts + row * (table.bucket_stride + 1) + bucket;
    const std::span tokens(kept() + firsts[0], kept() + firsts[1]);
    const auto below = std::ranges::lower_bound(tokens, window) - tokens.begin();
    return {0, static_cast<int32_t>(below), firsts[0], 0};
  }
  const BF16* MeanOf(int32_t bucket, int dim) const {
    return bucket < listed
               ? table.means + (row * table.bucket_stride + bucket) * dim
               : table.whole_means + (int64_t{bucket - listed} * table.rows + row) * dim;
  }
  const int32_t* kept() const { return table.kept + row * table.kept_stride; }
  BucketScore* scores() const { return table.scores + int64_t{head} * table.score_stride(); }

  const SentenceTable table;
  const int sequence, head;
  const int64_t row, at;
  const int32_t window;
  const bool is_ready, picks;
  int32_t listed = 0, count = 0;
};

// The mean of the sentence's queries, this step's included, whose sum is kept.
std::vector<double> KeepQuery(const PickBucketsBatch& w, const List& list) {
  const int32_t tokens = w.tokens[list.sequence], from = w.queries_from[list.sequence];
  float* sums[2];
  QuerySumHead heads[2];
  for (int i = 0; i < 2; ++i) {
    sums[i] = list.table.queries + (list.row * 2 + i) * QuerySumFloats(w.head_dim);
    std::memcpy(&heads[i], sums[i], sizeof(heads[i]));
  }
  const auto counts = [=](const QuerySumHead& s) { return s.tokens > from && s.tokens < tokens; };
  int last = -1;
  for (int i = 0; i < 2; ++i) {
    if (counts(heads[i]) && (last < 0 || heads[i].tokens > heads[last].tokens)) last = i;
  }
  // Without a sum that counts, what a step of as many tokens left that was given up is replaced.
  const int next = last >= 0 ? 1 - last : heads[1].tokens >= tokens ? 1 : 0;
  const QuerySumHead now{tokens, (last < 0 ? 0 : heads[last].count) + 1};
  std::vector<double> mean(static_cast<size_t>(w.head_dim));
  for (int c = 0; c < w.head_dim; ++c) {
    double sum = last < 0 ? 0 : sums[last][4 + c];
    for (int i = 0; i < w.group; ++i) {
      sum += ElementAt(w.q, w.q_dtype, (list.at * w.group + i) * w.head_dim + c);
    }
    sums[next][4 + c] = static_cast<float>(sum);
    mean[static_cast<size_t>(c)] = sum / (w.group * now.count);
  }
  std::memcpy(sums[next], &now, sizeof(now));
  return mean;
}

template <typename Visit>
void VisitLists(const PickBucketsBatch& w, const Visit& visit) {
  for (int b = 0; b < w.batch; ++b) {
    for (int h = 0; h < w.kv_heads; ++h) visit(List(w, b, h));
  }
}

}  // namespace

void ScoreBucketsRef(const PickBucketsBatch& w) {
  VisitLists(w, [&w](const List& list) {
    if (!list.is_ready) return;
    const std::vector<double> mean = KeepQuery(w, list);
    for (int32_t i = 0; i < list.count; ++i) {
      const BF16* const of_bucket = list.MeanOf(i, w.head_dim);
      double dot = 0;
      for (size_t c = 0; c < mean.size(); ++c) dot += mean[c] * ToFloat(of_bucket[c]);
      list.scores()[i] = list.Unscored(i);
      list.scores()[i].score = static_cast<float>(dot);
    }
  });
}

void TakeBucketsRef(const PickBucketsBatch& w) {
  VisitLists(w, [&w](const List& list) {
    std::vector<float> scores;
    for (int32_t i = 0; i < list.count; ++i) scores.push_back(list.scores()[i].score);
    std::vector<int32_t> taken(scores.size());
    int32_t room = w.tau;
    for (const int32_t i : RankedRef(scores.data(), list.count)) {
      taken[static_cast<size_t>(i)] = std::min(list.scores()[i].size, room);
      room -= taken[static_cast<size_t>(i)];
    }
    int32_t* const units = w.units + list.at * w.list_stride;
    int32_t n = 0;
    for (int32_t i = 0; i < list.count; ++i) {
      const int32_t first = list.scores()[i].first;
      for (int32_t t = first; t < first + taken[static_cast<size_t>(i)]; ++t) {
        units[n++] = i < list.listed ? list.kept()[t] : t;
      }
    }
    w.counts[list.at] = n;
  });
}

}  // namespace kvstrata::cuda
