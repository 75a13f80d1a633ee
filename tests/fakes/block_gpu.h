// SPDX-License-Identifier: Apache-2.0
// The ops that choose over an engine's own blocks, as a GPU in host memory (attending_gpu.h): each
// computes what its header says, in doubles. Not thread-safe.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/ops/pick/pick.h"
#include "kernels/ops/quantise_keys/quantise_keys.h"
#include "kernels/ops/score_bits/score_bits.h"
#include "kernels/ops/summarize/summarize.h"
#include "tests/fakes/attending_gpu.h"

namespace kvstrata::testing {

inline int BlockPages(const cuda::BlockPagesBatch& w, cuda::Stream) {
  if (w.sampled_row != nullptr) *w.sampled_row = w.sampled;
  for (int32_t row = 0; row < w.capacity; ++row) {
    const bool there = row < w.rows;
    const int32_t most = w.page_stride * w.block_tokens;
    const int32_t tokens = !there ? 0 : w.tokens == nullptr ? most : std::min(w.tokens[row], most);
    const int32_t added = !there ? 0
                          : w.query_starts == nullptr
                              ? tokens
                              : w.query_starts[row + 1] - w.query_starts[row];
    w.lengths[row] = w.to[row] = tokens;
    w.from[row] = std::max(tokens - added, 0);
    w.chosen[row] = there && w.in_full != nullptr && w.in_full[row] != 0 ? 0 : tokens;
    if (w.sink_end != nullptr) {
      const cuda::Candidates out = CandidatesOf(w.window, w.chosen[row]);
      w.sink_end[row] = out.full ? 0 : out.first;
      w.recent_begin[row] = out.full ? 0 : out.last;
    }
    uint64_t* const pages = w.pages + int64_t{row} * w.page_stride;
    pages[0] = 0;
    for (int32_t i = 0; i * w.block_tokens < tokens; ++i) {
      pages[i] = static_cast<uint64_t>(w.blocks[row * w.blocks_of_row + i] * w.block_stride);
    }
  }
  return 0;
}

inline std::byte* RowAt(const cuda::DeviceRows& rows, int b, int head, int32_t r) {
  const uint64_t page = rows.pages[int64_t{b} * rows.page_stride + r / rows.page_rows];
  return reinterpret_cast<std::byte*>(page + static_cast<uint64_t>(rows.offset)) +
         head * rows.head_stride + r % rows.page_rows * rows.row_stride;
}
inline std::byte* GroupAt(const cuda::DeviceGroups& groups, int b, int head, int32_t g) {
  const uint64_t block = groups.blocks[int64_t{b} * groups.block_stride + g / groups.block_groups];
  return reinterpret_cast<std::byte*>(block + static_cast<uint64_t>(groups.offset)) +
         head * groups.head_stride + g % groups.block_groups * groups.format.bytes();
}

inline int SummarizeBlocks(const cuda::SummarizeBatch& work, cuda::Stream) {
  cuda::SummarizeBatch w = work;
  const auto kind = w.kind == cuda::SummarizeBatch::Kind::kDeviation
                        ? SummarizeWork::Kind::kDeviation
                        : SummarizeWork::Kind::kMinMax;
  for (int32_t layer = 0; layer < w.layers; ++layer) {
    for (int32_t b = 0; b < w.batch; ++b) {
      for (int32_t u = w.from[b] / w.unit_rows; u < w.to[b] / w.unit_rows; ++u) {
        if (u - w.from[b] / w.unit_rows >= w.units_max)
          return 1;  // the launch has no thread for it
        for (int head = 0; head < w.source.kv_heads; ++head) {
          std::byte* unit = RowAt(w.source, b, head, u * w.unit_rows);
          std::byte* const out = RowAt(w.summary, b, head, u);
          const PagedRows keys{
              &unit, 0, w.source.row_stride, w.unit_rows, w.source.head_dim, w.source.dtype};
          const SummarizeWork one{kind,          keys, {0, w.unit_rows}, out, out + w.field_stride,
                                  w.source.dtype};
          SummarizeRef(&one, 1, InlineExecutor());
        }
      }
    }
    w.source.offset += w.source_layer_stride;
    w.summary.offset += w.summary_layer_stride;
  }
  return 0;
}

inline int QuantiseBlocks(const cuda::QuantiseKeysBatch& work, cuda::Stream) {
  cuda::QuantiseKeysBatch w = work;
  const QuantisedGroup& format = w.groups.format;
  for (int32_t layer = 0; layer < w.layers; ++layer) {
    for (int32_t b = 0; b < w.batch; ++b) {
      const int32_t first = w.from[b] / format.tokens, end = w.to[b] / format.tokens;
      if (end - first > w.groups_max) return 1;
      for (int32_t g = first; g < end; ++g) {
        for (int head = 0; head < w.keys.kv_heads; ++head) {
          std::byte* page = RowAt(w.keys, b, head, g * format.tokens);
          const PagedRows keys{&page,         0,          w.keys.row_stride,
                               format.tokens, format.dim, w.keys.dtype};
          const QuantiseKeysWork seal{keys, 0, format, GroupAt(w.groups, b, head, g)};
          QuantiseKeysRef(&seal, 1, InlineExecutor());
        }
      }
    }
    w.keys.offset += w.key_layer_stride;
    w.groups.offset += w.group_layer_stride;
  }
  return 0;
}

// The scores of candidates by query head `h`, unscaled. Work: a ScoreBatch or a VoteBatch.
template <typename Work>
std::vector<double> ScoresOf(const Work& w, int b, int h, const cuda::Candidates& candidates) {
  std::vector<double> scores;
  const cuda::DeviceRows& rows = w.rows;
  const int head = h / (w.query_heads / rows.kv_heads);
  for (int32_t u = candidates.first; u < candidates.last; ++u) {
    double sum = 0, variance = 0;
    const std::byte* const row = RowAt(rows, b, head, u);
    for (int c = 0; c < rows.head_dim; ++c) {
      const double x = At(w.q, w.q_dtype, w.QueriesAt(b) + h * rows.head_dim + c);
      const double first = x * At(row, rows.dtype, c);
      const double second = w.fields == 2 ? At(row + w.field_stride, rows.dtype, c) : 0;
      sum += w.fields == 2 && !w.deviation ? std::max(first, x * second) : first;
      variance += x * x * second;
    }
    scores.push_back(w.deviation ? sum + 2 * std::sqrt(variance) : sum);
  }
  return scores;
}

inline int ScoreBlocks(const cuda::ScoreBatch& w, cuda::Stream) {
  const int group = w.query_heads / w.rows.kv_heads;
  for (int b = 0; b < w.batch; ++b) {
    const cuda::Candidates candidates = CandidatesOf(w.rule, w.tokens[b]);
    if (candidates.full) continue;
    for (int head = 0; head < w.rows.kv_heads; ++head) {
      float* const out = w.scores + (int64_t{b} * w.rows.kv_heads + head) * w.unit_stride;
      std::fill_n(out, candidates.count(), -INFINITY);
      for (int h = head * group; h < (head + 1) * group; ++h) {
        const std::vector<double> scores = ScoresOf(w, b, h, candidates);
        for (size_t i = 0; i < scores.size(); ++i) {
          out[i] = std::max(out[i], static_cast<float>(scores[i]));
        }
      }
    }
  }
  return 0;
}

inline std::vector<double> BitsScoresOf(const cuda::VoteBatch& w, int b, int h,
                                        const cuda::Candidates& candidates) {
  const int32_t tokens = w.groups.format.tokens;
  const int head = h / (w.query_heads / w.groups.kv_heads);
  const int dim = w.groups.format.dim;
  std::vector<float> q(static_cast<size_t>(dim));
  for (int c = 0; c < dim; ++c) q[c] = At(w.q, w.q_dtype, w.QueriesAt(b) + h * dim + c);
  std::vector<double> scores;
  for (int32_t t = candidates.first; t < candidates.last; ++t) {
    std::byte* block = GroupAt(w.groups, b, head, t / tokens);
    float score = 0;
    const ScoreBitsWork work{{w.groups.format, &block, 0, 1},
                             {t % tokens, t % tokens + 1},
                             q.data(),
                             1,
                             1.0f,
                             &score,
                             0};
    ScoreBitsRef(&work, 1, InlineExecutor());
    scores.push_back(score);
  }
  return scores;
}

inline int VoteBlocks(const cuda::VoteBatch& w, cuda::Stream) {
  const int each = w.query_heads / w.output_rows;
  const int32_t run = w.of_groups() ? w.rule.unit_tokens : 1;
  for (int b = 0; b < w.batch; ++b) {
    const cuda::Candidates candidates =
        run > 1 ? CandidateTokensOf(w.rule, w.tokens[b]) : CandidatesOf(w.rule, w.tokens[b]);
    if (candidates.full) continue;
    for (int row = 0; row < w.output_rows; ++row) {
      std::vector<double> votes(static_cast<size_t>(candidates.count() / run));
      for (int h = row * each; h < (row + 1) * each; ++h) {
        std::vector<double> scores =
            w.of_groups() ? BitsScoresOf(w, b, h, candidates) : ScoresOf(w, b, h, candidates);
        const double top = *std::ranges::max_element(scores);
        double sum = 0;
        for (double& score : scores) sum += score = std::exp((score - top) * w.scale);
        for (size_t i = 0; i < scores.size(); ++i)
          votes[i / static_cast<size_t>(run)] += scores[i] / sum;
      }
      std::ranges::copy(votes,
                        w.votes + (int64_t{b} * w.output_rows + row) * (w.candidate_stride / run));
    }
  }
  return 0;
}

inline int PickBlocks(const cuda::PickBatch& w, cuda::Stream) {
  for (int b = 0; b < w.batch; ++b) {
    const cuda::Candidates candidates = CandidatesOf(w.rule, w.tokens[b]);
    w.sink_end[b] = candidates.full ? 0 : candidates.first * w.rule.unit_tokens;
    w.recent_begin[b] = candidates.full ? 0 : candidates.last * w.rule.unit_tokens;
    for (int g = 0; g < w.groups; ++g) {
      const int64_t list = int64_t{b} * w.groups + g;
      int32_t* const units = w.units + list * w.list_stride;
      w.counts[list] = candidates.full ? 0 : w.rule.take;
      if (candidates.full) continue;
      TopKRef({static_cast<const float*>(w.scores) + list * w.score_stride, candidates.count(),
               w.rule.take, units});
      for (int32_t i = 0; i < w.rule.take; ++i) units[i] += candidates.first;
    }
  }
  return 0;
}

inline cuda::CudaOps BlockOps() {
  cuda::CudaOps ops = FakeOps();
  ops.zero_async = [](void* at, uint64_t bytes, cuda::Stream) {
    std::memset(at, 0, bytes);
    return 0;
  };
  ops.block_pages = BlockPages;
  ops.summarize = SummarizeBlocks;
  ops.quantise_keys = QuantiseBlocks;
  ops.score = ScoreBlocks;
  ops.vote = VoteBlocks;
  ops.pick = PickBlocks;
  return ops;
}

}  // namespace kvstrata::testing
