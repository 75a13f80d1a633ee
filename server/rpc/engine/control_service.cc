// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/engine/control_service.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "kernels/plan/plan_needs.h"
#include "server/rpc/calls/copy_fields.h"
#include "server/rpc/calls/prefix_messages.h"
#include "server/rpc/calls/service_context.h"
#include "server/sockets/packet.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

// As in shm::RegisterModel, so that both transports take the same texts.
constexpr size_t kMaxName = 63, kMaxDigest = 79, kMaxLayout = 31, kMaxAdapter = 63;
constexpr int kMaxBoundaryTokens = 1 << 16;
constexpr std::string_view kPlanPrefix = "plans.";

Status CheckText(std::string_view field, const std::string& text, size_t limit) {
  if (text.size() <= limit && Printable(text) == text) return OkStatus();
  return InvalidArgument("TEXT_INVALID", std::string(field) + " has " +
                                             std::to_string(text.size()) +
                                             " bytes; allowed: at most " + std::to_string(limit) +
                                             " bytes of text without control characters");
}

Result<ModelDesc> ReadModel(const v1::RegisterModelRequest& in) {
  KVS_RETURN_IF_ERROR(CheckText("name", in.name(), kMaxName));
  KVS_RETURN_IF_ERROR(CheckText("digest", in.digest(), kMaxDigest));
  KVS_RETURN_IF_ERROR(CheckText("layout", in.layout(), kMaxLayout));
  KVS_RETURN_IF_ERROR(CheckText("adapter", in.adapter(), kMaxAdapter));
  const v1::Geometry& g = in.geometry();
  if (!IsDType(g.dtype())) {
    return InvalidArgument("MODEL_DTYPE", "geometry.dtype " + std::to_string(g.dtype()) +
                                              "; allowed: " + AllDTypes("DTYPE"));
  }
  if (in.boundary_tokens_size() > kMaxBoundaryTokens) {
    return InvalidArgument("ARGUMENT_RANGE", "boundary_tokens has " +
                                                 std::to_string(in.boundary_tokens_size()) +
                                                 " elements; allowed: 0..65536");
  }
  ModelDesc out;
  out.name = in.name();
  out.digest = in.digest();
  out.layout = in.layout();
  out.adapter = in.adapter();
  out.geometry = {g.layers(),   g.query_heads(), g.kv_heads(),
                  g.head_dim(), g.page_tokens(), static_cast<DType>(g.dtype())};
  out.geometry.scale = g.scale();
  KVS_RETURN_IF_ERROR(Validate(out.geometry));
  const v1::Rotary& rope = in.rope();
  KVS_ASSIGN_OR_RETURN(out.geometry.rotary, ReadRotary({in.keys_pre_rope(), rope.theta(),
                                                        rope.dim(), rope.interleaved() ? 1 : 0},
                                                       g.head_dim()));
  out.rank = in.rank();
  out.ranks = in.ranks() == 0 ? 1 : in.ranks();
  out.boundary_tokens.assign(in.boundary_tokens().begin(), in.boundary_tokens().end());
  return out;
}

void Write(const Geometry& g, v1::Geometry* out) {
  KVS_COPY_FIELDS(out, g, layers, query_heads, kv_heads, head_dim, page_tokens, scale);
  out->set_dtype(static_cast<v1::DType>(g.dtype));
}

void Write(const Room& room, v1::Room* out) {
  out->set_tokens(room.tokens);
  out->set_bytes(room.bytes);
}

void Write(const PoolCapacity& pool, v1::PoolCapacity* out) {
  Write(pool.free, out->mutable_free());
  Write(pool.after_eviction, out->mutable_after_eviction());
  if (pool.limit.bytes != kUnlimited) Write(pool.limit, out->mutable_limit());
}

void Write(const ModelInfo& m, v1::Model* out) {
  out->set_model(m.model);
  out->set_name(m.desc.name);
  out->set_digest(m.desc.digest);
  out->set_adapter(m.desc.adapter);
  Write(m.desc.geometry, out->mutable_geometry());
  out->set_page_bytes(m.desc.geometry.page_bytes());
  out->set_token_bytes(m.desc.geometry.page_bytes() / m.desc.geometry.page_tokens);
  out->set_sequences(static_cast<int64_t>(m.sequences));
  out->set_cached_pages(static_cast<int64_t>(m.cached_pages));
  out->set_boundary_tokens(static_cast<int32_t>(m.desc.boundary_tokens.size()));
  if (!m.desc.geometry.pre_rope()) return;
  const Rotary& rotary = m.desc.geometry.rotary;
  out->set_keys_pre_rope(true);
  out->mutable_rope()->set_theta(rotary.theta);
  out->mutable_rope()->set_dim(rotary.dim);
  out->mutable_rope()->set_interleaved(rotary.interleaved);
}

