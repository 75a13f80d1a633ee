// SPDX-License-Identifier: Apache-2.0
// A sequence whose groups of planes are sealed on one machine: by a GPU's packer where its pages
// lie, or on the host. What both make is compared.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/plans/strata/planes_recompressor.h"
#include "tests/kernels/verify_extent.h"

namespace kvstrata {

// Copies of a GPU's memory.
using ReadBytes = std::function<void(std::byte* to, const std::byte* from, size_t bytes)>;

// Memory of the host that a GPU reads.
struct HostBytes {
  ReadBytes read;
  std::function<std::shared_ptr<std::byte[]>(uint64_t bytes)> allocate;
};

class SealedPlanes {
 public:
  // packers: null: on the host. on_host: for extents of that tier that a packer makes.
  SealedPlanes(std::unique_ptr<Recompressor> recompressor, std::byte* const* pages,
               const GpuPackers* packers, HostBytes on_host = {})
      : recompressor_(std::move(recompressor)),
        pages_(pages),
        packers_(packers),
        on_host_(std::move(on_host)) {}

  RecompressInput Input(int32_t tokens) {
    views_.clear();
    for (const ExtentDraft& d : extents_) {
      const auto front = static_cast<int64_t>(d.bytes.size());
      if (d.on_device.data == nullptr) {
        views_.push_back({d.bytes.data(), front, d.tokens});
      } else {
        const bool on_host = d.tier == Tier::kHost;
        views_.push_back({d.on_device.data.get(), static_cast<int64_t>(d.on_device.size), d.tokens,
                          on_host ? nullptr : d.bytes.data(), on_host ? 0 : front});
      }
    }
    RecompressInput input;
    input.view.pages = pages_;
    input.view.tokens = tokens;
    input.view.extents = views_.data();
    input.view.extent_count = static_cast<int32_t>(views_.size());
    input.backend = *FindBackend("ref");
    input.executor = &InlineExecutor();
    input.gpu_packers = packers_;
    return input;
  }
  // Until nothing is due.
  void Settle(int32_t tokens) {
    for (RecompressInput input = Input(tokens); recompressor_->Due(input); input = Input(tokens)) {
      EXPECT_EQ(recompressor_->Reads(input).in_place, packers_ != nullptr);
      Result<RecompressOutput> output = recompressor_->Run(input);
      ASSERT_TRUE(output.ok()) << output.status().ToString();
      for (ExtentDraft& d : output->extents) {
        if (d.kept >= 0) {
          d = std::move(extents_[static_cast<size_t>(d.kept)]);
        } else if (d.on_device.data != nullptr && d.tier == Tier::kHost) {
          MoveToHost(&d);
        }
      }
      extents_ = std::move(output->extents);
    }
  }
  Recompressor& recompressor() { return *recompressor_; }
  const std::vector<ExtentDraft>& extents() const { return extents_; }

 private:
  // As a store does.
  void MoveToHost(ExtentDraft* draft) const {
    const std::shared_ptr<std::byte[]> memory = on_host_.allocate(draft->on_device.size);
    on_host_.read(memory.get(), draft->on_device.data.get(), draft->on_device.size);
    std::ranges::copy(draft->bytes, memory.get());
    draft->on_device.data = {memory, memory.get()};
  }

  const std::unique_ptr<Recompressor> recompressor_;
  std::byte* const* const pages_;
  const GpuPackers* const packers_;
  const HostBytes on_host_;
  std::vector<ExtentDraft> extents_;
  std::vector<ExtentView> views_;
};

// An extent that a GPU made is one of the host's, but for what headers say of who made it.
inline void ExpectSameExtent(const ExtentDraft& of_gpu, const ExtentDraft& of_host,
                             const ReadBytes& read) {
  ASSERT_EQ(of_gpu.tokens, of_host.tokens);
  ASSERT_NE(of_gpu.on_device.data, nullptr);
  const std::vector<std::byte>& want = of_host.bytes;
  std::vector<std::byte> got(of_gpu.on_device.size);
  ASSERT_EQ(got.size(), want.size());
  read(got.data(), of_gpu.on_device.data.get(), got.size());
  std::ranges::copy(of_gpu.bytes, got.begin());
  EXPECT_TRUE(VerifyExtent(got).ok());
  ExtentHeader a, b;
  std::memcpy(&a, got.data(), sizeof(a));
  std::memcpy(&b, want.data(), sizeof(b));
  EXPECT_EQ(a.flags, kExtentUnhashed);
  a.flags = b.flags;
  a.checksum = b.checksum;
  EXPECT_EQ(std::memcmp(&a, &b, sizeof(a)), 0) << "headers";
  int64_t different = 0, first = -1;
  for (size_t i = sizeof(a); i < got.size(); ++i) {
    if (got[i] == want[i]) continue;
    if (different++ == 0) first = static_cast<int64_t>(i);
  }
  EXPECT_EQ(different, 0) << "bytes of " << got.size() << "; the first is byte " << first;
}

inline void ExpectSameExtents(const SealedPlanes& gpu, const SealedPlanes& host,
                              const ReadBytes& read) {
  ASSERT_EQ(gpu.extents().size(), host.extents().size());
  for (size_t i = 0; i < host.extents().size(); ++i) {
    SCOPED_TRACE("extent " + std::to_string(i));
    ASSERT_NO_FATAL_FAILURE(ExpectSameExtent(gpu.extents()[i], host.extents()[i], read));
  }
}

}  // namespace kvstrata
