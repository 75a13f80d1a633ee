// SPDX-License-Identifier: Apache-2.0
// Keys of one layer on scattered pages, and index blocks for their quantised groups, on the device
// and, for the reference, on the host.
#pragma once

#include <limits>
#include <memory>
#include <vector>

#include "kernels/cuda/batches/device_rows.h"
#include "kernels/ops/quantise_keys/device_groups.h"
#include "kernels/ops/quantise_keys/quantise_keys.h"
#include "kernels/ops/score_bits/score_bits.h"
#include "tests/cuda/scattered_pages.h"

namespace kvstrata::cuda {

class QuantisedBlocks {
 public:
  static constexpr int kLayer = 1, kBlockGroups = 8;

  QuantisedBlocks(const Geometry& g, QuantisedGroup format, int batch, int tokens_max, Rng& rng)
      : geometry_(g), layout_(PageLayout::Of(g)), format_(format) {
    const int pages = (tokens_max + g.page_tokens - 1) / g.page_tokens;
    pages_ = std::make_unique<ScatteredPages>(batch, pages, g.page_bytes(), g.dtype, rng);
    const int groups = tokens_max / format.tokens + 1;
    blocks_ = std::make_unique<ScatteredPages>(batch, (groups + kBlockGroups - 1) / kBlockGroups,
                                               g.layers * layer_bytes(), DType::kF32, rng);
  }

  const Geometry& geometry() const { return geometry_; }
  ScatteredPages& pages() { return *pages_; }
  ScatteredPages& blocks() { return *blocks_; }

  DeviceRows Keys() const {
    PagedLayer layer;
    layer.pages = pages_->addresses();
    layer.page_stride = pages_->stride();
    layer.page_tokens = geometry_.page_tokens;
    layer.kv_heads = geometry_.kv_heads;
    layer.head_dim = geometry_.head_dim;
    layer.dtype = geometry_.dtype;
    layer.key_offset = layout_.KeyOffset(kLayer, 0, 0);
    layer.head_stride = layout_.head_stride;
    layer.slot_stride = layout_.slot_stride;
    return KeyRows(layer);
  }
  DeviceGroups Groups() const {
    return {blocks_->addresses(),   blocks_->stride(), kBlockGroups, geometry_.kv_heads, format_,
            kLayer * layer_bytes(), head_bytes()};
  }
  QuantisedRows HostRows(int sequence, int head) const {
    return {format_, blocks_->TableOf(sequence), kLayer * layer_bytes() + head * head_bytes(),
            kBlockGroups};
  }

  // Quantises the groups of a sequence on the host.
  void Quantise(int sequence, kvstrata::Run groups) {
    for (int head = 0; head < geometry_.kv_heads; ++head) {
      for (int g = groups.begin; g < groups.end; ++g) {
        const QuantiseKeysWork work{KeysOf(pages_->TableOf(sequence), layout_, kLayer, head),
                                    g * format_.tokens, format_,
                                    const_cast<std::byte*>(HostRows(sequence, head).Group(g))};
        QuantiseKeysRef(&work, 1, InlineExecutor());
      }
    }
  }

 private:
  int64_t head_bytes() const { return kBlockGroups * format_.bytes(); }
  int64_t layer_bytes() const { return geometry_.kv_heads * head_bytes(); }

  Geometry geometry_;
  PageLayout layout_;
  QuantisedGroup format_;
  std::unique_ptr<ScatteredPages> pages_, blocks_;
};

}  // namespace kvstrata::cuda
