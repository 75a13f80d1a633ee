// SPDX-License-Identifier: Apache-2.0
#include "server/store/references/watermarks.h"

#include <algorithm>
#include <utility>

#include "server/store/books/books.h"

namespace kvstrata {
namespace {

uint64_t Percent(uint64_t bytes, uint32_t percent) { return bytes / 100 * percent; }

}  // namespace

uint64_t Watermarks::HighMark(PoolId pool) const {
  return Percent(books_.memory.capacity(pool), settings_.high_percent);
}

uint64_t Watermarks::LowMark(PoolId pool) const {
  return Percent(books_.memory.capacity(pool),
                 std::min(settings_.low_percent, settings_.high_percent));
}

void Watermarks::SetWake(std::function<void()> wake) { wake_ = std::move(wake); }

void Watermarks::NoteFill() const {
  if (!wake_) return;
  for (const PoolId pool : books_.memory.ids()) {
    const bool over = books_.pools.taken(pool) > books_.memory.capacity(pool);
    if (over || books_.pools.used(pool) > HighMark(pool)) return wake_();
  }
}

}  // namespace kvstrata
