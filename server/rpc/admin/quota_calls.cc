// SPDX-License-Identifier: Apache-2.0
// Admin's calls of the users' limits (server/store/options/user_limits.h).
#include <algorithm>
#include <optional>
#include <string>

#include "server/rpc/admin/admin_messages.h"
#include "server/rpc/admin/admin_service.h"
#include "server/store/options/user_limits.h"
#include "server/store/options/user_name.h"
#include "server/telemetry/log.h"

namespace kvstrata {
namespace {

constexpr std::string_view kDefault = "default";

Result<Limit> CheckQuota(const v1::SetQuotaRequest& request) {
  if (request.user() != kDefault && !UidOf(request.user())) {
    return InvalidArgument("QUOTA_USER", "user '" + request.user() +
                                             "'; allowed: uid:N, such as uid:1000, or default");
  }
  const std::optional<Limit> limit = LimitOf(request.limit());
  if (!limit) {
    return InvalidArgument("QUOTA_LIMIT",
                           "limit '" + request.limit() + "'; allowed: " + LimitNames());
  }
  if (request.reset() && request.value() != 0) {
    return InvalidArgument("QUOTA_VALUE", "a reset takes no value, and " +
                                              std::to_string(request.value()) + " was given");
  }
  if (request.value() > MostOf(*limit)) {
    return InvalidArgument("QUOTA_VALUE",
                           request.limit() + " = " + std::to_string(request.value()) +
                               "; allowed: 0 (none) to " + std::to_string(MostOf(*limit)));
  }
  return *limit;
}

UserReport ReportOf(const UserLimits& limits, const std::string& user) {
  if (user != kDefault) return limits.ReportOf(user);
  UserReport report;
  report.user = user;
  report.limits = limits.defaults();
  return report;
}

}  // namespace

UnaryReactor* AdminService::ListQuotas(CallContext* call, const v1::ListQuotasRequest*,
                                       v1::ListQuotasResponse* response) {
  return context_->AsAdmin(call, [&]() -> Status {
    const UserLimits& limits = *context_->store().user_limits();
    Write(limits.defaults(), response->mutable_defaults());
    std::vector<UserReport> users = limits.Report();
    std::ranges::sort(users, {}, [](const UserReport& user) { return UidOf(user.user); });
    for (const UserReport& user : users) {
      Write(user, context_->store().cluster_tenants(), response->add_users());
    }
    return OkStatus();
  });
}

UnaryReactor* AdminService::SetQuota(CallContext* call, const v1::SetQuotaRequest* request,
                                     v1::SetQuotaResponse* response) {
  return context_->AsAdmin(call, [&]() -> Status {
    const Result<Limit> limit = CheckQuota(*request);
    if (!limit.ok()) return limit.status();
    UserLimits& limits = *context_->store().user_limits();
    if (request->reset()) limits.Reset(request->user(), *limit);
    if (!request->reset()) limits.Set(request->user(), *limit, request->value());
    const UserReport report = ReportOf(limits, request->user());
    LogEvent(LogLevel::kInfo, "quota_set",
             {{"user", request->user()},
              {"limit", request->limit()},
              {"value", report.limits[*limit]},
              {"by", context_->user().tenant}});
    Write(report, context_->store().cluster_tenants(), response->mutable_quota());
    return OkStatus();
  });
}

}  // namespace kvstrata
