// SPDX-License-Identifier: Apache-2.0
// EngineRecalls: what plans lose in engines that attend by them over their own blocks, as workers
// tell it (RECALLED, docs/chunks.md): added up by layer from when an engine came, all its workers
// together, and gone with it. And by plan since the daemon's start, for metrics.
//
// An engine has one plan and one model: when it names another, its layers begin anew.
//
// Memory: at most kMostRecalledLayers rows an engine that is connected. Thread-safety: any thread,
// by a lock of its own that nobody waits under. Cost: of Add a look-up and its layers, of the
// others a copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "base/sync.h"

namespace kvstrata {

// Means over the samples of a layer, or of several.
struct LayerRecall {
  uint32_t layer = 0;
  uint64_t samples = 0;
  double recall = 0;  // softmax mass of full attention on what the plan attended
  double least = 1;   // the least recall of a sample
  double error = 0;   // relative error of the output
};

struct EngineRecall {
  std::string engine, plan, model;  // printable
  std::vector<LayerRecall> layers;  // those that were measured, ascending; at least one

  // All layers together; its `layer` says nothing.
  LayerRecall all() const;
  // The one of the least mean recall.
  const LayerRecall& worst() const;
};

struct PlanRecall {
  std::string_view plan;  // one of `plans`, or "other"
  uint64_t samples = 0;
  double recall = 0;  // as it was told last: mean over samples
};

class EngineRecalls {
 public:
  // `plans`: names that metrics tell apart, without "full"; they outlive it.
  explicit EngineRecalls(std::span<const std::string_view> plans);

  // A worker's RECALLED. CHUNK_PACKET: malformed, and nothing of it counts.
  Status Add(const std::string& engine, std::span<const std::byte> packet) KVS_EXCLUDES(mu_);
  // The engine is gone.
  void Forget(const std::string& engine) KVS_EXCLUDES(mu_);

  std::vector<EngineRecall> Engines() const KVS_EXCLUDES(mu_);  // by name
  std::vector<PlanRecall> Plans() const KVS_EXCLUDES(mu_);      // all, told of or not

 private:
  struct Told {
    std::string plan, model;
    std::map<uint32_t, LayerRecall> layers;
  };

  PlanRecall* PlanOf(std::string_view plan) KVS_REQUIRES(mu_);

  mutable Mutex mu_;
  std::map<std::string, Told> engines_ KVS_GUARDED_BY(mu_);
  std::vector<PlanRecall> plans_ KVS_GUARDED_BY(mu_);
};

}  // namespace kvstrata
