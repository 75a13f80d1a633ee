// SPDX-License-Identifier: Apache-2.0
// MooncakeValueTier::Get: stripes come into the agent's memory in batches, and are copied to the
// caller and checked there, where the agent cannot change them any more.
#include <algorithm>
#include <cstring>
#include <utility>

#include "server/tier/mooncake/mooncake_calls.h"

namespace kvstrata {
namespace {

using Entry = MooncakeAgent::Entry;
using remote::IncomingValue;

// A value that is on its way here.
struct Reading {
  TierGet* get = nullptr;
  IncomingValue value;
};
struct StripeRead {
  Reading* reading;
  uint32_t stripe;
  uint64_t room;  // more than it may have: what is longer is seen
};

class MooncakeReads {
 public:
  MooncakeReads(MooncakeTierParts* parts, const TierCall& call) : parts_(*parts), call_(call) {}

  void Add(TierGet* get) {
    Result<IncomingValue> value = parts_.format.Expect(get->key, get->buffers);
    get->status = value.status();
    if (value.ok()) readings_.push_back(std::make_unique<Reading>(get, std::move(*value)));
  }

  void Run() {
    std::vector<StripeRead> batch;
    uint64_t bytes = 0;
    for (const auto& reading : readings_) {
      for (uint32_t i = 0; i < reading->value.stripes(); ++i) {
        const uint64_t room = AgentMemory::WholeUnits(reading->value.length(i) + 1);
        if (bytes + room > kMooncakeBatchBytes || batch.size() == mooncake::kMostEntries) {
          Read(std::exchange(batch, {}), std::exchange(bytes, 0));
        }
        batch.push_back({reading.get(), i, room});
        bytes += room;
      }
    }
    if (!batch.empty()) Read(batch, bytes);
    for (const auto& reading : readings_) End(*reading);
  }

 private:
  void Read(const std::vector<StripeRead>& batch, uint64_t bytes) {
    const Status read = TryRead(batch, bytes);
    if (read.ok()) return;
    for (const StripeRead& one : batch) {
      Status& status = one.reading->get->status;
      if (status.ok()) status = read;
    }
  }

  Status TryRead(const std::vector<StripeRead>& batch, uint64_t bytes) {
    KVS_ASSIGN_OR_RETURN(const std::shared_ptr<AgentBlock> block, RoomFor(&parts_, bytes, call_));
    std::vector<Entry> entries;
    uint64_t at = block->offset;
    for (const StripeRead& one : batch) {
      const TierGet& get = *one.reading->get;
      entries.push_back({parts_.format.NameOf(get.key, get.place, one.stripe), at, one.room});
      at += one.room;
    }
    KVS_ASSIGN_OR_RETURN(const std::vector<int64_t> came,
                         parts_.agent->Call(mooncake::Kind::kGet, entries, block, call_));
    for (size_t i = 0; i < batch.size(); ++i) {
      Status& status = batch[i].reading->get->status;
      const std::byte* from = block->bytes.data() + (entries[i].offset - block->offset);
      if (status.ok()) status = Open(batch[i], came[i], from);
    }
    return OkStatus();
  }

  Status Open(const StripeRead& one, int64_t came, const std::byte* from) {
    if (came < 0) return StatusOfCode(came);
    const auto length = static_cast<uint64_t>(came);
    if (length > one.room) return StatusOfCode(mooncake::kTooSmall);
    IncomingValue& value = one.reading->value;
    remote::Header header{};
    const uint64_t head = std::min<uint64_t>(length, header.size());
    std::memcpy(header.data(), from, head);
    if (length == value.length(one.stripe)) {
      from += header.size();
      for (const std::span<std::byte> part : value.parts(one.stripe)) {
        std::memcpy(part.data(), from, part.size());
        from += part.size();
      }
    }
    return parts_.format.Open(&value, one.stripe, std::span(header).first(head), length,
                              std::chrono::system_clock::now());
  }

  void End(const Reading& reading) {
    const TierGet& get = *reading.get;
    const Code code = get.status.code();
    if (code == Code::kOk) parts_.known.Saw(get.key, ValueSizes::Of(get.buffers));
    if (code == Code::kNotFound || code == Code::kDataLoss) parts_.known.Lost(get.key);
    if (code == Code::kDataLoss) {
      // Whatever becomes of it: who reads it again finds the same.
      (void)RemoveFromMooncake(&parts_, get.key, get.place, reading.value.stripes(), call_);
    }
    MutexLock lock(parts_.mu);
    parts_.counted.hits += code == Code::kOk;
    parts_.counted.misses += code == Code::kNotFound;
    parts_.counted.damaged += code == Code::kDataLoss;
  }

  MooncakeTierParts& parts_;
  const TierCall& call_;
  std::vector<std::unique_ptr<Reading>> readings_;
};

}  // namespace

void ReadFromMooncake(MooncakeTierParts* parts, std::span<TierGet> gets, const TierCall& call) {
  MooncakeReads reads(parts, call);
  for (TierGet& get : gets) reads.Add(&get);
  reads.Run();
}

}  // namespace kvstrata
