// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/room/chunk_leases.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvstrata {

using chunks::kComing;
using chunks::kNotThere;

namespace {

// Keys that a remote tier may be asked for at once; more are not there.
constexpr uint64_t kMostProbes = 65536;

}  // namespace

// -- holding

int32_t ChunkLeases::Hold(ChunkEngine* engine, ChunkLease* lease, Chunk* chunk, uint32_t index) {
  auto holds = std::ranges::find(chunk->engines, engine->number, &EngineHolds::engine);
  if (holds == chunk->engines.end()) {
    const uint64_t most = state_->region->most_bytes() / 2;
    if (engine->pinned_bytes > 0 && engine->pinned_bytes + chunk->row_bytes > most)
      return kNotThere;
    engine->pinned_bytes += chunk->row_bytes;
    if (chunk->engines.empty()) {
      ++state_->leased.chunks;
      state_->leased.bytes += chunk->row_bytes;
    }
    holds = chunk->engines.insert(chunk->engines.end(), {engine->number, 0});
  }
  if (chunk->place == Chunk::Place::kIdle) state_->region->MakeBusy(chunk);
  ++holds->leases;
  lease->held.push_back(chunk);
  chunk->use = std::max(chunk->use, RoomState::UseOf(lease->use, index));
  return chunk->id;
}

void ChunkLeases::Unhold(ChunkEngine* engine, Chunk* chunk) {
  const auto holds = std::ranges::find(chunk->engines, engine->number, &EngineHolds::engine);
  KVS_CHECK(holds != chunk->engines.end() && holds->leases > 0);
  if (--holds->leases > 0) return;
  chunk->engines.erase(holds);
  engine->pinned_bytes -= chunk->row_bytes;
  if (!chunk->engines.empty()) return;
  --state_->leased.chunks;
  state_->leased.bytes -= chunk->row_bytes;
  state_->Settle(chunk);
}

// -- leases

ChunkLease* ChunkLeases::LeaseOf(ChunkClaims* claims, uint32_t number) {
  ChunkLease& lease = claims->leases[number];
  if (lease.serial == 0) {
    lease.serial = ++leases_;
    lease.number = number;
    lease.use = state_->NextUse();
    by_serial_[lease.serial] = {claims, number};
  }
  return &lease;
}

void ChunkLeases::End(ChunkClaims* claims, ChunkLease* lease) {
  by_serial_.erase(lease->serial);
  claims->keys -= lease->held.size() + lease->waits;
  for (Chunk* chunk : lease->held) Unhold(claims->engine, chunk);
}

void ChunkLeases::ReleaseAll(ChunkClaims* claims) {
  for (auto& [number, lease] : claims->leases) End(claims, &lease);
  claims->leases.clear();
}

void ChunkLeases::StopWaiting(ChunkClaims* claims) {
  for (auto& [number, lease] : claims->leases) {
    by_serial_.erase(lease.serial);
    claims->keys -= lease.waits;
    lease.waits = 0;
  }
  std::erase_if(claims->leases, [](const auto& entry) { return entry.second.held.empty(); });
}

Status ChunkLeases::Release(ChunkClaims* claims, std::span<const std::byte> packet) {
  chunks::Counted head{};
  std::vector<uint32_t> numbers;
  if (!ReadList(packet, &head, &numbers))
    return MalformedPacket("RELEASE: its size and count differ");
  for (const uint32_t number : numbers) {
    const auto lease = claims->leases.find(number);
    if (lease == claims->leases.end()) continue;
    End(claims, &lease->second);
    claims->leases.erase(lease);
  }
  return OkStatus();
}

// -- asking

int32_t ChunkLeases::Wait(ChunkLease* lease, RoomState::Entry* entry, uint32_t index) {
  entry->waiters.push_back({lease->serial, index});
  ++lease->waits;
  return kComing;
}

int32_t ChunkLeases::Look(ChunkClaims* claims, ChunkLease* lease, const ChunkKey& key,
                          uint32_t index, bool* wanted) {
  const auto found = state_->index.find(key);
  if (found == state_->index.end()) {
    *wanted = state_->options.find != nullptr;
    return kNotThere;
  }
  Chunk* const chunk = found->second.chunk;
  if (chunk == nullptr || chunk->state != ChunkState::kShown) {
    return Wait(lease, &found->second, index);
  }
  const int32_t id = Hold(claims->engine, lease, chunk, index);
  const bool unsaved = (state_->options.write_reused & ~chunk->asked_writes) != 0;
  if (id != kNotThere && unsaved) state_->reused.push_back(chunk);
  return id;
}

int32_t ChunkLeases::Fetch(ChunkLease* lease, const ChunkFind& find, uint32_t index) {
  const auto known = state_->index.find(find.key);  // the same key twice in one packet
  if (known != state_->index.end()) return Wait(lease, &known->second, index);
  if (find.there != kNowhere) {
    Chunk* const chunk = state_->Take(find.row_bytes, ChunkState::kReading);
    if (chunk == nullptr) return kNotThere;
    chunk->key = find.key;
    chunk->use = RoomState::UseOf(lease->use, index);
    RoomState::Entry& entry = state_->index[find.key];
    entry.chunk = chunk;
    state_->Order(ChunkWork::Kind::kRead, chunk, find.there);
    return Wait(lease, &entry, index);
  }
  if (find.maybe == kNowhere || state_->probes == kMostProbes) return kNotThere;
  ++state_->probes;
  ChunkWork probe;
  probe.kind = ChunkWork::Kind::kProbe;
  probe.below = find.maybe;
  probe.chunk = {state_->options.serial, find.row_bytes, -1};
  probe.key = find.key;
  state_->work.push_back(std::move(probe));
  return Wait(lease, &state_->index[find.key], index);
}

