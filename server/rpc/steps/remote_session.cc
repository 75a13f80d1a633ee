// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/steps/remote_session.h"

#include <algorithm>
#include <limits>

#include "kernels/step/finite_rows.h"
#include "server/telemetry/log.h"
#include "session/member_codes.h"
#include "session/recall_samples.h"

namespace kvstrata {
namespace {

Status UnknownSequence(uint64_t sequence) {
  return NotFound("SEQUENCE_UNKNOWN",
                  "sequence " + std::to_string(sequence) +
                      " is not open in this session: it was closed, or is another session's");
}

std::unique_ptr<RemoteSequence> NewSequence(const OpenedSequence& opened) {
  auto s = std::make_unique<RemoteSequence>();
  s->id = opened.sequence;
  s->slot = opened.slot;
  return s;
}

HeldAtOpen HeldOf(const OpenedSequence& opened) {
  return {opened.held_tokens, opened.indexed_tokens, opened.surprisal_tokens, opened.boundary};
}

}  // namespace

RemoteSession::RemoteSession(Store* store, const SessionSegments& segments,
                             std::unique_ptr<StepDevice> device, WorkQueue* queue)
    : store_(store),
      session_(segments.session),
      device_(std::move(device)),
      strand_(std::make_shared<Strand>(queue)),
      memory_(store, device_.get(), session_),
      tables_(&memory_, {segments.header, segments.tables, segments.table_bytes}),
      access_counts_(segments.header),
      step_counts_(&segments.header->steps) {}

Status RemoteSession::Post(WorkQueue::Task task) {
  // A task keeps this alive.
  switch (strand_->Post([this, task = std::move(task)] {
    if (StepGpu* const gpu = device_->gpu(); gpu != nullptr) gpu->Enter();
    task();
  })) {
    case Strand::Outcome::kQueued:
      return OkStatus();
    case Strand::Outcome::kFull:
      return ResourceExhausted("SESSION_QUEUE_FULL",
                               std::to_string(Strand::kMaxWaiting) + " calls of session " +
                                   std::to_string(session_) + " wait already; wait for answers");
    case Strand::Outcome::kClosed:
      break;
  }
  return NotFound("SESSION_UNKNOWN", "session " + std::to_string(session_) + " has ended");
}

void RemoteSession::End(std::shared_ptr<RemoteSession> self, WorkQueue::Task done) {
  const std::shared_ptr<Strand> strand = self->strand_;
  strand->PostLast([self = std::move(self), done = std::move(done)] {
    if (StepGpu* const gpu = self->device_->gpu(); gpu != nullptr) gpu->Enter();
    self->DropAll();
    const EndedSession ended =
        self->store_->sessions().EndSession(self->session_, SessionEnd::kDied);
    LogEvent(LogLevel::kInfo, "session_ended",
             {{"session", self->session_},
              {"transport", "remote"},
              {"uid", ended.uid},
              {"client", ended.client_name},
              {"sequences", ended.sequences},
              {"freed_bytes", ended.freed_bytes}});
    if (done) done();
  });
}

void RemoteSession::DropAll() {
  // Steps point into sequences and enter epochs in the session's segment.
  steps_.clear();
  sequences_.clear();
  if (device_->gpu() != nullptr) device_->gpu()->Close();
}

// --- sequences -----------------------------------------------------------------------------------

Result<RemoteSequence*> RemoteSession::Peek(uint64_t sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) return UnknownSequence(sequence);
  return found->second.get();
}

Result<RemoteSequence*> RemoteSession::Find(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(RemoteSequence * s, Peek(sequence));
  if (s->step != 0 || !s->lost.ok()) return s;
  if (const std::optional<uint32_t> asked = tables_.TruncateTo(*s)) {
    KVS_RETURN_IF_ERROR(Truncate(s, *asked));
  }
  return s;
}

Result<RemoteSequence*> RemoteSession::FindIdle(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(RemoteSequence * s, Find(sequence));
  KVS_RETURN_IF_ERROR(s->lost);
  if (s->step == 0) return s;
  return FailedPrecondition("SEQUENCE_BUSY", "sequence " + std::to_string(sequence) +
                                                 " is in open step " + std::to_string(s->step) +
                                                 "; end or abort it first");
}

