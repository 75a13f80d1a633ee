// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/tier_records.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "server/tier/blocking_calls.h"
#include "server/tier/tier_buffers.h"

namespace kvstrata {
namespace {

constexpr std::chrono::seconds kWalkTimeout{30};
constexpr size_t kBatch = 256;  // records: a block of the disk or two each

struct Reading {
  Store* store = nullptr;
  TierRow* row = nullptr;
  std::function<void(size_t)> done;
  std::vector<PageKey> keys;
  size_t asked = 0, read = 0;
};

void Take(Reading* r, std::span<const PageKey> keys, std::span<const LoadedValue> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].size() != 1) continue;
    r->store->values().NoteRecord(keys[i], values[i].front());
    ++r->read;
  }
}

void ReadNext(const std::shared_ptr<Reading>& r) {
  const auto keys =
      std::span(r->keys).subspan(r->asked, std::min(kBatch, r->keys.size() - r->asked));
  if (keys.empty()) return r->done(r->read);
  r->asked += keys.size();
  TierLoad load;
  load.keys.assign(keys.begin(), keys.end());
  load.asked = std::chrono::steady_clock::now();
  load.take = [r, keys](size_t first, std::span<const LoadedValue> values) {
    Take(r.get(), keys.subspan(first), values);
    return true;
  };
  load.done = [r] { ReadNext(r); };
  if (!r->row->Load(std::move(load))) r->done(r->read);
}

}  // namespace

void NoteRecords(Store* store, ValueTier* values, TierRow* row,
                 std::function<void(size_t records)> done) {
  const auto r = std::make_shared<Reading>(Reading{store, row, std::move(done), {}});
  const auto deadline = std::chrono::steady_clock::now() + kWalkTimeout;
  (void)WalkAndWait(values, deadline, [&r](const TierValue& value) {
    // All other values of such keys are whole blocks.
    const bool record = value.sizes.size() == 1 && value.sizes.front() % kValueAlignment != 0;
    if (!record || value.key.size() != sizeof(PageKey)) return;
    std::ranges::copy(value.key, r->keys.emplace_back().begin());
  });
  ReadNext(r);
}

}  // namespace kvstrata