void ChunkLeases::FetchAll(ChunkLease* lease, uint32_t first, std::span<const Wanted> wanted,
                           std::span<int32_t> ids) {
  if (wanted.empty()) return;
  std::vector<ChunkFind> finds;
  for (const Wanted& w : wanted) finds.push_back(w.find);
  state_->options.find(finds);
  for (size_t i = 0; i < finds.size(); ++i) {
    const size_t at = wanted[i].at;
    ids[at] = Fetch(lease, finds[i], first + static_cast<uint32_t>(at));
  }
}

Status ChunkLeases::Ask(ChunkClaims* claims, std::span<const std::byte> packet) {
  chunks::Ask head{};
  std::vector<chunks::AskedKey> keys;
  if (!ReadList(packet, &head, &keys)) return MalformedPacket("ASK: its size and count differ");
  if (head.count > chunks::kMostAsked || head.first > chunks::kMostLeased - head.count) {
    return MalformedPacket("ASK: first is " + std::to_string(head.first) + ", count " +
                           std::to_string(head.count) + "; at most 1024 keys of 1048576");
  }
  if (!claims->has_space) return MalformedPacket("ASK before SPACE");
  std::vector<int32_t> ids(keys.size(), kNotThere);
  // More than one connection can mean to hold: the rest is not there for it.
  const size_t most = std::min<uint64_t>(keys.size(), chunks::kMostLeased - claims->keys);
  ChunkLease* const lease = LeaseOf(claims, head.lease);
  const size_t had = lease->held.size() + lease->waits;
  std::vector<Wanted> wanted;
  for (size_t i = 0; i < most; ++i) {
    const ChunkKey key = ChunkKeyOf(claims->scope, keys[i]);
    bool look_below = false;
    ids[i] = Look(claims, lease, key, head.first + static_cast<uint32_t>(i), &look_below);
    if (look_below) wanted.push_back({i, {key, claims->scope.row_bytes}});
  }
  FetchAll(lease, head.first, wanted, ids);
  claims->keys += lease->held.size() + lease->waits - had;
  if (lease->held.empty() && lease->waits == 0) {
    by_serial_.erase(lease->serial);
    claims->leases.erase(head.lease);
  }
  ChunkCounters* const counters = state_->options.counters;
  counters->asked += ids.size();
  for (const int32_t id : ids) {
    ++(id >= 0 ? counters->hits : id == kComing ? counters->coming : counters->misses);
  }
  const chunks::Held held{chunks::Type::kHeld, head.lease, head.first, head.count};
  state_->packets.push_back(NewPacket(claims->connection, held, std::span<const int32_t>(ids)));
  return OkStatus();
}

// -- arriving

void ChunkLeases::Tell(const ChunkWaiter& waiter, Chunk* chunk) {
  const auto waits = by_serial_.find(waiter.lease);
  if (waits == by_serial_.end()) return;  // released meanwhile
  ChunkClaims* const claims = waits->second.claims;
  ChunkLease* const lease = &claims->leases.at(waits->second.number);
  --lease->waits;
  const int32_t id =
      chunk == nullptr ? kNotThere : Hold(claims->engine, lease, chunk, waiter.index);
  if (id == kNotThere) --claims->keys;
  state_->options.counters->arrived += id != kNotThere;
  arrived_[waiter.lease].push_back({waiter.index, id});
}

void ChunkLeases::Arrive(Chunk* chunk) {
  RoomState::Entry& entry = state_->index.at(chunk->key);
  for (const ChunkWaiter& waiter : std::exchange(entry.waiters, {})) Tell(waiter, chunk);
  state_->Settle(chunk);
}

void ChunkLeases::Miss(const ChunkKey& key) {
  const auto entry = state_->index.find(key);
  KVS_CHECK(entry != state_->index.end());
  for (const ChunkWaiter& waiter : entry->second.waiters) Tell(waiter, nullptr);
  state_->index.erase(entry);
}

void ChunkLeases::SendArrived() {
  for (const auto& [serial, came] : std::exchange(arrived_, {})) {
    const auto waits = by_serial_.find(serial);
    if (waits == by_serial_.end()) continue;  // released meanwhile
    ChunkClaims* const claims = waits->second.claims;
    ChunkLease* const lease = &claims->leases.at(waits->second.number);
    ForEachPart(std::span<const chunks::ArrivedChunk>(came), [&](auto part) {
      const chunks::Arrived head{chunks::Type::kArrived, lease->number,
                                 static_cast<uint32_t>(part.size())};
      state_->packets.push_back(NewPacket(claims->connection, head, part));
    });
    if (!lease->held.empty() || lease->waits > 0) continue;
    by_serial_.erase(waits);
    claims->leases.erase(lease->number);
  }
}

}  // namespace kvstrata
