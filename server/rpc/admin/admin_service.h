// SPDX-License-Identifier: Apache-2.0
// AdminService: kvstrata.v1.Admin: what an operator sees and does. Every call of a user who is
// neither root nor the daemon's own answers PERMISSION_DENIED ADMIN_ONLY.
//
// Threads: gRPC's; moves, evictions and audits run on work threads. Errors: those of the store;
// UNIMPLEMENTED for a call that GrpcOptions leaves out (ValueCalls).
#pragma once

#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/calls/service_context.h"

namespace kvstrata {

class AdminService final : public v1::Admin::CallbackService {
 public:
  // Not inline, nor is the destructor: the generated base takes half a minute to compile where one
  // is called.
  explicit AdminService(ServiceContext* context) : context_(context) {}
  ~AdminService() override;

  UnaryReactor* GetStatus(CallContext*, const v1::GetStatusRequest*,
                          v1::GetStatusResponse*) override;
  UnaryReactor* ListSessions(CallContext*, const v1::ListSessionsRequest*,
                             v1::ListSessionsResponse*) override;
  UnaryReactor* ListSequences(CallContext*, const v1::ListSequencesRequest*,
                              v1::ListSequencesResponse*) override;
  UnaryReactor* ShowSequence(CallContext*, const v1::ShowSequenceRequest*,
                             v1::ShowSequenceResponse*) override;
  UnaryReactor* ListPools(CallContext*, const v1::ListPoolsRequest*,
                          v1::ListPoolsResponse*) override;
  UnaryReactor* ListWork(CallContext*, const v1::ListWorkRequest*, v1::ListWorkResponse*) override;
  // work_calls.cc
  UnaryReactor* BuildSequence(CallContext*, const v1::BuildSequenceRequest*,
                              v1::BuildSequenceResponse*) override;
  WriteReactor<v1::RecompressSequenceResponse>* RecompressSequence(
      CallContext*, const v1::RecompressSequenceRequest*) override;
  UnaryReactor* CancelWork(CallContext*, const v1::CancelWorkRequest*,
                           v1::CancelWorkResponse*) override;
  // config_calls.cc
  UnaryReactor* GetConfig(CallContext*, const v1::GetConfigRequest*,
                          v1::GetConfigResponse*) override;
  UnaryReactor* ReloadConfig(CallContext*, const v1::ReloadConfigRequest*,
                             v1::ReloadConfigResponse*) override;
  UnaryReactor* SetLogLevel(CallContext*, const v1::SetLogLevelRequest*,
                            v1::SetLogLevelResponse*) override;
  UnaryReactor* GetMetrics(CallContext*, const v1::GetMetricsRequest*,
                           v1::GetMetricsResponse*) override;
  UnaryReactor* Audit(CallContext*, const v1::AuditRequest*, v1::AuditResponse*) override;
  WriteReactor<v1::AuditRecallResponse>* AuditRecall(CallContext*,
                                                     const v1::AuditRecallRequest*) override;
  UnaryReactor* Demote(CallContext*, const v1::MoveRequest*, v1::MoveResponse*) override;
  UnaryReactor* Prefetch(CallContext*, const v1::MoveRequest*, v1::MoveResponse*) override;
  UnaryReactor* LookupPrefix(CallContext*, const v1::LookupPrefixRequest*,
                             v1::LookupResponse*) override;
  UnaryReactor* Evict(CallContext*, const v1::EvictRequest*, v1::EvictResponse*) override;
  UnaryReactor* Pin(CallContext*, const v1::PinRequest*, v1::PinResponse*) override;
  UnaryReactor* Unpin(CallContext*, const v1::UnpinRequest*, v1::UnpinResponse*) override;
  UnaryReactor* ListPins(CallContext*, const v1::ListPinsRequest*, v1::ListPinsResponse*) override;
  UnaryReactor* ListValues(CallContext*, const v1::ListValuesRequest*,
                           v1::ListValuesResponse*) override;
  WriteReactor<v1::GetValueResponse>* GetValue(CallContext*, const v1::GetValueRequest*) override;
  UnaryReactor* Verify(CallContext*, const v1::VerifyRequest*, v1::VerifyResponse*) override;
  WriteReactor<v1::ScrubResponse>* Scrub(CallContext*, const v1::ScrubRequest*) override;
  WriteReactor<v1::WatchResponse>* Watch(CallContext*, const v1::WatchRequest*) override;
  // selection_calls.cc
  UnaryReactor* SampleSelections(CallContext*, const v1::SampleSelectionsRequest*,
                                 v1::SampleSelectionsResponse*) override;
  UnaryReactor* ListEngineRecalls(CallContext*, const v1::ListEngineRecallsRequest*,
                                  v1::ListEngineRecallsResponse*) override;
  // quota_calls.cc
  UnaryReactor* ListQuotas(CallContext*, const v1::ListQuotasRequest*,
                           v1::ListQuotasResponse*) override;
  UnaryReactor* SetQuota(CallContext*, const v1::SetQuotaRequest*, v1::SetQuotaResponse*) override;
  // remote_calls.cc
  UnaryReactor* ProbeRemote(CallContext*, const v1::ProbeRemoteRequest*,
                            v1::ProbeRemoteResponse*) override;
  UnaryReactor* PurgeRemote(CallContext*, const v1::PurgeRemoteRequest*,
                            v1::PurgeRemoteResponse*) override;
  UnaryReactor* Drain(CallContext*, const v1::DrainRequest*, v1::DrainResponse*) override;
  UnaryReactor* Resize(CallContext*, const v1::ResizeRequest*, v1::ResizeResponse*) override;

 private:
  UnaryReactor* Missing(CallContext* call, std::string_view name);
  UnaryReactor* Move(CallContext* call, const v1::MoveRequest* request, v1::MoveResponse* response,
                     Tier to);

  ServiceContext* const context_;
};

}  // namespace kvstrata
