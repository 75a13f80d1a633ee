// SPDX-License-Identifier: Apache-2.0
// MooncakeAgent: the process that calls Mooncake Store for the daemon (docs/mooncake.md), and who
// starts it, again where it ends.
//
// A call is a batch of at most 512 entries. It ends by its deadline, or when it is cancelled,
// whatever the agent does; the store's own calls do not. So the memory of a call that nobody waits
// for any more stays the agent's until it answers or its process is gone. An agent that leaves a
// call unanswered for `stall_timeout`, is not ready within `start_timeout` or sends what is no
// answer is killed. One that ended is started again after a pause that doubles. While calls are
// late in a row, the agent is asked once a pause.
//
// Threads: "kvs-mooncake" serves the process. Thread-safety: all methods, from any thread; Call not
// after Stop began. Blocking: Call, until its deadline; Stop and the end, until the process is
// dead. Cost of a call: two messages.
//
// Errors of Call: UNAVAILABLE MOONCAKE_AGENT (it is not there, or ended under the call),
// MOONCAKE_LEFT_ALONE, TierStopped; DEADLINE_EXCEEDED MOONCAKE_SLOW; TierCancelled.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/sync.h"
#include "base/unique_fd.h"
#include "server/telemetry/traffic.h"
#include "server/tier/breaker.h"
#include "server/tier/mooncake/agent_memory.h"
#include "server/tier/mooncake/agent_process.h"
#include "server/tier/mooncake/mooncake_agent_options.h"
#include "server/tier/mooncake/mooncake_messages.h"
#include "server/tier/value_tier.h"

namespace kvstrata {

// What became of the entries of calls.
struct MooncakeAnswers {
  uint64_t hits = 0;     // the store had them
  uint64_t absent = 0;   // it had them not
  uint64_t refused = 0;  // another code
  uint64_t late = 0;     // no answer by the deadline
  uint64_t lost = 0;     // the agent ended first
};

// Since start, but for what is so now.
struct MooncakeAgentStats {
  pid_t pid = 0;  // 0: none runs
  bool ready = false;
  bool left_alone = false;  // after failures: its own, or the store's
  uint64_t starts = 0;
  uint64_t calls = 0;                     // that it was sent
  uint64_t failures = 0;                  // calls that it did not take, or ended under
  uint64_t late = 0;                      // calls without an answer in time
  uint64_t openings = 0;                  // how often `left_alone` began
  uint64_t held_bytes = 0;                // memory of calls, waited for or not
  uint64_t most_held_bytes = 0;           // at once
  MooncakeAnswers exists, gets;           // by entry
  uint64_t put_bytes = 0, got_bytes = 0;  // in whole objects
  LatencyHistogram times;                 // calls that were answered in time
  std::string last_error;
};

class MooncakeAgent {
 public:
  struct Entry {
    std::string name;
    uint64_t offset = 0, bytes = 0;  // in the memory
  };

  // Maps the memory, and has the process started soon.
  static Result<std::unique_ptr<MooncakeAgent>> Start(const MooncakeAgentOptions& options);
  ~MooncakeAgent();

  AgentMemory& memory() { return *memory_; }
  // What the store says of each entry. `block`: has the bytes of all of them; null: none have.
  // `terms`: its deadline, and its cancel, which ends the wait at once. REQUIRES: 1 to 512 entries.
  Result<std::vector<int64_t>> Call(mooncake::Kind kind, std::span<const Entry> entries,
                                    std::shared_ptr<AgentBlock> block, const TierCall& terms)
      KVS_EXCLUDES(mu_);
  // Ends all calls, and the process.
  void Stop() KVS_EXCLUDES(mu_);

  MooncakeAgentStats Stats() const KVS_EXCLUDES(mu_);
  // "": well, or it was not tried yet.
  std::string Illness() const KVS_EXCLUDES(mu_);

 private:
  struct Pending;  // a call that is not answered
  MooncakeAgent(const MooncakeAgentOptions& options, std::shared_ptr<AgentMemory> memory);
  void Serve() KVS_EXCLUDES(mu_);
  // When the next thing is due that nobody sends word of.
  Deadline NextDue() const KVS_REQUIRES(mu_);
  void DoWhatIsDue(Deadline now) KVS_REQUIRES(mu_);
  void Spawn(Deadline now) KVS_REQUIRES(mu_);
  void ReadReplies() KVS_REQUIRES(mu_);
  // False: it is no answer to anything.
  bool Take(std::span<const std::byte> message) KVS_REQUIRES(mu_);
  // `why`: "" where how it ends tells.
  void Kill(const std::string& why) KVS_REQUIRES(mu_);
  // If the process is dead: nothing touches the memory any more.
  void Reap(Deadline now) KVS_REQUIRES(mu_);
  void PauseBeforeNext(Deadline now) KVS_REQUIRES(mu_);
  void EndCalls(const Status& why) KVS_REQUIRES(mu_);
  Status Send(mooncake::Kind kind, std::span<const Entry> entries, uint64_t call, Deadline deadline)
      KVS_REQUIRES(mu_);
  bool LeftAlone() const KVS_REQUIRES(mu_) { return failed_ || breaker_.open(); }
  // A call failed; the process is none, or none any more.
  void Blame() KVS_REQUIRES(mu_);
  void NoteLost() KVS_REQUIRES(mu_);

  const MooncakeAgentOptions options_;
  const std::shared_ptr<AgentMemory> memory_;
  const UniqueFd wake_;

  mutable Mutex mu_;
  std::condition_variable answered_;  // or a call is cancelled
  AgentProcess process_ KVS_GUARDED_BY(mu_);
  std::map<uint64_t, std::shared_ptr<Pending>> calls_ KVS_GUARDED_BY(mu_);  // not answered, by age
  uint64_t next_call_ KVS_GUARDED_BY(mu_) = 1;
  Breaker breaker_ KVS_GUARDED_BY(mu_);
  bool stopped_ KVS_GUARDED_BY(mu_) = false;
  bool failed_ KVS_GUARDED_BY(mu_) = false;  // and has not been ready since
  Deadline next_start_ KVS_GUARDED_BY(mu_){}, started_ KVS_GUARDED_BY(mu_){};
  std::chrono::milliseconds pause_ KVS_GUARDED_BY(mu_);
  MooncakeAgentStats stats_ KVS_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace kvstrata
