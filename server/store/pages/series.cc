// SPDX-License-Identifier: Apache-2.0
#include "server/store/pages/series.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace kvstrata {
namespace {

template <typename T>
void PutValues(uint32_t first, const std::vector<T>& part, T missing, std::vector<T>* all) {
  if (part.empty()) return;
  if (all->size() < first + part.size()) all->resize(first + part.size(), missing);
  std::copy(part.begin(), part.end(), all->begin() + first);
}

template <typename T>
std::vector<T> SliceOf(const std::vector<T>& all, uint32_t first, uint32_t n) {
  const size_t begin = std::min<size_t>(first, all.size());
  return {all.begin() + static_cast<std::ptrdiff_t>(begin),
          all.begin() + static_cast<std::ptrdiff_t>(std::min(begin + n, all.size()))};
}

struct SeriesHeader {
  static constexpr uint32_t kVersion = 1;
  uint32_t version;
  uint32_t surprisal, entropy, boundary;  // values that follow, in this order
};
static_assert(sizeof(SeriesHeader) == 16);

template <typename T>
void Append(const std::vector<T>& values, std::vector<std::byte>* bytes) {
  const auto raw = std::as_bytes(std::span(values));
  bytes->insert(bytes->end(), raw.begin(), raw.end());
}

// REQUIRES: `bytes` has as many.
template <typename T>
std::vector<T> TakeValues(size_t n, std::span<const std::byte>* bytes) {
  std::vector<T> values(n);
  if (n != 0) std::memcpy(values.data(), bytes->data(), n * sizeof(T));
  *bytes = bytes->subspan(n * sizeof(T));
  return values;
}

template <typename T>
bool SameValues(const std::vector<T>& a, const std::vector<T>& b) {
  return std::ranges::equal(std::as_bytes(std::span(a)), std::as_bytes(std::span(b)));
}

}  // namespace

bool SameSeries(const Series& a, const Series& b) {
  return SameValues(a.surprisal, b.surprisal) && SameValues(a.entropy, b.entropy) &&
         SameValues(a.boundary, b.boundary);
}

std::vector<std::byte> Series::Encode() const {
  const auto count = [](const auto& values) { return static_cast<uint32_t>(values.size()); };
  const SeriesHeader header{SeriesHeader::kVersion, count(surprisal), count(entropy),
                            count(boundary)};
  const auto head = std::as_bytes(std::span(&header, 1));
  std::vector<std::byte> bytes(head.begin(), head.end());
  Append(surprisal, &bytes);
  Append(entropy, &bytes);
  Append(boundary, &bytes);
  return bytes;
}

std::optional<Series> Series::Parse(std::span<const std::byte> bytes) {
  SeriesHeader h;
  if (bytes.size() < sizeof(h)) return std::nullopt;
  std::memcpy(&h, bytes.data(), sizeof(h));
  bytes = bytes.subspan(sizeof(h));
  const uint64_t wanted =
      (uint64_t{h.surprisal} + h.entropy) * sizeof(float) + uint64_t{h.boundary};
  if (h.version != SeriesHeader::kVersion || bytes.size() != wanted) return std::nullopt;
  Series series;
  series.surprisal = TakeValues<float>(h.surprisal, &bytes);
  series.entropy = TakeValues<float>(h.entropy, &bytes);
  series.boundary = TakeValues<uint8_t>(h.boundary, &bytes);
  return series;
}

size_t Series::Count() const {
  const auto given = [](const std::vector<float>& values) {
    return std::ranges::count_if(values, [](float x) { return !std::isnan(x); });
  };
  return static_cast<size_t>(given(surprisal) + given(entropy)) + boundary.size();
}

uint32_t Series::LeadingSurprisals() const {
  size_t n = std::min<size_t>(1, surprisal.size());
  while (n < surprisal.size() && !std::isnan(surprisal[n])) ++n;
  return static_cast<uint32_t>(n);
}

void Series::Put(uint32_t first, const Series& part) {
  const float missing = std::numeric_limits<float>::quiet_NaN();
  PutValues(first, part.surprisal, missing, &surprisal);
  PutValues(first, part.entropy, missing, &entropy);
  PutValues(first, part.boundary, uint8_t{0}, &boundary);
}

void Series::Truncate(uint32_t tokens) {
  const auto cut = [tokens](auto* values) {
    values->resize(std::min<size_t>(values->size(), tokens));
  };
  cut(&surprisal);
  cut(&entropy);
  cut(&boundary);
}

Series Series::Slice(uint32_t first, uint32_t n) const {
  return {SliceOf(surprisal, first, n), SliceOf(entropy, first, n), SliceOf(boundary, first, n)};
}

}  // namespace kvstrata
