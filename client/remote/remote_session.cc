// SPDX-License-Identifier: Apache-2.0
// Session over gRPC: the remote transport (session.h). Keeps what the caller must know without
// asking: the geometry of models and the selections of a step. Everything else is the daemon's.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "client/remote/remote_channel.h"
#include "client/session.h"
#include "session/member_codes.h"

namespace kvstrata::client {
namespace {

// The daemon takes 64 MiB a message; leave room for what is not tensor.
constexpr int64_t kMaxTensorBytes = (int64_t{64} << 20) - (int64_t{64} << 10);
constexpr std::string_view kBeginDetail = "kvstrata.v1.StepBeginResponse";

struct Shape {
  int32_t tokens = 0, heads = 0, head_dim = 0;
  int64_t rows() const { return int64_t{tokens} * heads; }
};

int64_t BytesOf(const Shape& shape, DType dtype) {
  return shape.rows() * shape.head_dim * SizeOf(dtype);
}

Status CheckFits(int64_t bytes, const Shape& shape) {
  if (bytes <= kMaxTensorBytes) return OkStatus();
  return ResourceExhausted("MESSAGE_TOO_LARGE", "a layer of " + std::to_string(shape.tokens) +
                                                    " new tokens has " + std::to_string(bytes) +
                                                    " bytes; the remote transport carries " +
                                                    std::to_string(kMaxTensorBytes) +
                                                    " a call: begin steps with fewer tokens");
}

void WriteTensor(const Rows& rows, const Shape& shape, v1::TensorRef* out) {
  out->set_dtype(static_cast<v1::DType>(rows.dtype));
  out->set_tokens(shape.tokens);
  out->set_heads(shape.heads);
  out->set_head_dim(shape.head_dim);
  const int64_t row = shape.head_dim * SizeOf(rows.dtype);
  std::string* bytes = out->mutable_inline_();
  bytes->reserve(static_cast<size_t>(BytesOf(shape, rows.dtype)));
  for (int32_t t = 0; t < shape.tokens; ++t) {
    for (int32_t h = 0; h < shape.heads; ++h) {
      const std::byte* from = rows.data + t * rows.token_stride + h * rows.head_stride;
      bytes->append(reinterpret_cast<const char*>(from), static_cast<size_t>(row));
    }
  }
}

void ReadTensor(const std::string& bytes, const Shape& shape, const MutableRows& out) {
  const int64_t row = shape.head_dim * SizeOf(out.dtype);
  const char* from = bytes.data();
  for (int32_t t = 0; t < shape.tokens; ++t) {
    for (int32_t h = 0; h < shape.heads; ++h, from += row) {
      std::memcpy(out.data + t * out.token_stride + h * out.head_stride, from,
                  static_cast<size_t>(row));
    }
  }
}

Status AnswerInvalid(const char* what) {
  return Internal("REPLY_INVALID", std::string("the daemon's answer has a wrong ") + what +
                                       "; daemon and library differ");
}

Room RoomOf(const v1::Room& room) { return {room.tokens(), room.bytes()}; }

PoolCapacity PoolOf(const v1::PoolCapacity& pool) {
  return {RoomOf(pool.free()), RoomOf(pool.after_eviction()),
          pool.has_limit() ? RoomOf(pool.limit()) : Room{UINT64_MAX, UINT64_MAX}};
}

// What an older daemon does not know it leaves out, and does not say so.
Status CheckServed(const OpenOptions& asked, const v1::OpenSequenceResponse& response) {
  if (response.private_pages() != asked.private_pages) {
    return Unimplemented("PRIVATE_PAGES",
                         "private_pages is 1, and the daemon is older than this library and shares "
                         "the pages of every sequence; pass 0, or update the daemon");
  }
  if (response.reserved_tokens() == asked.reserve_tokens) return OkStatus();
  return Unimplemented("RESERVE_TOKENS", "reserve_tokens is " +
                                             std::to_string(asked.reserve_tokens) +
                                             ", and the daemon is older than this library and "
                                             "reserves nothing; pass 0, or update the daemon");
}

std::string BackendName(const AttachOptions& options) {
  if (!options.backend.empty()) return options.backend;
  const char* name = std::getenv("KVSTRATA_BACKEND");
  return name == nullptr ? "" : name;
}

}  // namespace

struct Session::State {
  AttachOptions options;
  std::unique_ptr<RemoteChannel> channel;

