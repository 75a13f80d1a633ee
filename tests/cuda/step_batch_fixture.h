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
#include "kernels/codec/codec.h"
#include "kernels/step/gpu/cuda_step.h"
#include "kernels/step/step.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/elements.h"
#include "tests/cuda/page_locked_bytes.h"

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

// The extents of a sequence, which its codec's Recompressor makes of the host's pages: on the
// host, and as copies where a session reads them, those on the GPU with descriptions.
class TwinExtents {
 public:
  // Until nothing is due. surprisal: [prompt], of codec lowrank. REQUIRES: the GPU is idle.
  void Settle(const Plan& plan, const Geometry& g, SequenceView view, int32_t prompt,
              std::span<const float> surprisal) {
    if (recompressor_ == nullptr) recompressor_ = NewRecompressor(plan, g, nullptr);
    RecompressInput input;
    input.prompt_tokens = prompt;
    input.indexed_tokens = view.tokens;
    input.surprisal = surprisal;
    input.backend = FindBackend("ref").value();
    input.executor = &InlineExecutor();
    input.view = HostView(view);
    for (; recompressor_->Due(input); input.view = HostView(view)) {
      auto output = recompressor_->Run(input);
      ASSERT_TRUE(output.ok()) << output.status().ToString();
      std::vector<Extent> next;
      for (ExtentDraft& draft : output.value().extents) {
        if (draft.kept >= 0) {
          next.push_back(std::move(extents_[static_cast<size_t>(draft.kept)]));
        } else {
          next.emplace_back(std::move(draft));
        }
      }
      extents_ = std::move(next);
      ++version_;
    }
  }
  SequenceView HostView(SequenceView view) { return Viewed(view, false); }
  SequenceView DeviceView(SequenceView view) { return Viewed(view, true); }
  int32_t end() const { return extents_.empty() ? 0 : extents_.back().tokens.end; }
  size_t size() const { return extents_.size(); }
  // The description of extent `i`, to be damaged.
  std::vector<std::byte>& description(size_t i) {
    ++version_;
    return extents_[i].description;
  }

 private:
  struct Extent {
    explicit Extent(ExtentDraft draft) : tokens(draft.tokens), bytes(std::move(draft.bytes)) {
      if (draft.tier == Tier::kHost) {
        on_host = NewPageLocked(bytes.size());
        std::ranges::copy(bytes, on_host.get());
        return;
      }
      device = DeviceArray<std::byte>(bytes);
      const std::span front(bytes.data(), std::min(bytes.size(), size_t{kExtentFrontBytes}));
      const int64_t size = DescriptionBytes(front, static_cast<int64_t>(bytes.size()));
      description.assign(bytes.begin(), bytes.begin() + size);
    }
    kvstrata::Run tokens;
    std::vector<std::byte> bytes, description;
    DeviceArray<std::byte> device;
    std::shared_ptr<std::byte[]> on_host;  // that tier's, instead of `device`
  };

  SequenceView Viewed(SequenceView view, bool device) {
    std::vector<ExtentView>& views = views_[device ? 1 : 0];
    views.clear();
    for (const Extent& e : extents_) {
      const auto size = static_cast<int64_t>(e.bytes.size());
      const std::byte* const on_gpu = e.on_host == nullptr ? e.device.get() : e.on_host.get();
      views.push_back({device ? on_gpu : e.bytes.data(), size, e.tokens});
      if (!device || e.on_host != nullptr) continue;
      views.back().description = e.description.data();
      views.back().description_bytes = static_cast<int64_t>(e.description.size());
    }
    view.extents = views.data();
    view.extent_count = static_cast<int32_t>(views.size());
    view.version = version_;
    return view;
  }

  std::unique_ptr<Recompressor> recompressor_;
  std::vector<Extent> extents_;
  std::vector<ExtentView> views_[2];
  uint64_t version_ = 1;
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
