#include "server/store/series.h"

#include <algorithm>
#include <cmath>
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

}  // namespace

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

Series Series::Slice(uint32_t first, uint32_t n) const {
  return {SliceOf(surprisal, first, n), SliceOf(entropy, first, n), SliceOf(boundary, first, n)};
}

}  // namespace kvstrata
