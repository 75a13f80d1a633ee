// SPDX-License-Identifier: Apache-2.0
// Taker: who pages are taken for, where from, and what of others it may have.
//
// Ownership: borrows tenant and session. Thread-safety: all of it under the store's lock. Cost:
// constant.
#ifndef KVSTRATA_SERVER_STORE_BOOKS_TAKER_H_
#define KVSTRATA_SERVER_STORE_BOOKS_TAKER_H_

#include <cstdint>
#include <vector>

#include "server/store/options/user_limits.h"
#include "server/store/pages/page.h"

namespace kvstrata {

struct Sequence;
struct Session;
struct Tenant;

// Who pages are taken for and where from, first choice first.
struct Taker {
  Tenant* tenant;
  uint64_t writer;         // a session or kDaemon
  const Session* session;  // null: the daemon
  uint64_t model;
  std::vector<PoolId> pools;
  bool evicts = true;  // else only what is free is taken
  uint64_t ahead = 0;  // bytes that are taken next: what is evicted makes room for them too
};

// Where memory for a session's sequence comes from: of its device, else of host; or of host only.
std::vector<PoolId> PoolsOf(const Session& session, Tier tier);
Taker TakerOf(const Session& session, const Sequence& s);
// The limit that a pool's arenas count against.
inline Limit LimitOf(PoolId pool) {
  return pool.tier() == Tier::kHost ? Limit::kHostBytes : Limit::kDeviceBytes;
}
// Whether the taker may become the writer of an orphan arena. A client that mapped it read-only
// keeps that mapping, so its session may not.
bool MayAdopt(const Taker& taker, const Arena& arena);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_BOOKS_TAKER_H_
