// SPDX-License-Identifier: Apache-2.0
// Tensors of a step's layers, on the host and on the GPU.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/pages/page_view.h"
#include "kernels/pages/tier.h"
#include "kernels/step/step_batch.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"

namespace kvstrata::cuda {

// Where a test's tensors lie.
// A tensor [tokens][heads][dim] with `gap` bytes after each head and token, on host and GPU.
class Tensor {
 public:
  Tensor(DType dtype, int32_t tokens, int32_t heads, int32_t dim, int64_t gap)
      : dtype_(dtype), tokens_(tokens), heads_(heads), dim_(dim) {
    head_stride_ = dim * SizeOf(dtype) + gap;
    token_stride_ = heads * head_stride_ + gap;
    host_.assign(static_cast<size_t>(tokens * token_stride_), std::byte{0xFF});
    device_ = DeviceArray<std::byte>(host_.size());
  }
  void Draw(Rng& rng) {
    ForElements([&](std::byte* at) { StoreFloat(at, dtype_, Normal(rng)); });
    device_.Write(host_);
  }
  void Poison() {
    std::ranges::fill(host_, std::byte{0xFF});
    device_.Poison();
  }
  Rows On(Tier tier) const {
    return {tier == Tier::kHost ? host_.data() : device_.get(), token_stride_, head_stride_,
            dtype_};
  }
  MutableRows Out(Tier tier) {
    return {tier == Tier::kHost ? host_.data() : device_.get(), token_stride_, head_stride_,
            dtype_};
  }
  std::vector<float> Read(Tier tier) {
    if (tier == Tier::kDevice) {
      const std::vector<std::byte> bytes = device_.Read();
      std::ranges::copy(bytes, host_.begin());
    }
    std::vector<float> values;
    ForElements([&](const std::byte* at) { values.push_back(LoadFloat(at, dtype_)); });
    return values;
  }

 private:
  template <typename Fn>
  void ForElements(const Fn& fn) {
    for (int32_t t = 0; t < tokens_; ++t) {
      for (int32_t h = 0; h < heads_; ++h) {
        for (int32_t c = 0; c < dim_; ++c) {
          fn(host_.data() + t * token_stride_ + h * head_stride_ + c * SizeOf(dtype_));
        }
      }
    }
  }

  DType dtype_;
  int32_t tokens_, heads_, dim_;
  int64_t head_stride_ = 0, token_stride_ = 0;
  std::vector<std::byte> host_;
  DeviceArray<std::byte> device_;
};

struct Tensors {
  Tensors(const Geometry& g, int32_t tokens, DType dtype, int64_t gap)
      : k(dtype, tokens, g.kv_heads, g.head_dim, gap),
        v(dtype, tokens, g.kv_heads, g.head_dim, gap),
        q(dtype, tokens, g.query_heads, g.head_dim, gap),
        out(dtype, tokens, g.query_heads, g.head_dim, gap),
        lse(DType::kF32, tokens, g.query_heads, 1, 0) {}
  void Draw(Rng& rng) {
    for (Tensor* t : {&k, &v, &q}) t->Draw(rng);
    out.Poison();
    lse.Poison();
  }
  Tensor k, v, q, out, lse;
};

struct TensorKind {
  DType dtype = DType::kBF16;
  Tier tier = Tier::kDevice;
  int64_t gap = 0;  // bytes between rows
};

}  // namespace kvstrata::cuda
