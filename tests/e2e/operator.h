// SPDX-License-Identifier: Apache-2.0
// Operator: the daemon's admin service as the end-to-end tests use it. Not in a program that loads
// libkvstrata_remote.so: two copies of the services' descriptors abort protobuf.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "kvstrata/v1/admin.grpc.pb.h"
#include "proto/status_map.h"

namespace kvstrata::testing {

// A recall audit as its caller sees it. Destroying it cancels.
class RecallCall {
 public:
  RecallCall(v1::Admin::Stub* stub, const v1::AuditRecallRequest& request) {
    context_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(120));
    reader_ = stub->AuditRecall(&context_, request);
  }
  RecallCall(const RecallCall&) = delete;
  RecallCall& operator=(const RecallCall&) = delete;
  ~RecallCall() {
    if (reader_ != nullptr) (void)Cancel();
  }

  // Waits for a message; false when there is none any more.
  bool Next() { return reader_->Read(&last_); }
  // Reads to the end: how it ended.
  kvstrata::Status Await() {
    while (Next()) {
    }
    const grpc::Status status = reader_->Finish();
    reader_ = nullptr;
    return FromGrpc(status);
  }
  kvstrata::Status Cancel() {
    context_.TryCancel();
    return Await();
  }
  const v1::AuditRecallResponse& last() const { return last_; }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::AuditRecallResponse>> reader_;
  v1::AuditRecallResponse last_;
};

// A call of the daemon's admin service within `deadline`.
template <typename Request, typename Response>
kvstrata::Status CallAdmin(v1::Admin::Stub* stub,
                           grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*,
                                                                   const Request&, Response*),
                           const Request& request, Response* response,
                           std::chrono::seconds deadline = std::chrono::seconds(20)) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + deadline);
  return FromGrpc((stub->*method)(&context, request, response));
}

// The daemon's admin service.
class Operator {
 public:
  explicit Operator(const std::string& socket)
      : stub_(v1::Admin::NewStub(
            grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()))) {}

  // How a call ended that may fail; for tests of what the functions below have not.
  template <typename Request, typename Response>
  kvstrata::Status Ask(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&,
                                                               Response*),
                       const Request& request, Response* response,
                       std::chrono::seconds deadline = std::chrono::seconds(120)) {
    return CallAdmin(stub_.get(), method, request, response, deadline);
  }
  v1::GetStatusResponse Status() {
    return Call<v1::GetStatusResponse>(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest());
  }
  // "" when the books balance, else the findings.
  std::string Audit() {
    const auto r = Call<v1::AuditResponse>(&v1::Admin::Stub::Audit, v1::AuditRequest());
    std::string text;
    for (const std::string& f : r.findings()) text += f + "\n";
    return text;
  }
  uint64_t UsedBytes() {  // that something other than the prefix index refers to
    uint64_t bytes = 0;
    const v1::GetStatusResponse status = Status();
    for (const auto& p : status.pools()) bytes += p.used_bytes() - p.cached_bytes();
    return bytes;
  }
  uint64_t RetiredBytes() { return Status().retired_bytes(); }
  v1::ListWorkResponse Work() {
    return Call<v1::ListWorkResponse>(&v1::Admin::Stub::ListWork, v1::ListWorkRequest());
  }
  v1::ShowSequenceResponse Show(uint64_t s) {
    v1::ShowSequenceRequest request;
    request.set_sequence(s);
    return Call<v1::ShowSequenceResponse>(&v1::Admin::Stub::ShowSequence, request);
  }
  // Samples one decode step in `every`, until `steps` are sampled or `timeout_ms` is over.
  std::unique_ptr<RecallCall> Recall(uint64_t s, uint32_t every, uint32_t steps,
                                     uint64_t timeout_ms = 60000) {
    v1::AuditRecallRequest request;
    request.set_sequence(s);
    request.set_every(every);
    request.set_steps(steps);
    request.set_timeout_us(timeout_ms * 1000);
    return std::make_unique<RecallCall>(stub_.get(), request);
  }
  // Bytes of all pools that anything, a cache included, has.
  uint64_t HeldBytes() {
    uint64_t bytes = 0;
    const v1::GetStatusResponse status = Status();
    for (const auto& p : status.pools()) bytes += p.used_bytes() + p.retired_bytes();
    return bytes;
  }
  // Waits for it.
  kvstrata::Status Build(uint64_t s, const std::string& plan, v1::BuildSequenceResponse* response) {
    v1::BuildSequenceRequest request;
    request.set_sequence(s);
    request.set_plan(plan);
    grpc::ClientContext context;
    return FromGrpc(stub_->BuildSequence(&context, request, response));
  }
  // Follows it to the end; *last is the last message.
  kvstrata::Status Recompress(uint64_t s, v1::RecompressSequenceResponse* last) {
    v1::RecompressSequenceRequest request;
    request.set_sequence(s);
    grpc::ClientContext context;
    const auto reader = stub_->RecompressSequence(&context, request);
    while (reader->Read(last)) {
    }
    return FromGrpc(reader->Finish());
  }
  v1::CancelWorkResponse CancelWork(uint64_t s) {
    v1::CancelWorkRequest request;
    request.set_sequence(s);
    return Call<v1::CancelWorkResponse>(&v1::Admin::Stub::CancelWork, request);
  }
  v1::EvictResponse Evict() {
    return Call<v1::EvictResponse>(&v1::Admin::Stub::Evict, v1::EvictRequest());
  }
  v1::PinnedPrefix Pin(uint64_t s, std::chrono::microseconds ttl) {
    v1::PinRequest request;
    request.set_sequence(s);
    request.set_ttl_us(static_cast<uint64_t>(ttl.count()));
    return Call<v1::PinResponse>(&v1::Admin::Stub::Pin, request).pin();
  }
  void Unpin(uint64_t pin) {
    v1::UnpinRequest request;
    request.set_pin(pin);
    Call<v1::UnpinResponse>(&v1::Admin::Stub::Unpin, request);
  }
  v1::ListPinsResponse Pins() {
    return Call<v1::ListPinsResponse>(&v1::Admin::Stub::ListPins, v1::ListPinsRequest());
  }
  v1::MoveResponse Demote(uint64_t s) { return Move(&v1::Admin::Stub::Demote, s); }
  v1::MoveResponse Prefetch(uint64_t s) { return Move(&v1::Admin::Stub::Prefetch, s); }
  // Moves to host and back; returns the first error.
  kvstrata::Status TryMoves(uint64_t s) {
    v1::MoveRequest request;
    request.set_sequence(s);
    for (const auto method : {&v1::Admin::Stub::Demote, &v1::Admin::Stub::Prefetch}) {
      v1::MoveResponse response;
      const kvstrata::Status moved = Ask(method, request, &response, kDeadline);
      if (!moved.ok()) return moved;
    }
    return kvstrata::OkStatus();
  }

 private:
  static constexpr std::chrono::seconds kDeadline{10};

  template <typename Response, typename Request>
  Response Call(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&,
                                                        Response*),
                const Request& request) {
    Response response;
    const kvstrata::Status status = Ask(method, request, &response, kDeadline);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return response;
  }
  v1::MoveResponse Move(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*,
                                                                const v1::MoveRequest&,
                                                                v1::MoveResponse*),
                        uint64_t s) {
    v1::MoveRequest request;
    request.set_sequence(s);
    return Call<v1::MoveResponse>(method, request);
  }

  std::unique_ptr<v1::Admin::Stub> stub_;
};

}  // namespace kvstrata::testing
