// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/room/chunk_room.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "server/telemetry/log.h"

namespace kvstrata {

using chunks::Role;
using chunks::Type;

Status ChunkRoom::CheckRow(uint64_t row_bytes, uint64_t region_bytes) {
  const uint64_t slab = ChunkRegion::SlabBytes(region_bytes);
  const bool whole = row_bytes > 0 && row_bytes % chunks::kRowGranularity == 0;
  if (whole && row_bytes <= slab) return OkStatus();
  return InvalidArgument("CHUNK_ROW",
                         "row_bytes is " + std::to_string(row_bytes) +
                             "; allowed: multiples of 4096 up to a slab, which has " +
                             std::to_string(slab) +
                             " bytes with chunks.bytes = " + std::to_string(region_bytes) +
                             "; set chunks.bytes to 64 times row_bytes or more, or make "
                             "blocks_per_chunk smaller");
}

Result<std::unique_ptr<ChunkRoom>> ChunkRoom::Make(const ChunkRoomOptions& options) {
  std::unique_ptr<ChunkRoom> room(new ChunkRoom(options));
  KVS_ASSIGN_OR_RETURN(room->state_.region,
                       ChunkRegion::Make(options.bytes, options.layout_percent));
  return room;
}

// -- who is there

ChunkEngine* ChunkRoom::EngineOf(const std::string& name) {
  std::unique_ptr<ChunkEngine>& engine = engines_[name];
  if (engine == nullptr) {
    engine = std::make_unique<ChunkEngine>();
    engine->number = ++engine_numbers_;
    engine->name = name;
  }
  return engine.get();
}

Status ChunkRoom::Join(const ChunkPeer& peer) {
  KVS_RETURN_IF_ERROR(CheckRow(peer.row_bytes, bytes()));
  ChunkEngine* const engine = EngineOf(peer.engine);
  ++engine->connections;
  engine->processes.insert(peer.process);
  members_[peer.connection] = Member{peer, engine};
  if (peer.role == Role::kWorker) return OkStatus();
  auto claims = std::make_unique<ChunkClaims>();
  claims->connection = peer.connection;
  claims->engine = engine;
  claims->scope.user = user();
  claims->scope.row_bytes = peer.row_bytes;
  claims_[peer.connection] = std::move(claims);
  return OkStatus();
}

void ChunkRoom::Free(ChunkClaims* claims) {
  leases_.ReleaseAll(claims);
  credits_.ReturnAll(claims);
}

void ChunkRoom::Leave(uint64_t connection) {
  const auto member = members_.find(connection);
  if (member == members_.end()) return;
  ChunkEngine* const engine = member->second.engine;
  members_.erase(member);
  --engine->connections;
  if (auto claims = claims_.extract(connection)) {
    claims.mapped()->owed = 0;
    leases_.StopWaiting(claims.mapped().get());
    if (engine->processes.empty()) Free(claims.mapped().get());
    if (!claims.mapped()->empty()) {
      resting_.push_back({std::move(claims.mapped()), engine->processes});
    }
  }
  EndIfGone(engine);
}

void ChunkRoom::EndRests(ChunkEngine* engine) {
  resting_.remove_if([&](Resting& resting) {
    if (resting.claims->engine != engine) return false;
    Free(resting.claims.get());
    return true;
  });
}

void ChunkRoom::StopAwaiting(uint32_t process, const ChunkEngine* engine) {
  resting_.remove_if([&](Resting& resting) {
    if (engine != nullptr && resting.claims->engine != engine) return false;
    resting.awaited.erase(process);
    if (!resting.awaited.empty()) return false;
    Free(resting.claims.get());
    return true;
  });
}

void ChunkRoom::OnDead(uint32_t process) {
  StopAwaiting(process, nullptr);
  std::vector<ChunkEngine*> touched;
  for (const auto& [name, engine] : engines_) {
    if (engine->processes.erase(process) > 0) touched.push_back(engine.get());
  }
  for (ChunkEngine* engine : touched) EndIfGone(engine);
}

void ChunkRoom::EndIfGone(ChunkEngine* engine) {
  const auto rests = [engine](const Resting& r) { return r.claims->engine == engine; };
  if (engine->connections > 0 || std::ranges::any_of(resting_, rests)) return;
  KVS_CHECK(engine->pinned_bytes == 0 && engine->credited_bytes == 0);
  state_.options.recalls->Forget(engine->name);
  engines_.erase(engine->name);
}

bool ChunkRoom::Awaits(uint32_t process) const {
  return std::ranges::any_of(
      engines_, [process](const auto& e) { return e.second->processes.contains(process); });
}

// -- packets

Status ChunkRoom::OnSpace(ChunkClaims* claims, std::span<const std::byte> packet) {
  chunks::Space space{};
  if (!ReadHead(packet, &space) || packet.size() != sizeof(space)) {
    return MalformedPacket("SPACE: it has " + std::to_string(packet.size()) + " bytes, not 40");
  }
  claims->scope.space = space.space;
  claims->has_space = true;
  return OkStatus();
}

Status ChunkRoom::OnDetach(Member* member, std::span<const std::byte> packet) {
  if (packet.size() != sizeof(chunks::Counted)) {
    return MalformedPacket("DETACH: it has " + std::to_string(packet.size()) + " bytes, not 8");
  }
  member->detached = true;
  ChunkEngine* const engine = member->engine;
  if (member->peer.role == Role::kScheduler) {
    Free(claims_.at(member->peer.connection).get());
    EndRests(engine);
    return OkStatus();
  }
  const uint32_t process = member->peer.process;
  StopAwaiting(process, engine);
  const bool others = std::ranges::any_of(members_, [&](const auto& entry) {
    const Member& other = entry.second;
    return !other.detached && other.engine == engine && other.peer.process == process;
  });
  if (!others) engine->processes.erase(process);
  return OkStatus();
}

Status ChunkRoom::OnPacket(uint64_t connection, std::span<const std::byte> packet) {
  const auto found = members_.find(connection);
  KVS_CHECK(found != members_.end());
  Member* const member = &found->second;
  Type type{};
  if (!ReadHead(packet, &type)) return MalformedPacket("it has no type");
  if (member->detached) return MalformedPacket("a packet behind DETACH");
  if (type == Type::kDetach) return OnDetach(member, packet);
  if (member->peer.role != Role::kScheduler) {
    if (type == Type::kRecalled) return state_.options.recalls->Add(member->engine->name, packet);
    return MalformedPacket("a worker's packet that is neither DETACH nor RECALLED");
  }
  ChunkClaims* const claims = claims_.at(connection).get();
  switch (type) {
    case Type::kSpace:
      return OnSpace(claims, packet);
    case Type::kAsk: {
      const Status status = leases_.Ask(claims, packet);
      credits_.SaveReused();
      return status;
    }
    case Type::kRelease:
      return leases_.Release(claims, packet);
    case Type::kWant:
      return credits_.Want(claims, packet);
    case Type::kStored:
      return credits_.Store(claims, packet);
    case Type::kReturn:
      return credits_.Return(claims, packet);
    default:
      return MalformedPacket("type " + std::to_string(static_cast<uint32_t>(type)) +
                             " is none of a scheduler's");
  }
}

void ChunkRoom::OnDone(const ChunkDone& done) {
  if (done.chunk.room != state_.options.serial) return;
  switch (done.kind) {
    case ChunkWork::Kind::kSum:
      return credits_.OnSummed(done.chunk, done.sum);
    case ChunkWork::Kind::kVerify:
      return credits_.OnVerified(done.chunk, done.sum, done.below);
    case ChunkWork::Kind::kWrite:
      return credits_.OnWritten(done.chunk, done.ok);
    case ChunkWork::Kind::kProbe:
      return credits_.OnProbed(done.chunk, done.key, done.below);
    case ChunkWork::Kind::kRead:
      if (done.let_go) return credits_.OnLetGo(done.chunk);
      return credits_.OnRead(done.chunk, done.ok ? std::optional(done.sum) : std::nullopt,
                             done.below);
  }
}

// -- what goes out

std::vector<ChunkPacket> ChunkRoom::TakePackets() {
  leases_.SendArrived();
  credits_.Give(claims_);
  return std::exchange(state_.packets, {});
}

std::vector<ChunkWork> ChunkRoom::TakeWork() { return std::exchange(state_.work, {}); }

std::vector<ShownChunk> ChunkRoom::List(uint64_t* at, size_t n) const {
  std::vector<ShownChunk> shown;
  for (size_t i = 0; i < n; ++i) {
    const Chunk* const chunk = state_.region->NextFrom(at);
    if (chunk == nullptr) break;
    if (chunk->state == ChunkState::kShown) shown.push_back(ShownOf(*chunk));
  }
  return shown;
}

std::optional<ShownChunk> ChunkRoom::Shown(const ChunkKey& key) const {
  const auto found = state_.index.find(key);
  if (found == state_.index.end()) return std::nullopt;
  const Chunk* const chunk = found->second.chunk;
  if (chunk == nullptr || chunk->state != ChunkState::kShown) return std::nullopt;
  return ShownOf(*chunk);
}

ShownChunk ChunkRoom::ShownOf(const Chunk& chunk) const {
  return {chunk.key, state_.region->BytesOf(chunk), state_.region->keep()};
}

ChunkNumbers ChunkRoom::Numbers() const {
  ChunkNumbers numbers;
  numbers.region_bytes = bytes();
  numbers.user = user();
  numbers.connections = members_.size();
  numbers.engines = engines_.size();
  numbers.resting = resting_.size();
  numbers.by_state = state_.by_state;
  numbers.leased = state_.leased;
  numbers.starved = state_.starved;
  return numbers;
}

}  // namespace kvstrata
