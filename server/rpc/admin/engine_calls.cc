// SPDX-License-Identifier: Apache-2.0
// Admin.ListEngineRecalls.
#include <string>

#include "server/rpc/admin/admin_service.h"

namespace kvstrata {
namespace {

void Write(const LayerRecall& row, v1::LayerRecall* out) {
  out->set_layer(static_cast<int32_t>(row.layer));
  out->set_samples(row.samples);
  out->set_recall(row.recall);
  out->set_least(row.least);
  out->set_error(row.error);
}

void Write(const EngineRecall& engine, v1::EngineRecall* out) {
  out->set_engine(engine.engine);
  out->set_plan(engine.plan);
  out->set_model_name(engine.model);
  Write(engine.all(), out->mutable_all());
  out->mutable_all()->set_layer(-1);
  Write(engine.worst(), out->mutable_worst());
  for (const LayerRecall& row : engine.layers) Write(row, out->add_layers());
}

}  // namespace

grpc::ServerUnaryReactor* AdminService::ListEngineRecalls(
    grpc::CallbackServerContext* call, const v1::ListEngineRecallsRequest* request,
    v1::ListEngineRecallsResponse* response) {
  const Status admin = context_->CheckAdmin();
  if (!admin.ok()) return ServiceContext::Answer(call, admin);
  const auto& told = context_->options().engine_recalls;
  for (const EngineRecall& engine : told ? told() : std::vector<EngineRecall>()) {
    if (request->engine().empty() || request->engine() == engine.engine) {
      Write(engine, response->add_engines());
    }
  }
  if (!request->engine().empty() && response->engines().empty()) {
    return ServiceContext::Answer(
        call, NotFound("ENGINE_UNKNOWN",
                       "no engine '" + request->engine() + "' has told what its plan loses"));
  }
  return ServiceContext::Answer(call, grpc::Status::OK);
}

}  // namespace kvstrata