void RemoteSession::AdoptOpened(const OpenedSequence& opened, uint64_t model,
                                std::span<const int32_t> tokens) {
  auto s = NewSequence(opened);
  s->model = model;
  s->boundary_tokens = Ascending(opened.boundary_tokens);
  BeginState(opened.geometry, opened.plan, tokens, HeldOf(opened), s.get());
  sequences_.emplace(opened.sequence, std::move(s));
}

Result<OpenedSequence> RemoteSession::ForkSequence(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(RemoteSequence * parent, FindIdle(sequence));
  KVS_RETURN_IF_ERROR(TellIndexed(parent));
  KVS_ASSIGN_OR_RETURN(OpenedSequence opened, store_->sequences().ForkSequence(session_, sequence));
  auto s = NewSequence(opened);
  if (const Status begun = BeginFork(*parent, HeldOf(opened), s.get()); !begun.ok()) {
    (void)store_->sequences().CloseSequence(session_, opened.sequence);
    return begun;
  }
  sequences_.emplace(opened.sequence, std::move(s));
  return opened;
}

Status RemoteSession::TruncateSequence(uint64_t sequence, uint32_t tokens) {
  KVS_ASSIGN_OR_RETURN(RemoteSequence * s, FindIdle(sequence));
  return Truncate(s, tokens);
}

Status RemoteSession::Truncate(RemoteSequence* s, uint32_t tokens) {
  KVS_RETURN_IF_ERROR(
      store_->sequences().Truncate(session_, s->id, tokens, s->state->TailIds(tokens)));
  TakeBack(s, tokens);
  return OkStatus();
}

Status RemoteSession::CloseSequence(uint64_t sequence, bool abort_step) {
  KVS_ASSIGN_OR_RETURN(RemoteSequence * s, Peek(sequence));
  if (s->step != 0 && abort_step) KVS_RETURN_IF_ERROR(StepEnd(s->step, true));
  if (s->step != 0) return FindIdle(sequence).status();
  sequences_.erase(sequence);
  return store_->sequences().CloseSequence(session_, sequence);
}

// --- steps ---------------------------------------------------------------------------------------

Status RemoteSession::CheckMembers(std::span<const RemoteMember> members,
                                   std::vector<RemoteSequence*>* sequences,
                                   std::vector<int32_t>* codes) {
  codes->assign(members.size(), 0);
  BatchMembers batch;
  return CheckEach(members.size(), codes->data(), [&](size_t i) -> Status {
    const RemoteMember& member = members[i];
    if (member.tokens.empty()) {
      return InvalidArgument("ARGUMENT_RANGE", "members[" + std::to_string(i) +
                                                   "].tokens is empty; at least one is needed");
    }
    KVS_RETURN_IF_ERROR(batch.Name(member.sequence));
    KVS_ASSIGN_OR_RETURN(RemoteSequence * s, FindIdle(member.sequence));
    KVS_RETURN_IF_ERROR(batch.Extend(*s, i, member.tokens.size()));
    sequences->push_back(s);
    return OkStatus();
  });
}

