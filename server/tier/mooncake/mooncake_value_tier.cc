// SPDX-License-Identifier: Apache-2.0
#include "server/tier/mooncake/mooncake_value_tier.h"

#include <utility>

#include "server/tier/mooncake/mooncake_calls.h"

namespace kvstrata {
namespace {

constexpr const char* kMooncakeThread = "kvs-mooncake-io";
constexpr size_t kSpare = 2;  // threads that see to deadlines while every lane waits

}  // namespace

Result<std::unique_ptr<MooncakeValueTier>> MooncakeValueTier::Open(
    const MooncakeTierOptions& options, remote::RemoteFormat format) {
  KVS_ASSIGN_OR_RETURN(auto agent, MooncakeAgent::Start(options.agent));
  return std::unique_ptr<MooncakeValueTier>(new MooncakeValueTier(
      std::make_unique<MooncakeTierParts>(options, std::move(format), std::move(agent))));
}

MooncakeValueTier::MooncakeValueTier(std::unique_ptr<MooncakeTierParts> parts)
    : parts_(std::move(parts)),
      queue_(kLanes),
      threads_(kMooncakeThread, kLanes + kSpare, &queue_) {}

MooncakeValueTier::~MooncakeValueTier() {
  queue_.Stop();
  parts_->agent->Stop();  // what waits for it ends
}

void MooncakeValueTier::Probe(std::span<TierProbe> probes, TierCall call) {
  if (!WhyNotNow(call).ok()) {
    for (TierProbe& probe : probes) probe.sizes = parts_->known.Find(probe.key);
    call.done();
    return;
  }
  queue_.Add(kProbes, {std::move(call),
                       [p = parts_.get(), probes](const TierCall& terms) {
                         ProbeMooncake(p, probes, terms);
                       },
                       [probes](const Status&) {
                         for (TierProbe& probe : probes) probe.sizes = ValueSizes();
                       }});
}

void MooncakeValueTier::Get(std::span<TierGet> gets, TierCall call) {
  const Lane lane = next_read_++ % 2 == 0 ? kReads : kOtherReads;
  queue_.Add(lane,
             {std::move(call),
              [p = parts_.get(), gets](const TierCall& terms) { ReadFromMooncake(p, gets, terms); },
              Refusing(gets)});
}

void MooncakeValueTier::Put(std::span<TierPut> puts, TierCall call) {
  queue_.Add(kWrites,
             {std::move(call),
              [p = parts_.get(), puts](const TierCall& terms) { WriteToMooncake(p, puts, terms); },
              Refusing(puts)});
}

void MooncakeValueTier::Forget(std::span<TierForget> keys, TierCall call) {
  queue_.Add(kWrites,
             {std::move(call),
              [p = parts_.get(), keys](const TierCall& terms) { ForgetInMooncake(p, keys, terms); },
              Refusing(keys)});
}

void MooncakeValueTier::Walk(TierWalk* walk, TierCall call) {
  walk->values.clear();
  walk->status = WhyNotNow(call);
  if (walk->status.ok()) {
    walk->status = Unimplemented("MOONCAKE_WALK", "Mooncake Store does not list what it has");
  }
  call.done();
}

TierStats MooncakeValueTier::Stats() const {
  TierStats stats;
  {
    MutexLock lock(parts_->mu);
    stats = parts_->counted;
  }
  stats.illness = parts_->agent->Illness();
  return stats;
}

MooncakePing MooncakeValueTier::PingAndWait(Deadline deadline) {
  return PingMooncake(parts_.get(), deadline);
}

MooncakeAgentStats MooncakeValueTier::Agent() const { return parts_->agent->Stats(); }

}  // namespace kvstrata