void Write(const OpenedSequence& s, v1::OpenSequenceResponse* out) {
  KVS_COPY_FIELDS(out, s, sequence, held_tokens, indexed_tokens, surprisal_tokens, slot);
  out->set_plan(FormatPlan(s.plan));
  out->set_boundary_tokens(s.bounded_tokens);
}

// Its span and those of its parts; null: it is not traced.
void TellOpen(RequestSpan* span, uint64_t session, const Result<OpenedSequence>& opened) {
  if (span == nullptr) return;
  if (!opened.ok()) return span->End(opened.status(), {{"session", session}});
  const OpenTimes& t = opened->times;
  span->Part("open.prepare", t.begun, t.prepared);
  span->Part("open.disk_load", t.prepared, t.loaded, {{"disk_values", t.disk_values}});
  span->Part("open.lookup", t.loaded, t.found, {{"held_tokens", opened->held_tokens}});
  span->Part("open.publish", t.found, t.published);
  span->End(
      OkStatus(),
      {{"session", session}, {"sequence", opened->sequence}, {"held_tokens", opened->held_tokens}});
}

void WriteNeeds(const Plan& plan, v1::Plan* out) {
  const uint32_t needs = NeedsOf(plan);
  for (const NeedText& t : NeedTexts()) {
    if ((needs & t.need) == 0) continue;
    v1::PlanNeed* const need = out->add_needs();
    need->set_name(std::string(t.name));
    need->set_text(std::string(t.text));
  }
}

bool IsPreset(std::string_view text) {
  return std::ranges::find(PresetNames(), text) != PresetNames().end();
}

// Names of the configuration's plans.
std::vector<std::string> NamedPlans(const GrpcOptions& options) {
  std::vector<std::string> names;
  if (!options.config) return names;
  for (const ConfigItem& item : options.config()) {
    if (item.key.starts_with(kPlanPrefix)) names.push_back(item.key.substr(kPlanPrefix.size()));
  }
  return names;
}

// What `plan ls` and `plan show` say of a plan beside its options.
std::string Describe(const Plan& plan) {
  std::string text;
  if (IsPreset(plan.name)) text = DescribePreset(plan.name);
  const double share = IndexShare(plan);
  if (share == 0) return text;
  std::array<char, 80> memory;
  std::snprintf(memory.data(), memory.size(), "index: %.1f %% of keys and values in 16 bits",
                100 * share);
  return text + (text.empty() ? "" : "; ") + memory.data();
}

Status WritePlan(const Store& store, const std::string& text, std::string_view origin,
                 v1::Plan* out) {
  KVS_ASSIGN_OR_RETURN(const Plan plan, store.plans().ResolvePlan(text));
  out->set_name(origin == "configuration" ? text : plan.name);
  out->set_text(FormatPlan(plan));
  out->set_description(Describe(plan));
  out->set_segmenter(std::string(NameOf(plan.segmenter())));
  out->set_selector(std::string(NameOf(plan.selector)));
  out->set_codec(std::string(NameOf(plan.codec)));
  out->set_tier(std::string(NameOf(plan.tier)));
  out->set_origin(std::string(origin));
  WriteNeeds(plan, out);
  return OkStatus();
}

}  // namespace

ControlService::~ControlService() = default;

WriteReactor<v1::OpenSessionResponse>* ControlService::OpenSession(
    CallContext*, const v1::OpenSessionRequest* request) {
  return SessionStream::Start(context_, &streams_, *request);
}

UnaryReactor* ControlService::CloseSession(CallContext* call,
                                           const v1::CloseSessionRequest* request,
                                           v1::CloseSessionResponse*) {
  const uint64_t id = request->session();
  std::shared_ptr<RemoteSession> session = context_->TakeSession(id);
  // Not there: FindSession says why.
  if (session == nullptr) return ServiceContext::Answer(call, context_->FindSession(id).status());
  UnaryReactor* reactor = context_->NewCall();
  RemoteSession::End(std::move(session), [reactor] { reactor->Finish(grpc::Status::OK); });
  streams_.End(id);
  return reactor;
}

UnaryReactor* ControlService::IssueAttachToken(CallContext* call,
                                               const v1::IssueAttachTokenRequest* request,
                                               v1::IssueAttachTokenResponse* response) {
  const Status found = context_->FindSession(request->session()).status();
  if (!found.ok()) return ServiceContext::Answer(call, found);
  if (context_->options().tokens == nullptr) {
    return ServiceContext::Answer(
        call, Unimplemented("ATTACH_TOKEN", "this daemon has no attach socket that takes tokens"));
  }
  const Result<AttachToken> token = context_->options().tokens->Issue(
      context_->user().uid, {request->session(), request->writable()},
      std::chrono::milliseconds(request->lifetime_ms()));
  if (token.ok()) {
    response->set_token(token->data(), token->size());
    response->set_layout_version(shm::kVersion);
  }
  return ServiceContext::Answer(call, token.status());
}

