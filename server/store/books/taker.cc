// SPDX-License-Identifier: Apache-2.0
#include "server/store/books/taker.h"

#include <algorithm>
#include <utility>

#include "server/store/books/sequence.h"

namespace kvstrata {

Taker TakerOf(const Session& session, const Sequence& s) {
  std::vector<PoolId> pools = PoolsOf(session, Tier::kDevice);
  if (s.imported || s.plan.tier == Tier::kHost) std::ranges::reverse(pools);
  if (s.imported) return {session.tenant, kDaemon, nullptr, s.model->id, std::move(pools)};
  return {session.tenant, session.id, &session, s.model->id, std::move(pools)};
}

std::vector<PoolId> PoolsOf(const Session& session, Tier tier) {
  if (tier == Tier::kHost) return {PoolId::Host()};
  return {PoolId::Device(session.device), PoolId::Host()};
}

bool MayAdopt(const Taker& taker, const Arena& arena) {
  return taker.session != nullptr && !taker.session->granted.contains(arena.id);
}

}  // namespace kvstrata
