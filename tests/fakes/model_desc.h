// SPDX-License-Identifier: Apache-2.0
// DescOf: the description that a test or benchmark registers its model by: keys after rotary
// embedding, one rank, no adapter, no boundary tokens. Name and digest must outlive it.
#pragma once

#include "client/include/kvstrata/kvstrata.h"

namespace kvstrata::testing {

struct ModelShape {
  int layers, query_heads, kv_heads, head_dim, page_tokens;
  int dtype = KVS_BF16;
};

inline kvs_model_desc DescOf(const ModelShape& shape, const char* name, const char* digest) {
  kvs_model_desc desc{};
  desc.size = sizeof(desc);
  desc.name = name;
  desc.digest = digest;
  desc.layers = shape.layers;
  desc.query_heads = shape.query_heads;
  desc.kv_heads = shape.kv_heads;
  desc.head_dim = shape.head_dim;
  desc.page_tokens = shape.page_tokens;
  desc.dtype = shape.dtype;
  desc.ranks = 1;
  return desc;
}

}  // namespace kvstrata::testing
