#include "server/store/recall_audits.h"

#include <algorithm>
#include <string>

#include "server/store/store_parts.h"

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

}  // namespace

RecallAudits::RecallAudits(StoreParts* store)
    : mu_(store->mu),
      answers_(store->answers),
      catalog_(store->catalog),
      inspection_(store->inspection) {}

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
  s->recall = std::make_shared<RecallAudit>(next_recall_, options, g.layers, g.query_heads,
                                            std::move(listener));
  if (++next_recall_ == 0) next_recall_ = 1;  // 0 says none
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

void RecallAudits::StopRecall(Sequence* s, const Status& why) {
  if (!s->recall) return;
  AskRecall(catalog_.SessionOf(s->session), *s, {});
  answers_.Add([audit = std::move(s->recall)](const Status& end) { audit->End(end); }, why);
  s->recall = nullptr;
}

}  // namespace kvstrata
