// SPDX-License-Identifier: Apache-2.0
// Sequences that a Step and a CudaStep run side by side: the same tokens on the host's pages and
// the GPU's, at the same places of two arenas, NaN wherever nothing was written; and, of all codecs
// but raw, the same extents.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/step/gpu/cuda_step.h"
#include "kernels/step/step.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"
#include "tests/cuda/twin_extents.h"

namespace kvstrata::cuda {

// Pieces of equal size, scattered over an arena of the host and one of the GPU.
class TwinPieces {
 public:
  TwinPieces(Rng& rng, int count, int64_t bytes)
      : host_(static_cast<size_t>(count * bytes), std::byte{0xFF}), device_(host_.size()) {
    std::vector<int64_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    for (const int64_t i : order) {
      host_pieces.push_back(host_.data() + i * bytes);
      device_pieces.push_back(device_.get() + i * bytes);
    }
  }
  // All of it random, of deviation `scale`; a block repeats, at no multiple of a row.
  void Draw(Rng& rng, DType dtype, float scale) {
    std::vector<std::byte> block(static_cast<size_t>(65521 * SizeOf(dtype)));
    for (size_t i = 0; i < block.size(); i += static_cast<size_t>(SizeOf(dtype))) {
      StoreFloat(block.data() + i, dtype, scale * Normal(rng));
    }
    for (size_t at = 0; at < host_.size(); at += block.size()) {
      std::copy_n(block.begin(), std::min(block.size(), host_.size() - at), host_.begin() + at);
    }
    device_.Write(host_);
  }

  // The same pieces hold the same bytes. REQUIRES: the GPU is idle.
  void CopyFrom(const TwinPieces& other, int64_t bytes) {
    const auto size = static_cast<size_t>(bytes);
    for (size_t i = 0; i < host_pieces.size(); ++i) {
      std::memcpy(host_pieces[i], other.host_pieces[i], size);
      Check(cudaMemcpy(device_pieces[i], other.device_pieces[i], size, cudaMemcpyDefault),
            "copying a page");
    }
  }

  // The GPU's copy of piece `i` goes to the host's memory, or back; NaN stay where it was.
  // REQUIRES: the GPU is idle.
  void Move(size_t i, bool to_host, int64_t bytes) {
    if (on_host_ == nullptr) {
      void* on_host = nullptr;
      Check(cudaMallocHost(&on_host, host_.size()), "cudaMallocHost");
      on_host_.reset(static_cast<std::byte*>(on_host));
    }
    const auto offset = host_pieces[i] - host_.data();
    std::byte* const from = device_pieces[i];
    std::byte* const to = (to_host ? on_host_.get() : device_.get()) + offset;
    if (to == from) return;
    const auto size = static_cast<size_t>(bytes);
    Check(cudaMemcpy(to, from, size, cudaMemcpyDefault), "moving a page");
    Check(cudaMemset(from, 0xFF, size), "poisoning a page");
    Check(cudaDeviceSynchronize(), "moving a page");
    device_pieces[i] = to;
  }

  std::vector<std::byte*> host_pieces, device_pieces;

 private:
  struct FreePageLocked {
    void operator()(std::byte* memory) const { cudaFreeHost(memory); }
  };
  std::vector<std::byte> host_;
  DeviceArray<std::byte> device_;
  std::unique_ptr<std::byte, FreePageLocked> on_host_;
};

// Tokens that one selection has and the other has not, and the other way round.
struct Difference {
  std::vector<int32_t> missing, extra;
  bool operator==(const Difference&) const = default;
};

struct TwinSequence {
  TwinSequence(Rng& rng, const Geometry& g, const std::string& plan_text, int32_t capacity)
      : TwinSequence(rng, g, ParsePlan(plan_text).value(), capacity) {}
  TwinSequence(Rng& rng, const Geometry& g, const Plan& plan_, int32_t capacity)
      : plan(plan_),
        on_host(std::make_unique<SequenceState>(g, plan, 0, 0)),
        on_device(std::make_unique<SequenceState>(g, plan, 0, 0)),
        pages(rng, capacity / g.page_tokens + 1, g.page_bytes()),
        blocks(rng, on_host->index().BlocksFor(capacity) + 1,
               std::max<int64_t>(on_host->index().block_bytes, 64)) {}

