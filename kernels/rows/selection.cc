// SPDX-License-Identifier: Apache-2.0
#include "kernels/rows/selection.h"

#include <algorithm>

namespace kvstrata {

Selection Selection::Full(int32_t n) {
  Selection selection;
  selection.SetFull(n);
  return selection;
}

void Selection::SetFull(int32_t n) {
  Reset(n, 1);
  full = true;
  if (n > 0) runs[0].push_back({0, n});
}

void Selection::Reset(int32_t n, int group_count) {
  tokens = n;
  full = false;
  scored_bytes = 0;
  runs.resize(group_count);
  units.resize(group_count);
  coarse.clear();
  fine.reset();
  for (auto& list : runs) list.clear();
  for (auto& list : units) list.clear();
}

std::vector<Run> Normalize(std::vector<Run> runs) {
  std::erase_if(runs, [](const Run& r) { return r.begin >= r.end; });
  std::ranges::sort(runs, {}, &Run::begin);
  std::vector<Run> out;
  for (const Run& run : runs) AppendRun(run, &out);
  return out;
}

int GroupsOf(const Selection& selection) {
  return static_cast<int>(std::max(selection.runs.size(), selection.units.size()));
}

std::span<const int32_t> UnitsOf(const Selection& selection, int group) {
  const auto& units = selection.units;
  if (units.empty()) return {};  // full and window have none
  return units[units.size() * static_cast<size_t>(group) /
               static_cast<size_t>(GroupsOf(selection))];
}

}  // namespace kvstrata