UnaryReactor* ControlService::Ping(CallContext* call, const v1::PingRequest* request,
                                   v1::PingResponse*) {
  return ServiceContext::Answer(call, context_->FindSession(request->session()).status());
}

UnaryReactor* ControlService::RegisterModel(CallContext* call,
                                            const v1::RegisterModelRequest* request,
                                            v1::RegisterModelResponse* response) {
  return context_->InSession(call, request, [this, request, response](RemoteSession& s) -> Status {
    KVS_ASSIGN_OR_RETURN(const ModelDesc desc, ReadModel(*request));
    KVS_ASSIGN_OR_RETURN(const uint64_t model,
                         context_->store().models().RegisterModel(s.id(), desc));
    response->set_model(model);
    return OkStatus();
  });
}

UnaryReactor* ControlService::ListModels(CallContext* call, const v1::ListModelsRequest*,
                                         v1::ListModelsResponse* response) {
  const Status admin = context_->CheckAdmin();
  if (!admin.ok()) return ServiceContext::Answer(call, admin);
  for (const ModelInfo& m : context_->store().inspection().Models())
    Write(m, response->add_models());
  return ServiceContext::Answer(call, grpc::Status::OK);
}

UnaryReactor* ControlService::OpenSequence(CallContext* call,
                                           const v1::OpenSequenceRequest* request,
                                           v1::OpenSequenceResponse* response) {
  // On the session's strand, so that earlier calls count; then, when the store has read what is on
  // disk, again on its strand. Nothing waits meanwhile.
  const auto span = TracedCall(*call, "open");
  const auto open = [store = &context_->store(), call, request, response, span](
                        UnaryReactor* reactor, const std::shared_ptr<RemoteSession>& s) {
    if (call->IsCancelled()) return reactor->Finish(grpc::Status::CANCELLED);
    const std::span<const int32_t> tokens(request->tokens().data(),
                                          static_cast<size_t>(request->tokens_size()));
    const auto adopt = [store, call, reactor, request, response, tokens, span,
                        s](const Result<OpenedSequence>& unnamed) {
      const Result<OpenedSequence> opened =
          store->sequences().GiveKey(s->id(), unnamed, request->key());
      TellOpen(span.get(), s->id(), opened);
      if (!opened.ok()) return reactor->Finish(ToGrpc(opened.status()));
      const auto drop = [store, s, id = opened->sequence] {
        (void)store->sequences().CloseSequence(s->id(), id);
      };
      if (call->IsCancelled()) {
        drop();
        return reactor->Finish(grpc::Status::CANCELLED);
      }
      const Status posted = s->Post([reactor, request, response, tokens, s, opened = *opened] {
        reactor->Finish(ServiceContext::Outcome([&] {
          s->AdoptOpened(opened, request->model(), tokens);
          LogEvent(LogLevel::kDebug, "sequence_opened",
                   {{"session", s->id()},
                    {"sequence", opened.sequence},
                    {"plan", opened.plan.name},
                    {"held_tokens", opened.held_tokens}});
          Write(opened, response);
          response->set_reserved_tokens(request->reserve_tokens());
          response->set_private_pages(request->private_pages());
          return OkStatus();
        }));
      });
      if (posted.ok()) return;
      drop();
      reactor->Finish(ToGrpc(posted));
    };
    const std::string plan = request->plan().empty() ? "full" : request->plan();
    store->openings().OpenSequence(s->id(), request->model(), plan, tokens, adopt,
                                   {{request->max_held_tokens(), request->hold_only_reported()},
                                    request->reserve_tokens(),
                                    request->private_pages()});
  };
  return context_->OnStrand(call, request, open);
}

UnaryReactor* ControlService::ForkSequence(CallContext* call,
                                           const v1::ForkSequenceRequest* request,
                                           v1::OpenSequenceResponse* response) {
  return context_->InSession(call, request, [call, request, response](RemoteSession& s) -> Status {
    KVS_ASSIGN_OR_RETURN(const OpenedSequence opened, s.ForkSequence(request->sequence()));
    // Nobody would close it.
    if (call->IsCancelled()) return s.CloseSequence(opened.sequence);
    Write(opened, response);
    return OkStatus();
  });
}

