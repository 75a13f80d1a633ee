// SPDX-License-Identifier: Apache-2.0
// Session over mapped memory and rings: the linked transport (session.h).
#include "client/linked/linked_session.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "kernels/cuda/device_buffer.h"
#include "kernels/step/gpu/cuda_inspect.h"

namespace kvstrata::client {
namespace {

// One pool for the ops of all sessions of this process; the first session decides its size. It
// lives until the process ends (its threads may outlast any session). A child of fork() has none of
// the parent's threads, so it makes its own.
Executor& ProcessExecutor(uint32_t threads) {
  static Mutex mu;
  static Executor* pool = nullptr;
  static pid_t owner = 0;
  MutexLock lock(mu);
  if (pool == nullptr || owner != getpid()) {
    const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
    const unsigned n = threads == 0 ? cores : threads;
    pool = n == 1 ? &InlineExecutor() : NewThreadPool(static_cast<int>(n)).release();
    owner = getpid();
  }
  return *pool;
}

// The option, else the environment, else what the daemon uses: both transports then answer alike.
std::string BackendName(const AttachOptions& options, const shm::Welcome& welcome) {
  if (!options.backend.empty()) return options.backend;
  if (const char* name = std::getenv("KVSTRATA_BACKEND"); name != nullptr && *name != '\0') {
    return name;
  }
  return TextOf(welcome.backend);
}

template <size_t N>
void PutText(char (&to)[N], const std::string& from) {
  KVS_CHECK(from.size() < N);  // abi.cc checked the lengths
  std::memcpy(to, from.data(), from.size());
}

// A plan's text as messages have it: at least one NUL.
std::string Padded(std::string_view plan) {
  std::string padded(plan);
  padded.resize((plan.size() + 4) & ~size_t{3});
  return padded;
}

// For a sequence in an open step on a GPU: waits until what a fork takes over is there, index rows
// and buckets. A prompt of selector bucket keeps its last queries where the step writes those of
// the tokens behind them.
Status SettleBegin(const Sequence& s) {
  const bool observes =
      s.state->plan().selector == SelectorKind::kBucket && s.state->prompt_tokens() < 0;
  if (observes || s.gpu_step == nullptr) {
    return FailedPrecondition("SEQUENCE_BUSY",
                              "sequence " + std::to_string(s.id) +
                                  (observes ? " is in an open step that keeps queries of its "
                                              "prompt (selector 'bucket'); end or abort it first"
                                            : " is in a step that another thread ends"));
  }
  return s.gpu_step->AwaitBegin();
}

}  // namespace

std::string_view Transport() { return "linked"; }

Session::Session(std::unique_ptr<State> state) : state_(std::move(state)) {}

Result<std::unique_ptr<Session>> Session::Attach(const AttachOptions& options) {
  auto state = std::make_unique<State>();
  state->options = options;
  KVS_ASSIGN_OR_RETURN(state->connection,
                       Connection::Dial(options.socket, options.device_uuid, options.client_name,
                                        options.timeout, &state->arenas));
  Connection& c = *state->connection;
  state->ring = std::make_unique<RingClient>(&c, options.timeout);
  if (const Status chosen = state->ChooseBackend(); !chosen.ok()) {
    // A session that only hangs up counts until its process has ended.
    (void)state->ring->Call(shm::kDetach, {}, nullptr);
    return chosen;
  }
  state->executor = &ProcessExecutor(options.threads);
  state->OpenTables();
  return std::make_unique<Session>(std::move(state));
}

// Where the pages lie decides: the CPU's backends cannot follow a GPU's addresses, nor the other
// way.
Status Session::State::ChooseBackend() {
  const shm::Welcome& welcome = connection->welcome();
  const std::string name = BackendName(options, welcome);
  if (TextOf(welcome.backend) != kCudaBackend) {
    KVS_ASSIGN_OR_RETURN(backend, FindBackend(name));
    return OkStatus();
  }
  const std::string uuid = TextOf(welcome.device_uuid);
  if (name != kCudaBackend) {
    return InvalidArgument("BACKEND_UNKNOWN", "backend is '" + name +
                                                  "'; the daemon's pages lie on " + uuid +
                                                  ", where 'cuda' alone computes");
  }
  KVS_ASSIGN_OR_RETURN(gpu, FindGpu(uuid));
  arenas.Use(gpu);
  KVS_ASSIGN_OR_RETURN(gpu_session, GpuSession::Make(gpu, connection->session()));
  return OkStatus();
}

void Session::State::OpenTables() {
  const Connection& c = *connection;
  memory =
      std::make_unique<LinkedMemory>(&arenas, connection.get(), ring.get(), gpu, options.timeout);
  tables = std::make_unique<SequenceTables>(
      memory.get(), shm::TableReader(c.session(), c.tables(), c.table_bytes()));
}

Result<int> Session::State::Enter(std::span<const TableClaim> claims, int32_t* codes) {
  KVS_ASSIGN_OR_RETURN(SequenceTables::EnteredEpoch entered, tables->Enter(claims, codes));
  const int slot = std::move(entered).Release();
  if (gpu_session != nullptr) gpu_session->Entered(slot);
  return slot;
}

DeviceRead Session::State::Reader() const {
  return [this](std::byte* to, const std::byte* from, uint64_t bytes) {
    return memory->Read(to, from, bytes);
  };
}

Session::~Session() {
  if (state_ == nullptr) return;
  // What the GPU still works on is told before the end, so that others may have it: as far as it
  // gets.
  const auto deadline = state_->Deadline();
  for (const auto& [id, s] : state_->sequences) (void)state_->TellAll(s.get(), deadline);
  state_->gpu_session.reset();
  state_->arenas.Clear();
  // Nothing is left to do about an error here: the closed socket ends the session as well.
  (void)state_->ring->Call(shm::kDetach, {}, nullptr);
}

void Session::AbandonAfterFork() {
  // Locks may have been held by threads that this process has not got: nothing is destroyed.
  State* state = state_.release();
  state->connection->AbandonAfterFork();
  state->arenas.AbandonAfterFork();
}

Status Session::Ping() { return state_->ring->Call(shm::kPing, {}, nullptr); }

Result<uint64_t> Session::RegisterModel(const ModelSpec& spec) {
  shm::RegisterModel request{};
  PutText(request.name, spec.name);
  PutText(request.digest, spec.digest);
  PutText(request.adapter, spec.adapter);
  const Geometry& g = spec.geometry;
  request.layers = g.layers;
  request.query_heads = g.query_heads;
  request.kv_heads = g.kv_heads;
  request.head_dim = g.head_dim;
  request.page_tokens = g.page_tokens;
  request.dtype = static_cast<int32_t>(g.dtype);
  request.keys_pre_rope = g.pre_rope() ? 1 : 0;
  request.rope_theta = g.rotary.theta;
  request.rope_dim = g.rotary.dim;
  request.rope_interleaved = g.rotary.interleaved ? 1 : 0;
  request.scale = g.scale;
  request.rank = spec.rank;
  request.ranks = spec.ranks;
  request.boundary_count = static_cast<int32_t>(spec.boundary_tokens.size());
  KVS_ASSIGN_OR_RETURN(
      const auto reply,
      state_->ring->Ask<shm::ModelReply>(
          shm::kRegisterModel, {BytesOf(request), std::as_bytes(std::span(spec.boundary_tokens))}));
  std::lock_guard<std::mutex> lock(state_->mu);
  state_->models.insert_or_assign(reply.model,
                                  State::RegisteredModel{g, Ascending(spec.boundary_tokens)});
  return reply.model;
}

Result<Session::State::RegisteredModel> ModelOf(Session::State* session, uint64_t model) {
  std::lock_guard<std::mutex> lock(session->mu);
  const auto it = session->models.find(model);
  if (it == session->models.end()) {
    return NotFound("MODEL_UNKNOWN", "model " + std::to_string(model) +
                                         " was not registered in this session; call "
                                         "kvs_model_register");
  }
  return it->second;
}

Result<Opened> Session::Open(uint64_t model, std::string_view plan, std::span<const int32_t> tokens,
                             const OpenOptions& options) {
  KVS_ASSIGN_OR_RETURN(const State::RegisteredModel registered, ModelOf(state_.get(), model));
  if (tokens.size() > state_->ring->max_tokens() || plan.size() > 1 << 16) {
    return InvalidArgument("PROMPT_TOO_LONG", "the prompt has " + std::to_string(tokens.size()) +
                                                  " tokens, the plan " +
                                                  std::to_string(plan.size()) + " bytes; at most " +
                                                  std::to_string(state_->ring->max_tokens()) +
                                                  " and 65536 are allowed");
  }
  const std::string padded = Padded(plan);
  const uint32_t flags = (options.only_reported ? shm::OpenSequence::kOnlyReported : 0u) |
                         (options.private_pages ? shm::OpenSequence::kPrivate : 0u);
  shm::OpenSequence request{model,
                            static_cast<uint32_t>(padded.size()),
                            static_cast<uint32_t>(tokens.size()),
                            options.max_held,
                            flags,
                            options.reserve_tokens,
                            0,
                            ""};
  PutText(request.key, std::string(options.key));
  std::vector<std::byte> payload;
  KVS_RETURN_IF_ERROR(state_->ring->Call(
      shm::kOpenSequence,
      {BytesOf(request), std::as_bytes(std::span(padded)), std::as_bytes(tokens)}, &payload));
  return state_->Adopt(payload, [&](const HeldAtOpen& held, Sequence* s) -> Status {
    KVS_ASSIGN_OR_RETURN(const Plan parsed, state_->PlanOf(s->plan_text));
    s->model = model;
    s->boundary_tokens = registered.boundary_tokens;
    BeginState(registered.geometry, parsed, tokens, held, s);
    return OkStatus();
  });
}

Result<Opened> Session::Fork(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(SequenceUse parent, SequenceUse::Current(state_.get(), sequence, true));
  if (parent->imported) return SequenceImported(sequence);
  if (parent->in_step && state_->gpu_session != nullptr) {
    KVS_RETURN_IF_ERROR(SettleBegin(*parent.get()));
  }
  KVS_RETURN_IF_ERROR(state_->TellAll(parent.get(), state_->Deadline()));
  KVS_RETURN_IF_ERROR(state_->TellIndexed(parent.get()));
  std::vector<std::byte> payload;
  const Status forked = state_->ring->CallOf(shm::kForkSequence, sequence, &payload);
  if (TimedOut(forked)) parent->unanswered = Unanswered(sequence, "a fork");
  KVS_RETURN_IF_ERROR(forked);
  parent->forked_in_step = parent->in_step;
  return state_->Adopt(payload, [&](const HeldAtOpen& held, Sequence* s) {
    return BeginFork(*parent.get(), held, s);
  });
}

Status Session::Truncate(uint64_t sequence, uint32_t tokens) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Current(state_.get(), sequence, false));
  if (s->imported) return SequenceImported(sequence);
  return state_->Truncate(s.get(), tokens);
}

