// Scores of tokens by the queries of a step, wherever their keys lie: packed rows in rotated space,
// raw rows on their pages. Private to kernels/select.
//
// Threads: one call at a time for an object. Deterministic: work is cut by fixed lengths.
#ifndef KVSTRATA_KERNELS_SELECT_TOKEN_SCORES_H_
#define KVSTRATA_KERNELS_SELECT_TOKEN_SCORES_H_

#include <cstdint>
#include <vector>

#include "kernels/select/selector.h"

namespace kvstrata {

// The queries of one layer in the axes of each packed segment: pieces that share their rotations
// share the rotated queries (docs/spec/mosaickv.md, "Attention over packed rows").
class RotatedQueries {
 public:
  // Rotates q [query_heads][head_dim] for the segments that hold a row of `range`.
  // REQUIRES: context.packed is not null.
  void Rotate(const SelectContext& context, int layer, const float* q, Run range);

  // [group][head_dim] of the heads that share `kv_head`. REQUIRES: the segment was in the range.
  const float* For(int segment, int kv_head) const {
    return rows_.data() + offsets_[static_cast<size_t>(segment) * kv_heads_ + kv_head];
  }

 private:
  size_t kv_heads_ = 0;
  std::vector<int64_t> offsets_;  // in rows_, [segments][kv_heads]; -1: not in the range
  std::vector<float> rows_;
  std::vector<RotateWork> works_;
};

class TokenScores {
 public:
  // out [(kv head - heads.begin) * group + g][t - range.begin], rows `stride` floats apart: scale *
  // q.k of the tokens of `range`, for the KV heads `heads`. q [query_heads][head_dim].
  // Cost: reads each key once for all queries of its KV head.
  void Score(const SelectContext& context, int layer, const float* q, Run heads, Run range,
             float scale, float* out, int64_t stride);

 private:
  void AddPacked(const SelectContext& context, int layer, int head, Run range, float scale,
                 float* out, int64_t stride);

  RotatedQueries rotated_;
  std::vector<ScorePackedWork> packed_;
  std::vector<ScoreTokensWork> raw_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_KERNELS_SELECT_TOKEN_SCORES_H_
