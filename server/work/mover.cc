// SPDX-License-Identifier: Apache-2.0
#include "server/work/mover.h"

#include <algorithm>
#include <optional>

#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kMovePatience = 15;

}  // namespace

Mover::Mover(const MoverOptions& options, Store* store)
    : bytes_per_second_(options.bytes_per_second), store_(store) {
  thread_ = StartThread("kvs-move", [this] { Run(); });
  store_->moves().SetMoveSink([this] {
    {
      MutexLock lock(mu_);
      work_ = true;
    }
    wake_.notify_one();
  });
}

Mover::~Mover() {
  store_->moves().SetMoveSink(nullptr);
  {
    MutexLock lock(mu_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

bool Mover::AwaitWork() {
  std::unique_lock<std::mutex> lock(mu_.native());
  return [&]() KVS_NO_THREAD_SAFETY_ANALYSIS {
    wake_.wait(lock, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return work_ || stopping_; });
    work_ = false;
    return !stopping_;
  }();
}

bool Mover::AwaitTime(Clock::time_point at) {
  std::unique_lock<std::mutex> lock(mu_.native());
  return !wake_.wait_until(lock, at, [this]() KVS_NO_THREAD_SAFETY_ANALYSIS { return stopping_; });
}

void Mover::Run() {
  Heartbeat beat("kvs-move", kMovePatience);
  while (AwaitWork()) {
    for (auto next = Clock::now();;) {
      const auto began = Clock::now();
      std::optional<uint64_t> bytes;
      Survive("kvs-move", [&] {
        const LoopIteration iteration(&beat);
        bytes = store_->moves().MoveSome(kPieceBytes);
      });
      if (!bytes) break;
      if (const uint64_t rate = bytes_per_second_; rate != 0) {
        const std::chrono::duration<double> takes(static_cast<double>(*bytes) /
                                                  static_cast<double>(rate));
        next = std::max(next, began) + std::chrono::duration_cast<Clock::duration>(takes);
      }
      if (!AwaitTime(next)) return;
    }
  }
}

}  // namespace kvstrata
