// SPDX-License-Identifier: Apache-2.0
#include "tests/fakes/memory_value_tier.h"

#include <cstring>
#include <functional>
#include <utility>

namespace kvstrata::testing {
namespace {

enum Lane : size_t { kReads, kWrites, kLanes };

size_t ChecksumOf(std::string_view bytes) { return std::hash<std::string_view>()(bytes); }

template <typename Buffers>
Status CheckValue(const std::string& key, const Buffers& buffers) {
  const auto empty = [](const auto& buffer) { return buffer.empty(); };
  const bool sound = !key.empty() && key.size() <= kMaxValueKeyBytes && !buffers.empty() &&
                     buffers.size() <= kMaxValueBuffers && std::ranges::none_of(buffers, empty);
  return sound ? OkStatus() : InvalidArgument("TIER_VALUE", "no such key or buffers");
}

}  // namespace

uint64_t MemoryValueTier::Value::bytes() const {
  uint64_t sum = 0;
  for (const std::string& buffer : buffers) sum += buffer.size();
  return sum;
}

MemoryValueTier::MemoryValueTier(uint64_t capacity_bytes) : capacity_(capacity_bytes) {
  stats_.capacity_bytes = capacity_bytes;
  for (size_t i = 0; i <= kLanes; ++i) {
    threads_.emplace_back([this] {
      while (std::optional<CallQueue::Task> task = queue_.Next()) queue_.Run(std::move(*task));
    });
  }
}

MemoryValueTier::~MemoryValueTier() {
  queue_.Stop();
  for (std::thread& thread : threads_) thread.join();
}

void MemoryValueTier::Hold() {
  const std::lock_guard lock(mu_);
  held_ = true;
}

void MemoryValueTier::Release() {
  const std::lock_guard lock(mu_);
  held_ = false;
  released_.notify_all();
}

void MemoryValueTier::Damage(const std::string& key) {
  const std::lock_guard lock(mu_);
  values_.at(key).buffers.front().front() ^= 1;
}

template <typename Request, typename One>
void MemoryValueTier::ForEach(std::span<Request> requests, const TierCall& call, const One& one) {
  for (Request& request : requests) {
    std::unique_lock lock(mu_);
    (void)released_.wait_until(lock, call.cancel, call.deadline, [this] { return !held_; });
    request.status = WhyNotNow(call);
    if (request.status.ok()) request.status = one(&request);
  }
}

template <typename Request, typename One>
void MemoryValueTier::Add(size_t lane, std::span<Request> requests, TierCall call, One one) {
  queue_.Add(lane,
             {std::move(call), [=, this](const TierCall& terms) { ForEach(requests, terms, one); },
              [requests](const Status& why) {
                for (Request& request : requests) request.status = why;
              }});
}

void MemoryValueTier::Probe(std::span<TierProbe> probes, TierCall call) {
  {
    const std::lock_guard lock(mu_);
    for (TierProbe& probe : probes) {
      const auto it = values_.find(probe.key);
      std::vector<uint64_t> sizes;
      if (it != values_.end()) {
        for (const std::string& buffer : it->second.buffers) sizes.push_back(buffer.size());
      }
      probe.sizes = ValueSizes(sizes);
    }
  }
  call.done();
}

void MemoryValueTier::Get(std::span<TierGet> gets, TierCall call) {
  Add(kReads, gets, std::move(call), [this](TierGet* get) { return GetOne(get); });
}

Status MemoryValueTier::GetOne(TierGet* get) {
  const auto it = values_.find(get->key);
  stats_.misses += it == values_.end();
  if (it == values_.end()) return NotFound("TIER_MISS", "no such key");
  KVS_RETURN_IF_ERROR(CheckValue(get->key, get->buffers));
  const Value& value = it->second;
  bool fits = get->buffers.size() == value.buffers.size();
  for (size_t i = 0; fits && i < value.buffers.size(); ++i) {
    fits = get->buffers[i].size() == value.buffers[i].size();
  }
  if (!fits) return InvalidArgument("TIER_VALUE", "the value was put with other sizes");
  for (size_t i = 0; i < value.buffers.size(); ++i) {
    if (ChecksumOf(value.buffers[i]) == value.checksums[i]) continue;
    Erase(it);
    ++stats_.damaged;
    return {Code::kDataLoss, "TIER_CORRUPT", "a value failed its check"};
  }
  for (size_t i = 0; i < value.buffers.size(); ++i) {
    std::memcpy(get->buffers[i].data(), value.buffers[i].data(), value.buffers[i].size());
  }
  if (!get->inspects) uses_.splice(uses_.begin(), uses_, value.use);
  ++stats_.hits;
  return OkStatus();
}

void MemoryValueTier::Put(std::span<TierPut> puts, TierCall call) {
  Add(kWrites, puts, std::move(call), [this](TierPut* put) { return PutOne(*put); });
}

Status MemoryValueTier::PutOne(const TierPut& put) {
  KVS_RETURN_IF_ERROR(CheckValue(put.key, put.buffers));
  stats_.puts += values_.contains(put.key);
  if (values_.contains(put.key)) return OkStatus();
  Value value;
  for (const std::span<const std::byte> buffer : put.buffers) {
    value.buffers.emplace_back(reinterpret_cast<const char*>(buffer.data()), buffer.size());
    value.checksums.push_back(ChecksumOf(value.buffers.back()));
  }
  const uint64_t bytes = value.bytes();
  if (bytes > capacity_) return ResourceExhausted("TIER_FULL", "larger than the tier");
  for (; stats_.used_bytes + bytes > capacity_; ++stats_.evicted) Erase(values_.find(uses_.back()));
  value.number = next_number_++;
  uses_.push_front(put.key);
  value.use = uses_.begin();
  by_number_[value.number] = put.key;
  values_.emplace(put.key, std::move(value));
  stats_.used_bytes += bytes;
  ++stats_.puts;
  return OkStatus();
}

void MemoryValueTier::Erase(Values::iterator it) {
  stats_.used_bytes -= it->second.bytes();
  by_number_.erase(it->second.number);
  uses_.erase(it->second.use);
  values_.erase(it);
}

void MemoryValueTier::Forget(std::span<TierForget> keys, TierCall call) {
  Add(kWrites, keys, std::move(call), [this](TierForget* forget) {
    if (const auto it = values_.find(forget->key); it != values_.end()) Erase(it);
    return OkStatus();
  });
}

void MemoryValueTier::Walk(TierWalk* walk, TierCall call) {
  walk->values.clear();
  walk->status = WhyNotNow(call);
  if (walk->status.ok()) {
    const std::lock_guard lock(mu_);
    auto it = by_number_.lower_bound(walk->cursor);
    for (size_t n = 0; n < walk->most && it != by_number_.end(); ++n, ++it) {
      TierValue& found = walk->values.emplace_back();
      found.key = it->second;
      for (const std::string& buffer : values_.at(it->second).buffers) {
        found.sizes.push_back(buffer.size());
      }
    }
    walk->cursor = it == by_number_.end() ? kWalkEnd : it->first;
  }
  call.done();
}

TierStats MemoryValueTier::Stats() const {
  const std::lock_guard lock(mu_);
  TierStats stats = stats_;
  stats.entries = values_.size();
  return stats;
}

}  // namespace kvstrata::testing
