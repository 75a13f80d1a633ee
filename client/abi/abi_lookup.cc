// SPDX-License-Identifier: Apache-2.0
// The C ABI's look-up and capacity (include/kvstrata/kvstrata.h), as abi.cc has the rest.
#include <cstddef>

#include "client/abi/abi_call.h"
#include "client/include/kvstrata/kvstrata.h"
#include "client/session.h"

namespace kvstrata::client {
namespace {

constexpr size_t kMaxDeviceBytes = 63;

Result<LookupQuery> ReadLookupOptions(const kvs_lookup_options* caller) {
  LookupQuery query;
  if (caller == nullptr) return query;
  KVS_ASSIGN_OR_RETURN(const kvs_lookup_options options,
                       Grown("kvs_lookup_options", caller, offsetof(kvs_lookup_options, lease_ms)));
  KVS_ASSIGN_OR_RETURN(query.plan, ReadView("bytes of plan", options.plan, kMaxPlanBytes));
  KVS_ASSIGN_OR_RETURN(query.device_uuid,
                       ReadView("bytes of device_uuid", options.device_uuid, kMaxDeviceBytes));
  query.lease_ms = options.lease_ms;
  return query;
}

void Write(const Room& room, kvs_room* out) { *out = {room.tokens, room.bytes}; }

void Write(const PoolCapacity& pool, kvs_pool_capacity* out) {
  Write(pool.free, &out->free);
  Write(pool.after_eviction, &out->after_eviction);
  Write(pool.limit, &out->limit);
}

}  // namespace
}  // namespace kvstrata::client

using namespace kvstrata;          // NOLINT: this file is the boundary
using namespace kvstrata::client;  // NOLINT

int kvs_lookup(kvs_session* session, kvs_model model, const kvs_lookup_options* options,
               const int32_t* tokens, size_t n, kvs_lookup_result* out) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_RETURN_IF_ERROR(StructSize("kvs_lookup_result", out, out->size, sizeof(*out)));
    KVS_RETURN_IF_ERROR(ArrayOf("tokens", tokens, n, kMaxTokens));
    KVS_ASSIGN_OR_RETURN(const LookupQuery query, ReadLookupOptions(options));
    KVS_ASSIGN_OR_RETURN(const LookedUp found, s.Lookup(model, query, {tokens, n}));
    out->held = found.held_tokens;
    out->indexed = found.indexed_tokens;
    out->device_tokens = found.device_tokens;
    out->host_tokens = found.host_tokens;
    out->disk_tokens = found.disk_tokens;
    return OkStatus();
  });
}

int kvs_capacity(kvs_session* session, kvs_model model, const char* plan,
                 kvs_capacity_result* out) {
  return WithSession(session, [&](Session& s) -> Status {
    KVS_RETURN_IF_ERROR(NotNull("plan", plan));
    KVS_RETURN_IF_ERROR(NotNull("out", out));
    KVS_RETURN_IF_ERROR(StructSize("kvs_capacity_result", out, out->size, sizeof(*out)));
    KVS_ASSIGN_OR_RETURN(const std::string_view text,
                         ReadView("bytes of plan", plan, kMaxPlanBytes));
    KVS_ASSIGN_OR_RETURN(const Capacity room, s.CountCapacity(model, text));
    Write(room.device, &out->device);
    Write(room.host, &out->host);
    out->open_tokens = room.open_tokens;
    return OkStatus();
  });
}
