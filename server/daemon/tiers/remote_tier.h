// SPDX-License-Identifier: Apache-2.0
// RemoteTier: the daemon's remote tier: the engine that the configuration names, what goes there
// and comes from there (server/work/tiers/tier_row.h), and what is told of it.
//
// Ownership: borrows store and local tier, which outlive it. Thread-safety: Info, illness, Probe,
// Purge and Configure from any thread between Use and the end. Errors of Open: REMOTE_SECRET
// (server/tier/remote/remote_secret.h) and those of the engine
// (server/daemon/tiers/remote_engine.h).
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "server/config/config.h"
#include "server/daemon/tiers/remote_engine.h"
#include "server/rpc/calls/grpc_options.h"
#include "server/work/tiers/tier_chain.h"

namespace kvstrata {

class RemoteTier {
 public:
  // REQUIRES: remote.on(), and what CheckRemoteEngine says. Reads the secret, connects to nothing:
  // servers may come later.
  static Result<std::unique_ptr<RemoteTier>> Open(const Config& config);

  // From now on it is a row of the store's tiers, behind the local one. null: there is none.
  void Use(Store* store, ValueTier* local, TierChain* tiers);
  // What reloads of its configuration.
  void Configure(const RemoteConfig& config);
  // As its row, and logs what it did. Once.
  void Stop();

  // "": well.
  std::string illness() const;
  // Both wait, until the deadline at most. Of `prompt` no keys: servers alone.
  RemoteProbeInfo Probe(const PromptValues& prompt, Deadline deadline);
  RemotePurgeInfo Purge(const PromptValues& prompt, Deadline deadline);
  RemoteInfo Info() const;
  // These as calls of Admin.
  void Offer(GrpcOptions* options);
  // For who asks it, or its servers, for something else.
  RemoteEngine& engine() const { return *engine_; }

 private:
  RemoteTier(const RemoteConfig& config, std::string secret_fingerprint,
             std::unique_ptr<RemoteEngine> engine);

  std::vector<bool> Held(const PromptValues& prompt, Deadline deadline);

  const RemoteConfig config_;  // as of the start
  const std::string secret_fingerprint_;
  std::atomic<TierWrite> write_;
  const std::unique_ptr<RemoteEngine> engine_;
  TierChain* tiers_ = nullptr;
  std::unique_ptr<TierRow> row_;
};

}  // namespace kvstrata
