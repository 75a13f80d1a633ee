// SPDX-License-Identifier: Apache-2.0
// What the daemon's parts tell of themselves: health, the numbers of its pages, what kvs-watch
// sees.
#include "server/web/daemon_numbers.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/daemon/daemon_parts.h"
#include "server/memory/cgroup.h"
#include "server/sockets/descriptor_closer.h"
#include "server/store/reports/session_totals.h"
#include "server/telemetry/thread_top.h"

namespace kvstrata {
namespace {

// PartHealth of the daemon's parts (server/web/daemon_numbers.h), from what they say of
// themselves. Pure; any thread.

std::string HealthOfDescriptors(std::span<const ClosingCounters> closing) {
  const auto late = std::ranges::find_if(closing, [](const auto& c) { return c.late != 0; });
  if (late == closing.end()) return "";
  return std::to_string(late->late) + " descriptors that clients of user " +
         std::to_string(late->late_user) + (late->late == 1 ? "" : " and others") +
         " passed do not close";
}

std::string HealthOfPools(std::span<const PoolInfo> pools) {
  const auto lost = std::ranges::find_if(pools, [](const auto& p) { return !p.failure.empty(); });
  if (lost == pools.end()) return "";
  const bool several = std::ranges::count(pools, Tier::kDevice, &PoolInfo::tier) > 1;
  return "the " + std::string(NameOf(lost->tier)) + " pool" +
         (several ? " of " + lost->device : "") + " is lost: " + lost->failure;
}

// "descriptors", "pools", "disk", "remote", each with the first failure that it has. illness: the
// tiers'; nothing: there is no such tier, and it is no part.
std::vector<PartHealth> HealthOfParts(std::span<const ClosingCounters> closing,
                                      std::span<const PoolInfo> pools,
                                      std::optional<std::string> disk_illness,
                                      std::optional<std::string> remote_illness) {
  std::vector<PartHealth> parts = {{"descriptors", HealthOfDescriptors(closing), false},
                                   {"pools", HealthOfPools(pools), true}};
  if (disk_illness) parts.push_back({"disk", std::move(*disk_illness), false});
  if (remote_illness) parts.push_back({"remote", std::move(*remote_illness), false});
  return parts;
}

// What ails the daemon first: a loop that has not answered for longer than `patience`, a part.
std::string HealthOf(std::span<const PartHealth> parts, std::chrono::microseconds patience) {
  for (const HangingLoop& loop : HangingLoops(patience)) {
    return "hangs: " + loop.thread + " has not answered for " + std::to_string(loop.since.count()) +
           " s";
  }
  for (const PartHealth& part : parts) {
    if (!part.failure.empty()) return "degraded: " + part.failure;
  }
  return "serving";
}

}  // namespace

std::optional<CgroupInfo> ReadCgroup() {
  const std::optional<CgroupMemory> c = ReadCgroupMemory();
  if (!c) return std::nullopt;
  return CgroupInfo{c->file, c->limit, c->charged, c->reclaimable, c->available()};
}

std::vector<PartHealth> Daemon::Parts::PartsOf(std::span<const PoolInfo> pools) const {
  const ClosingCounters closing[] = {mapped.attach->counters().closing, door.closer.counters()};
  const auto illness_of = [](const auto& tier) {
    return tier == nullptr ? std::nullopt : std::optional<std::string>(tier->illness());
  };
  return HealthOfParts(closing, pools, illness_of(tiers.local), illness_of(tiers.remote));
}

std::string Daemon::Parts::Health() const {
  return HealthOf(PartsOf(store->inspection().Pools()), page_source.patience);
}

DaemonNumbers Daemon::Parts::Numbers(bool all) const {
  DaemonNumbers numbers;
  numbers.taken = std::chrono::steady_clock::now();
  numbers.pools = store->inspection().Pools();
  numbers.parts = PartsOf(numbers.pools);
  numbers.counters = store->inspection().Counters();
  if (mapped.chunks != nullptr) numbers.chunks = mapped.chunks->Numbers();
  if (tiers.local != nullptr) numbers.disk = tiers.local->Info();
  if (tiers.remote != nullptr) numbers.remote = tiers.remote->Info();
  if (!all) return numbers;
  numbers.pins = store->pins().PinUse();
  numbers.users = config.store.user_limits->Report();
  numbers.sessions = ReadSessionTotals();
  numbers.recall = store->recalls().Sampled();
  numbers.engine_recalls = mapped.recalls.Engines();
  numbers.plan_recalls = mapped.recalls.Plans();
  numbers.cgroup = ReadCgroup();
  if (page_source.status.watched()) {
    LiveNumbers& live = numbers.live.emplace();
    live.sequences = store->inspection().Newest(LiveNumbers::kMostSequences, LiveNumbers::kBuckets);
    live.all_sequences = numbers.counters.sequences;
    live.work = store->requests().Work();
  }
  return numbers;
}

DaemonState Daemon::Parts::State() {
  DaemonNumbers numbers = Numbers(config.http.kind != HttpAddress::Kind::kNone);
  DaemonState state;
  state.health = HealthOf(numbers.parts, page_source.patience);
  state.evicted_pages = numbers.counters.evicted_pages;
  state.evicted_stored_pages = numbers.counters.evicted_stored_pages;
  state.evicted_chunks = numbers.chunks.counters.evicted;
  for (const PoolInfo& pool : numbers.pools) {
    if (pool.capacity_bytes == 0) continue;
    const uint64_t percent = pool.used_bytes * 100 / pool.capacity_bytes;
    state.fullest_percent = std::max(state.fullest_percent, static_cast<uint32_t>(percent));
  }
  if (numbers.disk) {
    state.draining = numbers.disk->draining;
    state.disk_evicted = numbers.disk->evicted;
  }
  if (numbers.remote) {
    for (const RemoteShardInfo& shard : numbers.remote->shards) {
      state.servers.insert(shard.address);
      if (shard.breaker_open) state.left_alone[shard.address] = shard.last_error;
    }
  }
  if (pages != nullptr) {
    page_source.audits.MakeWanted([this] { return store->inspection().Audit(); });
  }
  page_source.numbers.Put(std::move(numbers));
  return state;
}

}  // namespace kvstrata