  std::mutex mu;  // guards the maps
  std::unordered_map<uint64_t, Geometry> models;
  struct Known {
    Geometry geometry;
    Status unanswered;  // Unanswered, of a step, a truncation or a fork
  };
  std::unordered_map<uint64_t, Known> sequences;

  Opened Adopt(const v1::OpenSequenceResponse& response, const Geometry& geometry) {
    std::lock_guard lock(mu);
    sequences.emplace(response.sequence(), Known{geometry, {}});
    return {response.sequence(), response.held_tokens(), response.indexed_tokens(),
            response.surprisal_tokens(), response.boundary_tokens()};
  }
  // SEQUENCE_UNANSWERED.
  Status Answered(uint64_t sequence) {
    std::lock_guard lock(mu);
    const auto found = sequences.find(sequence);
    return found == sequences.end() ? OkStatus() : found->second.unanswered;
  }
  Result<Geometry> GeometryOf(uint64_t sequence) {
    std::lock_guard lock(mu);
    const auto found = sequences.find(sequence);
    if (found != sequences.end()) return found->second.geometry;
    return NotFound("SEQUENCE_UNKNOWN",
                    "sequence " + std::to_string(sequence) +
                        " is not open in this session: it was closed, or is another session's");
  }
  // What a call that changes the sequence ended with.
  Status Note(uint64_t sequence, std::string_view what, const Status& ended) {
    if (!TimedOut(ended)) return ended;
    std::lock_guard lock(mu);
    const auto found = sequences.find(sequence);
    if (found == sequences.end()) return ended;
    found->second.unanswered = Unanswered(sequence, what);
    return ended;
  }
  Result<v1::GetSequenceResponse> Get(uint64_t sequence) {
    KVS_RETURN_IF_ERROR(Answered(sequence));
    return channel->AskOf(&v1::Compute::Stub::GetSequence, sequence);
  }
};

struct SessionStep::State {
  Session::State* session = nullptr;
  RemoteChannel* channel = nullptr;
  uint64_t step = 0;
  std::vector<uint64_t> sequences;  // sequences of the members
  Geometry geometry;
  int32_t tokens = 0;
  int members = 0;
  bool over = false;
  v1::SelectResponse selections;  // answer for the last layer