Status Session::State::Truncate(Sequence* s, uint32_t tokens) {
  KVS_RETURN_IF_ERROR(TellAll(s, Deadline()));
  const std::span<const int32_t> tail = s->state->TailIds(tokens);
  const shm::Truncate request{s->id, tokens, static_cast<uint32_t>(tail.size())};
  const Status cut = ring->Call(shm::kTruncate, {BytesOf(request), std::as_bytes(tail)}, nullptr);
  if (TimedOut(cut)) s->unanswered = Unanswered(s->id, "a truncation");
  KVS_RETURN_IF_ERROR(cut);
  TakeBack(s, tokens);
  return OkStatus();
}

Result<Plan> Session::State::PlanOf(const std::string& text) {
  constexpr size_t kMaxPlans = 64;
  std::lock_guard<std::mutex> lock(mu);
  if (const auto it = plans.find(text); it != plans.end()) return it->second;
  KVS_ASSIGN_OR_RETURN(Plan plan, ParsePlan(text));
  if (plans.size() == kMaxPlans) plans.clear();
  return plans.emplace(text, std::move(plan)).first->second;
}

Result<Opened> Session::State::Adopt(
    const std::vector<std::byte>& payload,
    const std::function<Status(const HeldAtOpen&, Sequence*)>& begin) {
  KVS_ASSIGN_OR_RETURN(const auto reply, RingClient::ReadReply<shm::SequenceReply>(payload));
  if (payload.size() < sizeof(reply) + uint64_t{reply.plan_bytes} + reply.boundary_bytes) {
    return RingClient::ReplyInvalid();
  }
  auto s = std::make_shared<Sequence>();
  s->id = reply.sequence;
  s->slot = reply.slot;
  if (gpu_session != nullptr) gpu_session->ForgetNotFinite(s->slot);
  const auto* const plan = reinterpret_cast<const char*>(payload.data()) + sizeof(reply);
  s->plan_text.assign(plan, strnlen(plan, reply.plan_bytes));
  const HeldAtOpen held{
      reply.held_tokens,
      reply.indexed_tokens,
      reply.surprisal_tokens,
      {reinterpret_cast<const uint8_t*>(plan) + reply.plan_bytes, reply.boundary_bytes}};
  if (const Status begun = begin(held, s.get()); !begun.ok()) {
    (void)ring->CallOf(shm::kCloseSequence, reply.sequence);
    return begun;
  }
  std::lock_guard<std::mutex> lock(mu);
  s->imported = imported_models.contains(s->model);
  sequences.emplace(s->id, s);
  return Opened{reply.sequence, reply.held_tokens, reply.indexed_tokens, reply.surprisal_tokens,
                reply.boundary_tokens};
}

