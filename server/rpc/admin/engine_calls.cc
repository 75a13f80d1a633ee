// SPDX-License-Identifier: Apache-2.0
// Admin.ListEngineRecalls.

#include "server/rpc/admin/admin_service.h"
#include "server/rpc/calls/copy_fields.h"

namespace kvstrata {
namespace {

void Write(const LayerRecall& row, v1::LayerRecall* out) {
  out->set_layer(static_cast<int32_t>(row.layer));
  KVS_COPY_FIELDS(out, row, samples, recall, least, error);
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

UnaryReactor* AdminService::ListEngineRecalls(CallContext* call,
                                              const v1::ListEngineRecallsRequest* request,
                                              v1::ListEngineRecallsResponse* response) {
  return context_->AsAdmin(call, [&]() -> Status {
    const auto& told = context_->options().engine_recalls;
    for (const EngineRecall& engine : told ? told() : std::vector<EngineRecall>()) {
      if (request->engine().empty() || request->engine() == engine.engine) {
        Write(engine, response->add_engines());
      }
    }
    if (!request->engine().empty() && response->engines().empty()) {
      return NotFound("ENGINE_UNKNOWN",
                      "no engine '" + request->engine() + "' has told what its plan loses");
    }
    return OkStatus();
  });
}

}  // namespace kvstrata
