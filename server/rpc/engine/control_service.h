// SPDX-License-Identifier: Apache-2.0
// ControlService: kvstrata.v1.Control over the store and this user's remote sessions.
//
// Threads: gRPC's; what a session does runs on its strand. Errors: those of the store.
#pragma once

#include "kvstrata/v1/control.grpc.pb.h"
#include "server/rpc/calls/service_context.h"
#include "server/rpc/engine/session_stream.h"

namespace kvstrata {

class ControlService final : public v1::Control::CallbackService {
 public:
  // Not inline, nor is the destructor: the generated base takes half a minute to compile where one
  // is called.
  explicit ControlService(ServiceContext* context) : context_(context) {}
  ~ControlService() override;

  SessionStreams& streams() { return streams_; }

  WriteReactor<v1::OpenSessionResponse>* OpenSession(
      CallContext*, const v1::OpenSessionRequest* request) override;
  UnaryReactor* CloseSession(CallContext*, const v1::CloseSessionRequest*,
                             v1::CloseSessionResponse*) override;
  UnaryReactor* IssueAttachToken(CallContext*, const v1::IssueAttachTokenRequest*,
                                 v1::IssueAttachTokenResponse*) override;
  UnaryReactor* Ping(CallContext*, const v1::PingRequest*, v1::PingResponse*) override;
  UnaryReactor* RegisterModel(CallContext*, const v1::RegisterModelRequest*,
                              v1::RegisterModelResponse*) override;
  UnaryReactor* ListModels(CallContext*, const v1::ListModelsRequest*,
                           v1::ListModelsResponse*) override;
  UnaryReactor* OpenSequence(CallContext*, const v1::OpenSequenceRequest*,
                             v1::OpenSequenceResponse*) override;
  UnaryReactor* ForkSequence(CallContext*, const v1::ForkSequenceRequest*,
                             v1::OpenSequenceResponse*) override;
  UnaryReactor* TruncateSequence(CallContext*, const v1::TruncateSequenceRequest*,
                                 v1::TruncateSequenceResponse*) override;
  UnaryReactor* CloseSequence(CallContext*, const v1::CloseSequenceRequest*,
                              v1::CloseSequenceResponse*) override;
  UnaryReactor* CloseKey(CallContext*, const v1::CloseKeyRequest*,
                         v1::CloseSequenceResponse*) override;
  UnaryReactor* TruncateKey(CallContext*, const v1::TruncateKeyRequest*,
                            v1::TruncateSequenceResponse*) override;
  UnaryReactor* Lookup(CallContext*, const v1::LookupRequest*, v1::LookupResponse*) override;
  UnaryReactor* GetCapacity(CallContext*, const v1::GetCapacityRequest*,
                            v1::GetCapacityResponse*) override;
  UnaryReactor* ListPlans(CallContext*, const v1::ListPlansRequest*,
                          v1::ListPlansResponse*) override;
  UnaryReactor* ShowPlan(CallContext*, const v1::ShowPlanRequest*, v1::Plan*) override;

 private:
  ServiceContext* const context_;
  SessionStreams streams_;
};

}  // namespace kvstrata
