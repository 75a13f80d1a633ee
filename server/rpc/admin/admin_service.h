// SPDX-License-Identifier: Apache-2.0
// AdminService: kvstrata.v1.Admin: what an operator sees and does. Every call of a user who is
// neither root nor the daemon's own answers PERMISSION_DENIED ADMIN_ONLY.
//
// Threads: gRPC's; moves, evictions and audits run on work threads. Errors: those of the store;
// UNIMPLEMENTED for a call that GrpcOptions leaves out (ValueCalls).
#ifndef KVSTRATA_SERVER_RPC_ADMIN_ADMIN_SERVICE_H_
#define KVSTRATA_SERVER_RPC_ADMIN_ADMIN_SERVICE_H_

#include "kvstrata/v1/admin.grpc.pb.h"
#include "server/rpc/calls/service_context.h"

namespace kvstrata {

class AdminService final : public v1::Admin::CallbackService {
 public:
  // Not inline, nor is the destructor: the generated base takes half a minute to compile where one
  // is called.
  explicit AdminService(ServiceContext* context) : context_(context) {}
  ~AdminService() override;

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext*, const v1::GetStatusRequest*,
                                      v1::GetStatusResponse*) override;
  grpc::ServerUnaryReactor* ListSessions(grpc::CallbackServerContext*,
                                         const v1::ListSessionsRequest*,
                                         v1::ListSessionsResponse*) override;
  grpc::ServerUnaryReactor* ListSequences(grpc::CallbackServerContext*,
                                          const v1::ListSequencesRequest*,
                                          v1::ListSequencesResponse*) override;
  grpc::ServerUnaryReactor* ShowSequence(grpc::CallbackServerContext*,
                                         const v1::ShowSequenceRequest*,
                                         v1::ShowSequenceResponse*) override;
  grpc::ServerUnaryReactor* ListPools(grpc::CallbackServerContext*, const v1::ListPoolsRequest*,
                                      v1::ListPoolsResponse*) override;
  grpc::ServerUnaryReactor* ListWork(grpc::CallbackServerContext*, const v1::ListWorkRequest*,
                                     v1::ListWorkResponse*) override;
  // work_calls.cc
  grpc::ServerUnaryReactor* BuildSequence(grpc::CallbackServerContext*,
                                          const v1::BuildSequenceRequest*,
                                          v1::BuildSequenceResponse*) override;
  grpc::ServerWriteReactor<v1::RecompressSequenceResponse>* RecompressSequence(
      grpc::CallbackServerContext*, const v1::RecompressSequenceRequest*) override;
  grpc::ServerUnaryReactor* CancelWork(grpc::CallbackServerContext*, const v1::CancelWorkRequest*,
                                       v1::CancelWorkResponse*) override;
  // config_calls.cc
  grpc::ServerUnaryReactor* GetConfig(grpc::CallbackServerContext*, const v1::GetConfigRequest*,
                                      v1::GetConfigResponse*) override;
  grpc::ServerUnaryReactor* ReloadConfig(grpc::CallbackServerContext*,
                                         const v1::ReloadConfigRequest*,
                                         v1::ReloadConfigResponse*) override;
  grpc::ServerUnaryReactor* SetLogLevel(grpc::CallbackServerContext*, const v1::SetLogLevelRequest*,
                                        v1::SetLogLevelResponse*) override;
  grpc::ServerUnaryReactor* GetMetrics(grpc::CallbackServerContext*, const v1::GetMetricsRequest*,
                                       v1::GetMetricsResponse*) override;
  grpc::ServerUnaryReactor* Audit(grpc::CallbackServerContext*, const v1::AuditRequest*,
                                  v1::AuditResponse*) override;
  grpc::ServerWriteReactor<v1::AuditRecallResponse>* AuditRecall(
      grpc::CallbackServerContext*, const v1::AuditRecallRequest*) override;
  grpc::ServerUnaryReactor* Demote(grpc::CallbackServerContext*, const v1::MoveRequest*,
                                   v1::MoveResponse*) override;
  grpc::ServerUnaryReactor* Prefetch(grpc::CallbackServerContext*, const v1::MoveRequest*,
                                     v1::MoveResponse*) override;
  grpc::ServerUnaryReactor* LookupPrefix(grpc::CallbackServerContext*,
                                         const v1::LookupPrefixRequest*,
                                         v1::LookupResponse*) override;
  grpc::ServerUnaryReactor* Evict(grpc::CallbackServerContext*, const v1::EvictRequest*,
                                  v1::EvictResponse*) override;
  grpc::ServerUnaryReactor* Pin(grpc::CallbackServerContext*, const v1::PinRequest*,
                                v1::PinResponse*) override;
  grpc::ServerUnaryReactor* Unpin(grpc::CallbackServerContext*, const v1::UnpinRequest*,
                                  v1::UnpinResponse*) override;
  grpc::ServerUnaryReactor* ListPins(grpc::CallbackServerContext*, const v1::ListPinsRequest*,
                                     v1::ListPinsResponse*) override;
  grpc::ServerUnaryReactor* ListValues(grpc::CallbackServerContext*, const v1::ListValuesRequest*,
                                       v1::ListValuesResponse*) override;
  grpc::ServerWriteReactor<v1::GetValueResponse>* GetValue(grpc::CallbackServerContext*,
                                                           const v1::GetValueRequest*) override;
  grpc::ServerUnaryReactor* Verify(grpc::CallbackServerContext*, const v1::VerifyRequest*,
                                   v1::VerifyResponse*) override;
  grpc::ServerWriteReactor<v1::ScrubResponse>* Scrub(grpc::CallbackServerContext*,
                                                     const v1::ScrubRequest*) override;
  grpc::ServerWriteReactor<v1::WatchResponse>* Watch(grpc::CallbackServerContext*,
                                                     const v1::WatchRequest*) override;
  // selection_calls.cc
  grpc::ServerUnaryReactor* SampleSelections(grpc::CallbackServerContext*,
                                             const v1::SampleSelectionsRequest*,
                                             v1::SampleSelectionsResponse*) override;
  // engine_calls.cc
  grpc::ServerUnaryReactor* ListEngineRecalls(grpc::CallbackServerContext*,
                                              const v1::ListEngineRecallsRequest*,
                                              v1::ListEngineRecallsResponse*) override;
  // quota_calls.cc
  grpc::ServerUnaryReactor* ListQuotas(grpc::CallbackServerContext*, const v1::ListQuotasRequest*,
                                       v1::ListQuotasResponse*) override;
  grpc::ServerUnaryReactor* SetQuota(grpc::CallbackServerContext*, const v1::SetQuotaRequest*,
                                     v1::SetQuotaResponse*) override;
  // remote_calls.cc
  grpc::ServerUnaryReactor* ProbeRemote(grpc::CallbackServerContext*, const v1::ProbeRemoteRequest*,
                                        v1::ProbeRemoteResponse*) override;
  grpc::ServerUnaryReactor* PurgeRemote(grpc::CallbackServerContext*, const v1::PurgeRemoteRequest*,
                                        v1::PurgeRemoteResponse*) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext*, const v1::DrainRequest*,
                                  v1::DrainResponse*) override;
  grpc::ServerUnaryReactor* Resize(grpc::CallbackServerContext*, const v1::ResizeRequest*,
                                   v1::ResizeResponse*) override;

 private:
  grpc::ServerUnaryReactor* Missing(grpc::CallbackServerContext* call, std::string_view name);
  grpc::ServerUnaryReactor* Move(grpc::CallbackServerContext* call, const v1::MoveRequest* request,
                                 v1::MoveResponse* response, Tier to);

  ServiceContext* const context_;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_ADMIN_ADMIN_SERVICE_H_
