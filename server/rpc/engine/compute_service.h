// SPDX-License-Identifier: Apache-2.0
// ComputeService: kvstrata.v1.Compute, the remote transport: kernels/step on the daemon's own
// mappings.
//
// Threads: gRPC's; every call runs on its session's strand on a work thread. Tensors are read where
// the message has them and written where the answer has them. Errors: as compute.proto says.
#pragma once

#include "kvstrata/v1/compute.grpc.pb.h"
#include "server/rpc/calls/service_context.h"

namespace kvstrata {

class ComputeService final : public v1::Compute::CallbackService {
 public:
  // Not inline, nor is the destructor: the generated base takes half a minute to compile where one
  // is called.
  explicit ComputeService(ServiceContext* context) : context_(context) {}
  ~ComputeService() override;

  UnaryReactor* StepBegin(CallContext*, const v1::StepBeginRequest*,
                          v1::StepBeginResponse*) override;
  UnaryReactor* Append(CallContext*, const v1::AppendRequest*, v1::AppendResponse*) override;
  UnaryReactor* Select(CallContext*, const v1::SelectRequest*, v1::SelectResponse*) override;
  UnaryReactor* Attend(CallContext*, const v1::AttendRequest*, v1::AttendResponse*) override;
  UnaryReactor* StepEnd(CallContext*, const v1::StepEndRequest*, v1::StepEndResponse*) override;
  UnaryReactor* ReportVerified(CallContext*, const v1::ReportVerifiedRequest*,
                               v1::ReportVerifiedResponse*) override;
  UnaryReactor* Report(CallContext*, const v1::ReportRequest*, v1::ReportResponse*) override;
  UnaryReactor* PrefillDone(CallContext*, const v1::PrefillDoneRequest*,
                            v1::PrefillDoneResponse*) override;
  UnaryReactor* Settle(CallContext*, const v1::SettleRequest*, v1::SettleResponse*) override;
  UnaryReactor* GetSequence(CallContext*, const v1::GetSequenceRequest*,
                            v1::GetSequenceResponse*) override;
  UnaryReactor* Inspect(CallContext*, const v1::InspectRequest*, v1::InspectResponse*) override;
  UnaryReactor* GetPageTable(CallContext*, const v1::GetPageTableRequest*,
                             v1::GetPageTableResponse*) override;
  // work_calls.cc
  UnaryReactor* Build(CallContext*, const v1::BuildRequest*, v1::BuildResponse*) override;
  UnaryReactor* Recompress(CallContext*, const v1::RecompressRequest*,
                           v1::RecompressResponse*) override;
  UnaryReactor* StopWork(CallContext*, const v1::StopWorkRequest*, v1::StopWorkResponse*) override;

 private:
  ServiceContext* const context_;
};

}  // namespace kvstrata
