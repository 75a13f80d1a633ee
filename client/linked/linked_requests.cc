// SPDX-License-Identifier: Apache-2.0
// What the linked transport asks of the daemon, a message over the ring each (kvstrata.h): builds,
// recompressions and their end, what is held of a prompt, what there is room for.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "client/linked/linked_session.h"

namespace kvstrata::client {
namespace {

// What the daemon wrote this process has not looked at: without this the first step takes a page
// fault every few rows. Kernels that do not know it (before 5.14) leave that as it is.
void MapBlocks(const Sequence& s) {
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ; older headers have no name for it
  const auto bytes = static_cast<size_t>(s.state->index().block_bytes);
  for (std::byte* const block : s.blocks) (void)madvise(block, bytes, kPopulateRead);
}

Room RoomOf(const shm::Room& room) { return {room.tokens, room.bytes}; }

PoolCapacity PoolOf(const shm::PoolCapacity& pool) {
  return {RoomOf(pool.free), RoomOf(pool.after_eviction), RoomOf(pool.limit)};
}

}  // namespace

Result<Built> Session::Build(uint64_t sequence, std::string_view plan) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Current(state_.get(), sequence, false));
  KVS_RETURN_IF_ERROR(state_->TellAll(s.get(), state_->Deadline()));
  std::string text(plan);
  const shm::Build request{sequence, static_cast<uint32_t>(text.size()), 0};
  text.resize((text.size() + 3) & ~size_t{3});
  KVS_ASSIGN_OR_RETURN(const auto reply,
                       state_->ring->Ask<shm::BuildReply>(
                           shm::kBuild, {BytesOf(request), std::as_bytes(std::span(text))}));
  Built built{reply.indexed_tokens, reply.built_blocks, reply.extents};
  // For its own plan, rows of the block that is being filled, and buckets, are made here.
  if (reply.own == 0) return built;
  KVS_RETURN_IF_ERROR(state_->CatchUp(s.get()));
  if (state_->gpu_session == nullptr && !s->imported) {
    const TableClaim claim{s.get(), s->state->tokens(), false};
    KVS_ASSIGN_OR_RETURN(const int slot, state_->Enter({&claim, 1}, nullptr));
    MapBlocks(*s.get());
    state_->Leave(slot);
  }
  built.indexed_tokens =
      std::max(built.indexed_tokens, static_cast<uint32_t>(s->state->indexed_tokens()));
  return built;
}

Status Session::Recompress(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Current(state_.get(), sequence, false));
  KVS_RETURN_IF_ERROR(state_->TellAll(s.get(), state_->Deadline()));
  KVS_RETURN_IF_ERROR(state_->ring->CallOf(shm::kRecompress, sequence));
  return state_->CatchUp(s.get());
}

// Goes by the daemon's books alone: whoever waits in Recompress has the sequence.
Status Session::CancelWork(uint64_t sequence) {
  KVS_RETURN_IF_ERROR(state_->Find(sequence).status());
  return state_->ring->CallOf(shm::kCancelWork, sequence);
}

Result<Capacity> Session::CountCapacity(uint64_t model, std::string_view plan) {
  std::string text(plan);
  const shm::Capacity request{model, static_cast<uint32_t>(text.size()), 0};
  text.resize((text.size() + 3) & ~size_t{3});
  KVS_ASSIGN_OR_RETURN(const auto reply,
                       state_->ring->Ask<shm::CapacityReply>(
                           shm::kCapacity, {BytesOf(request), std::as_bytes(std::span(text))}));
  return Capacity{PoolOf(reply.device), PoolOf(reply.host), reply.open_tokens};
}

Result<LookedUp> Session::Lookup(uint64_t model, const LookupQuery& query,
                                 std::span<const int32_t> tokens) {
  if (tokens.size() > state_->ring->max_tokens()) {
    return InvalidArgument("PROMPT_TOO_LONG", std::to_string(tokens.size()) + " tokens; at most " +
                                                  std::to_string(state_->ring->max_tokens()) +
                                                  " are allowed");
  }
  std::string plan(query.plan);
  plan.resize((plan.size() + 3) & ~size_t{3});
  shm::Lookup request{model,
                      static_cast<uint32_t>(plan.size()),
                      static_cast<uint32_t>(tokens.size()),
                      "",
                      query.lease_ms,
                      0};
  // One that does not fit is no device's.
  const size_t bytes = std::min(query.device_uuid.size(), sizeof(request.device_uuid) - 1);
  std::memcpy(request.device_uuid, query.device_uuid.data(), bytes);
  KVS_ASSIGN_OR_RETURN(
      const auto reply,
      state_->ring->Ask<shm::LookupReply>(
          shm::kLookup, {BytesOf(request), std::as_bytes(std::span(plan)), std::as_bytes(tokens)}));
  return LookedUp{reply.held_tokens, reply.indexed_tokens, reply.device_tokens, reply.host_tokens,
                  reply.disk_tokens};
}

}  // namespace kvstrata::client