Result<uint64_t> RemoteSession::StepBegin(std::span<const RemoteMember> members,
                                          std::vector<int32_t>* codes) {
  if (members.empty()) {
    return InvalidArgument("ARGUMENT_RANGE", "members is empty; at least one is needed");
  }
  std::vector<RemoteSequence*> sequences;
  KVS_RETURN_IF_ERROR(CheckMembers(members, &sequences, codes));
  std::vector<TableClaim> claims;
  for (size_t i = 0; i < members.size(); ++i) {
    const auto n = static_cast<int32_t>(members[i].tokens.size());
    claims.push_back({sequences[i], sequences[i]->state->tokens() + n});
  }
  KVS_ASSIGN_OR_RETURN(SequenceTables::EnteredEpoch entered, tables_.Enter(claims, codes->data()));
  for (size_t i = 0; i < sequences.size(); ++i) {
    const RemoteSequence& s = *sequences[i];
    const Status refreshed = s.state->Refresh(s.View());
    if (refreshed.ok()) continue;
    (*codes)[i] = static_cast<int32_t>(refreshed.code());
    return refreshed;
  }
  std::vector<std::vector<int32_t>> tokens;
  std::vector<StepMember> batch;
  for (size_t i = 0; i < members.size(); ++i) {
    RemoteSequence* s = sequences[i];
    tokens.emplace_back(members[i].tokens.begin(), members[i].tokens.end());
    batch.push_back({s->state.get(), s->View(), static_cast<int32_t>(members[i].tokens.size())});
  }
  KVS_ASSIGN_OR_RETURN(std::unique_ptr<StepRunner> runner, device_->Begin(std::move(batch)));
  for (RemoteSequence* s : sequences) s->step = next_step_;
  const auto layers = static_cast<size_t>(sequences.front()->state->geometry().layers);
  RemoteStep* const step = steps_
                               .emplace(next_step_, new RemoteStep{std::move(sequences),
                                                                   std::move(tokens),
                                                                   std::vector<bool>(layers),
                                                                   std::vector<bool>(layers),
                                                                   std::move(entered),
                                                                   std::move(runner),
                                                                   {},
                                                                   {}})
                               .first->second.get();
  // No error of it is the step's: a sample that is lost is counted.
  step->audits = SampleRecall(tables_, step->step->batch(), step->sequences, [step](int member) {
    Result<StepRunner::ReadSample> sample = step->step->Shadow(member);
    if (sample.ok()) step->samples.emplace(member, std::move(sample).value());
    return sample.ok();
  });
  return next_step_++;
}

Result<RemoteStep*> RemoteSession::FindStep(uint64_t step) {
  const auto found = steps_.find(step);
  if (found != steps_.end()) return found->second.get();
  return NotFound("STEP_UNKNOWN",
                  "step " + std::to_string(step) +
                      " is not open in this session: it was ended, or is another's");
}

Status RemoteSession::AppendInPlace(RemoteStep* step, std::optional<int> layer) {
  if (device_->gpu() != nullptr) {
    return Unimplemented("IN_PLACE",
                         "the pages lie on a GPU, which the daemon does not wait for another "
                         "process's writes to; send k and v, or link libkvstrata.so");
  }
  KVS_RETURN_IF_ERROR(store_->sessions().CheckWriter(session_));
  for (std::vector<bool>* const layers : {&step->appended, &step->in_place}) {
    if (layer) {
      (*layers)[static_cast<size_t>(*layer)] = true;
    } else {
      layers->assign(layers->size(), true);
    }
  }
  return OkStatus();
}

Status RemoteSession::Attend(RemoteStep* step, int layer, const Rows& q, const MutableRows& out,
                             float* lse) {
  KVS_RETURN_IF_ERROR(step->step->Attend(layer, q, out, lse));
  if (device_->gpu() != nullptr) return OkStatus();  // whose selections would have to be read
  for (int i = 0; i < step->step->batch().members(); ++i) {
    KVS_ASSIGN_OR_RETURN(const StepRunner::Chosen chosen, step->step->ChosenOf(i, false));
    access_counts_.Count(*step->sequences[i], *chosen.selection);
    CountSelection(step->step->batch().member(i), *chosen.selection, step_counts_);
  }
  return OkStatus();
}

Status RemoteSession::StepEnd(uint64_t step, bool abort) {
  KVS_RETURN_IF_ERROR(FindStep(step).status());
  auto node = steps_.extract(step);
  RemoteStep& s = *node.mapped();
  for (RemoteSequence* sequence : s.sequences) sequence->step = 0;
  if (abort) return OkStatus();
  const auto missing = std::find(s.appended.begin(), s.appended.end(), false);
  if (missing != s.appended.end()) {
    return FailedPrecondition("LAYER_NOT_APPENDED",
                              "layer " + std::to_string(missing - s.appended.begin()) +
                                  " was not appended; the step is dropped, begin it again");
  }
  for (size_t layer = 0; layer < s.in_place.size(); ++layer) {
    if (!s.in_place[layer]) continue;
    KVS_RETURN_IF_ERROR(CheckWritten(s.step->batch(), static_cast<int>(layer)));
  }
  return Commit(&s);
}

