// SPDX-License-Identifier: Apache-2.0
// MooncakeValueTier: a ValueTier in a Mooncake Store that several daemons share, by way of an agent
// (mooncake_agent.h). What a value is called and looks like there is docs/remote_format.md, with
// one object more: docs/mooncake.md.
//
//   Probe   which keys are there, then the heads of those. With a deadline in the past: what was
//           put, found or read here during the last `known_for`.
//   Get     by way of the memory that the agent has, checked; what fails a check is removed and
//           DATA_LOSS.
//   Put     what has its head there is not sent again; the head goes last. `durable` adds nothing.
//   Walk    UNIMPLEMENTED MOONCAKE_WALK: the store's client lists nothing.
// Stats knows nothing of what the store holds, TierGet::inspects is a use as any, and nobody knows
// beforehand what never fits: a value that the store had no room for beside itself is a miss.
//
// Threads: "kvs-mooncake-io" carries out one probe, two reads and one write at a time, and two more
// see to deadlines (server/tier/call_queue.h). Ownership: as ValueTier; callers' buffers are free
// when a call ends, since they are copied. Thread-safety: all methods, from any thread. Cost: a
// copy and a pass over the bytes of each value.
//
// Errors of requests: those of RemoteFormat, MooncakeAgent and CallQueue; NOT_FOUND MOONCAKE_MISS,
// RESOURCE_EXHAUSTED MOONCAKE_FULL, UNAVAILABLE MOONCAKE_REFUSED (a code of the store's),
// DEADLINE_EXCEEDED MOONCAKE_HELD (late calls hold the memory).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "server/tier/call_queue.h"
#include "server/tier/call_threads.h"
#include "server/tier/mooncake/mooncake_agent.h"
#include "server/tier/remote/remote_format.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

struct MooncakeTierOptions {
  MooncakeAgentOptions agent;
  std::chrono::milliseconds known_for{30000};
};

struct MooncakeTierParts;

// What the store's master says to a question.
struct MooncakePing {
  std::chrono::microseconds round_trip{0};  // by way of the agent
  Status status;                            // MooncakeAgent::Call's, or the answer's
};

class MooncakeValueTier final : public ValueTier {
 public:
  // Waits for nothing: until the agent is ready, calls end with UNAVAILABLE.
  static Result<std::unique_ptr<MooncakeValueTier>> Open(const MooncakeTierOptions& options,
                                                         remote::RemoteFormat format);
  // Ends what it holds, and the agent.
  ~MooncakeValueTier() override;

  void Probe(std::span<TierProbe> probes, TierCall call) override;
  void Get(std::span<TierGet> gets, TierCall call) override;
  void Put(std::span<TierPut> puts, TierCall call) override;
  void Forget(std::span<TierForget> keys, TierCall call) override;
  void Walk(TierWalk* walk, TierCall call) override;
  TierStats Stats() const override;

  // Waits until the deadline at most. Not in a thread of the tier's.
  MooncakePing PingAndWait(Deadline deadline);
  MooncakeAgentStats Agent() const;

 private:
  enum Lane : uint8_t { kProbes, kReads, kOtherReads, kWrites, kLanes };

  explicit MooncakeValueTier(std::unique_ptr<MooncakeTierParts> parts);

  const std::unique_ptr<MooncakeTierParts> parts_;
  CallQueue queue_;
  std::atomic<uint32_t> next_read_ = 0;
  CallThreads threads_;
};

}  // namespace kvstrata