  SequenceView HostView() const {
    return extents->HostView({.pages = pages.host_pieces.data(),
                              .index_blocks = blocks.host_pieces.data(),
                              .tokens = on_host->tokens()});
  }
  SequenceView DeviceView() const {
    return extents->DeviceView({.pages = pages.device_pieces.data(),
                                .index_blocks = blocks.device_pieces.data(),
                                .tokens = on_device->tokens(),
                                .host_pages = host_pages.empty() ? nullptr : host_pages.data()});
  }
  // Page `i`, which is complete, goes to the host's memory, or back.
  void MovePage(const Geometry& g, size_t i, bool to_host) {
    host_pages.resize(pages.device_pieces.size());
    host_pages[i] = to_host ? 1 : 0;
    pages.Move(i, to_host, g.page_bytes());
    if (std::ranges::count(host_pages, 1) == 0) host_pages.clear();
  }
  int32_t CompletePages(const Geometry& g) const { return on_device->tokens() / g.page_tokens; }
  // Makes the extents that are due. Nobody may read the GPU's rows of them any more: they become
  // NaN.
  void Recompress(const Geometry& g, std::span<const float> surprisal = {}) {
    Check(cudaDeviceSynchronize(), "the steps before");
    extents->Settle(plan, g, HostView(), on_host->prompt_tokens(), surprisal);
    for (int32_t i = 0; i < extents->end() / g.page_tokens; ++i) {
      Check(cudaMemset(pages.device_pieces[static_cast<size_t>(i)], 0xFF,
                       static_cast<size_t>(g.page_bytes())),
            "poisoning a page");
    }
    Check(cudaDeviceSynchronize(), "poisoning pages");
  }
  // The prompt is complete.
  void ClosePrompt(const Backend& backend) {
    ASSERT_TRUE(on_host->Refresh(HostView()).ok());
    ASSERT_TRUE(on_host->PrefillDone(HostView(), backend, InlineExecutor()).ok());
    ASSERT_TRUE(on_device->ClosePrompt().ok());
  }
  // A fork on pages of its own. REQUIRES: the GPU is idle.
  std::unique_ptr<TwinSequence> Fork(Rng& rng, const Geometry& g, int32_t capacity) const {
    auto child = std::make_unique<TwinSequence>(rng, g, plan, capacity);
    child->pages.CopyFrom(pages, g.page_bytes());
    child->blocks.CopyFrom(blocks, on_host->index().block_bytes);
    child->on_host = on_host->Clone();
    child->on_device = on_device->Clone();
    child->tied = tied;
    child->bounded = bounded;
    return child;
  }
  void SetArriving(const Geometry& g, bool arriving) {
    extents->SetArriving({g.head_dim, plan.planes.unit, plan.planes.keep}, arriving);
  }
  // As it is opened on what is packed: the prompt is not complete, and raw rows of that are gone.
  void Reopen(const Geometry& g) {
    Hold(g, extents->end());
    for (int32_t i = 0; i < extents->end() / g.page_tokens; ++i) {
      const auto page = static_cast<size_t>(i);
      pages.host_pieces[page] = pages.device_pieces[page] = nullptr;
    }
  }
  // Both hold `tokens`, as of a prefix that is held without an index.
  void Hold(const Geometry& g, int32_t tokens) {
    on_host = std::make_unique<SequenceState>(g, plan, tokens, 0);
    on_device = std::make_unique<SequenceState>(g, plan, tokens, 0);
    bounded = tokens;
  }
  // What was committed since the last report: one token in `every` ends a sentence.
  void ReportBoundaries(Rng& rng, int every) {
    std::vector<uint8_t> ends(static_cast<size_t>(on_host->tokens() - bounded));
    for (uint8_t& end : ends) end = Below(rng, every) == 0 ? 1 : 0;
    const auto count = static_cast<int32_t>(ends.size());
    for (SequenceState* state : {on_host.get(), on_device.get()}) {
      const Status reported = state->Report(bounded, count, nullptr, nullptr, ends.data());
      ASSERT_TRUE(reported.ok()) << reported.ToString();
    }
    bounded += count;
  }
  void ForgetIndex(const Geometry& g) { Hold(g, on_host->tokens()); }
  // Clones go on for both.
  void Clone() {
    on_host = on_host->Clone();
    on_device = on_device->Clone();
  }
  // An array that the selector keeps on the host.
  template <typename T>
  static std::vector<T> Inspected(const SequenceState& state, const SequenceView& view,
                                  const char* name) {
    const auto array = state.Inspect(view, *FindBackend("ref").value(), InlineExecutor(), name);
    EXPECT_TRUE(array.ok()) << array.status().ToString();
    std::vector<T> values(array.value().bytes.size() / sizeof(T));
    std::memcpy(values.data(), array.value().bytes.data(), array.value().bytes.size());
    return values;
  }

  Plan plan;
  std::unique_ptr<SequenceState> on_host, on_device;
  TwinPieces pages, blocks;
  std::unique_ptr<TwinExtents> extents = std::make_unique<TwinExtents>();
  // By layer: where near-ties made the last selection of selector vote another one; hits keep it.
  std::map<int, Difference> tied;
  int32_t bounded = 0;              // tokens whose boundaries were reported
  std::vector<uint8_t> host_pages;  // as of SequenceView; empty: none
};

}  // namespace kvstrata::cuda
