// SPDX-License-Identifier: Apache-2.0
#include "kernels/codec/head_loop.h"

#include <algorithm>

namespace kvstrata {
namespace {

bool IsCancelled(const RecompressInput& input) {
  return input.cancelled != nullptr && input.cancelled->load(std::memory_order_relaxed);
}

}  // namespace

Status ForEachHead(const RecompressInput& input, const Geometry& geometry,
                   const std::function<void(const HeadIndex&)>& fn) {
  // What the flag said to the loop counts, not what it says after it.
  std::atomic<bool> stopped = false;
  input.executor->ParallelFor(HeadCount(geometry), [&](int64_t i) {
    if (stopped.load(std::memory_order_relaxed) || IsCancelled(input)) {
      stopped.store(true, std::memory_order_relaxed);
      return;
    }
    fn({static_cast<int>(i / geometry.kv_heads), static_cast<int>(i % geometry.kv_heads),
        static_cast<size_t>(i)});
  });
  if (!stopped.load(std::memory_order_relaxed)) return OkStatus();
  return {Code::kAborted, "CANCELLED", "recompression was cancelled; nothing has changed"};
}

Status CheckRawRows(const RecompressInput& input, const Geometry& geometry, Run tokens) {
  const int32_t first = tokens.begin / geometry.page_tokens;
  const int32_t end = (tokens.end + geometry.page_tokens - 1) / geometry.page_tokens;
  for (int32_t page = first; page < end; ++page) {
    if (input.view.pages[page] != nullptr) continue;
    return FailedPrecondition("RAW_ROWS_GONE", "raw page " + std::to_string(page) +
                                                   " is released, but tokens " +
                                                   std::to_string(tokens.begin) + " to " +
                                                   std::to_string(tokens.end) + " need it");
  }
  return OkStatus();
}

std::vector<ExtentDraft> KeepFirst(const SequenceView& view, int32_t count) {
  std::vector<ExtentDraft> kept(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    kept[static_cast<size_t>(i)].kept = i;
    kept[static_cast<size_t>(i)].tokens = view.extents[i].tokens;
  }
  return kept;
}

std::vector<Run> ReleasedRows(const RecompressInput& input, int32_t end) {
  end = std::min(end, input.indexed_tokens);
  if (input.prompt_tokens < 0 || end <= 0) return {};
  return {{0, end}};
}

}  // namespace kvstrata
