// SPDX-License-Identifier: Apache-2.0
#include "server/work/tiers/pin_records.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "server/tier/blocking_calls.h"
#include "server/tier/tier_buffers.h"

namespace kvstrata {
namespace {

constexpr std::chrono::seconds kWalkTimeout{30};
constexpr size_t kRecordBatch = 256;  // records: a block of the disk or two each

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
      std::span(r->keys).subspan(r->asked, std::min(kRecordBatch, r->keys.size() - r->asked));
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

using SteadyClock = std::chrono::steady_clock;
using SystemClock = std::chrono::system_clock;

constexpr std::string_view kPrefix = "pin/";

// Little-endian; the tenant, the model's name and the keys follow it.
struct Record {
  uint32_t version = 1;
  uint32_t page_tokens = 0;
  uint32_t tenant_bytes = 0;
  uint32_t model_bytes = 0;
  uint64_t pin = 0;
  uint64_t bytes = 0;
  int64_t expires_us = 0;  // since 1970
  uint64_t pages = 0;
  uint64_t index_blocks = 0;
};
static_assert(sizeof(Record) == 56);

int64_t UnixUs(SteadyClock::time_point at) {
  const auto when = SystemClock::now() + (at - SteadyClock::now());
  return std::chrono::duration_cast<std::chrono::microseconds>(when.time_since_epoch()).count();
}

SteadyClock::time_point FromUnixUs(int64_t us) {
  const SystemClock::time_point when{std::chrono::microseconds(us)};
  return SteadyClock::now() +
         std::chrono::duration_cast<SteadyClock::duration>(when - SystemClock::now());
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

std::string PinRecordName(uint64_t pin) {
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(pin));
  return std::string(kPrefix) + digits;
}

TierPut EncodePin(const PrefixPin& pin) {
  Record record;
  record.page_tokens = pin.page_tokens;
  record.tenant_bytes = static_cast<uint32_t>(pin.tenant.size());
  record.model_bytes = static_cast<uint32_t>(pin.model_name.size());
  record.pin = pin.id;
  record.bytes = pin.bytes;
  record.expires_us = UnixUs(pin.expires);
  record.pages = pin.pages.size();
  record.index_blocks = pin.index_blocks.size();
  const uint64_t bytes =
      sizeof(record) + pin.tenant.size() + pin.model_name.size() +
      sizeof(PageKey) * (pin.pages.size() + pin.index_blocks.size() + pin.artefact.size());
  const std::shared_ptr<std::byte> memory = HeapBuffers(WholeBlocks(bytes));
  std::byte* to = memory.get();
  const auto add = [&to](const void* from, size_t n) {
    if (n != 0) std::memcpy(to, from, n);
    to += n;
  };
  add(&record, sizeof(record));
  add(pin.tenant.data(), pin.tenant.size());
  add(pin.model_name.data(), pin.model_name.size());
  add(pin.pages.data(), sizeof(PageKey) * pin.pages.size());
  add(pin.index_blocks.data(), sizeof(PageKey) * pin.index_blocks.size());
  add(pin.artefact.data(), sizeof(PageKey) * pin.artefact.size());
  return {
      PinRecordName(pin.id), {std::span<const std::byte>(memory.get(), bytes)}, memory, {}, true};
}

std::optional<PrefixPin> DecodePin(std::span<const std::byte> bytes) {
  Record record;
  if (bytes.size() < sizeof(record)) return std::nullopt;
  std::memcpy(&record, bytes.data(), sizeof(record));
  const uint64_t keys = (bytes.size() - sizeof(record)) / sizeof(PageKey);
  if (record.version != 1 || record.pages > keys || record.index_blocks > keys) return std::nullopt;
  const uint64_t want = sizeof(record) + uint64_t{record.tenant_bytes} + record.model_bytes +
                        sizeof(PageKey) * (record.pages + record.index_blocks);
  if (bytes.size() < want || (bytes.size() - want) % sizeof(PageKey) != 0) return std::nullopt;
  const std::byte* from = bytes.data() + sizeof(record);
  const auto take = [&from](void* to, size_t n) {
    if (n != 0) std::memcpy(to, from, n);
    from += n;
  };
  PrefixPin pin;
  pin.id = record.pin;
  pin.page_tokens = record.page_tokens;
  pin.bytes = record.bytes;
  pin.expires = FromUnixUs(record.expires_us);
  pin.tenant.resize(record.tenant_bytes);
  take(pin.tenant.data(), pin.tenant.size());
  pin.model_name.resize(record.model_bytes);
  take(pin.model_name.data(), pin.model_name.size());
  pin.pages.resize(record.pages);
  take(pin.pages.data(), sizeof(PageKey) * pin.pages.size());
  pin.index_blocks.resize(record.index_blocks);
  take(pin.index_blocks.data(), sizeof(PageKey) * pin.index_blocks.size());
  pin.artefact.resize((bytes.size() - want) / sizeof(PageKey));
  take(pin.artefact.data(), sizeof(PageKey) * pin.artefact.size());
  return pin;
}

Status ErasePin(ValueTier* tier, uint64_t pin, Deadline deadline) {
  const std::string record = PinRecordName(pin);
  return ForgetAndWait(tier, {&record, 1}, deadline, true);
}

std::vector<PrefixPin> ReadPins(ValueTier* tier, Deadline deadline) {
  std::vector<TierGet> gets;
  // What a walk that fails has found is read all the same.
  (void)WalkAndWait(tier, deadline, [&gets](const TierValue& value) {
    const std::string& key = value.key;
    if (!key.starts_with(kPrefix) || key.size() != PinRecordName(0).size()) return;
    if (value.sizes.size() != 1) return;
    gets.push_back(NewTierGet(key, value.sizes, nullptr));
  });
  GetAndWait(tier, gets, deadline);
  std::vector<PrefixPin> pins;
  for (const TierGet& get : gets) {
    if (!get.status.ok()) continue;
    std::optional<PrefixPin> pin = DecodePin(get.buffers.front());
    if (pin && PinRecordName(pin->id) == get.key) pins.push_back(std::move(*pin));
  }
  std::ranges::sort(pins, {}, &PrefixPin::id);
  return pins;
}

}  // namespace kvstrata
