// SPDX-License-Identifier: Apache-2.0
#include "server/store/sequences/recall_audits.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "server/store/books/books.h"
#include "server/store/books/sequence.h"
#include "server/store/requests/answers.h"
#include "server/store/sequences/inspection.h"

namespace kvstrata {
namespace {

Status CheckOptions(const RecallOptions& options) {
  const auto refuse = [](const char* field, uint32_t value, uint32_t most) {
    return InvalidArgument("RECALL_OPTION", std::string(field) + " is " + std::to_string(value) +
                                                "; allowed: 1 .. " + std::to_string(most));
  };
  if (options.every < 1 || options.every > RecallOptions::kMaxEvery) {
    return refuse("every", options.every, RecallOptions::kMaxEvery);
  }
  if (options.steps < 1 || options.steps > RecallOptions::kMaxSteps) {
    return refuse("steps", options.steps, RecallOptions::kMaxSteps);
  }
  return OkStatus();
}

Status CheckSamples(const RecallOptions& options, const Geometry& g) {
  const uint64_t step = static_cast<uint64_t>(int64_t{g.layers} * g.query_heads);
  if (step * options.steps <= RecallAudit::kMaxSamples) return OkStatus();
  return InvalidArgument(
      "RECALL_OPTION", "steps is " + std::to_string(options.steps) + "; allowed for " +
                           std::to_string(g.layers) + " layers of " +
                           std::to_string(g.query_heads) + " query heads: 1 .. " +
                           std::to_string(std::max<uint64_t>(1, RecallAudit::kMaxSamples / step)));
}

Status RawGone(uint64_t sequence, const Plan& plan) {
  return FailedPrecondition(
      "RECALL_RAW_GONE",
      "raw pages of sequence " + std::to_string(sequence) +
          " were released: its codec holds their rows alone, so there is no full attention to "
          "measure plan " +
          plan.name +
          " against; open the sequence with keep_raw = \"host\" in its plan and audit that");
}

Status Captured(uint64_t sequence, int32_t position) {
  return FailedPrecondition(
      "RECALL_CAPTURED",
      "the step of sequence " + std::to_string(sequence) + " at position " +
          std::to_string(position) +
          " ran from a CUDA graph that its engine captured, to which nothing can be added; have "
          "the "
          "engine run steps without its graphs meanwhile (kvs_append and kvs_attend for each "
          "layer), or replay a trace (kvstrata replay)");
}

bool SelectsNow(const Sequence& s) {
  return s.plan.selector != SelectorKind::kFull &&
         int64_t{s.tokens} + 1 >= int64_t{s.plan.min_tokens};
}

// Whether the arrays are what a step of the model measures: a client may say anything.
bool IsSound(const RecallSamples& samples, const Geometry& g) {
  const size_t n = samples.layers.size() * static_cast<size_t>(std::max(samples.heads, 0));
  const auto finite = [](float x) { return std::isfinite(x) && x >= 0; };
  return n != 0 && samples.heads == g.query_heads &&
         samples.layers.size() <= static_cast<size_t>(g.layers) && samples.recall.size() == n &&
         samples.error.size() == n && std::ranges::all_of(samples.recall, finite) &&
         std::ranges::all_of(samples.error, finite);
}

double Mean(std::span<const float> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

RecallAudits::RecallAudits(StoreMutex& mu, const StoreSettings& settings, Answers& answers,
                           SessionCatalog& catalog, Inspection& inspection)
    : mu_(mu), settings_(settings), answers_(answers), catalog_(catalog), inspection_(inspection) {
  for (const std::string_view plan : PresetNames()) {
    if (plan != "full") sampled_.push_back({plan});  // which never selects
  }
  sampled_.push_back({"other"});
}

uint32_t RecallAudits::NextNumber() {
  const uint32_t number = next_recall_;
  if (++next_recall_ == 0) next_recall_ = 1;  // 0 says none
  return number;
}

Result<RecallStart> RecallAudits::StartRecallAudit(uint64_t sequence, const RecallOptions& options,
                                                   RecallAudit::Listener listener) {
  KVS_RETURN_IF_ERROR(CheckOptions(options));
  StoreLock lock(mu_);
  KVS_ASSIGN_OR_RETURN(Sequence * s, catalog_.FindSequence(sequence));
  const Geometry& g = s->model->desc.geometry;
  KVS_RETURN_IF_ERROR(CheckSamples(options, g));
  if (s->recall) {
    const RecallProgress at = s->recall->Progress();
    return FailedPrecondition("RECALL_RUNNING",
                              "sequence " + std::to_string(sequence) + " is being audited: " +
                                  std::to_string(at.steps) + " of " + std::to_string(at.wanted) +
                                  " steps are sampled; wait for the end of that audit");
  }
  if (std::find(s->pages.begin(), s->pages.end(), nullptr) != s->pages.end())
    return RawGone(sequence, s->plan);
  Session* session = catalog_.SessionOf(s->session);
  s->sampled = 0;
  s->recall = std::make_shared<RecallAudit>(NextNumber(), options, g.layers, g.query_heads,
                                            std::move(listener));
  AskRecall(session, *s, {s->recall->number(), options.every});
  RecallStart start{s->recall, inspection_.InfoOf(*s), session->transport};
  inspection_.CountPages(&start.sequence);
  return start;
}

void RecallAudits::AskRecall(Session* session, const Sequence& s, shm::RecallRequest request) {
  session->memory->tables()->slots[s.slot].recall_audit.store(request.Packed(),
                                                              std::memory_order_relaxed);
}

void RecallAudits::AddRecall(uint64_t session, uint64_t sequence, const RecallSamples& samples) {
  std::shared_ptr<RecallAudit> audit;
  Status unmeasured;
  {
    StoreLock lock(mu_);
    const Result<Sequence*> s = catalog_.FindSequence(session, sequence);
    if (s.ok() && (*s)->sampled != 0 && (*s)->sampled == samples.audit) {
      StopSample(catalog_.SessionOf(session), *s);
      return TakeSample(**s, samples);
    }
    if (!s.ok() || !(*s)->recall || (*s)->recall->number() != samples.audit) return;  // it ended
    audit = (*s)->recall;
    if (samples.captured) unmeasured = Captured(sequence, samples.position);
    if (samples.raw_gone) unmeasured = RawGone(sequence, (*s)->plan);
  }
  const Status more = unmeasured.ok() ? audit->Add(samples) : unmeasured;
  if (more.ok()) return;
  EndRecallAudit(sequence, samples.audit, more.reason() == "RECALL_COMPLETE" ? OkStatus() : more);
}

void RecallAudits::EndRecallAudit(uint64_t sequence, uint32_t audit, const Status& why) {
  answers_.TellAfter([&] {
    StoreLock lock(mu_);
    const auto it = catalog_.sequences().find(sequence);
    if (it == catalog_.sequences().end()) return;
    Sequence* s = it->second;
    if (s->recall && s->recall->number() == audit) StopRecall(s, why);
  });
}

void RecallAudits::EndRecallAudits(const Status& why) {
  answers_.TellAfter([&] {
    StoreLock lock(mu_);
    for (const auto& [id, s] : catalog_.sequences()) StopRecall(s, why);
  });
}

// Gaps are random, with a mean of recall_every: batches whose sequences commit in turn would else
// have the same one sampled again and again.
void RecallAudits::NoteDecode(Session* session, Sequence* s) {
  const uint64_t every = settings_.recall_every;
  if (every == 0 || !SelectsNow(*s)) return;
  const bool drawn = until_sample_ != 0 && until_sample_ < 2 * every;  // for what `every` is now
  if (!drawn) until_sample_ = 1 + random_() % (2 * every - 1);
  if (--until_sample_ != 0 || s->recall || s->sampled != 0) return;
  if (std::ranges::find(s->pages, nullptr) != s->pages.end()) return;  // no full attention any more
  s->sampled = NextNumber();
  AskRecall(session, *s, {s->sampled, 1});
}

void RecallAudits::StopSample(Session* session, Sequence* s) {
  if (s->sampled == 0) return;
  s->sampled = 0;
  AskRecall(session, *s, {});
}

void RecallAudits::TakeSample(const Sequence& s, const RecallSamples& samples) {
  if (samples.raw_gone || samples.captured || !IsSound(samples, s.model->desc.geometry)) return;
  auto row = std::ranges::find(sampled_, std::string_view(s.plan.name), &SampledRecall::plan);
  if (row == sampled_.end()) --row;
  ++row->steps;
  row->recall = std::min(Mean(samples.recall), 1.0);
  row->error = Mean(samples.error);
}

std::vector<SampledRecall> RecallAudits::Sampled() const {
  StoreLock lock(mu_);
  return sampled_;
}

void RecallAudits::StopRecall(Sequence* s, const Status& why) {
  StopSample(catalog_.SessionOf(s->session), s);
  if (!s->recall) return;
  AskRecall(catalog_.SessionOf(s->session), *s, {});
  answers_.Add([audit = std::move(s->recall)](const Status& end) { audit->End(end); }, why);
  s->recall = nullptr;
}

}  // namespace kvstrata
