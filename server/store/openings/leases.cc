// SPDX-License-Identifier: Apache-2.0
#include "server/store/openings/leases.h"

#include <algorithm>
#include <string>
#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/devices.h"
#include "server/store/books/sequence.h"
#include "server/store/lookups/lookups.h"
#include "server/store/openings/openings.h"
#include "server/store/options/parameters.h"
#include "server/store/requests/prefix_hit.h"
#include "server/store/sequences/sequences.h"

namespace kvstrata {
namespace {

LeasedPrompt LeasedPromptOf(uint64_t model, const PrefixHit& hit, std::span<const int32_t> tokens) {
  const std::span<const int32_t> rest = tokens.subspan(hit.keys.size() * hit.page_tokens);
  return {model, FormatPlan(*hit.plan), hit.keys.back(), {rest.begin(), rest.end()}};
}

// Others may have computed more since it was opened.
PrefixHit Within(PrefixHit hit, const OpenedSequence& opened) {
  hit.pages.resize(std::min<size_t>(hit.pages.size(), opened.held_tokens / hit.page_tokens));
  hit.indexed_tokens = std::min(hit.indexed_tokens, opened.indexed_tokens);
  return hit;
}

}  // namespace

Status Leases::CheckLease(uint64_t session, uint64_t model, const LookupPlan& open,
                          std::chrono::milliseconds lease) {
  if (lease < std::chrono::milliseconds(1) || lease > kLongestLease) {
    return InvalidArgument("LEASE_TIME", "lease_ms is " + std::to_string(lease.count()) +
                                             "; allowed: 0 (none) to " +
                                             std::to_string(kLongestLease.count()));
  }
  if (open.plan.empty()) {
    return InvalidArgument("LEASE_PLAN", "lease_ms is " + std::to_string(lease.count()) +
                                             " and plan is empty; a lease holds what an open of a "
                                             "plan finds: name the plan, and tokens");
  }
  KVS_ASSIGN_OR_RETURN(const PageOwner owner, lookups_.OwnerOf(session, model));
  if (open.device.empty()) return OkStatus();
  KVS_ASSIGN_OR_RETURN(const uint32_t device, devices_.FindDevice(open.device));
  if (device == owner.device) return OkStatus();
  return InvalidArgument("LEASE_DEVICE", "device_uuid is '" + open.device +
                                             "', this session's is '" +
                                             devices_.DeviceName(owner.device) +
                                             "'; ask for a lease in a session that attached with "
                                             "that device_uuid");
}

bool Leases::RenewLease(uint64_t session_id, const LeasedPrompt& prompt, const PrefixHit& hit,
                        std::chrono::milliseconds lease) {
  StoreLock lock(mu_);
  const Result<Session*> session = catalog_.FindSession(session_id);
  if (!session.ok()) return false;
  const auto found = (*session)->leases.find(prompt);
  if (found == (*session)->leases.end()) return false;
  const auto s = (*session)->sequences.find(found->second.sequence);
  if (s == (*session)->sequences.end()) return false;
  const Sequence& held = *s->second;
  if (held.held_tokens < hit.held_tokens() || held.indexed_tokens < hit.indexed_tokens)
    return false;
  found->second.ends = std::max(found->second.ends, Clock::now() + lease);
  return true;
}

void Leases::EnterLease(uint64_t session_id, const LeasedPrompt& prompt, uint64_t sequence,
                        std::chrono::milliseconds lease) {
  uint64_t replaced = 0;
  {
    StoreLock lock(mu_);
    const Result<Session*> session = catalog_.FindSession(session_id);
    if (!session.ok()) return;  // it has closed its sequences
    Lease& entered = (*session)->leases[prompt];
    replaced = std::exchange(entered.sequence, sequence);
    entered.ends = std::max(entered.ends, Clock::now() + lease);
  }
  if (replaced == 0) return;
  (void)sequences_.CloseSequence(session_id, replaced);
}

void Leases::AnswerLeased(const Leasing& leasing, const LeasedPrompt& prompt,
                          const Result<OpenedSequence>& opened) {
  if (!opened.ok()) return leasing.done(opened.status());
  EnterLease(leasing.session, prompt, opened->sequence, leasing.lease);
  const Result<PrefixHit> hit =
      lookups_.Lookup(leasing.session, leasing.model, leasing.tokens, leasing.open, Files::kRead);
  leasing.done(hit.ok() ? Within(*hit, *opened) : hit);
}

void Leases::HoldHit(const std::shared_ptr<const Leasing>& leasing, const PrefixHit& hit) {
  if (hit.pages.empty()) return leasing->done(hit);
  const LeasedPrompt prompt = LeasedPromptOf(leasing->model, hit, leasing->tokens);
  if (RenewLease(leasing->session, prompt, hit, leasing->lease)) return leasing->done(hit);
  OpenOptions options;
  options.hold.only_held = true;
  openings_.OpenSequence(
      leasing->session, leasing->model, leasing->open.plan, leasing->tokens,
      [this, leasing, prompt](const Result<OpenedSequence>& opened) {
        AnswerLeased(*leasing, prompt, opened);
      },
      options);
}

void Leases::LookupLeased(uint64_t session, uint64_t model, std::span<const int32_t> tokens,
                          const LookupPlan& open, std::chrono::milliseconds lease,
                          LookupDone done) {
  if (lease.count() == 0) {
    return lookups_.Lookup(session, model, tokens, open, std::move(done));
  }
  if (const Status status = CheckLease(session, model, open, lease); !status.ok())
    return done(status);
  const auto leasing = std::make_shared<const Leasing>(
      Leasing{session, model, {tokens.begin(), tokens.end()}, open, lease, std::move(done)});
  lookups_.Lookup(session, model, leasing->tokens, open,
                  [this, leasing](const Result<PrefixHit>& hit) {
                    if (!hit.ok()) return leasing->done(hit);
                    HoldHit(leasing, *hit);
                  });
}

void Leases::ExpireLeases(Clock::time_point now) {
  std::vector<std::pair<uint64_t, uint64_t>> over;  // session, sequence
  {
    StoreLock lock(mu_);
    for (auto& [id, session] : catalog_.sessions()) {
      std::erase_if(session->leases, [&, id = id](const auto& entry) {
        if (entry.second.ends > now) return false;
        over.emplace_back(id, entry.second.sequence);
        return true;
      });
    }
  }
  // One whose session ended meanwhile is closed already.
  for (const auto& [session, sequence] : over) (void)sequences_.CloseSequence(session, sequence);
}

}  // namespace kvstrata
