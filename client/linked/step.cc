// SPDX-License-Identifier: Apache-2.0
// SessionStep of the linked transport: kernels/step on mapped pages, inside one epoch.
#include <algorithm>
#include <cstring>
#include <optional>

#include "client/linked/linked_session.h"
#include "kernels/step/shadow_attention.h"
#include "session/access_counts.h"
#include "session/member_codes.h"
#include "session/recall_samples.h"

namespace kvstrata::client {

struct SessionStep::State {
  Session::State* session = nullptr;
  std::vector<std::shared_ptr<Sequence>> sequences;
  struct NewTokens {
    std::vector<int32_t> ids;  // zeros in place of those that come late
    bool late = false;
    bool kept = true;  // else padding
  };
  std::vector<NewTokens> tokens;  // per member
  // One of the two: on the CPU, on a GPU.
  std::unique_ptr<Step> step;
  std::unique_ptr<CudaStep> gpu_step;
  bool ended_on_gpu = false;
  int reader_slot = -1;
  std::optional<AccessCounts> access_counts;  // on the CPU: what a GPU chose would have to be read
  std::vector<uint32_t> audits;  // that sample this step, per member; 0: none. Empty: none at all

  void SampleRecall();
  bool ShadowOnGpu(int member);
  Status Separate(Sequence* s);
  Status Begin(std::vector<StepMember> batch, void* stream);
  struct Told {
    shm::Commit event;
    std::span<const std::byte> ids;
  };
  std::vector<Told> Commits(size_t member) const;
  void Noted(size_t member);
  Status SeparateForked();
  Status EndOnGpu(void* stream);
  void AbortOnGpu();
  const StepBatch& batch() const {
    return gpu_step != nullptr ? static_cast<const StepBatch&>(*gpu_step) : *step;
  }
  Result<const Selection*> SelectionOf(int member);
  std::vector<std::optional<Selection>> read;  // from the GPU, of the last layer, per member
};

namespace {

Status CheckMembers(Session::State* session, std::span<const BatchMember> members,
                    std::vector<SequenceUse>* uses, int32_t* codes) {
  BatchMembers batch;
  return CheckEach(members.size(), codes, [&](size_t i) -> Status {
    const BatchMember& member = members[i];
    KVS_RETURN_IF_ERROR(batch.Name(member.sequence));
    KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Current(session, member.sequence, false));
    if (s->imported) return SequenceImported(member.sequence);
    KVS_RETURN_IF_ERROR(CheckIds(*s.get(), member));
    KVS_RETURN_IF_ERROR(batch.Extend(*s.get(), i, member.n()));
    uses->push_back(std::move(s));
    return OkStatus();
  });
}

// missing: ids at the end that are not there yet.
Sequence::Deferred Deferred(const shm::Commit& event, std::span<const std::byte> ids,
                            uint32_t missing) {
  Sequence::Deferred commit;
  commit.type = shm::kCommit;
  commit.missing = missing;
  for (const auto part : {BytesOf(event), ids}) {
    commit.message.insert(commit.message.end(), part.begin(), part.end());
  }
  return commit;
}

}  // namespace

Result<std::unique_ptr<SessionStep>> BeginStep(Session::State* session,
                                               std::span<const BatchMember> members, void* stream,
                                               int32_t* codes) {
  if (session->gpu_session == nullptr) KVS_RETURN_IF_ERROR(NoStream(stream));
  std::fill_n(codes, members.size(), 0);
  if (!session->connection->Poll()) {
    std::fill_n(codes, members.size(), static_cast<int32_t>(Code::kUnavailable));
    return DaemonGone();
  }
  std::vector<SequenceUse> uses;
  uses.reserve(members.size());
  KVS_RETURN_IF_ERROR(CheckMembers(session, members, &uses, codes));
  std::vector<TableClaim> claims;
  claims.reserve(members.size());
  for (size_t i = 0; i < members.size(); ++i) {
    const auto n = static_cast<int32_t>(members[i].n());
    claims.push_back({uses[i].get(), uses[i]->state->tokens() + n});
    KVS_RETURN_IF_ERROR(session->TellDone(uses[i].get()));
  }
  KVS_ASSIGN_OR_RETURN(const int slot, session->Enter(claims, codes));
  for (size_t i = 0; i < members.size(); ++i) {
    const Status refreshed = uses[i]->state->Refresh(uses[i]->View());
    if (refreshed.ok()) continue;
    codes[i] = static_cast<int32_t>(refreshed.code());
    session->Leave(slot);
    return refreshed;
  }
  auto state = std::make_unique<SessionStep::State>();
  state->session = session;
  state->reader_slot = slot;
  std::vector<StepMember> batch;
  for (size_t i = 0; i < members.size(); ++i) {
    Sequence* s = uses[i].get();
    const BatchMember& m = members[i];
    batch.push_back({s->state.get(), s->View(), static_cast<int32_t>(m.n()), !m.padding,
                     m.padding ? GpuSession::kPaddingWord : static_cast<int32_t>(s->slot)});
    state->tokens.push_back({{m.tokens.begin(), m.tokens.end()}, m.late > 0, !m.padding});
    state->tokens.back().ids.resize(m.n());
    state->sequences.push_back(uses[i].shared());
  }
  if (const Status begun = state->Begin(std::move(batch), stream); !begun.ok()) {
    session->Leave(slot);
    return begun;
  }
  for (size_t i = 0; i < members.size(); ++i) {
    Sequence* s = uses[i].get();
    s->in_step = true;
    s->gpu_step = state->gpu_step.get();
    s->forked_in_step = false;
    s->step_tokens = claims[i].tokens_after;
  }
  return std::make_unique<SessionStep>(std::move(state));
}