  Shape KeyShape() const { return {tokens, geometry.kv_heads, geometry.head_dim}; }
  Shape QueryShape() const { return {tokens, geometry.query_heads, geometry.head_dim}; }
  Status End(bool abort) {
    over = true;
    v1::StepEndRequest request;
    request.set_step(step);
    request.set_abort(abort);
    const Status ended = channel->Ask(&v1::Compute::Stub::StepEnd, request).status();
    for (const uint64_t s : sequences) (void)session->Note(s, "the end of a step", ended);
    return ended;
  }
};

std::string_view Transport() { return "remote"; }

// --- session -------------------------------------------------------------------------------------

Session::Session(std::unique_ptr<State> state) : state_(std::move(state)) {}
Session::~Session() = default;

Result<std::unique_ptr<Session>> Session::Attach(const AttachOptions& options) {
  auto state = std::make_unique<State>();
  state->options = options;
  KVS_ASSIGN_OR_RETURN(state->channel, RemoteChannel::Open(options, BackendName(options)));
  return std::make_unique<Session>(std::move(state));
}

void Session::AbandonAfterFork() {
  // gRPC's threads and locks stayed with the parent: nothing of it is destroyed here.
  state_.release()->channel->AbandonAfterFork();
}

Status Session::Ping() {
  v1::PingRequest request;
  return state_->channel->Ask(&v1::Control::Stub::Ping, request).status();
}

Result<uint64_t> Session::RegisterModel(const ModelSpec& spec) {
  v1::RegisterModelRequest request;
  request.set_name(spec.name);
  request.set_digest(spec.digest);
  request.set_adapter(spec.adapter);
  v1::Geometry* g = request.mutable_geometry();
  g->set_layers(spec.geometry.layers);
  g->set_query_heads(spec.geometry.query_heads);
  g->set_kv_heads(spec.geometry.kv_heads);
  g->set_head_dim(spec.geometry.head_dim);
  g->set_page_tokens(spec.geometry.page_tokens);
  g->set_dtype(static_cast<v1::DType>(spec.geometry.dtype));
  g->set_scale(spec.geometry.scale);
  if (const Rotary& rotary = spec.geometry.rotary; spec.geometry.pre_rope()) {
    request.set_keys_pre_rope(true);
    request.mutable_rope()->set_theta(rotary.theta);
    request.mutable_rope()->set_dim(rotary.dim);
    request.mutable_rope()->set_interleaved(rotary.interleaved);
  }
  request.set_rank(spec.rank);
  request.set_ranks(spec.ranks);
  request.mutable_boundary_tokens()->Add(spec.boundary_tokens.begin(), spec.boundary_tokens.end());
  KVS_ASSIGN_OR_RETURN(const v1::RegisterModelResponse response,
                       state_->channel->Ask(&v1::Control::Stub::RegisterModel, request));
  std::lock_guard lock(state_->mu);
  state_->models.insert_or_assign(response.model(), spec.geometry);
  return response.model();
}

Result<Opened> Session::Open(uint64_t model, std::string_view plan, std::span<const int32_t> tokens,
                             const OpenOptions& options) {
  Geometry geometry;
  {
    std::lock_guard lock(state_->mu);
    const auto found = state_->models.find(model);
    if (found == state_->models.end()) {
      return NotFound("MODEL_UNKNOWN", "model " + std::to_string(model) +
                                           " was not registered in this session; call "
                                           "kvs_model_register");
    }
    geometry = found->second;
  }
  v1::OpenSequenceRequest request;
  request.set_model(model);
  request.set_plan(std::string(plan));
  request.mutable_tokens()->Add(tokens.begin(), tokens.end());
  request.set_max_held_tokens(options.max_held);
  request.set_hold_only_reported(options.only_reported);
  request.set_reserve_tokens(options.reserve_tokens);
  request.set_private_pages(options.private_pages);
  request.set_key(std::string(options.key));
  KVS_ASSIGN_OR_RETURN(const v1::OpenSequenceResponse response,
                       state_->channel->Ask(&v1::Control::Stub::OpenSequence, request));
  const Opened opened = state_->Adopt(response, geometry);
  const Status served = CheckServed(options, response);
  if (served.ok()) return opened;
  (void)Close(opened.sequence);
  return served;
}

Result<LookedUp> Session::Lookup(uint64_t model, const LookupQuery& query,
                                 std::span<const int32_t> tokens) {
  v1::LookupRequest request;
  request.set_model(model);
  request.set_plan(std::string(query.plan));
  request.set_device_uuid(std::string(query.device_uuid));
  request.set_lease_ms(query.lease_ms);
  request.mutable_tokens()->Add(tokens.begin(), tokens.end());
  KVS_ASSIGN_OR_RETURN(const v1::LookupResponse response,
                       state_->channel->Ask(&v1::Control::Stub::Lookup, request));
  return LookedUp{response.held_tokens(), response.indexed_tokens(), response.device_tokens(),
                  response.host_tokens(), response.disk_tokens()};
}

Result<Capacity> Session::CountCapacity(uint64_t model, std::string_view plan) {
  v1::GetCapacityRequest request;
  request.set_model(model);
  request.set_plan(std::string(plan));
  KVS_ASSIGN_OR_RETURN(const v1::GetCapacityResponse response,
                       state_->channel->Ask(&v1::Control::Stub::GetCapacity, request));
  return Capacity{PoolOf(response.device()), PoolOf(response.host()), response.open_tokens()};
}

Result<Opened> Session::Fork(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(const Geometry geometry, state_->GeometryOf(sequence));
  KVS_RETURN_IF_ERROR(state_->Answered(sequence));
  const auto forked = state_->channel->AskOf(&v1::Control::Stub::ForkSequence, sequence);
  KVS_RETURN_IF_ERROR(state_->Note(sequence, "a fork", forked.status()));
  return state_->Adopt(*forked, geometry);
}

Status Session::Truncate(uint64_t sequence, uint32_t tokens) {
  KVS_RETURN_IF_ERROR(state_->Answered(sequence));
  v1::TruncateSequenceRequest request;
  request.set_sequence(sequence);
  request.set_tokens(tokens);
  return state_->Note(sequence, "a truncation",
                      state_->channel->Ask(&v1::Control::Stub::TruncateSequence, request).status());
}

Status Session::Close(uint64_t sequence) {
  v1::CloseSequenceRequest request;
  request.set_sequence(sequence);
  request.set_abort_step(!state_->Answered(sequence).ok());  // one may be open
  KVS_RETURN_IF_ERROR(state_->channel->Ask(&v1::Control::Stub::CloseSequence, request).status());
  std::lock_guard lock(state_->mu);
  state_->sequences.erase(sequence);
  return OkStatus();
}

Status Session::CloseKey(std::string_view key) {
  v1::CloseKeyRequest request;
  request.set_key(std::string(key));
  return state_->channel->Ask(&v1::Control::Stub::CloseKey, request).status();
}

Status Session::TruncateKey(std::string_view key, uint32_t tokens) {
  v1::TruncateKeyRequest request;
  request.set_key(std::string(key));
  request.set_tokens(tokens);
  return state_->channel->Ask(&v1::Control::Stub::TruncateKey, request).status();
}

Result<uint32_t> Session::Tokens(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(const v1::GetSequenceResponse s, state_->Get(sequence));
  return s.tokens();
}

Result<std::string> Session::StatusText(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(const v1::GetSequenceResponse s, state_->Get(sequence));
  return s.status();
}

Result<std::string> Session::PlanText(uint64_t sequence) {
  KVS_ASSIGN_OR_RETURN(const v1::GetSequenceResponse s, state_->Get(sequence));
  return s.plan();
}

Result<std::string> Session::CanonicalPlan(std::string_view plan) {
  v1::ShowPlanRequest request;
  request.set_plan(std::string(plan));
  KVS_ASSIGN_OR_RETURN(const v1::Plan response,
                       state_->channel->Ask(&v1::Control::Stub::ShowPlan, request));
  return response.text();
}

Status Session::PrefillDone(uint64_t sequence) {
  KVS_RETURN_IF_ERROR(state_->Answered(sequence));
  return state_->channel->AskOf(&v1::Compute::Stub::PrefillDone, sequence).status();
}

Status Session::Report(uint64_t sequence, uint32_t first, uint32_t n, const float* surprisal,
                       const float* entropy, const uint8_t* boundary) {
  v1::ReportRequest request;
  request.set_sequence(sequence);
  request.set_first(first);
  if (surprisal != nullptr) request.mutable_surprisal()->Add(surprisal, surprisal + n);
  if (entropy != nullptr) request.mutable_entropy()->Add(entropy, entropy + n);
  if (boundary != nullptr) request.set_boundary(boundary, n);
  return state_->channel->Ask(&v1::Compute::Stub::Report, request).status();
}

Status Session::ReportVerified(uint64_t sequence, uint32_t first, uint32_t n, bool equal) {
  v1::ReportVerifiedRequest request;
  request.set_sequence(sequence);
  request.set_first(first);
  request.set_tokens(n);
  request.set_equal(equal);
  return state_->channel->Ask(&v1::Compute::Stub::ReportVerified, request).status();
}

Status Session::Settle(uint64_t sequence) {
  KVS_RETURN_IF_ERROR(state_->Answered(sequence));
  return state_->channel->AskOf(&v1::Compute::Stub::Settle, sequence).status();
}

Result<Built> Session::Build(uint64_t sequence, std::string_view plan) {
  v1::BuildRequest request;
  request.set_sequence(sequence);
  request.set_plan(std::string(plan));
  KVS_ASSIGN_OR_RETURN(const v1::BuildResponse response,
                       state_->channel->Ask(&v1::Compute::Stub::Build, request));
  return Built{response.indexed_tokens(), response.built_blocks(), response.extents()};
}

Status Session::Recompress(uint64_t sequence) {
  return state_->channel->AskOf(&v1::Compute::Stub::Recompress, sequence).status();
}

Status Session::CancelWork(uint64_t sequence) {
  return state_->channel->AskOf(&v1::Compute::Stub::StopWork, sequence).status();
}

namespace {
Status NotImported() {
  return Unimplemented(
      "REMOTE_IMPORT",
      "engines' tensors are lent over the linked transport alone; load libkvstrata.so");
}
}  // namespace

Status Session::RegisterTensors(uint64_t, int32_t, const LentTensor&, const LentTensor&, bool) {
  return NotImported();
}
Status Session::SealBlocks(uint64_t, uint32_t, std::span<const int32_t>, std::span<const int32_t>) {
  return NotImported();
}
Result<uint32_t> Session::Acknowledged(uint64_t) { return NotImported(); }
Status Session::LoadBlocks(uint64_t, uint32_t, std::span<const int32_t>, void*) {
  return NotImported();
}

namespace {
Status NotRemote() {
  return Unimplemented(
      "REMOTE_LATE_TOKENS",
      "the remote transport takes all ids at a step's begin, and no padding: its steps "
      "run in the daemon; pass members[].tokens, or attach on the daemon's machine");
}
}  // namespace
Status Session::LateTokens(std::span<const LateIds>, bool) { return NotRemote(); }

Result<std::unique_ptr<SessionStep>> Session::StepBegin(std::span<const BatchMember> members,
                                                        void* stream, int32_t* codes) {
  KVS_RETURN_IF_ERROR(NoStream(stream));
  std::fill_n(codes, members.size(), 0);
  if (std::ranges::any_of(members, [](const auto& m) { return m.late > 0; })) return NotRemote();
  auto step = std::make_unique<SessionStep::State>();
  v1::StepBeginRequest request;
  request.set_session(state_->channel->session());
  const auto answered = [this, members](size_t i) { return state_->Answered(members[i].sequence); };
  KVS_RETURN_IF_ERROR(CheckEach(members.size(), codes, answered));
  for (const BatchMember& m : members) {
    v1::StepMember* out = request.add_members();
    out->set_sequence(m.sequence);
    out->mutable_tokens()->Add(m.tokens.begin(), m.tokens.end());
    step->tokens += static_cast<int32_t>(m.tokens.size());
  }
  v1::StepBeginResponse response;
  grpc::Status raw;
  const Status status =
      state_->channel->Call(&v1::Compute::Stub::StepBegin, request, &response, &raw);
  for (const BatchMember& m : members) (void)state_->Note(m.sequence, "a step's begin", status);
  if (!status.ok()) {
    v1::StepBeginResponse detail;
    if (detail.ParseFromString(DetailOf(raw, kBeginDetail)) &&
        static_cast<size_t>(detail.codes_size()) == members.size()) {
      std::copy(detail.codes().begin(), detail.codes().end(), codes);
    } else if (status.code() == Code::kUnavailable) {
      std::fill_n(codes, members.size(), static_cast<int32_t>(status.code()));
    }
    return status;
  }
  KVS_ASSIGN_OR_RETURN(step->geometry, state_->GeometryOf(members.front().sequence));
  step->session = state_.get();
  step->channel = state_->channel.get();
  step->step = response.step();
  for (const BatchMember& m : members) step->sequences.push_back(m.sequence);
  step->members = static_cast<int>(members.size());
  return std::make_unique<SessionStep>(std::move(step));
}

Result<PageTable> Session::GetPageTable(uint64_t) {
  return Unimplemented("TRANSPORT_REMOTE",
                       "the remote transport maps no pages; load libkvstrata.so for "
                       "addresses, or ask Compute.GetPageTable for places");
}

Result<InspectArray> Session::Inspect(uint64_t sequence, std::string_view name) {
  v1::InspectRequest request;
  request.set_sequence(sequence);
  request.set_name(std::string(name));
  KVS_ASSIGN_OR_RETURN(const v1::InspectResponse response,
                       state_->channel->Ask(&v1::Compute::Stub::Inspect, request));
  InspectArray array;
  array.type = static_cast<InspectArray::Type>(response.type());
  array.shape.assign(response.shape().begin(), response.shape().end());
  array.bytes.resize(response.data().size());
  std::copy_n(reinterpret_cast<const std::byte*>(response.data().data()), array.bytes.size(),
              array.bytes.begin());
  return array;
}

// --- step ----------------------------------------------------------------------------------------

SessionStep::SessionStep(std::unique_ptr<State> state) : state_(std::move(state)) {}

SessionStep::~SessionStep() {
  // An error ends the step as well: with the session, if in no other way.
  if (state_ != nullptr && !state_->over) (void)state_->End(true);
}

void SessionStep::AbandonAfterFork() { (void)state_.release(); }

const Geometry& SessionStep::geometry() const { return state_->geometry; }
int32_t SessionStep::tokens() const { return state_->tokens; }
int SessionStep::members() const { return state_->members; }

Status SessionStep::Append(int layer, const Rows& k, const Rows& v) {
  const Shape shape = state_->KeyShape();
  KVS_RETURN_IF_ERROR(CheckFits(BytesOf(shape, k.dtype) + BytesOf(shape, v.dtype), shape));
  v1::AppendRequest request;
  request.set_step(state_->step);
  request.set_layer(layer);
  WriteTensor(k, shape, request.mutable_k());
  WriteTensor(v, shape, request.mutable_v());
  return state_->channel->Ask(&v1::Compute::Stub::Append, request).status();
}

Status SessionStep::Select(int layer, const Rows& q) {
  const Shape shape = state_->QueryShape();
  KVS_RETURN_IF_ERROR(CheckFits(BytesOf(shape, q.dtype), shape));
  v1::SelectRequest request;
  request.set_step(state_->step);
  request.set_layer(layer);
  WriteTensor(q, shape, request.mutable_q());
  KVS_ASSIGN_OR_RETURN(v1::SelectResponse response,
                       state_->channel->Ask(&v1::Compute::Stub::Select, request));
  if (response.members_size() != state_->members) return AnswerInvalid("number of selections");
  state_->selections.Swap(&response);
  return OkStatus();
}

Status SessionStep::Attend(int layer, const Rows& q, const MutableRows& out, float* lse) {
  const Shape shape = state_->QueryShape();
  KVS_RETURN_IF_ERROR(CheckFits(BytesOf(shape, q.dtype), shape));
  v1::AttendRequest request;
  request.set_step(state_->step);
  request.set_layer(layer);
  WriteTensor(q, shape, request.mutable_q());
  request.set_out_dtype(static_cast<v1::DType>(out.dtype));
  request.set_want_lse(lse != nullptr);
  request.set_want_selection(true);
  KVS_ASSIGN_OR_RETURN(v1::AttendResponse response,
                       state_->channel->Ask(&v1::Compute::Stub::Attend, request));
  const std::string& bytes = response.out().inline_();
  const size_t lse_bytes = lse == nullptr ? 0 : sizeof(float) * static_cast<size_t>(shape.rows());
  if (bytes.size() != static_cast<size_t>(BytesOf(shape, out.dtype)) ||
      response.lse().size() != lse_bytes) {
    return AnswerInvalid("tensor size");
  }
  if (response.selection().members_size() != state_->members) {
    return AnswerInvalid("number of selections");
  }
  ReadTensor(bytes, shape, out);
  if (lse != nullptr) std::memcpy(lse, response.lse().data(), lse_bytes);
  state_->selections.Swap(response.mutable_selection());
  return OkStatus();
}

Status SessionStep::Replay() {
  return FailedPrecondition("GRAPH_STALE",
                            "the remote transport captures no graphs; make the calls");
}

Status SessionStep::End(void*) { return state_->End(false); }

bool SessionStep::on_gpu() const { return false; }

Result<uint32_t> SessionStep::SelectionGroups(int member) const {
  return static_cast<uint32_t>(state_->selections.members(member).groups_size());
}

Result<StepCost> SessionStep::Cost(int member) const {
  const v1::AttendCost& cost = state_->selections.members(member).cost();
  return StepCost{cost.rows(), cost.coarse_rows(), cost.attend_bytes(), cost.select_bytes()};
}

Result<size_t> SessionStep::CopySelection(int member, uint32_t group, SelectionKind kind,
                                          std::span<int32_t> out) const {
  const v1::SelectionGroup& g = state_->selections.members(member).groups(static_cast<int>(group));
  const auto& list = kind == SelectionKind::kTokens ? g.tokens() : g.units();
  const auto n = static_cast<size_t>(list.size());
  std::copy_n(list.begin(), std::min(n, out.size()), out.begin());
  return n;
}

}  // namespace kvstrata::client
