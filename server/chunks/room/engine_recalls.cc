// SPDX-License-Identifier: Apache-2.0
#include "server/chunks/room/engine_recalls.h"

#include <algorithm>
#include <cmath>

#include "server/chunks/room/chunk_packets.h"
#include "server/sockets/packet.h"

namespace kvstrata {
namespace {

constexpr std::string_view kOther = "other";

bool IsShare(float x) { return x >= 0 && x <= 1; }  // no NaN is

Status Check(const chunks::RecalledLayer& row) {
  if (row.layer >= chunks::kMostRecalledLayers || row.samples == 0 ||
      row.samples > chunks::kMostRecalledSamples) {
    return MalformedPacket("RECALLED: layer " + std::to_string(row.layer) + " with " +
                           std::to_string(row.samples) +
                           " samples; allowed: layers below 1024, 1 .. 1048576 samples");
  }
  if (!IsShare(row.recall) || !IsShare(row.least) || !std::isfinite(row.error) || row.error < 0) {
    return MalformedPacket("RECALLED: layer " + std::to_string(row.layer) + " has recall " +
                           std::to_string(row.recall) + ", least " + std::to_string(row.least) +
                           ", error " + std::to_string(row.error) +
                           "; allowed: 0 .. 1, of error any from 0 on that is finite");
  }
  return OkStatus();
}

// Both means weighted by their samples.
void AddTo(LayerRecall* sum, uint64_t samples, double recall, double least, double error) {
  sum->samples += samples;
  const double share = static_cast<double>(samples) / static_cast<double>(sum->samples);
  sum->recall += (recall - sum->recall) * share;
  sum->error += (error - sum->error) * share;
  sum->least = std::min(sum->least, least);
}

}  // namespace

LayerRecall EngineRecall::all() const {
  LayerRecall sum;
  for (const LayerRecall& row : layers) AddTo(&sum, row.samples, row.recall, row.least, row.error);
  return sum;
}

const LayerRecall& EngineRecall::worst() const {
  return *std::ranges::min_element(layers, {}, &LayerRecall::recall);
}

EngineRecalls::EngineRecalls(std::span<const std::string_view> plans) {
  for (const std::string_view plan : plans) {
    if (plan != "full") plans_.push_back({plan});  // which loses nothing
  }
  plans_.push_back({kOther});
}

// "quest" of "quest{budget = 2048}".
PlanRecall* EngineRecalls::PlanOf(std::string_view plan) {
  const std::string_view name = plan.substr(0, plan.find('{'));
  const auto row = std::ranges::find(plans_, name, &PlanRecall::plan);
  return row == plans_.end() ? &plans_.back() : &*row;
}

Status EngineRecalls::Add(const std::string& engine, std::span<const std::byte> packet) {
  chunks::Recalled head{};
  std::vector<chunks::RecalledLayer> rows;
  if (!ReadList(packet, &head, &rows) || rows.empty() ||
      rows.size() > chunks::kMostRecalledLayers) {
    return MalformedPacket("RECALLED: it has " + std::to_string(packet.size()) +
                           " bytes and count " + std::to_string(head.count) +
                           "; allowed: 256 bytes, and 20 for each of 1 .. 1024 layers");
  }
  std::string plan, model;
  if (!ReadText(head.plan, &plan) || !ReadText(head.model, &model) || plan.empty()) {
    return MalformedPacket(
        "RECALLED: plan and model need a NUL in their 128 and 120 bytes, and "
        "plan some text");
  }
  for (const chunks::RecalledLayer& row : rows) KVS_RETURN_IF_ERROR(Check(row));
  LayerRecall now;
  MutexLock lock(mu_);
  Told& told = engines_[engine];
  if (told.plan != plan || told.model != model) told = {plan, model, {}};
  for (const chunks::RecalledLayer& row : rows) {
    LayerRecall& layer = told.layers[row.layer];
    layer.layer = row.layer;
    AddTo(&layer, row.samples, row.recall, row.least, row.error);
    AddTo(&now, row.samples, row.recall, row.least, row.error);
  }
  PlanRecall* const of_plan = PlanOf(plan);
  of_plan->samples += now.samples;
  of_plan->recall = now.recall;
  return OkStatus();
}

void EngineRecalls::Forget(const std::string& engine) {
  MutexLock lock(mu_);
  engines_.erase(engine);
}

std::vector<EngineRecall> EngineRecalls::Engines() const {
  std::vector<EngineRecall> engines;
  MutexLock lock(mu_);
  for (const auto& [name, told] : engines_) {
    EngineRecall engine{Printable(name), Printable(told.plan), Printable(told.model), {}};
    for (const auto& [number, layer] : told.layers) engine.layers.push_back(layer);
    engines.push_back(std::move(engine));
  }
  return engines;
}

std::vector<PlanRecall> EngineRecalls::Plans() const {
  MutexLock lock(mu_);
  return plans_;
}

}  // namespace kvstrata
