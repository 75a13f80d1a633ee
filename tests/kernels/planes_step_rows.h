// SPDX-License-Identifier: Apache-2.0
// PlanesStepRows: the queries, keys and values of a step's tokens as an engine has them on a GPU,
// side by side for each token, layer after layer. What is no row of the step is no number. For
// tests.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/blocks/block_planes.h"
#include "tests/kernels/block_memory.h"
#include "tests/kernels/planes_sequences.h"

namespace kvstrata {

// A row of a step.
struct PlanesRow {
  int sequence = 0;
  int32_t added = 1;     // new tokens; several: of a prompt
  bool in_full = false;  // decoding, and attends all of it finely
  int shares = -1;       // a new sequence takes over this one's blocks, with those of this step
};

class PlanesStepRows {
 public:
  // most: tokens of a step.
  PlanesStepRows(const Geometry& geometry, int32_t most, Random* random, BlockMemory* memory)
      : g_(geometry),
        most_(most),
        random_(*random),
        memory_(*memory),
        mirror_(static_cast<size_t>(g_.layers * most * stride()), std::byte{0xFF}),
        device_(memory->Allocate(mirror_.size())) {}

  // The newest rows of each sequence. starts: of the rows' tokens among the step's.
  void Upload(const std::vector<PlanesRow>& rows, const std::vector<int32_t>& starts,
              const PlanesSequences& sequences) {
    std::ranges::fill(mirror_, std::byte{0xFF});
    for (size_t i = 0; i < rows.size(); ++i) {
      const PlanesSequences::Sequence& s = sequences[rows[i].sequence];
      for (int32_t t = 0; t < rows[i].added; ++t) {
        for (int j = 0; j < g_.layers * g_.kv_heads; ++j) {
          Put(s.rows[static_cast<size_t>(j)], s.tokens - rows[i].added + t, j % g_.kv_heads,
              &mirror_[Place(j / g_.kv_heads, starts[i] + t)]);
        }
      }
    }
    memory_.Upload(device_, mirror_.data(), mirror_.size());
  }

  TokenRows Queries(int layer, int32_t token) const { return At(layer, token, 0); }
  TokenRows Keys(int layer, int32_t token) const { return At(layer, token, query_bytes()); }
  TokenRows Values(int layer, int32_t token) const {
    return At(layer, token, query_bytes() + head_bytes());
  }
  // A token's queries, as uploaded.
  const std::byte* QueriesOf(int layer, int32_t token) const {
    return &mirror_[Place(layer, token)];
  }
  int64_t query_bytes() const { return g_.query_heads * g_.row_bytes(); }

 private:
  int64_t head_bytes() const { return g_.kv_heads * g_.row_bytes(); }
  int64_t stride() const { return query_bytes() + 2 * head_bytes() + 32; }
  size_t Place(int layer, int32_t token) const {
    return static_cast<size_t>((layer * most_ + token) * stride());
  }
  TokenRows At(int layer, int32_t token, int64_t offset) const {
    return {device_ + Place(layer, token) + offset, stride()};
  }

  void Put(const HeadRows& rows, int32_t token, int head, std::byte* to) {
    const auto bytes = static_cast<size_t>(g_.row_bytes());
    const size_t from = static_cast<size_t>(token) * bytes;
    std::memcpy(to + query_bytes() + head * g_.row_bytes(), &rows.keys[from], bytes);
    std::memcpy(to + query_bytes() + head_bytes() + head * g_.row_bytes(), &rows.values[from],
                bytes);
    for (int h = head * g_.group(); h < (head + 1) * g_.group(); ++h) {
      PutQuery(rows, token, to + h * g_.row_bytes());
    }
  }
  // Small queries, with so much of the key of some token that limits of weights lie well between it
  // and the others, or that others are left out.
  void PutQuery(const HeadRows& rows, int32_t token, std::byte* to) {
    const std::byte* const key = &rows.keys[static_cast<size_t>(random_.Below(token + 1)) *
                                            static_cast<size_t>(g_.row_bytes())];
    const float logit = random_.Below(2) == 0 ? 3 : 10;
    const float share = logit / std::sqrt(static_cast<float>(g_.head_dim));
    for (int c = 0; c < g_.head_dim; ++c) {
      const float x = 0.1f * random_.Normal() + share * LoadAs(g_.dtype, key + 2 * c);
      StoreAs(g_.dtype, to + 2 * c, x);
    }
  }

  const Geometry g_;
  const int32_t most_;
  Random& random_;
  BlockMemory& memory_;
  std::vector<std::byte> mirror_;
  std::byte* const device_;
};

}  // namespace kvstrata
