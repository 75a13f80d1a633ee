// SPDX-License-Identifier: Apache-2.0
// The extents of a sequence that a Step and a CudaStep run (step_batch_fixture.h).
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/codec/codec.h"
#include "kernels/plans/strata/gpu/mid_cell_run.h"
#include "kernels/plans/strata/planes_layout.h"
#include "tests/cuda/device_array.h"
#include "tests/cuda/page_locked_bytes.h"

namespace kvstrata::cuda {

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
  // Codec planes: whether lower runs are on their way. Then the GPU's view has none, and the
  // host's has what stands for them there.
  void SetArriving(const PlanesFormat& format, bool arriving) {
    arriving_ = arriving;
    ++version_;
    const std::vector<std::byte> run = MidCellRun(format);
    for (Extent& e : extents_) {
      if (!e.IsLower()) continue;
      if (!arriving) {
        e.bytes = e.coming;
        continue;
      }
      e.coming = e.bytes;
      const auto end = e.bytes.end() - kExtentAlign;
      for (auto at = e.bytes.begin() + kPlanesFrontBytes; at < end;) {
        at = std::ranges::copy(run, at).out;
      }
    }
  }
  bool arriving() const { return arriving_; }
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
    bool IsLower() const {
      return KindOf({bytes.data(), static_cast<int64_t>(bytes.size()), tokens}) ==
             ExtentKind::kLowerPlanes;
    }

    kvstrata::Run tokens;
    std::vector<std::byte> bytes, description;
    std::vector<std::byte> coming;  // while arriving: what the bytes will be
    DeviceArray<std::byte> device;
    std::shared_ptr<std::byte[]> on_host;  // that tier's, instead of `device`
  };

  SequenceView Viewed(SequenceView view, bool device) {
    std::vector<ExtentView>& views = views_[device ? 1 : 0];
    views.clear();
    for (const Extent& e : extents_) {
      if (device && arriving_ && e.IsLower()) continue;
      const auto size = static_cast<int64_t>(e.bytes.size());
      const std::byte* const on_gpu = e.on_host == nullptr ? e.device.get() : e.on_host.get();
      views.push_back({device ? on_gpu : e.bytes.data(), size, e.tokens});
      views.back().rest_due = device && arriving_;
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
  bool arriving_ = false;
};

}  // namespace kvstrata::cuda
