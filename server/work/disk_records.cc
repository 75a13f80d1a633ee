#include "server/work/disk_records.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>
#include <vector>

#include "server/work/tier_buffers.h"

namespace kvstrata {
namespace {

constexpr size_t kBatch = 256;  // records: a block of the disk or two each

struct Reading {
  Store* store = nullptr;
  PageTier* tier = nullptr;
  std::function<void(size_t)> done;
  std::vector<PageKey> keys;
  size_t asked = 0, read = 0;
};

void Take(Reading* r, std::span<const PageKey> keys, std::span<const LoadedValue> values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].size() != 1) continue;
    r->store->NoteRecord(keys[i], values[i].front());
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
  if (!r->tier->Load(std::move(load))) r->done(r->read);
}

}  // namespace

void NoteRecords(Store* store, const DiskTier& disk, PageTier* tier,
                 std::function<void(size_t records)> done) {
  const auto r = std::make_shared<Reading>(Reading{store, tier, std::move(done), {}});
  disk.ForEach([&r](const std::string& key, std::span<const uint64_t> sizes) {
    // All other values of such keys are whole blocks.
    const bool record = sizes.size() == 1 && sizes.front() % kValueAlignment != 0;
    if (!record || key.size() != sizeof(PageKey)) return;
    std::ranges::copy(key, r->keys.emplace_back().begin());
  });
  ReadNext(r);
}

}  // namespace kvstrata
