// SPDX-License-Identifier: Apache-2.0
// MooncakeValueTier::Put: asks which values have their head there, writes the stripes of the others
// into the agent's memory, batch by batch, and then their heads, which say that they are whole.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "server/tier/mooncake/mooncake_calls.h"

namespace kvstrata {
namespace {

using Entry = MooncakeAgent::Entry;
using mooncake::Kind;
using remote::OutgoingValue;

// A value on its way out.
struct Writing {
  TierPut* put = nullptr;
  OutgoingValue value;
  remote::Header head{};   // header of stripe 0
  uint32_t unwritten = 0;  // stripes
};
struct StripeWrite {
  Writing* writing;
  uint32_t stripe;
  uint64_t bytes() const {
    return remote::kHeaderBytes + remote::StripeBytes(writing->value.bytes, stripe);
  }
};

class MooncakeWrites {
 public:
  MooncakeWrites(MooncakeTierParts* parts, const TierCall& call) : parts_(*parts), call_(call) {}

  void Run(std::span<TierPut> puts) {
    std::vector<StripeWrite> batch;
    uint64_t bytes = 0;
    for (TierPut* put : Missing(puts)) {
      Writing* writing = Prepare(put);
      for (uint32_t i = 0; writing != nullptr && i < writing->value.stripes; ++i) {
        const StripeWrite one{writing, i};
        const uint64_t room = AgentMemory::WholeUnits(one.bytes());
        if (bytes + room > kMooncakeBatchBytes || batch.size() == mooncake::kMostEntries) {
          Write(std::exchange(batch, {}), std::exchange(bytes, 0));
        }
        batch.push_back(one);
        bytes += room;
      }
    }
    if (!batch.empty()) Write(batch, bytes);
  }

 private:
  // Those that the store has not; the others have their status.
  std::vector<TierPut*> Missing(std::span<TierPut> puts) {
    std::vector<TierPut*> missing;
    for (size_t at = 0; at < puts.size(); at += mooncake::kMostEntries) {
      const auto some = puts.subspan(at, std::min(mooncake::kMostEntries, puts.size() - at));
      std::vector<Entry> heads;
      for (const TierPut& put : some) heads.push_back({HeadNameOf(parts_, put.key, put.place)});
      const Result<std::vector<int64_t>> there = AskFor(heads);
      for (size_t i = 0; i < some.size(); ++i) {
        some[i].status = there.status();
        if (!there.ok()) continue;
        if ((*there)[i] == 1) {
          CountPut();
        } else {
          missing.push_back(&some[i]);
        }
      }
    }
    return missing;
  }

  Result<std::vector<int64_t>> AskFor(const std::vector<Entry>& heads) {
    KVS_RETURN_IF_ERROR(WhyNotNow(call_));
    return parts_.agent->Call(Kind::kExist, heads, nullptr, call_);
  }

  // Null: it is no value, and has its status.
  Writing* Prepare(TierPut* put) {
    Result<OutgoingValue> value =
        parts_.format.Prepare(put->key, put->buffers, std::chrono::system_clock::now());
    put->status = value.status();
    if (!value.ok()) return nullptr;
    writings_.push_back(std::make_unique<Writing>(put, std::move(*value)));
    writings_.back()->unwritten = writings_.back()->value.stripes;
    return writings_.back().get();
  }

  // Stripes, and the heads of values that are complete with them.
  void Write(const std::vector<StripeWrite>& batch, uint64_t bytes) {
    const Status written = TryWrite(batch, bytes);
    std::vector<Writing*> whole;
    for (const StripeWrite& one : batch) {
      Status& status = one.writing->put->status;
      if (status.ok()) status = written;
      if (status.ok() && --one.writing->unwritten == 0) whole.push_back(one.writing);
    }
    if (whole.empty()) return;
    const Status ended = WriteHeads(whole);
    for (Writing* writing : whole) {
      Status& status = writing->put->status;
      if (status.ok()) status = ended;
      if (!status.ok()) continue;
      parts_.known.Saw(writing->put->key, writing->value.sizes);
      CountPut();
    }
  }

