// SPDX-License-Identifier: Apache-2.0
// quota ls|set|reset: what users may hold of the daemon, and hold.
#include <charconv>
#include <iostream>
#include <memory>

#include "base/quantities.h"
#include "client/cli/arguments.h"
#include "client/cli/connection.h"
#include "client/cli/invocation.h"
#include "client/cli/quota_table.h"

namespace kvstrata::cli {
namespace {

struct WantedQuota {
  std::string user, limit, value;
};

Result<int> ListQuotas(const Options& options) {
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       Ask(options, &v1::Admin::Stub::ListQuotas, v1::ListQuotasRequest()));
  PrintQuotas(options.style, ToJson(answer), std::cout);
  return kOk;
}

Result<uint64_t> ParseValue(const WantedQuota& wanted) {
  const std::string& text = wanted.value;
  if (text == "none") return uint64_t{0};
  if (wanted.limit.ends_with("_bytes")) {
    uint64_t bytes = 0;
    if (ParseSize(text, &bytes) && bytes == 0) return bytes;
    try {
      return ParseBytes(text);
    } catch (const CLI::ValidationError& error) {
      return InvalidArgument("QUOTA_VALUE", std::string(error.what()) + "; none: no limit");
    }
  }
  uint64_t number = 0;
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, number);
  if (error == std::errc() && end == last) return number;
  return InvalidArgument("QUOTA_VALUE", "'" + text + "'; allowed: a number, or none");
}

// The user's limits as they are now, in a form that `ls` has too.
Result<int> Set(const Options& options, const v1::SetQuotaRequest& request) {
  KVS_ASSIGN_OR_RETURN(const auto answer, Ask(options, &v1::Admin::Stub::SetQuota, request));
  Json user = ToJson(answer.quota());
  if (request.user() == "default") user.erase("used");
  const Json document = {{"users", Json::array({user})}};
  PrintQuotas(options.style, document, std::cout);
  return kOk;
}

v1::SetQuotaRequest RequestOf(const WantedQuota& wanted) {
  v1::SetQuotaRequest request;
  request.set_user(wanted.user);
  request.set_limit(wanted.limit);
  return request;
}

Result<int> Change(const Options& options, const WantedQuota& wanted) {
  v1::SetQuotaRequest request = RequestOf(wanted);
  KVS_ASSIGN_OR_RETURN(const uint64_t value, ParseValue(wanted));
  if (value == 0 && wanted.value != "none") {
    return InvalidArgument("QUOTA_VALUE",
                           wanted.limit + " = '" + wanted.value +
                               "' would be no limit at all, as in the configuration: say none for "
                               "that; to keep a user out, take them from the group that may open "
                               "the socket (socket.group)");
  }
  request.set_value(value);
  return Set(options, request);
}

Result<int> Reset(const Options& options, const WantedQuota& wanted) {
  v1::SetQuotaRequest request = RequestOf(wanted);
  request.set_reset(true);
  return Set(options, request);
}

void AddUserAndLimit(CLI::App* verb, WantedQuota* wanted) {
  verb->add_option("USER", wanted->user,
                   "uid:N, such as uid:1000, or default: all that have none of their own")
      ->required();
  verb->add_option("LIMIT", wanted->limit, "Such as sessions or host_bytes, as in limits.*")
      ->required();
}

}  // namespace

void AddQuota(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("quota", "Quotas: what each user may hold, and holds");
  Shows(noun->add_subcommand("ls", "All users, what they hold, and their limits"), invocation,
        ListQuotas);

  auto wanted = std::make_shared<WantedQuota>();
  CLI::App* set = noun->add_subcommand("set", "Change a limit until the daemon ends");
  AddUserAndLimit(set, wanted.get());
  set->add_option("N", wanted->value,
                  "A number from 1 on, of bytes a size such as 8GiB; none: no limit")
      ->required();
  Runs(set, invocation, Change, wanted);

  CLI::App* reset = noun->add_subcommand("reset", "A limit as the configuration has it");
  AddUserAndLimit(reset, wanted.get());
  Runs(reset, invocation, Reset, wanted);
}

}  // namespace kvstrata::cli