UnaryReactor* ControlService::TruncateSequence(CallContext* call,
                                               const v1::TruncateSequenceRequest* request,
                                               v1::TruncateSequenceResponse*) {
  return context_->InSession(call, request, [request](RemoteSession& s) {
    return s.TruncateSequence(request->sequence(), request->tokens());
  });
}

UnaryReactor* ControlService::CloseSequence(CallContext* call,
                                            const v1::CloseSequenceRequest* request,
                                            v1::CloseSequenceResponse*) {
  return context_->InSession(call, request, [request](RemoteSession& s) {
    const Status closed = s.CloseSequence(request->sequence(), request->abort_step());
    if (closed.ok()) {
      LogEvent(LogLevel::kDebug, "sequence_closed",
               {{"session", s.id()}, {"sequence", request->sequence()}});
    }
    return closed;
  });
}

UnaryReactor* ControlService::CloseKey(CallContext* call, const v1::CloseKeyRequest* request,
                                       v1::CloseSequenceResponse*) {
  return context_->InSession(call, request, [this, request](RemoteSession& s) {
    return context_->store().sequences().CloseKey(s.id(), request->key());
  });
}

UnaryReactor* ControlService::TruncateKey(CallContext* call, const v1::TruncateKeyRequest* request,
                                          v1::TruncateSequenceResponse*) {
  return context_->InSession(call, request, [this, request](RemoteSession& s) {
    return context_->store().sequences().TruncateKey(s.id(), request->key(), request->tokens());
  });
}

UnaryReactor* ControlService::Lookup(CallContext* call, const v1::LookupRequest* request,
                                     v1::LookupResponse* response) {
  const auto span = TracedCall(*call, "lookup");
  const auto look_up = [this, request, response, span](UnaryReactor* reactor, const auto& s) {
    const auto answer = [reactor, request, response, span](const Result<PrefixHit>& hit) {
      if (span != nullptr) span->End(hit.status(), {{"session", request->session()}});
      reactor->Finish(ServiceContext::Outcome([&]() -> Status {
        KVS_RETURN_IF_ERROR(hit.status());
        Write(*hit, request->by_page(), response);
        return OkStatus();
      }));
    };
    const std::span<const int32_t> tokens(request->tokens().data(),
                                          static_cast<size_t>(request->tokens_size()));
    const Result<std::vector<PageKey>> keys = ReadPageKeys(*request);
    if (!keys.ok()) return answer(keys.status());
    Store& store = context_->store();
    // A lease has a plan, which page keys have not: refused as it is without one.
    if (!keys->empty() && request->lease_ms() == 0)
      return answer(store.lookups().Lookup(s->id(), request->model(), *keys));
    // A plan's parameters may be a file that has to be read, which others do not wait for.
    store.leases().LookupLeased(s->id(), request->model(), tokens, ReadLookupPlan(*request),
                                std::chrono::milliseconds(request->lease_ms()), answer);
  };
  return context_->OnStrand(call, request, look_up);
}

UnaryReactor* ControlService::GetCapacity(CallContext* call, const v1::GetCapacityRequest* request,
                                          v1::GetCapacityResponse* response) {
  return context_->InSession(call, request, [this, request, response](RemoteSession& s) -> Status {
    const std::string plan = request->plan().empty() ? "full" : request->plan();
    KVS_ASSIGN_OR_RETURN(const Capacity capacity, context_->store().capacity().CountCapacity(
                                                      s.id(), request->model(), plan));
    Write(capacity.device, response->mutable_device());
    Write(capacity.host, response->mutable_host());
    response->set_open_tokens(capacity.open_tokens);
    return OkStatus();
  });
}

UnaryReactor* ControlService::ListPlans(CallContext* call, const v1::ListPlansRequest*,
                                        v1::ListPlansResponse* response) {
  const Store& store = context_->store();
  Status status;
  for (const std::string_view name : PresetNames()) {
    if (status.ok()) status = WritePlan(store, std::string(name), "preset", response->add_plans());
  }
  for (const std::string& name : NamedPlans(context_->options())) {
    if (status.ok()) status = WritePlan(store, name, "configuration", response->add_plans());
  }
  return ServiceContext::Answer(call, status);
}

UnaryReactor* ControlService::ShowPlan(CallContext* call, const v1::ShowPlanRequest* request,
                                       v1::Plan* response) {
  const std::vector<std::string> named = NamedPlans(context_->options());
  const std::string& text = request->plan();
  std::string_view origin = "text";
  if (std::ranges::find(named, text) != named.end()) {
    origin = "configuration";
  } else if (IsPreset(text)) {
    origin = "preset";
  }
  return ServiceContext::Answer(call, WritePlan(context_->store(), text, origin, response));
}

}  // namespace kvstrata
