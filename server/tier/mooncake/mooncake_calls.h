// SPDX-License-Identifier: Apache-2.0
// The calls of a MooncakeValueTier, each in a file of its own, and what they share. Each sets the
// status of every request and returns by the call's deadline. Thread-safety: any thread; requests
// are one call's.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/sync.h"
#include "server/tier/mooncake/mooncake_agent.h"
#include "server/tier/mooncake/mooncake_value_tier.h"
#include "server/tier/remote/known_values.h"
#include "server/tier/remote/remote_format.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

// Bytes of values in one batch, but for a value's that has more in one stripe: so that several
// batches have room in the agent's memory.
inline constexpr uint64_t kMooncakeBatchBytes = uint64_t{12} << 20;

struct MooncakeTierParts {
  MooncakeTierParts(const MooncakeTierOptions& options, remote::RemoteFormat its,
                    std::unique_ptr<MooncakeAgent> the_agent)
      : format(std::move(its)), known(options.known_for), agent(std::move(the_agent)) {}

  const remote::RemoteFormat format;
  KnownValues known;
  const std::unique_ptr<MooncakeAgent> agent;
  mutable Mutex mu;
  TierStats counted KVS_GUARDED_BY(mu);
};

// The name of a value's head (docs/mooncake.md, "Objects").
std::string HeadNameOf(const MooncakeTierParts& parts, std::string_view key,
                       std::string_view place);
// Room in the agent's memory; MOONCAKE_HELD, or why the call may not go on.
Result<std::shared_ptr<AgentBlock>> RoomFor(MooncakeTierParts* parts, uint64_t bytes,
                                            const TierCall& call);
// What a code of the store's means that is no success.
Status StatusOfCode(int64_t code);
// Sizes of the values whose heads are there and sound; else none.
Result<std::vector<ValueSizes>> FindHeads(MooncakeTierParts* parts, std::span<TierProbe> probes,
                                          const TierCall& call);
// Removes a value's head and so many stripes.
Status RemoveFromMooncake(MooncakeTierParts* parts, std::string_view key, std::string_view place,
                          uint32_t stripes, const TierCall& call);

MooncakePing PingMooncake(MooncakeTierParts* parts, Deadline deadline);
void ProbeMooncake(MooncakeTierParts* parts, std::span<TierProbe> probes, const TierCall& call);
void ReadFromMooncake(MooncakeTierParts* parts, std::span<TierGet> gets, const TierCall& call);
void WriteToMooncake(MooncakeTierParts* parts, std::span<TierPut> puts, const TierCall& call);
void ForgetInMooncake(MooncakeTierParts* parts, std::span<TierForget> keys, const TierCall& call);

}  // namespace kvstrata
