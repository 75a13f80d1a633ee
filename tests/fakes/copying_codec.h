// SPDX-License-Identifier: Apache-2.0
// CopyingCodec: a Recompressor for tests of the daemon. Its extents hold the first 128 bytes of
// each token (layer 0, head 0: the canary of tests/server/store_fixture.h) of `unit` tokens each,
// and it needs no raw rows from `released_from` to its last extent or `released_to`. What it does
// besides, a test decides.
//
// Thread-safety: the control from any thread; a Recompressor as kernels/codec/codec.h says.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/codec/codec.h"
#include "kernels/codec/extent_bytes.h"

namespace kvstrata::testing {

struct CodecControl {
  int32_t unit = 32;
  std::atomic<int32_t> released_from{0}, released_to{std::numeric_limits<int32_t>::max()};
  std::atomic<int> runs{0};           // begun
  std::atomic<bool> merge{false};     // one extent instead of one more: old ones are replaced
  std::atomic<bool> nonsense{false};  // drafts that make no sense
  std::atomic<Tier> tier{Tier::kDevice};
  std::atomic<int64_t> padding{0};  // bytes behind an extent's rows
  std::mutex mu;
  Status fail;        // guarded by mu
  bool hold = false;  // Run waits until it is false, or it was cancelled
  std::condition_variable changed;

  void Hold(bool on) {
    std::lock_guard lock(mu);
    hold = on;
    changed.notify_all();
  }
  void Fail(Status status) {
    std::lock_guard lock(mu);
    fail = std::move(status);
  }
};

class CopyingCodec final : public Recompressor {
 public:
  CopyingCodec(std::shared_ptr<CodecControl> control, const Geometry& geometry)
      : control_(std::move(control)), geometry_(geometry) {}

  bool Due(const RecompressInput& in) const override { return Target(in) > Done(in); }
  int64_t ReleasableBytes(const RecompressInput& in) const override {
    return int64_t{Target(in) - Done(in)} * 256;
  }
  RecompressReads Reads(const RecompressInput& in) const override {
    RecompressReads reads{{0, in.view.tokens}, {}};
    for (int32_t i = 0; i < in.view.extent_count; ++i) reads.extents.push_back(i);
    return reads;
  }
  std::unique_ptr<Recompressor> Clone() const override {
    return std::make_unique<CopyingCodec>(*this);
  }

  Result<RecompressOutput> Run(const RecompressInput& in) override {
    ++control_->runs;
    KVS_RETURN_IF_ERROR(Wait(in));
    RecompressOutput out;
    const int32_t target = Target(in);
    const bool merge = control_->merge;
    int32_t begin = merge ? 0 : Done(in);
    if (!merge) {
      for (int32_t i = 0; i < in.view.extent_count; ++i) {
        out.extents.push_back({i, {}, in.view.extents[i].tokens, Tier::kDevice});
      }
    }
    for (; begin < target; begin = merge ? target : begin + control_->unit) {
      const kvstrata::Run tokens{begin, merge ? target : begin + control_->unit};
      out.extents.push_back({-1, Rows(in, tokens), tokens, control_->tier});
    }
    if (control_->nonsense) out.extents.push_back({7, {}, {0, 1}, Tier::kDevice});
    const kvstrata::Run released{control_->released_from,
                                 std::min(target, control_->released_to.load())};
    if (released.begin < released.end) out.released = {released};
    return out;
  }

 private:
  static int32_t Done(const RecompressInput& in) {
    const int32_t n = in.view.extent_count;
    return n == 0 ? 0 : in.view.extents[n - 1].tokens.end;
  }
  int32_t Target(const RecompressInput& in) const {
    return in.view.tokens / control_->unit * control_->unit;
  }

  Status Wait(const RecompressInput& in) {
    std::unique_lock lock(control_->mu);
    const auto free = [&] { return !control_->hold || in.cancelled->load(); };
    while (!control_->changed.wait_for(lock, std::chrono::milliseconds(1), free)) {
    }
    if (in.cancelled->load()) return {Code::kAborted, "CANCELLED", "cancelled"};
    return control_->fail;
  }

  // A row of the view, from its page or from the extent that holds it.
  static const std::byte* Row(const RecompressInput& in, int32_t t) {
    if (const std::byte* page = in.view.pages[t / 16]; page != nullptr) return page + t % 16 * 128;
    for (int32_t i = 0; i < in.view.extent_count; ++i) {
      const ExtentView& e = in.view.extents[i];
      if (e.tokens.begin > t || t >= e.tokens.end) continue;
      return e.data + sizeof(ExtentHeader) + (t - e.tokens.begin) * 128;
    }
    return nullptr;
  }

  std::vector<std::byte> Rows(const RecompressInput& in, kvstrata::Run tokens) const {
    const auto n = static_cast<size_t>(tokens.end - tokens.begin);
    ExtentWriter writer;
    const uint64_t at = writer.Reserve(static_cast<int64_t>(n) * 128 + control_->padding.load());
    writer.Allocate();
    for (size_t i = 0; i < n; ++i) {
      std::memcpy(writer.At<std::byte>(at + i * 128),
                  Row(in, tokens.begin + static_cast<int32_t>(i)), 128);
    }
    return writer.Finish(ExtentKind::kRawRows, geometry_, tokens, 0);
  }

  std::shared_ptr<CodecControl> control_;
  Geometry geometry_;
};

}  // namespace kvstrata::testing