Status Session::Close(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Of(state_.get(), sequence, false));
  const Status told = state_->TellAll(s.get(), state_->Deadline());
  if (!told.ok() && told.reason() != kIdsMissing) return told;  // those are not kept
  Lending(state_.get()).AwaitStaged(s.get());
  {
    std::lock_guard<std::mutex> lock(state_->mu);
    state_->sequences.erase(sequence);
  }
  return state_->ring->CallOf(shm::kCloseSequence, sequence);
}

Status Session::CloseKey(std::string_view key) {
  shm::SequenceKey request{};
  PutText(request.key, std::string(key));
  return state_->ring->Call(shm::kCloseKey, {BytesOf(request)}, nullptr);
}

Status Session::TruncateKey(std::string_view key, uint32_t tokens) {
  shm::TruncateKey request{tokens, 0, ""};
  PutText(request.key, std::string(key));
  return state_->ring->Call(shm::kTruncateKey, {BytesOf(request)}, nullptr);
}

Result<uint32_t> Session::Tokens(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Current(state_.get(), sequence, true));
  if (s->imported) return Lending(state_.get()).Acknowledged(sequence);
  return static_cast<uint32_t>(s->state->tokens());
}

Result<std::string> Session::StatusText(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Current(state_.get(), sequence, true));
  if (s->imported) return std::string("ok");  // its pages are the daemon's to fill: no plan attends
  KVS_ASSIGN_OR_RETURN(const int slot, state_->EnterToRead(s.get()));
  const Status refreshed = s->state->Refresh(s->View());
  Result<std::string> text =
      refreshed.ok() ? s->state->StatusText(s->View()) : Result<std::string>(refreshed);
  if (slot >= 0) state_->Leave(slot);
  return text;
}

