// SPDX-License-Identifier: Apache-2.0
// What the linked transport asks without taking anything, a message over the ring each: what is
// held of a prompt, what there is room for.
#include <cstring>
#include <string>

#include "client/linked/linked_session.h"

namespace kvstrata::client {
namespace {

Room RoomOf(const shm::Room& room) { return {room.tokens, room.bytes}; }

PoolCapacity PoolOf(const shm::PoolCapacity& pool) {
  return {RoomOf(pool.free), RoomOf(pool.after_eviction), RoomOf(pool.limit)};
}

}  // namespace

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