Status SessionStep::State::Begin(std::vector<StepMember> batch, void* stream) {
  if (session->gpu_session == nullptr) {
    step = std::make_unique<Step>(std::move(batch), *session->backend, *session->executor);
    access_counts.emplace(session->connection->session());
    SampleRecall();
    return OkStatus();
  }
  GpuSession& gpu = *session->gpu_session;
  const OnGpu current(gpu.gpu());
  CudaWorkspace* const workspace =
      gpu.WorkspaceOf(sequences.front()->model, sequences.front()->state->geometry(), stream);
  KVS_ASSIGN_OR_RETURN(
      gpu_step, CudaStep::Begin(std::move(batch), workspace, stream, {gpu.ExitOf(reader_slot), 0}));
  SampleRecall();
  return OkStatus();
}

SessionStep::SessionStep(std::unique_ptr<State> state) : state_(std::move(state)) {}

SessionStep::~SessionStep() {
  if (state_ == nullptr) return;
  for (const auto& s : state_->sequences) {
    std::lock_guard<std::mutex> lock(s->mu);
    s->gpu_step = nullptr;
  }
  if (state_->gpu_step == nullptr) {
    state_->step.reset();
    state_->session->Leave(state_->reader_slot);
  } else if (state_->ended_on_gpu) {
    const OnGpu current(state_->session->gpu_session->gpu());
    state_->gpu_step.reset();
  } else {
    state_->AbortOnGpu();
  }
  for (const auto& s : state_->sequences) {
    std::lock_guard<std::mutex> lock(s->mu);
    s->in_step = false;
  }
}

void SessionStep::AbandonAfterFork() { (void)state_.release(); }

const Geometry& SessionStep::geometry() const {
  return state_->sequences.front()->state->geometry();
}
int32_t SessionStep::tokens() const { return state_->batch().tokens(); }
int SessionStep::members() const { return state_->batch().members(); }
bool SessionStep::on_gpu() const { return state_->gpu_step != nullptr; }

Status SessionStep::Append(int layer, const Rows& k, const Rows& v) {
  if (on_gpu()) {
    const OnGpu current(state_->session->gpu_session->gpu());
    return state_->gpu_step->Append(layer, k, v);
  }
  return state_->step->Append(layer, k, v);
}

Status SessionStep::Select(int layer, const Rows& q) {
  state_->read.clear();
  if (on_gpu()) {
    const OnGpu current(state_->session->gpu_session->gpu());
    return state_->gpu_step->Select(layer, q);
  }
  state_->step->Select(layer, q);
  return OkStatus();
}

Status SessionStep::Replay() {
  state_->read.clear();
  if (on_gpu()) {
    const OnGpu current(state_->session->gpu_session->gpu());
    return state_->gpu_step->Replay();
  }
  return FailedPrecondition("GRAPH_STALE", "a CPU captures no graphs; make the calls");
}