Result<std::string> Session::PlanText(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Of(state_.get(), sequence, true));
  return s->plan_text;
}

Result<std::string> Session::CanonicalPlan(std::string_view plan) {
  const std::string padded = Padded(plan);
  const shm::PlanText request{static_cast<uint32_t>(padded.size()), 0};
  std::vector<std::byte> payload;
  KVS_RETURN_IF_ERROR(state_->ring->Call(
      shm::kPlanText, {BytesOf(request), std::as_bytes(std::span(padded))}, &payload));
  return std::string(reinterpret_cast<const char*>(payload.data()), payload.size());
}

Status Session::PrefillDone(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Current(state_.get(), sequence, false));
  if (!s->imported) KVS_RETURN_IF_ERROR(state_->ClosePrompt(s.get()));
  const shm::SequenceRef event{sequence};
  return state_->Tell(s.get(), shm::kPrefillDone, {BytesOf(event)});
}

Status Session::State::ClosePrompt(Sequence* s) {
  if (gpu_session != nullptr) return s->state->ClosePrompt();
  const TableClaim claim{s, s->state->tokens()};
  KVS_ASSIGN_OR_RETURN(const int slot, Enter({&claim, 1}, nullptr));
  Status done = s->state->Refresh(s->View());
  if (done.ok()) done = s->state->PrefillDone(s->View(), *backend, *executor);
  Leave(slot);
  return done;
}

