// SPDX-License-Identifier: Apache-2.0
// Admin's calls of the configuration (server/config/config_reload.h).
#include <string>

#include "server/rpc/admin/admin_service.h"
#include "server/rpc/calls/copy_fields.h"

namespace kvstrata {

UnaryReactor* AdminService::GetConfig(CallContext* call, const v1::GetConfigRequest*,
                                      v1::GetConfigResponse* response) {
  return context_->AsAdmin(call, [&]() -> Status {
    if (!context_->options().config) return OkStatus();
    for (const ConfigItem& item : context_->options().config()) {
      v1::ConfigEntry* out = response->add_entries();
      KVS_COPY_FIELDS(out, item, key, value, origin, where, description, reloads);
    }
    return OkStatus();
  });
}

UnaryReactor* AdminService::ReloadConfig(CallContext* call, const v1::ReloadConfigRequest* request,
                                         v1::ReloadConfigResponse* response) {
  if (!context_->options().reload) return Missing(call, "RELOAD");
  return context_->AsAdminInQueue(call, [this, request, response]() -> Status {
    KVS_ASSIGN_OR_RETURN(const auto changes,
                         context_->options().reload(request->dry_run(), context_->user().tenant));
    for (const ConfigChangeItem& change : changes) {
      v1::ConfigChange* out = response->add_changes();
      KVS_COPY_FIELDS(out, change, key, before, after, where);
      out->set_needs_restart(!change.applies);
    }
    return OkStatus();
  });
}

UnaryReactor* AdminService::SetLogLevel(CallContext* call, const v1::SetLogLevelRequest* request,
                                        v1::SetLogLevelResponse* response) {
  if (!context_->options().set_log_level) return Missing(call, "RELOAD");
  return context_->AsAdminInQueue(call, [this, request, response]() -> Status {
    KVS_ASSIGN_OR_RETURN(const std::string before, context_->options().set_log_level(
                                                       request->level(), context_->user().tenant));
    response->set_before(before);
    response->set_level(request->level().empty() ? before : request->level());
    return OkStatus();
  });
}

}  // namespace kvstrata