Status SessionStep::Attend(int layer, const Rows& q, const MutableRows& out, float* lse) {
  state_->read.clear();
  if (on_gpu()) {
    const OnGpu current(state_->session->gpu_session->gpu());
    return state_->gpu_step->Attend(layer, q, out, lse);
  }
  state_->step->Attend(layer, q, out, lse);
  shm::StepCounts* const counts = &state_->session->connection->session()->steps;
  for (int i = 0; i < members(); ++i) {
    state_->access_counts->Count(*state_->sequences[i], state_->step->selection(i));
    CountSelection(state_->step->member(i), state_->step->selection(i), counts);
  }
  return OkStatus();
}

void SessionStep::State::SampleRecall() {
  audits = kvstrata::SampleRecall(*session->tables, batch(), sequences, [this](int member) {
    if (step == nullptr) return ShadowOnGpu(member);
    step->Shadow(member);
    return true;
  });
}

// Whether there is a shadow for the member: the one that it has may not be read yet.
bool SessionStep::State::ShadowOnGpu(int member) {
  Sequence& s = *sequences[member];
  if (s.shadow_waits) return false;
  if (s.shadow == nullptr) {
    Result<std::unique_ptr<CudaShadow>> made =
        CudaShadow::Make(*session->gpu.ops, s.state->geometry());
    if (!made.ok()) return false;
    s.shadow = std::move(made).value();
  }
  gpu_step->Shadow(member, s.shadow.get());
  return true;
}

// A fork made the page that the step began in the child's too. The child reads its committed rows
// only, so nothing it sees was touched; the parent takes a page of its own and moves there.
Status SessionStep::State::Separate(Sequence* s) {
  const std::vector<std::byte*> written = s->pages;
  KVS_RETURN_IF_ERROR(session->memory->Grow({s, s->step_tokens}));
  KVS_RETURN_IF_ERROR(session->tables->Load(s));
  const Geometry& g = s->state->geometry();
  const auto end =
      static_cast<size_t>((int64_t{s->step_tokens} + g.page_tokens - 1) / g.page_tokens);
  for (auto i = static_cast<size_t>(s->state->tokens() / g.page_tokens); i < end; ++i) {
    if (s->pages[i] == written[i] || s->pages[i] == nullptr || written[i] == nullptr) continue;
    if (gpu_step != nullptr) {
      gpu_step->MovePage(written[i], s->pages[i]);
      continue;
    }
    std::memcpy(s->pages[i], written[i], static_cast<size_t>(g.page_bytes()));
  }
  return OkStatus();
}

Status SessionStep::State::SeparateForked() {
  for (const auto& s : sequences) {
    if (s->forked_in_step) KVS_RETURN_IF_ERROR(Separate(s.get()));
  }
  return OkStatus();
}

// What the daemon is to be told of a member's new tokens: nothing of padding.
std::vector<SessionStep::State::Told> SessionStep::State::Commits(size_t member) const {
  std::vector<Told> commits;
  if (!tokens[member].kept) return commits;
  const Sequence& s = *sequences[member];
  const std::span<const int32_t> ids(tokens[member].ids);
  const auto indexed = static_cast<uint32_t>(s.state->indexed_tokens());
  for (size_t done = 0; done < ids.size();) {
    const auto part = ids.subspan(done, std::min(ids.size() - done, session->ring->max_tokens()));
    commits.push_back({{s.id, static_cast<uint32_t>(s.state->tokens() + done),
                        static_cast<uint32_t>(part.size()), indexed, 0},
                       std::as_bytes(part)});
    done += part.size();
  }
  return commits;
}

// Where ids are late, what they say is noted when they come.
void SessionStep::State::Noted(size_t member) {
  Sequence& s = *sequences[member];
  const NewTokens& added = tokens[member];
  if (!added.kept) return;
  s.told_indexed = static_cast<uint32_t>(s.state->indexed_tokens());
  if (added.late) {
    s.late_tokens += static_cast<uint32_t>(added.ids.size());
  } else {
    s.state->reported().NoteTokens(s.state->tokens(), added.ids, *s.boundary_tokens);
  }
}

