// SPDX-License-Identifier: Apache-2.0
#include "server/store/codecs/builds.h"

#include <algorithm>
#include <utility>

#include "kernels/codec/codec.h"
#include "kernels/plan/plan_needs.h"
#include "kernels/segment/span_rule.h"
#include "kernels/select/selector.h"
#include "server/store/books/books.h"
#include "server/store/books/devices.h"
#include "server/store/books/plans.h"
#include "server/store/books/sequence.h"
#include "server/store/codecs/recompression.h"
#include "server/store/options/parameters.h"
#include "server/store/requests/answers.h"

namespace kvstrata {
namespace {

using Work = CodecState::Work;

Status InputMissing(const Plan& plan, const std::string& what) {
  return FailedPrecondition("BUILD_INPUT", "plan '" + plan.name + "' needs " + what);
}

std::string Positions(uint64_t begin, uint64_t end) {
  return std::to_string(begin) + " to " + std::to_string(end) + " (exclusive)";
}

// Checks `tokens` positions; position 0 needs none.
Status CheckSurprisal(const Sequence& s, const Plan& plan, uint32_t tokens) {
  if (HasSurprisal(s.series.surprisal, {0, static_cast<int32_t>(tokens)})) return OkStatus();
  const uint32_t first = std::min(s.series.LeadingSurprisals(), tokens);
  return InputMissing(plan, "the surprisal of the prompt's tokens, and of positions " +
                                Positions(first, tokens) +
                                " not all was reported; report it (kvs_report, Compute.Report)");
}

Status CheckBoundaries(const Sequence& s) {
  if (!s.model->desc.boundary_tokens.empty()) return OkStatus();
  const size_t reported = s.series.boundary.size();
  if (reported >= s.prompt_tokens) return OkStatus();
  return InputMissing(s.plan, "the prompt's sentence ends, and of positions " +
                                  Positions(reported, s.prompt_tokens) +
                                  " none were reported; report them (kvs_report, Compute.Report), "
                                  "or register the model with its boundary tokens");
}

// Buckets are made by whoever runs the steps, from what went through them.
Status CheckBuckets(const Sequence& s, bool operators) {
  const auto observed = std::min(static_cast<uint32_t>(s.plan.bucket.n_obs), s.prompt_tokens);
  if (!s.prefill_done || s.prompt_tokens - std::min(s.held_tokens, s.prompt_tokens) < observed) {
    return InputMissing(s.plan, "the queries of the prompt's last " +
                                    std::to_string(s.plan.bucket.n_obs) +
                                    " tokens, which only steps over them give; run the rest of the "
                                    "prompt as steps, then mark it complete (kvs_prefill_done)");
  }
  KVS_RETURN_IF_ERROR(CheckBoundaries(s));
  if (!operators || s.prompt_tokens == 0) return OkStatus();
  return Unimplemented("BUILD_BUCKETS",
                       "buckets are made from queries that only the sequence's own "
                       "session has; build from there (kvs_sequence_build)");
}

// Checks a build of the sequence's own plan.
Status CheckOwn(const Sequence& s, bool operators) {
  if ((SelectorNeeds(s.plan) & kNeedPromptQueries) != 0) {
    return CheckBuckets(s, operators);
  }
  if ((CodecNeeds(s.plan) & kNeedSurprisal) == 0 || !s.extents.empty()) return OkStatus();
  if (!s.prefill_done) {
    return InputMissing(s.plan, "the end of the prompt; mark it complete (kvs_prefill_done)");
  }
  return CheckSurprisal(s, s.plan, s.prompt_tokens);
}

uint32_t WholeBlocks(const IndexLayout& index, uint32_t tokens) {
  if (index.kind == IndexLayout::Kind::kNone) return 0;
  const auto block = static_cast<uint32_t>(index.block_tokens);
  return tokens / block * block;
}

// Checks a build of another plan.
Status CheckOther(const Sequence& s, const PendingBuild& p, const PageMemory& memory) {
  if (s.chain.is_private()) {
    return FailedPrecondition(
        "BUILD_PRIVATE", "sequence " + std::to_string(s.id) +
                             " is private: nobody would find what is made of it for plan '" +
                             p.plan.name + "'; build its own plan, or open it without private");
  }
  if ((SelectorNeeds(p.plan) & kNeedPromptQueries) != 0) {
    return InputMissing(p.plan,
                        "the queries of the prompt's last " + std::to_string(p.plan.bucket.n_obs) +
                            " tokens, which are not kept; open a sequence of that plan: its "
                            "prefix is held but for these tokens");
  }
  const bool indexed = p.index.kind != IndexLayout::Kind::kNone;
  if (indexed && p.index.block_tokens % static_cast<int32_t>(s.page_tokens()) != 0) {
    return Unimplemented("BUILD_BLOCKS",
                         "index blocks of " + std::to_string(p.index.block_tokens) +
                             " tokens end inside of pages of " + std::to_string(s.page_tokens()) +
                             " and are not kept beside them; choose a `page` that divides those, "
                             "or that they divide");
  }
  if (p.recompressor != nullptr && (CodecNeeds(p.plan) & kNeedSurprisal) != 0) {
    KVS_RETURN_IF_ERROR(CheckSurprisal(s, p.plan, s.tokens));
  }
  const uint32_t rows = p.recompressor != nullptr ? s.tokens : WholeBlocks(p.index, s.tokens);
  for (uint32_t i = 0; i < s.PagesFor(rows); ++i) {
    if (s.pages[i] == nullptr) {
      return InputMissing(p.plan, "raw rows, and those from position " +
                                      std::to_string(i * s.page_tokens()) +
                                      " on were released (keep_raw); compute that prompt again");
    }
    if (p.recompressor == nullptr || memory.readable(s.pages[i]->arena->tier)) continue;
    return Unimplemented("BUILD_ON_GPU",
                         "rows of this sequence lie on a GPU, from where extents of "
                         "another plan are not made; open a sequence of that plan");
  }
  return OkStatus();
}

}  // namespace

BuildResult PendingBuild::ResultFor(const Sequence& s) const {
  BuildResult result;
  result.plan = FormatPlan(plan);
  result.own = own;
  result.indexed_tokens = own ? s.indexed_tokens : built_to;
  result.built_blocks = built_blocks;
  result.extents = own ? static_cast<uint32_t>(s.extents.size()) : extents;
  return result;
}

PageKey PendingBuild::ArtefactKey(const Sequence& s) const {
  return Artefacts::KeyOf(s.chain, s.last_key, s.tail, FormatPlan(plan), parameters_digest);
}

// What is done before the lock.
Result<PendingBuild> Builds::Prepare(const BuildRequest& request) {
  PendingBuild p;
  p.sequence = request.sequence;
  p.operators = request.session == 0;
  Geometry geometry;
  {
    StoreLock lock(books_.mu);
    KVS_ASSIGN_OR_RETURN(const Sequence* s,
                         catalog_.FindSequenceFor(request.session, request.sequence));
    p.plan = s->plan;
    geometry = s->model->desc.geometry;
  }
  if (!request.plan.empty()) {
    KVS_ASSIGN_OR_RETURN(const Plan named, plans_.ResolvePlan(request.plan));
    KVS_ASSIGN_OR_RETURN(const Plan plan, plans_.PlanFor(named, geometry));
    p.own = FormatPlan(plan) == FormatPlan(p.plan);
    if (!p.own) p.plan = plan;
  }
  p.index = IndexOf(p.plan, geometry);
  if (p.own) return p;
  // Who asks may be a loop that serves others: it reads no file.
  const auto made = plans_.NewCodec(p.plan, geometry, Files::kKnown);
  if (!made.ok() && made.status().reason() == kFileUnread) {
    return InputMissing(p.plan,
                        "its parameters '" + p.plan.lowrank.parameters +
                            "', which the daemon has not read yet; open a sequence of this plan");
  }
  KVS_ASSIGN_OR_RETURN(const std::optional<CodecState> codec, made);
  if (codec) p.recompressor = codec->recompressor;
  if (codec) p.parameters_digest = codec->parameters_digest;
  return p;
}

Status Builds::CheckInputs(const Sequence& s, const PendingBuild& p) const {
  KVS_RETURN_IF_ERROR(devices_.CheckHeld(s));
  return p.own ? CheckOwn(s, p.operators) : CheckOther(s, p, books_.memory);
}

Result<BuildResult> Builds::Build(const BuildRequest& request, BuildDone done) {
  KVS_ASSIGN_OR_RETURN(PendingBuild pending, Prepare(request));
  Result<BuildResult> result = [&]() -> Result<BuildResult> {
    StoreLock lock(books_.mu);
    KVS_RETURN_IF_ERROR(catalog_.FindSequenceFor(request.session, request.sequence).status());
    return StartLocked(std::move(pending), std::move(done));
  }();
  answers_.Tell();
  return result;
}

Result<BuildResult> Builds::StartLocked(PendingBuild p, BuildDone done) {
  Sequence* const s = catalog_.SequenceOf(p.sequence);
  KVS_RETURN_IF_ERROR(CheckInputs(*s, p));
  if (const auto found = builds_.find(p.sequence); found != builds_.end()) {
    PendingBuild& other = found->second;
    if (FormatPlan(other.plan) != FormatPlan(p.plan)) {
      return FailedPrecondition("BUILD_RUNNING", "sequence " + std::to_string(p.sequence) +
                                                     " is being built for plan '" +
                                                     other.plan.name + "'; ask again after that");
    }
    if (done) other.waiters.push_back(std::move(done));
    BuildResult result = other.ResultFor(*s);
    result.done = false;
    return result;
  }
  if (p.recompressor != nullptr) {
    const Artefact* const there = books_.artefacts.Peek(p.ArtefactKey(*s));
    if (there != nullptr) p.extents = static_cast<uint32_t>(there->extents.size());
  }
  const Run next = NextBlocks(*s, &p);
  BuildResult result = p.ResultFor(*s);
  std::vector<BuildDone> waiters;
  if (done) waiters.push_back(std::move(done));
  if (s->codec && p.own && recompression_.sink() == nullptr) return WorkersStopped();
  if (next.begin == next.end && !p.WantsExtents()) {
    result.done = !p.own || FinishLocked(s, &result, std::move(waiters));
    return result;
  }
  if (recompression_.sink() == nullptr) return WorkersStopped();
  const Tenant& tenant = *catalog_.SessionOf(s->session)->tenant;
  KVS_ASSIGN_OR_RETURN(p.place, UserPlace::Take(user_limits_, tenant.name, Limit::kQueuedWork));
  if (!recompression_.sink()->OfferBuild(p.sequence)) {
    return ResourceExhausted("WORK_QUEUE",
                             "the workers' queue is full (work.queue); `kvstrata work ls` shows "
                             "it; ask again later");
  }
  p.id = next_build_++;
  p.since = Clock::now();
  p.waiters = std::move(waiters);
  builds_.emplace(p.sequence, std::move(p));
  result.done = false;
  return result;
}

void Builds::AnswerLocked(std::vector<BuildDone> waiters, const Result<BuildResult>& result) {
  for (BuildDone& done : waiters) {
    answers_.Add([done = std::move(done), result](const Status&) { done(result); }, OkStatus());
  }
}

bool Builds::FinishLocked(Sequence* s, BuildResult* result, std::vector<BuildDone> waiters) {
  if (!s->codec) return true;
  recompression_.NoteAsked(s);
  result->extents = static_cast<uint32_t>(s->extents.size());
  if (s->codec->work == Work::kIdle) return true;
  if (waiters.empty()) return false;
  s->codec->waiters.push_back(
      [this, id = s->id, so_far = *result, waiters = std::move(waiters)](const Status& status) {
        Result<BuildResult> built = so_far;
        if (!status.ok()) {
          built = status;
        } else {
          StoreLock lock(books_.mu);
          if (const Result<Sequence*> still = catalog_.FindSequence(id); still.ok()) {
            built->extents = static_cast<uint32_t>((*still)->extents.size());
          }
        }
        for (const BuildDone& done : waiters) done(built);
      });
  recompression_.AnswerWaiters(s);
  return false;
}

bool Builds::EndBuildLocked(uint64_t sequence, const Status& why) {
  const auto found = builds_.find(sequence);
  if (found == builds_.end()) return false;
  const bool ran = found->second.running;
  found->second.cancelled->store(true, std::memory_order_relaxed);
  if (!found->second.begun && recompression_.sink() != nullptr)
    recompression_.sink()->WithdrawBuild(sequence);
  AnswerLocked(std::move(found->second.waiters), why);
  builds_.erase(found);
  return ran;
}

void Builds::EndAllLocked(const Status& why) {
  while (!builds_.empty()) (void)EndBuildLocked(builds_.begin()->first, why);
}

void Builds::ListLocked(std::vector<WorkInfo>* list) const {
  for (const auto& [id, p] : builds_) {
    WorkInfo info;
    info.sequence = id;
    info.session = catalog_.SequenceOf(id)->session;
    info.plan = p.plan.name;
    info.state = p.begun ? "building" : "build queued";
    info.waiting_us = MicrosSince(p.since);
    list->push_back(std::move(info));
  }
}

}  // namespace kvstrata
