// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/engine/compute_service.h"

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/step/step.h"
#include "kvstrata/v1/compute.pb.h"
#include "server/rpc/calls/copy_fields.h"
#include "server/rpc/calls/service_context.h"
#include "server/telemetry/verified_hits.h"

namespace kvstrata {
namespace {

// Tensors in messages: TensorRef to Rows, checked against what a step expects.
//
// Rows point into the message, which outlives the call that handles it. Pure functions; any thread.
// Errors: TENSOR_* (INVALID_ARGUMENT), named as in the C ABI.
struct TensorShape {
  int32_t tokens = 0, heads = 0, head_dim = 0;
};

// `field` names the tensor in errors.
Result<Rows> ReadTensor(std::string_view field, const v1::TensorRef& tensor,
                        const TensorShape& want) {
  const std::string name(field);
  const auto mismatch = [&](const char* reason, const char* what, int64_t got, int64_t expected) {
    return InvalidArgument(reason, name + "." + what + " " + std::to_string(got) + "; expected " +
                                       std::to_string(expected));
  };
  if (!IsDType(tensor.dtype())) {
    return InvalidArgument("TENSOR_DTYPE", name + ".dtype " + std::to_string(tensor.dtype()) +
                                               "; allowed: " + AllDTypes("DTYPE"));
  }
  if (tensor.heads() != want.heads) {
    return mismatch("TENSOR_HEADS", "heads", tensor.heads(), want.heads);
  }
  if (tensor.head_dim() != want.head_dim) {
    return mismatch("TENSOR_HEAD_DIM", "head_dim", tensor.head_dim(), want.head_dim);
  }
  if (tensor.tokens() != want.tokens) {
    return mismatch("TENSOR_TOKENS", "tokens", tensor.tokens(), want.tokens);
  }
  const auto dtype = static_cast<DType>(tensor.dtype());
  const int64_t row = want.head_dim * SizeOf(dtype);
  const int64_t bytes = int64_t{want.tokens} * want.heads * row;
  if (static_cast<int64_t>(tensor.inline_().size()) != bytes) {
    return mismatch("TENSOR_DATA", "inline has bytes",
                    static_cast<int64_t>(tensor.inline_().size()), bytes);
  }
  return Rows{reinterpret_cast<const std::byte*>(tensor.inline_().data()), want.heads * row, row,
              dtype};
}

// Makes `out` a tensor of that shape, with room inside; the rows to write are in it.
MutableRows MakeTensor(const TensorShape& shape, DType dtype, v1::TensorRef* out) {
  out->set_dtype(static_cast<v1::DType>(dtype));
  KVS_COPY_FIELDS(out, shape, tokens, heads, head_dim);
  const int64_t row = shape.head_dim * SizeOf(dtype);
  std::string* bytes = out->mutable_inline_();
  bytes->resize(static_cast<size_t>(shape.tokens) * shape.heads * row);
  return {reinterpret_cast<std::byte*>(bytes->data()), shape.heads * row, row, dtype};
}

constexpr int32_t kAllLayers = -1;  // for rows in place

Status CheckLayer(const RemoteStep& step, int32_t layer) {
  if (layer >= 0 && layer < step.geometry().layers) return OkStatus();
  return InvalidArgument("ARGUMENT_RANGE", "layer " + std::to_string(layer) + "; allowed: 0.." +
                                               std::to_string(step.geometry().layers - 1));
}

TensorShape QueryShape(const RemoteStep& step) {
  const Geometry& g = step.geometry();
  return {step.step->batch().tokens(), g.query_heads, g.head_dim};
}

void Write(const Selection& selection, const StoredRows* stored, v1::MemberSelection* out) {
  for (int g = 0; g < GroupsOf(selection); ++g) {
    v1::SelectionGroup* group = out->add_groups();
    for (const Run& run : PositionsOf(selection, stored, g)) {
      for (int32_t t = run.begin; t < run.end; ++t) group->add_tokens(t);
    }
    const std::span<const int32_t> units = UnitsOf(selection, g);
    group->mutable_units()->Add(units.begin(), units.end());
  }
}

void Write(const StepCost& cost, v1::AttendCost* out) {
  KVS_COPY_FIELDS(out, cost, rows, coarse_rows, attend_bytes, select_bytes);
}

// with_cost: the layer was attended.
Status WriteSelections(StepRunner& step, bool with_cost, v1::SelectResponse* out) {
  for (int i = 0; i < step.batch().members(); ++i) {
    v1::MemberSelection* const member = out->add_members();
    KVS_ASSIGN_OR_RETURN(const StepRunner::Chosen chosen, step.ChosenOf(i, with_cost));
    Write(*chosen.selection, step.batch().member(i).state->stored(), member);
    Write(chosen.cost, member->mutable_cost());
  }
  return OkStatus();
}

grpc::Status BeginStep(RemoteSession& s, const v1::StepBeginRequest& request,
                       v1::StepBeginResponse* response) {
  std::vector<RemoteMember> members;
  for (const v1::StepMember& m : request.members()) {
    members.push_back({m.sequence(), {m.tokens().data(), static_cast<size_t>(m.tokens_size())}});
  }
  std::vector<int32_t> codes;
  const Result<uint64_t> step = s.StepBegin(members, &codes);
  if (step.ok()) {
    response->set_step(step.value());
    return grpc::Status::OK;
  }
  if (codes.empty()) return ToGrpc(step.status());
  v1::StepBeginResponse detail;
  detail.mutable_codes()->Add(codes.begin(), codes.end());
  return ToGrpc(step.status(),
                {v1::StepBeginResponse::descriptor()->full_name(), detail.SerializeAsString()});
}

Status AppendLayer(RemoteSession& s, const v1::AppendRequest& request) {
  KVS_ASSIGN_OR_RETURN(RemoteStep * step, s.FindStep(request.step()));
  if (request.in_place() && request.layer() == kAllLayers) return s.AppendInPlace(step, {});
  KVS_RETURN_IF_ERROR(CheckLayer(*step, request.layer()));
  if (request.in_place()) return s.AppendInPlace(step, request.layer());
  const Geometry& g = step->geometry();
  const TensorShape shape{step->step->batch().tokens(), g.kv_heads, g.head_dim};
  KVS_ASSIGN_OR_RETURN(const Rows k, ReadTensor("k", request.k(), shape));
  KVS_ASSIGN_OR_RETURN(const Rows v, ReadTensor("v", request.v(), shape));
  const auto layer = static_cast<size_t>(request.layer());
  step->appended[layer] = step->in_place[layer] = false;  // what came before is overwritten
  KVS_RETURN_IF_ERROR(step->step->Append(request.layer(), k, v));
  step->appended[layer] = true;
  return OkStatus();
}

Status SelectLayer(RemoteSession& s, const v1::SelectRequest& request,
                   v1::SelectResponse* response) {
  KVS_ASSIGN_OR_RETURN(RemoteStep * step, s.FindStep(request.step()));
  KVS_RETURN_IF_ERROR(CheckLayer(*step, request.layer()));
  KVS_ASSIGN_OR_RETURN(const Rows q, ReadTensor("q", request.q(), QueryShape(*step)));
  KVS_RETURN_IF_ERROR(step->step->Select(request.layer(), q));
  return WriteSelections(*step->step, false, response);
}

Status AttendLayer(RemoteSession& s, const v1::AttendRequest& request,
                   v1::AttendResponse* response) {
  KVS_ASSIGN_OR_RETURN(RemoteStep * step, s.FindStep(request.step()));
  const int32_t layer = request.layer();
  KVS_RETURN_IF_ERROR(CheckLayer(*step, layer));
  if (!step->appended[static_cast<size_t>(layer)]) {
    return FailedPrecondition("LAYER_NOT_APPENDED",
                              "layer " + std::to_string(layer) +
                                  " has no keys and values of this step yet; append first");
  }
  const TensorShape shape = QueryShape(*step);
  KVS_ASSIGN_OR_RETURN(const Rows q, ReadTensor("q", request.q(), shape));
  if (request.out_dtype() != v1::DTYPE_UNSPECIFIED && !IsDType(request.out_dtype())) {
    return InvalidArgument("TENSOR_DTYPE", "out_dtype " + std::to_string(request.out_dtype()) +
                                               "; allowed: " + AllDTypes("DTYPE") +
                                               ", or unspecified (q's)");
  }
  const DType dtype = request.out_dtype() == v1::DTYPE_UNSPECIFIED
                          ? q.dtype
                          : static_cast<DType>(request.out_dtype());
  const MutableRows out = MakeTensor(shape, dtype, response->mutable_out());
  float* lse = nullptr;
  if (request.want_lse()) {
    std::string* bytes = response->mutable_lse();
    bytes->resize(sizeof(float) * static_cast<size_t>(shape.tokens) * shape.heads);
    lse = reinterpret_cast<float*>(bytes->data());
  }
  KVS_RETURN_IF_ERROR(s.Attend(step, layer, q, out, lse));
  if (!request.want_selection()) return OkStatus();
  return WriteSelections(*step->step, true, response->mutable_selection());
}

Status ReportSeries(RemoteSession& s, const v1::ReportRequest& r) {
  size_t n = 0;
  for (const size_t size : {static_cast<size_t>(r.surprisal_size()),
                            static_cast<size_t>(r.entropy_size()), r.boundary().size()}) {
    if (size == 0 || size == n) continue;
    if (n != 0) {
      return InvalidArgument("SERIES_LENGTH",
                             "surprisal has " + std::to_string(r.surprisal_size()) +
                                 " values, entropy " + std::to_string(r.entropy_size()) +
                                 ", boundary " + std::to_string(r.boundary().size()) +
                                 "; those that are given must be of one length");
    }
    n = size;
  }
  const auto* boundary = reinterpret_cast<const uint8_t*>(r.boundary().data());
  return s.Report(r.sequence(), r.first(), static_cast<uint32_t>(n),
                  r.surprisal_size() == 0 ? nullptr : r.surprisal().data(),
                  r.entropy_size() == 0 ? nullptr : r.entropy().data(),
                  r.boundary().empty() ? nullptr : boundary);
}

Status InspectArrayOf(RemoteSession& s, const v1::InspectRequest& request,
                      v1::InspectResponse* response) {
  KVS_ASSIGN_OR_RETURN(const InspectArray array, s.Inspect(request.sequence(), request.name()));
  response->set_type(static_cast<v1::InspectResponse::Type>(array.type));
  response->mutable_shape()->Add(array.shape.begin(), array.shape.end());
  response->set_data(array.bytes.data(), array.bytes.size());
  return OkStatus();
}

Status WritePageTable(RemoteSession& s, uint64_t sequence, v1::GetPageTableResponse* response) {
  uint64_t version = 0;
  KVS_ASSIGN_OR_RETURN(const std::vector<shm::PageEntry> pages, s.PageTable(sequence, &version));
  response->set_version(version);
  for (const shm::PageEntry& page : pages) {
    v1::PageTableEntry* out = response->add_pages();
    KVS_COPY_FIELDS(out, page, arena, offset, tier, flags);
  }
  return OkStatus();
}

}  // namespace

ComputeService::~ComputeService() = default;

UnaryReactor* ComputeService::StepBegin(CallContext* call, const v1::StepBeginRequest* request,
                                        v1::StepBeginResponse* response) {
  return context_->InSession(call, request, [call, request, response](RemoteSession& s) {
    grpc::Status begun = BeginStep(s, *request, response);
    // Nobody would end it.
    if (begun.ok() && call->IsCancelled()) (void)s.StepEnd(response->step(), true);
    return begun;
  });
}

UnaryReactor* ComputeService::Append(CallContext* call, const v1::AppendRequest* request,
                                     v1::AppendResponse*) {
  return context_->InSession(call, request,
                             [request](RemoteSession& s) { return AppendLayer(s, *request); });
}

UnaryReactor* ComputeService::Select(CallContext* call, const v1::SelectRequest* request,
                                     v1::SelectResponse* response) {
  return context_->InSession(call, request, [request, response](RemoteSession& s) {
    return SelectLayer(s, *request, response);
  });
}

UnaryReactor* ComputeService::Attend(CallContext* call, const v1::AttendRequest* request,
                                     v1::AttendResponse* response) {
  return context_->InSession(call, request, [request, response](RemoteSession& s) {
    return AttendLayer(s, *request, response);
  });
}

UnaryReactor* ComputeService::StepEnd(CallContext* call, const v1::StepEndRequest* request,
                                      v1::StepEndResponse*) {
  const auto span = TracedCall(*call, "commit");
  return context_->InSession(call, request, [request, span](RemoteSession& s) {
    const Status ended = s.StepEnd(request->step(), request->abort());
    if (span != nullptr) span->End(ended, {{"session", s.id()}, {"step", request->step()}});
    return ended;
  });
}

UnaryReactor* ComputeService::Report(CallContext* call, const v1::ReportRequest* request,
                                     v1::ReportResponse*) {
  return context_->InSession(call, request,
                             [request](RemoteSession& s) { return ReportSeries(s, *request); });
}

UnaryReactor* ComputeService::ReportVerified(CallContext* call,
                                             const v1::ReportVerifiedRequest* request,
                                             v1::ReportVerifiedResponse*) {
  return context_->InSession(call, request, [this, request](RemoteSession& s) -> Status {
    KVS_RETURN_IF_ERROR(s.Find(request->sequence()).status());
    if (!request->equal()) {
      KVS_RETURN_IF_ERROR(context_->store().sequences().MakePrivate(s.id(), request->sequence()));
    }
    NoteVerifiedHit(
        {s.id(), request->sequence(), request->first(), request->tokens(), request->equal()});
    return OkStatus();
  });
}

UnaryReactor* ComputeService::PrefillDone(CallContext* call, const v1::PrefillDoneRequest* request,
                                          v1::PrefillDoneResponse*) {
  return context_->InSession(
      call, request, [request](RemoteSession& s) { return s.PrefillDone(request->sequence()); });
}

UnaryReactor* ComputeService::Settle(CallContext* call, const v1::SettleRequest* request,
                                     v1::SettleResponse*) {
  // On the session's strand, so that earlier calls count; then whenever the workers are done, again
  // on its strand. Nothing waits meanwhile.
  const auto settle = [this, call, request](UnaryReactor* reactor, const auto& s) {
    if (const Status idle = s->CheckIdle(request->sequence()); !idle.ok()) {
      return reactor->Finish(ToGrpc(idle));
    }
    const auto catch_up = [call, reactor, request, s](const Status& recompressed) {
      if (!recompressed.ok() && !call->IsCancelled()) return reactor->Finish(ToGrpc(recompressed));
      ServiceContext::FinishOnStrand(call, reactor, s, [request](RemoteSession& own) {
        return own.Settle(request->sequence());
      });
    };
    context_->store().recompression().Settle(s->id(), request->sequence(), catch_up);
  };
  return context_->OnStrand(call, request, settle);
}

UnaryReactor* ComputeService::GetSequence(CallContext* call, const v1::GetSequenceRequest* request,
                                          v1::GetSequenceResponse* response) {
  return context_->InSession(call, request, [request, response](RemoteSession& s) -> Status {
    KVS_ASSIGN_OR_RETURN(RemoteSequence* const sequence, s.Find(request->sequence()));
    response->set_tokens(static_cast<uint32_t>(sequence->state->tokens()));
    KVS_ASSIGN_OR_RETURN(*response->mutable_status(), s.StatusText(sequence));
    response->set_plan(FormatPlan(sequence->state->plan()));
    return OkStatus();
  });
}

UnaryReactor* ComputeService::Inspect(CallContext* call, const v1::InspectRequest* request,
                                      v1::InspectResponse* response) {
  return context_->InSession(call, request, [request, response](RemoteSession& s) {
    return InspectArrayOf(s, *request, response);
  });
}

UnaryReactor* ComputeService::GetPageTable(CallContext* call,
                                           const v1::GetPageTableRequest* request,
                                           v1::GetPageTableResponse* response) {
  return context_->InSession(call, request, [request, response](RemoteSession& s) {
    return WritePageTable(s, request->sequence(), response);
  });
}

}  // namespace kvstrata