// Ends a step that the GPU still works on: it is told when the GPU has written the rows.
Status SessionStep::State::EndOnGpu(void* stream) {
  const OnGpu current(session->gpu_session->gpu());
  KVS_RETURN_IF_ERROR(SeparateForked());
  std::vector<Sequence::Deferred> commits;
  std::vector<size_t> members;
  for (size_t i = 0; i < sequences.size(); ++i) {
    for (const auto& [event, ids] : Commits(i)) {
      commits.push_back(Deferred(event, ids, tokens[i].late ? event.tokens : 0));
      members.push_back(i);
    }
    // The GPU writes the pages of padding too: who closes it waits.
    if (!tokens[i].kept) {
      commits.emplace_back();
      members.push_back(i);
    }
    Noted(i);
  }
  KVS_RETURN_IF_ERROR(gpu_step->End(stream));
  ended_on_gpu = true;
  const uint64_t number = session->gpu_session->Ended(reader_slot);
  for (size_t i = 0; i < commits.size(); ++i) {
    commits[i].reader_slot = reader_slot;
    commits[i].number = number;
    sequences[members[i]]->deferred.push_back(std::move(commits[i]));
  }
  for (size_t i = 0; i < audits.size(); ++i) {
    if (audits[i] == 0) continue;
    sequences[i]->shadow_waits = true;
    sequences[i]->deferred.push_back({reader_slot,
                                      number,
                                      shm::kPad,
                                      {},
                                      0,
                                      audits[i],
                                      gpu_step->member(static_cast<int>(i)).view.tokens});
  }
  return OkStatus();
}

// The GPU leaves the epoch of its step itself. Index rows that the begin wrote stay, so that what
// the daemon is told next waits for them.
void SessionStep::State::AbortOnGpu() {
  const OnGpu current(session->gpu_session->gpu());
  gpu_step.reset();
  const uint64_t number = session->gpu_session->Ended(reader_slot);
  for (const auto& s : sequences)
    s->deferred.push_back({reader_slot, number, shm::kPad, {}, 0, 0, 0});
}

Status SessionStep::End(void* stream) {
  if (!state_->session->connection->Poll()) return DaemonGone();
  CountDecodes(state_->batch(), &state_->session->connection->session()->steps);
  if (on_gpu()) return state_->EndOnGpu(stream);
  KVS_RETURN_IF_ERROR(state_->SeparateForked());
  for (size_t i = 0; i < state_->sequences.size(); ++i) {
    for (const auto& [event, ids] : state_->Commits(i)) {
      if (state_->tokens[i].late) {
        state_->sequences[i]->deferred.push_back(Deferred(event, ids, event.tokens));
      } else {
        KVS_RETURN_IF_ERROR(state_->session->ring->Post(shm::kCommit, {BytesOf(event), ids}));
      }
    }
    state_->Noted(i);
  }
  for (size_t i = 0; i < state_->audits.size(); ++i) {
    if (state_->audits[i] == 0) continue;
    const auto member = static_cast<int>(i);
    state_->session->OfferRecall(state_->sequences[i].get(), state_->audits[i],
                                 state_->step->member(member).view.tokens,
                                 state_->step->shadow(member)->sample(), 0);
  }
  state_->step->End();
  return OkStatus();
}

// The last layer's; read from a GPU once.
Result<const Selection*> SessionStep::State::SelectionOf(int member) {
  if (gpu_step == nullptr) return &step->selection(member);
  read.resize(sequences.size());
  std::optional<Selection>& selection = read[static_cast<size_t>(member)];
  if (!selection) {
    KVS_ASSIGN_OR_RETURN(selection, gpu_step->ReadSelection(member));
  }
  return &*selection;
}

Result<uint32_t> SessionStep::SelectionGroups(int member) const {
  KVS_ASSIGN_OR_RETURN(const Selection* const selection, state_->SelectionOf(member));
  return static_cast<uint32_t>(GroupsOf(*selection));
}

Result<size_t> SessionStep::CopySelection(int member, uint32_t group, SelectionKind kind,
                                          std::span<int32_t> out) const {
  KVS_ASSIGN_OR_RETURN(const Selection* const selection, state_->SelectionOf(member));
  const auto list = static_cast<int>(group);
  if (kind == SelectionKind::kUnits) {
    const std::span<const int32_t> units = UnitsOf(*selection, list);
    std::copy_n(units.begin(), std::min(units.size(), out.size()), out.begin());
    return units.size();
  }
  const StoredRows* const stored = state_->batch().member(member).state->stored();
  size_t n = 0;
  for (const Run& run : PositionsOf(*selection, stored, list)) {
    for (int32_t t = run.begin; t < run.end; ++t, ++n) {
      if (n < out.size()) out[n] = t;
    }
  }
  return n;
}

Result<StepCost> SessionStep::Cost(int member) const {
  if (on_gpu()) return state_->gpu_step->ReadCost(member);
  return state_->step->cost(member);
}

}  // namespace kvstrata::client
