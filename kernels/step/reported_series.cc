// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/reported_series.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace kvstrata {
namespace {

constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
constexpr size_t kIdsAhead = 4096;
constexpr int32_t kAnywhere = std::numeric_limits<int32_t>::max();

// Where a series may go on: at its end, or, behind that, anywhere from there to `held` + `more`.
Status CheckOrder(std::string_view series, size_t length, int32_t first, int32_t held,
                  int32_t more) {
  const auto next = static_cast<int32_t>(length);
  if (first >= next && first <= std::max(next, held + more)) return OkStatus();
  const bool gap = first >= next;
  std::string text = std::string(series) + " from position " + std::to_string(first) +
                     (gap ? ": a gap" : ": already reported") + "; go on at position " +
                     std::to_string(gap ? std::max(next, held) : next);
  if (gap && more > 0 && next <= held) text += " or " + std::to_string(held + more);
  return InvalidArgument("REPORT_ORDER", text);
}

Status CheckValues(std::string_view series, const float* values, int32_t first, int32_t n) {
  for (int32_t i = 0; i < n; ++i) {
    if (std::isfinite(values[i]) && values[i] >= 0) continue;
    return InvalidArgument(
        "REPORT_VALUE", std::string(series) + " of position " + std::to_string(first + i) + " is " +
                            std::to_string(values[i]) + "; allowed are finite nats >= 0");
  }
  return OkStatus();
}

Status CheckBoundaries(const uint8_t* values, int32_t first, int32_t n) {
  for (int32_t i = 0; i < n; ++i) {
    if (values[i] <= 1) continue;
    return InvalidArgument("REPORT_VALUE", "boundary of position " + std::to_string(first + i) +
                                               " is " + std::to_string(values[i]) +
                                               "; allowed are 0 and 1");
  }
  return OkStatus();
}

template <typename T>
void Extend(const T* values, int32_t first, int32_t n, T none, std::vector<T>* series) {
  if (values == nullptr || n == 0) return;
  series->resize(first, none);
  series->insert(series->end(), values, values + n);
}

}  // namespace

Status ReportedSeries::Add(int32_t first, int32_t n, const float* surprisal, const float* entropy,
                           const uint8_t* boundary) {
  if (surprisal != nullptr) {
    KVS_RETURN_IF_ERROR(CheckOrder("surprisal", surprisal_.size(), first, held_tokens_, 1));
    KVS_RETURN_IF_ERROR(CheckValues("surprisal", surprisal, first, n));
  }
  if (entropy != nullptr) {
    KVS_RETURN_IF_ERROR(CheckOrder("entropy", entropy_.size(), first, kAnywhere, 0));
    KVS_RETURN_IF_ERROR(CheckValues("entropy", entropy, first, n));
  }
  if (boundary != nullptr) {
    if (!boundary_marked_) {
      KVS_RETURN_IF_ERROR(CheckOrder("boundary", boundary_.size(), first, held_tokens_, 0));
    }
    KVS_RETURN_IF_ERROR(CheckBoundaries(boundary, first, n));
  }
  if (const int32_t skipped = SkippedPosition(first, surprisal); skipped >= 0) {
    const float nothing = 0;
    Extend(&nothing, skipped, 1, kNone, &surprisal_);
  }
  Extend(surprisal, first, n, kNone, &surprisal_);
  Extend(entropy, first, n, kNone, &entropy_);
  if (boundary != nullptr && boundary_marked_) {
    boundary_.resize(std::max(boundary_.size(), static_cast<size_t>(first) + n), uint8_t{0});
    std::copy_n(boundary, n, boundary_.begin() + first);
  } else {
    Extend(boundary, first, n, uint8_t{0}, &boundary_);
  }
  return OkStatus();
}

// A report of nothing skips it too: the position may be the prompt's last.
int32_t ReportedSeries::SkippedPosition(int32_t first, const float* surprisal) const {
  const bool skips = surprisal != nullptr && first == held_tokens_ + 1 &&
                     static_cast<int32_t>(surprisal_.size()) <= held_tokens_;
  return skips ? held_tokens_ : -1;
}

void ReportedSeries::NoteTokens(int32_t first, std::span<const int32_t> ids,
                                std::span<const int32_t> ends) {
  // What a prompt is opened with is all there: its first step should not have to copy it.
  if (first == 0) ids_.reserve(ids.size() + kIdsAhead);
  ids_.resize(static_cast<size_t>(first));
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  if (ends.empty() || ids.empty()) return;
  boundary_marked_ = true;
  const size_t end = static_cast<size_t>(first) + ids.size();
  if (boundary_.size() < end) boundary_.resize(end, uint8_t{0});
  for (size_t i = 0; i < ids.size(); ++i) {
    boundary_[static_cast<size_t>(first) + i] = std::ranges::binary_search(ends, ids[i]) ? 1 : 0;
  }
}

void ReportedSeries::HoldBoundaries(std::span<const uint8_t> ends) {
  if (ends.empty()) return;
  boundary_marked_ = true;
  if (boundary_.size() < ends.size()) boundary_.resize(ends.size(), uint8_t{0});
  std::ranges::copy(ends, boundary_.begin());
}

std::span<const int32_t> ReportedSeries::TailIds(uint32_t tokens, uint32_t tail) const {
  if (tokens > ids_.size()) return {};
  return std::span(ids_).first(tokens).last(tail);
}

void ReportedSeries::Truncate(int32_t tokens) {
  const auto cut = [tokens](auto* series) {
    series->resize(std::min(series->size(), static_cast<size_t>(tokens)));
  };
  cut(&entropy_);
  cut(&surprisal_);
  cut(&boundary_);
  cut(&ids_);
  held_tokens_ = std::min(held_tokens_, tokens);
  surprisal_held_ = std::min(surprisal_held_, tokens);
}

std::optional<InspectArray> ReportedSeries::Inspect(std::string_view name) const {
  if (name == "entropy") return ArrayOf(InspectArray::Type::kF32, entropy_);
  if (name == "surprisal") return ArrayOf(InspectArray::Type::kF32, surprisal_);
  if (name == "boundary") return ArrayOf(InspectArray::Type::kU8, boundary_);
  return std::nullopt;
}

}  // namespace kvstrata
