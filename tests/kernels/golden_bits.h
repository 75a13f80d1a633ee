// SPDX-License-Identifier: Apache-2.0
// The part of a test vector (tests/golden/README.md) that is about keys in few bits: options of
// rule `bits`, and the keys of one (layer, KV head) in place.
#pragma once

#include "kernels/pages/page_view.h"
#include "kernels/pages/quantised_group.h"
#include "tests/kernels/golden_arrays.h"

namespace kvstrata {

struct GoldenBits {
  int bits = 0, group = 0, budget = 0, n_sink = 0, n_recent = 0, min_tokens = 0;

  static GoldenBits Of(const GoldenArrays& golden) {
    const std::string& params = golden.Get("params", "|u1").data;
    const std::string mine = params.substr(params.find("\"bits\": {"));
    const auto option = [&mine](const std::string& name) {
      return std::stoi(mine.substr(mine.find("\"" + name + "\": ") + name.size() + 4));
    };
    // The plan's own name stands before its options.
    const auto bits = std::stoi(mine.substr(mine.find("\"bits\": ", 9) + 8));
    return {bits,
            option("group"),
            option("budget"),
            option("n_sink"),
            option("n_recent"),
            option("min_tokens")};
  }
  QuantisedGroup format(int dim) const { return {dim, bits, group}; }
};

// Keys of one layer and head of keys_bf16 [layers][tokens][heads][dim]; refers to the array.
struct GoldenKeys {
  std::byte* first;
  PagedRows rows;

  GoldenKeys(const GoldenArray& keys, int layer, int head) {
    const auto tokens = static_cast<int>(keys.shape[1]), dim = static_cast<int>(keys.shape[3]);
    const int64_t heads = keys.shape[2], row = 2 * int64_t{dim};
    const auto* data = reinterpret_cast<const std::byte*>(keys.data.data());
    first = const_cast<std::byte*>(data) + (int64_t{layer} * tokens * heads + head) * row;
    rows = {&first, 0, heads * row, tokens, dim, DType::kBF16};
  }
  GoldenKeys(const GoldenKeys&) = delete;
};

}  // namespace kvstrata
