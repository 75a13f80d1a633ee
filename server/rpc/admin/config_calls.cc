// SPDX-License-Identifier: Apache-2.0
// Admin's calls of the configuration (server/config/config_reload.h).
#include <string>

#include "server/rpc/admin/admin_service.h"

namespace kvstrata {

grpc::ServerUnaryReactor* AdminService::GetConfig(grpc::CallbackServerContext* call,
                                                  const v1::GetConfigRequest*,
                                                  v1::GetConfigResponse* response) {
  const Status admin = context_->CheckAdmin();
  if (!admin.ok()) return ServiceContext::Answer(call, admin);
  if (!context_->options().config) return ServiceContext::Answer(call, grpc::Status::OK);
  for (const ConfigItem& item : context_->options().config()) {
    v1::ConfigEntry* out = response->add_entries();
    out->set_key(item.key);
    out->set_value(item.value);
    out->set_origin(item.origin);
    out->set_where(item.where);
    out->set_description(item.description);
    out->set_reloads(item.reloads);
  }
  return ServiceContext::Answer(call, grpc::Status::OK);
}

grpc::ServerUnaryReactor* AdminService::ReloadConfig(grpc::CallbackServerContext* call,
                                                     const v1::ReloadConfigRequest* request,
                                                     v1::ReloadConfigResponse* response) {
  if (!context_->options().reload) return Missing(call, "RELOAD");
  return context_->InQueue(call, [this, request, response]() -> Status {
    KVS_RETURN_IF_ERROR(context_->CheckAdmin());
    KVS_ASSIGN_OR_RETURN(const auto changes,
                         context_->options().reload(request->dry_run(), context_->user().tenant));
    for (const ConfigChangeItem& change : changes) {
      v1::ConfigChange* out = response->add_changes();
      out->set_key(change.key);
      out->set_before(change.before);
      out->set_after(change.after);
      out->set_where(change.where);
      out->set_needs_restart(!change.applies);
    }
    return OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::SetLogLevel(grpc::CallbackServerContext* call,
                                                    const v1::SetLogLevelRequest* request,
                                                    v1::SetLogLevelResponse* response) {
  if (!context_->options().set_log_level) return Missing(call, "RELOAD");
  return context_->InQueue(call, [this, request, response]() -> Status {
    KVS_RETURN_IF_ERROR(context_->CheckAdmin());
    KVS_ASSIGN_OR_RETURN(const std::string before, context_->options().set_log_level(
                                                       request->level(), context_->user().tenant));
    response->set_before(before);
    response->set_level(request->level().empty() ? before : request->level());
    return OkStatus();
  });
}

}  // namespace kvstrata
