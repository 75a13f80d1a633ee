// SPDX-License-Identifier: Apache-2.0
// RemoteClient: a session over gRPC as a tool has one, for tests and benchmarks whose program
// cannot load libkvstrata_remote.so beside libkvstrata.so. Tensors are dense and inline. Every call
// has a deadline; one thread.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "kvstrata/v1/compute.grpc.pb.h"
#include "kvstrata/v1/control.grpc.pb.h"
#include "proto/status_map.h"

namespace kvstrata::testing {

class RemoteClient {
 public:
  // The session's backend is asked for; "": the daemon's. failure() says why there is none.
  explicit RemoteClient(const std::string& socket, const std::string& backend = "")
      : RemoteClient(ChannelTo(socket), backend) {}
  explicit RemoteClient(const std::shared_ptr<grpc::Channel>& channel,
                        const std::string& backend = "") {
    control_ = v1::Control::NewStub(channel);
    compute_ = v1::Compute::NewStub(channel);
    v1::OpenSessionRequest request;
    request.set_client_name("remote-client");
    request.set_backend(backend);
    stream_ = control_->OpenSession(&context_, request);
    if (stream_->Read(&opened_)) return;
    failure_ = FromGrpc(stream_->Finish());
    stream_ = nullptr;
  }
  RemoteClient(const RemoteClient&) = delete;
  RemoteClient& operator=(const RemoteClient&) = delete;
  ~RemoteClient() {
    if (stream_ == nullptr) return;
    context_.TryCancel();
    (void)stream_->Finish();
  }
  const Status& failure() const { return failure_; }
  const v1::OpenSessionResponse& opened() const { return opened_; }

  // Any call of Control or Compute that names the session.
  template <typename Stub, typename Request, typename Response>
  Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
              Request request, Response* response) {
    request.set_session(opened_.session());
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    if constexpr (std::is_same_v<Stub, v1::Control::Stub>) {
      return FromGrpc((control_.get()->*method)(&context, request, response));
    } else {
      return FromGrpc((compute_.get()->*method)(&context, request, response));
    }
  }
  // As Call, for a call that only names a sequence.
  template <typename Request, typename Response>
  Status CallOf(grpc::Status (v1::Compute::Stub::*method)(grpc::ClientContext*, const Request&,
                                                          Response*),
                uint64_t sequence) {
    Request request;
    request.set_sequence(sequence);
    Response response;
    return Call(method, std::move(request), &response);
  }

  Result<uint64_t> Open(uint64_t model, const std::string& plan, std::span<const int32_t> tokens,
                        uint32_t* held) {
    v1::OpenSequenceRequest request;
    request.set_model(model);
    request.set_plan(plan);
    request.mutable_tokens()->Add(tokens.begin(), tokens.end());
    v1::OpenSequenceResponse response;
    KVS_RETURN_IF_ERROR(Call(&v1::Control::Stub::OpenSequence, std::move(request), &response));
    *held = response.held_tokens();
    return response.sequence();
  }
  Status Close(uint64_t sequence) {
    v1::CloseSequenceRequest request;
    request.set_sequence(sequence);
    v1::CloseSequenceResponse response;
    return Call(&v1::Control::Stub::CloseSequence, std::move(request), &response);
  }
  Result<uint64_t> Begin(uint64_t sequence, std::span<const int32_t> tokens) {
    v1::StepBeginRequest request;
    v1::StepMember* const member = request.add_members();
    member->set_sequence(sequence);
    member->mutable_tokens()->Add(tokens.begin(), tokens.end());
    v1::StepBeginResponse response;
    KVS_RETURN_IF_ERROR(Call(&v1::Compute::Stub::StepBegin, std::move(request), &response));
    return response.step();
  }
  Status End(uint64_t step, bool abort = false) {
    v1::StepEndRequest request;
    request.set_step(step);
    request.set_abort(abort);
    v1::StepEndResponse response;
    return Call(&v1::Compute::Stub::StepEnd, std::move(request), &response);
  }

  // [tokens][heads][dim].
  template <typename T>
  static v1::TensorRef Tensor(v1::DType dtype, int tokens, int heads, int dim,
                              std::span<const T> rows) {
    v1::TensorRef tensor;
    tensor.set_dtype(dtype);
    tensor.set_tokens(tokens);
    tensor.set_heads(heads);
    tensor.set_head_dim(dim);
    tensor.set_inline_(rows.data(), rows.size_bytes());
    return tensor;
  }
  Status Append(uint64_t step, int layer, const v1::TensorRef& k, const v1::TensorRef& v) {
    v1::AppendRequest request;
    request.set_step(step);
    request.set_layer(layer);
    *request.mutable_k() = k;
    *request.mutable_v() = v;
    v1::AppendResponse response;
    return Call(&v1::Compute::Stub::Append, std::move(request), &response);
  }
  Result<v1::SelectResponse> Select(uint64_t step, int layer, const v1::TensorRef& q) {
    v1::SelectRequest request;
    request.set_step(step);
    request.set_layer(layer);
    *request.mutable_q() = q;
    v1::SelectResponse response;
    KVS_RETURN_IF_ERROR(Call(&v1::Compute::Stub::Select, std::move(request), &response));
    return response;
  }
  // Attends; answers log-sum-exps and, if asked for, the selection.
  Result<v1::AttendResponse> Attend(uint64_t step, int layer, const v1::TensorRef& q,
                                    bool selection) {
    v1::AttendRequest request;
    request.set_step(step);
    request.set_layer(layer);
    *request.mutable_q() = q;
    request.set_want_lse(true);
    request.set_want_selection(selection);
    v1::AttendResponse response;
    KVS_RETURN_IF_ERROR(Call(&v1::Compute::Stub::Attend, std::move(request), &response));
    return response;
  }

 private:
  static std::shared_ptr<grpc::Channel> ChannelTo(const std::string& socket) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    return grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(),
                                     arguments);
  }

  std::unique_ptr<v1::Control::Stub> control_;
  std::unique_ptr<v1::Compute::Stub> compute_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::OpenSessionResponse>> stream_;
  v1::OpenSessionResponse opened_;
  Status failure_;
};

}  // namespace kvstrata::testing