Status Session::Report(uint64_t sequence, uint32_t first, uint32_t n, const float* surprisal,
                       const float* entropy, const uint8_t* boundary) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Of(state_.get(), sequence, true));
  const auto from = static_cast<int32_t>(first), count = static_cast<int32_t>(n);
  // Only the daemon keeps the series of an imported sequence.
  const int32_t skipped =
      s->surprisal_begun ? -1 : s->state->reported().SkippedPosition(from, surprisal);
  if (!s->imported) {  // else the daemon alone knows its tokens
    KVS_RETURN_IF_ERROR(s->state->Report(from, count, surprisal, entropy, boundary));
  }
  s->surprisal_begun = s->surprisal_begun || (s->imported && surprisal != nullptr);
  if (skipped >= 0) {
    const float nothing = 0;
    KVS_RETURN_IF_ERROR(
        state_->TellReport(s.get(), static_cast<uint32_t>(skipped), 1, &nothing, nullptr, nullptr));
  }
  return state_->TellReport(s.get(), first, n, surprisal, entropy, boundary);
}

Status Session::ReportVerified(uint64_t sequence, uint32_t first, uint32_t n, bool equal) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Of(state_.get(), sequence, true));
  const shm::Verified event{sequence, first, n, equal ? 1u : 0u, 0};
  // At once, and not behind what waits for the GPU: from here on nothing of it is to be found.
  return state_->ring->Post(shm::kVerified, {BytesOf(event)});
}

Status Session::State::TellReport(Sequence* s, uint32_t first, uint32_t n, const float* surprisal,
                                  const float* entropy, const uint8_t* boundary) {
  constexpr uint32_t kPerEvent = 1 << 16;
  for (uint32_t done = 0; done < n;) {
    const uint32_t part = std::min(n - done, kPerEvent);
    shm::Report event{s->id, first + done, part, 0, 0};
    if (surprisal != nullptr) event.flags |= shm::Report::kSurprisal;
    if (entropy != nullptr) event.flags |= shm::Report::kEntropy;
    if (boundary != nullptr) event.flags |= shm::Report::kBoundary;
    const auto slice = [&]<typename T>(const T* a) {
      return a == nullptr ? std::span<const std::byte>() : std::as_bytes(std::span(a + done, part));
    };
    KVS_RETURN_IF_ERROR(
        Tell(s, shm::kReport, {BytesOf(event), slice(surprisal), slice(entropy), slice(boundary)}));
    done += part;
  }
  return OkStatus();
}

Status Session::Settle(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Current(state_.get(), sequence, false));
  KVS_RETURN_IF_ERROR(state_->TellAll(s.get(), state_->Deadline()));
  KVS_RETURN_IF_ERROR(state_->ring->CallOf(shm::kSettle, sequence));
  return state_->CatchUp(s.get());
}