Status RemoteSession::Commit(RemoteStep* step) {
  Status failed;
  CountDecodes(step->step->batch(), step_counts_);
  std::vector<uint32_t> first;
  for (RemoteSequence* s : step->sequences) first.push_back(s->state->tokens());
  for (size_t i = 0; i < step->sequences.size(); ++i) {
    RemoteSequence* s = step->sequences[i];
    s->state->reported().NoteTokens(s->state->tokens(), step->tokens[i], *s->boundary_tokens);
  }
  if (const Status ended = step->step->End(); !ended.ok()) {
    for (RemoteSequence* s : step->sequences) s->lost = ended;
    return ended;
  }
  for (size_t i = 0; i < step->sequences.size(); ++i) {
    RemoteSequence* s = step->sequences[i];
    const auto indexed = static_cast<uint32_t>(s->state->indexed_tokens());
    s->lost = store_->steps().Commit(session_, s->id, first[i], step->tokens[i], indexed);
    s->told_indexed = indexed;
    // One that another session closed meanwhile says so when it is used next.
    if (failed.ok() && s->lost.reason() != "SEQUENCE_UNKNOWN") failed = s->lost;
  }
  TellRecall(*step);
  return failed;
}

void RemoteSession::TellRecall(const RemoteStep& s) {
  for (size_t i = 0; i < s.audits.size(); ++i) {
    if (s.audits[i] == 0) continue;
    const auto member = static_cast<int>(i);
    RemoteSequence& sequence = *s.sequences[i];
    const Result<ShadowSample> sample = s.samples.at(member)();
    if (!sample.ok()) {
      ++sequence.recall_dropped;
      continue;
    }
    const int32_t position = s.step->batch().member(member).view.tokens;
    const int32_t heads = sample->raw_gone ? 0 : s.geometry().query_heads;
    store_->recalls().AddRecall(
        session_, sequence.id,
        {s.audits[i], position, heads, sample->raw_gone, sequence.recall_dropped, sample->layers,
         sample->recall, sample->error});
  }
}

Status RemoteSession::TellIndexed(RemoteSequence* s) {
  return kvstrata::TellIndexed(s, [&](uint32_t first, uint32_t indexed) {
    return store_->steps().Commit(session_, s->id, first, {}, indexed);
  });
}

// --- between steps -------------------------------------------------------------------------------

Status RemoteSession::Report(uint64_t sequence, uint32_t first, uint32_t n, const float* surprisal,
                             const float* entropy, const uint8_t* boundary) {
  KVS_ASSIGN_OR_RETURN(RemoteSequence * s, Peek(sequence));
  constexpr uint32_t kMax = std::numeric_limits<int32_t>::max();
  if (first > kMax || n > kMax - first) {
    return InvalidArgument("ARGUMENT_RANGE", "first " + std::to_string(first) + " + n " +
                                                 std::to_string(n) + "; allowed: up to 2^31 - 1");
  }
  const auto from = static_cast<int32_t>(first), count = static_cast<int32_t>(n);
  const int32_t skipped = s->state->reported().SkippedPosition(from, surprisal);
  KVS_RETURN_IF_ERROR(s->state->Report(from, count, surprisal, entropy, boundary));
  if (skipped >= 0) {
    const float nothing = 0;
    KVS_RETURN_IF_ERROR(store_->steps().Report(session_, sequence, static_cast<uint32_t>(skipped),
                                               1, &nothing, nullptr, nullptr));
  }
  return store_->steps().Report(session_, sequence, first, n, surprisal, entropy, boundary);
}

Status RemoteSession::PrefillDone(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(RemoteSequence * s, FindIdle(sequence));
  const TableClaim claim{s, s->state->tokens()};
  {
    KVS_ASSIGN_OR_RETURN(const auto entered, tables_.Enter({&claim, 1}, nullptr));
    KVS_RETURN_IF_ERROR(s->state->Refresh(s->View()));
    KVS_RETURN_IF_ERROR(device_->CatchUp(s->state.get(), s->View(), true));
  }
  return store_->steps().PrefillDone(session_, sequence);
}

