// SPDX-License-Identifier: Apache-2.0
// A batch of sequences of random keys and values on pages, the same on host and GPU: pages in
// random order, NaN wherever no row was written.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/cuda/batches/batch.h"
#include "kernels/pages/page_view.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"

namespace kvstrata::cuda {

// Pages of `g.layers` layers for sequences of up to `capacity` tokens. Tests use the last layer.
class PagedBatch {
 public:
  PagedBatch(Rng& rng, const Geometry& g, std::vector<int32_t> lengths, int32_t capacity)
      : geometry(g),
        layout(PageLayout::Of(g)),
        tokens(std::move(lengths)),
        stride((capacity + g.page_tokens - 1) / g.page_tokens) {
    const size_t pages = tokens.size() * static_cast<size_t>(stride);
    memory_.assign(pages * static_cast<size_t>(g.page_bytes()), std::byte{0xFF});
    std::vector<size_t> order(pages);
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), rng);
    for (size_t i : order) {
      pages_.push_back(memory_.data() + i * static_cast<size_t>(g.page_bytes()));
      host_pages_.push_back(reinterpret_cast<uint64_t>(pages_.back()));
    }
    for (int b = 0; b < batch(); ++b) {
      for (int32_t t = 0; t < tokens[static_cast<size_t>(b)]; ++t) FillToken(rng, b, t);
    }
  }

  int batch() const { return static_cast<int>(tokens.size()); }
  int layer() const { return geometry.layers - 1; }
  std::byte* const* PagesOf(int sequence) const { return pages_.data() + sequence * stride; }
  PagedRows Keys(int sequence, int head) const {
    return KeysOf(PagesOf(sequence), layout, layer(), head);
  }
  PagedRows Values(int sequence, int head) const {
    return ValuesOf(PagesOf(sequence), layout, layer(), head);
  }
  void FillToken(Rng& rng, int sequence, int32_t t) {
    ForElements(sequence, t, [&](std::byte* p) { StoreFloat(p, geometry.dtype, Normal(rng)); });
  }
  void PoisonRow(int sequence, int head, int32_t t) {
    const auto bytes = static_cast<size_t>(geometry.row_bytes());
    std::memset(Keys(sequence, head).Row(t), 0xFF, bytes);
    std::memset(Values(sequence, head).Row(t), 0xFF, bytes);
  }

  // Copies everything; device addresses stay the same from the first call on.
  void Upload() {
    if (device_.size() == 0) {
      device_ = DeviceArray<std::byte>(memory_.size());
      std::vector<uint64_t> addresses;
      for (const std::byte* page : pages_) {
        addresses.push_back(device_.address() + static_cast<uint64_t>(page - memory_.data()));
      }
      device_pages_ = DeviceArray<uint64_t>(addresses);
      device_tokens_ = DeviceArray<int32_t>(tokens.size());
    }
    device_.Write(memory_);
    WriteTokens();
  }
  // The lengths alone: the pages keep what the device wrote.
  void WriteTokens() { device_tokens_.Write(tokens); }
  // The device's bytes, where this object's are on the host.
  std::vector<std::byte> Download() const { return device_.Read(); }
  const std::vector<std::byte>& memory() const { return memory_; }

  PagedLayer DeviceLayer() const {
    PagedLayer l;
    l.pages = device_pages_.get();
    l.page_stride = stride;
    l.page_tokens = geometry.page_tokens;
    l.kv_heads = geometry.kv_heads;
    l.head_dim = geometry.head_dim;
    l.dtype = geometry.dtype;
    l.key_offset = layout.KeyOffset(layer(), 0, 0);
    l.value_offset = layout.ValueOffset(layer(), 0, 0);
    l.head_stride = layout.head_stride;
    l.slot_stride = layout.slot_stride;
    return l;
  }
  // The same over this object's pages, for refs.
  PagedLayer HostLayer() const {
    PagedLayer l = DeviceLayer();
    l.pages = host_pages_.data();
    return l;
  }
  int32_t* device_tokens() const { return device_tokens_.get(); }

  const Geometry geometry;
  const PageLayout layout;
  std::vector<int32_t> tokens;
  const int32_t stride;  // pages a sequence

 private:
  template <class Fn>
  void ForElements(int sequence, int32_t t, const Fn& fn) {
    for (int head = 0; head < geometry.kv_heads; ++head) {
      for (std::byte* row : {Keys(sequence, head).Row(t), Values(sequence, head).Row(t)}) {
        for (int c = 0; c < geometry.head_dim; ++c) fn(row + c * SizeOf(geometry.dtype));
      }
    }
  }

  std::vector<std::byte> memory_;
  std::vector<std::byte*> pages_;  // [batch][stride]
  std::vector<uint64_t> host_pages_;
  DeviceArray<std::byte> device_;
  DeviceArray<uint64_t> device_pages_;
  DeviceArray<int32_t> device_tokens_;
};

}  // namespace kvstrata::cuda