  Status TryWrite(const std::vector<StripeWrite>& batch, uint64_t bytes) {
    KVS_ASSIGN_OR_RETURN(const std::shared_ptr<AgentBlock> block, RoomFor(&parts_, bytes, call_));
    std::vector<Entry> entries;
    uint64_t at = 0;
    for (const StripeWrite& one : batch) {
      const TierPut& put = *one.writing->put;
      Fill(one, block->bytes.subspan(at, one.bytes()));
      entries.push_back(
          {parts_.format.NameOf(put.key, put.place, one.stripe), block->offset + at, one.bytes()});
      at += AgentMemory::WholeUnits(one.bytes());
    }
    KVS_ASSIGN_OR_RETURN(const std::vector<int64_t> codes,
                         parts_.agent->Call(Kind::kPut, entries, block, call_));
    for (size_t i = 0; i < batch.size(); ++i) {
      Status& status = batch[i].writing->put->status;
      if (codes[i] != 0 && status.ok()) status = StatusOfCode(codes[i]);
    }
    return OkStatus();
  }

  // A sealed stripe is encrypted where it goes out.
  void Fill(const StripeWrite& one, std::span<std::byte> to) const {
    const std::span<std::byte> body = to.subspan(remote::kHeaderBytes);
    const std::span<std::byte> room = parts_.format.needs_room() ? body : std::span<std::byte>();
    const remote::OutgoingStripe out = parts_.format.Write(one.writing->value, one.stripe, room);
    std::memcpy(to.data(), out.header.data(), out.header.size());
    if (one.stripe == 0) one.writing->head = out.header;
    if (!room.empty()) return;
    std::byte* at = body.data();
    for (const std::span<const std::byte> part : out.bytes) {
      std::memcpy(at, part.data(), part.size());
      at += part.size();
    }
  }

  Status WriteHeads(const std::vector<Writing*>& whole) {
    KVS_ASSIGN_OR_RETURN(const std::shared_ptr<AgentBlock> block,
                         RoomFor(&parts_, whole.size() * remote::kHeaderBytes, call_));
    std::vector<Entry> entries;
    for (const Writing* writing : whole) {
      const uint64_t at = entries.size() * remote::kHeaderBytes;
      std::memcpy(&block->bytes[at], writing->head.data(), writing->head.size());
      entries.push_back({HeadNameOf(parts_, writing->put->key, writing->put->place),
                         block->offset + at, remote::kHeaderBytes});
    }
    KVS_ASSIGN_OR_RETURN(const std::vector<int64_t> codes,
                         parts_.agent->Call(Kind::kPut, entries, block, call_));
    for (size_t i = 0; i < whole.size(); ++i) {
      if (codes[i] != 0) whole[i]->put->status = StatusOfCode(codes[i]);
    }
    return OkStatus();
  }

  void CountPut() {
    MutexLock lock(parts_.mu);
    ++parts_.counted.puts;
  }

  MooncakeTierParts& parts_;
  const TierCall& call_;
  std::vector<std::unique_ptr<Writing>> writings_;
};

}  // namespace

void WriteToMooncake(MooncakeTierParts* parts, std::span<TierPut> puts, const TierCall& call) {
  // The first with a key counts; what becomes of it is what becomes of the others with that key.
  std::map<std::string_view, size_t> firsts;
  std::vector<TierPut> once;
  std::vector<size_t> of;
  for (TierPut& put : puts) {
    const auto [first, added] = firsts.emplace(put.key, once.size());
    if (added) once.push_back(put);
    of.push_back(first->second);
  }
  MooncakeWrites(parts, call).Run(once);
  for (size_t i = 0; i < puts.size(); ++i) puts[i].status = once[of[i]].status;
}

}  // namespace kvstrata