Status RemoteSession::Settle(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(RemoteSequence * s, FindIdle(sequence));
  const TableClaim claim{s, s->state->tokens()};
  {
    KVS_ASSIGN_OR_RETURN(const auto entered, tables_.Enter({&claim, 1}, nullptr));
    KVS_RETURN_IF_ERROR(s->state->Refresh(s->View()));
    KVS_RETURN_IF_ERROR(device_->CatchUp(s->state.get(), s->View(), false));
  }
  return TellIndexed(s);
}

Result<std::string> RemoteSession::StatusText(RemoteSequence* s) {
  if (s->step != 0) return s->state->StatusText(s->View());
  const TableClaim claim{s, s->state->tokens(), false};
  KVS_ASSIGN_OR_RETURN(const auto entered, tables_.Enter({&claim, 1}, nullptr));
  KVS_RETURN_IF_ERROR(s->state->Refresh(s->View()));
  return s->state->StatusText(s->View());
}

Result<InspectArray> RemoteSession::Inspect(uint64_t sequence, std::string_view name) {
  KVS_ASSIGN_OR_RETURN(RemoteSequence * s, Find(sequence));
  // In a step its epoch holds, and its table must not change.
  const auto inspect = [&] {
    return device_->Inspect(*s->state, s->View(), s->blocks.size(), name);
  };
  if (s->step != 0) return inspect();
  const TableClaim claim{s, s->state->tokens(), false};
  KVS_ASSIGN_OR_RETURN(const auto entered, tables_.Enter({&claim, 1}, nullptr));
  KVS_RETURN_IF_ERROR(s->state->Refresh(s->View()));
  return inspect();
}

Result<std::vector<shm::PageEntry>> RemoteSession::PageTable(uint64_t sequence, uint64_t* version) {
  KVS_ASSIGN_OR_RETURN(RemoteSequence * s, Find(sequence));
  const int32_t page_tokens = s->state->geometry().page_tokens;
  const auto copy = [&] {
    const auto pages = (s->state->tokens() + int64_t{page_tokens} - 1) / page_tokens;
    *version = s->version;
    std::vector<shm::PageEntry> entries;
    for (uint32_t i = 0; i < pages; ++i) entries.push_back(PageEntryOf(*s, i));
    return entries;
  };
  if (s->step != 0) return copy();
  const TableClaim claim{s, s->state->tokens(), false};
  KVS_ASSIGN_OR_RETURN(const auto entered, tables_.Enter({&claim, 1}, nullptr));
  return copy();
}

// Ids of arenas are never used again, and one that a table of an entered epoch names is mapped.
// What lies there the store itself entered, so nothing is checked against the arena's size.
Result<std::byte*> RemoteMemory::Resolve(const shm::PageEntry& entry, uint64_t /*bytes*/) {
  if (entry.arena != last_arena_ || last_base_ == nullptr) {
    last_base_ = nullptr;  // until all of it is known
    if (StepGpu* const gpu = device_.gpu(); gpu != nullptr && entry.tier != 0) {
      KVS_RETURN_IF_ERROR(gpu->Reach(entry.arena));
    }
    last_base_ = store_.devices().ArenaBase(entry.arena);
    last_arena_ = entry.arena;
  }
  if (last_base_ == nullptr) {
    return Internal("TABLE_INVALID", "a published table names arena " +
                                         std::to_string(entry.arena) + ", which does not exist");
  }
  return last_base_ + entry.offset;
}

// The daemon may write every arena of its own.
bool RemoteMemory::Writable(const shm::PageEntry& entry) {
  return (entry.flags & (shm::kPageShared | shm::kPageSealed | shm::kPageAbsent)) == 0;
}

Status RemoteMemory::Grow(const TableClaim& claim) {
  const SequenceState& state = *claim.sequence->state;
  return store_.steps().Grow(
      session_, claim.sequence->id, static_cast<uint32_t>(claim.tokens_after),
      static_cast<uint32_t>(state.tokens()), static_cast<uint32_t>(state.indexed_tokens()));
}

}  // namespace kvstrata
