// SPDX-License-Identifier: Apache-2.0
#include "client/cli/selection_strip.h"

#include <algorithm>

#include "client/cli/page_grid.h"

namespace kvstrata::cli {

std::string SelectionStrip(std::span<const uint32_t> selected, int cells, bool ascii) {
  if (selected.empty()) return "";
  const uint32_t most = *std::max_element(selected.begin(), selected.end());
  std::string out;
  const size_t n = selected.size();
  const auto wanted = static_cast<size_t>(cells);
  for (size_t cell = 0; cell < wanted; ++cell) {
    const size_t first = cell * n / wanted;
    const size_t end = std::max(first + 1, (cell + 1) * n / wanted);
    const uint32_t here = *std::max_element(selected.begin() + static_cast<ptrdiff_t>(first),
                                            selected.begin() + static_cast<ptrdiff_t>(end));
    out += ShadeGlyph(Shade(here, most), ascii);
  }
  return out;
}

double SelectedShare(uint64_t selected, uint64_t pages, uint64_t layers, uint64_t steps) {
  const double all = static_cast<double>(pages) * static_cast<double>(layers * steps);
  // Words of steps that have not committed are in the sum, too.
  return all == 0 ? 0 : std::min(1.0, static_cast<double>(selected) / all);
}

}  // namespace kvstrata::cli