// The next step of a GPU catches the index up; of what is imported the daemon has done so.
Status Session::State::CatchUp(Sequence* s) {
  if (gpu_session != nullptr || s->imported) return OkStatus();
  const TableClaim claim{s, s->state->tokens()};
  KVS_ASSIGN_OR_RETURN(const int slot, Enter({&claim, 1}, nullptr));
  const Status refreshed = s->state->Refresh(s->View());
  if (refreshed.ok()) s->state->CatchUp(s->View(), *backend, *executor);
  Leave(slot);
  KVS_RETURN_IF_ERROR(refreshed);
  return TellIndexed(s);
}

Result<std::unique_ptr<SessionStep>> Session::StepBegin(std::span<const BatchMember> members,
                                                        void* stream, int32_t* codes) {
  return BeginStep(state_.get(), members, stream, codes);
}

// The epoch of a step that the sequence is in holds, and its table must not change: then -1.
Result<int> Session::State::EnterToRead(Sequence* s) {
  if (s->in_step) return -1;
  const TableClaim claim{s, s->state->tokens(), false};
  return Enter({&claim, 1}, nullptr);
}

Result<PageTable> Session::GetPageTable(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Current(state_.get(), sequence, true));
  KVS_ASSIGN_OR_RETURN(const int slot, state_->EnterToRead(s.get()));
  const int32_t page_tokens = s->state->geometry().page_tokens;
  const int32_t tokens = s->in_step ? s->step_tokens : s->state->tokens();
  const auto pages = static_cast<uint32_t>((int64_t{tokens} + page_tokens - 1) / page_tokens);
  PageTable table{s->version, {}};
  for (uint32_t i = 0; i < pages; ++i) {
    const shm::PageEntry entry = PageEntryOf(*s.get(), i);
    table.pages.push_back({s->pages[i], entry.tier, entry.flags});
  }
  if (slot >= 0) state_->Leave(slot);
  return table;
}

Result<InspectArray> Session::State::Inspect(const Sequence& s, std::string_view name) {
  if (gpu_session == nullptr) return s.state->Inspect(s.View(), *backend, *executor, name);
  return InspectFromGpu(*s.state, s.View(), s.blocks.size(), Reader(), *executor, name);
}

Result<InspectArray> Session::Inspect(uint64_t sequence, std::string_view name) {
  KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Current(state_.get(), sequence, true));
  KVS_ASSIGN_OR_RETURN(const int slot, state_->EnterToRead(s.get()));
  Status refreshed = s->state->Refresh(s->View());
  Result<InspectArray> array =
      refreshed.ok() ? state_->Inspect(*s.get(), name) : Result<InspectArray>(refreshed);
  if (slot >= 0) state_->Leave(slot);
  return array;
}

Result<std::byte*> LinkedMemory::Resolve(const shm::PageEntry& entry, uint64_t bytes) {
  Result<std::byte*> at = arenas_.Resolve(entry, bytes);
  if (at.ok() || at.status().reason() != "ARENA_UNKNOWN") return at;
  // Its descriptor was sent before the table was published; a full socket may have delayed it.
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  while (!at.ok() && at.status().reason() == "ARENA_UNKNOWN") {
    if (!connection_.AwaitPacket(deadline)) return at;
    at = arenas_.Resolve(entry, bytes);
  }
  return at;
}

Status LinkedMemory::Grow(const TableClaim& claim) {
  const SequenceState& state = *claim.sequence->state;
  const shm::Grow grow{claim.sequence->id, static_cast<uint32_t>(claim.tokens_after),
                       static_cast<uint32_t>(state.tokens()),
                       static_cast<uint32_t>(state.indexed_tokens()), 0};
  return ring_.Call(shm::kGrow, {BytesOf(grow)}, nullptr);
}

Status LinkedMemory::Read(std::byte* to, const std::byte* from, uint64_t bytes) {
  return CudaStatus(*gpu_.ops, gpu_.ops->copy_2d(gpu_.device, to, from, {bytes, bytes, 1}),
                    "reading from the GPU");
}

}  // namespace kvstrata::client
