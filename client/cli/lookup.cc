// SPDX-License-Identifier: Apache-2.0
// lookup: how much of a prompt is held, and in which tier.
#include <iostream>
#include <memory>

#include "client/cli/connection.h"
#include "client/cli/hex.h"
#include "client/cli/invocation.h"
#include "client/cli/named_model.h"
#include "client/cli/token_file.h"

namespace kvstrata::cli {
namespace {

struct Wanted {
  std::string model, file, tenant, plan, device;
  std::vector<std::string> keys;
  bool pages = false;
};

std::string OrRawPages(const Json& plan) {
  const std::string text = plan.get<std::string>();
  return text.empty() ? "none: raw pages" : Printable(text);
}

constexpr Column kRecord[] = {
    {"TOKENS", "/tokens"},         {"HELD-TOKENS", "/held_tokens"}, {"ON-DEVICE", "/device_tokens"},
    {"ON-HOST", "/host_tokens"},   {"ON-DISK", "/disk_tokens"},     {"PAGE-TOKENS", "/page_tokens"},
    {"PLAN", "/plan", OrRawPages},
};
constexpr Column kPlanned[] = {
    {"TOKENS", "/tokens"},           {"HELD-TOKENS", "/held_tokens"},
    {"INDEXED", "/indexed_tokens"},  {"ON-DEVICE", "/device_tokens"},
    {"ON-HOST", "/host_tokens"},     {"ON-DISK", "/disk_tokens"},
    {"PAGE-TOKENS", "/page_tokens"}, {"PLAN", "/plan"},
};
constexpr Column kPages[] = {{"PAGE", "/page", nullptr, true},
                             {"KEY", "/key", nullptr, false, 1},
                             {"TIER", "/tier", OrDash}};

Result<v1::LookupPrefixRequest> RequestOf(const Wanted& wanted) {
  v1::LookupPrefixRequest request;
  request.set_tenant(wanted.tenant);
  request.set_plan(wanted.plan);
  request.set_device_uuid(wanted.device);
  request.set_by_page(true);
  if (wanted.file.empty() == wanted.keys.empty()) {
    return InvalidArgument("LOOKUP_WHAT", "name a FILE of token ids, or page keys by --key");
  }
  for (const std::string& key : wanted.keys) {
    KVS_ASSIGN_OR_RETURN(*request.add_page_keys(), FromHex(key));
  }
  if (wanted.file.empty()) return request;
  KVS_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, ReadTokens(wanted.file));
  request.mutable_tokens()->Add(tokens.begin(), tokens.end());
  return request;
}

// Its `tokens` are those that were asked for; by keys, those of their pages.
Json Document(const v1::LookupPrefixRequest& request, const v1::LookupResponse& answer) {
  const int64_t tokens = request.page_keys().empty()
                             ? request.tokens_size()
                             : int64_t{request.page_keys_size()} * answer.page_tokens();
  Json document = {{"tokens", tokens}};
  document.update(ToJson(answer));
  document["pages"] = Json::array();
  for (const v1::HeldPage& page : answer.pages()) {
    document["pages"].push_back(
        {{"page", document["pages"].size()}, {"key", ToHex(page.key())}, {"tier", page.tier()}});
  }
  return document;
}

Result<int> Lookup(const Options& options, const Wanted& wanted) {
  KVS_ASSIGN_OR_RETURN(v1::LookupPrefixRequest request, RequestOf(wanted));
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  KVS_ASSIGN_OR_RETURN(const v1::Model model, NamedModel(connection.get(), wanted.model));
  request.set_model(model.model());
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       connection->Call(&v1::Admin::Stub::LookupPrefix, request));
  const Json document = Document(request, answer);
  PrintRecord(options.style, document,
              wanted.plan.empty() ? std::span<const Column>(kRecord) : kPlanned, std::cout);
  if (wanted.pages && options.style.IsTable()) {
    std::cout << "\n";
    PrintList(options.style, document, "pages", kPages, std::cout);
  }
  return kOk;
}

}  // namespace

void AddLookup(CLI::App& app, Invocation& invocation) {
  CLI::App* verb = app.add_subcommand("lookup", "How much of a prompt is held, and where");
  auto wanted = std::make_shared<Wanted>();
  verb->add_option("MODEL", wanted->model, "Its number or name")->required();
  verb->add_option("FILE", wanted->file, "Token ids: text, a trace, or - for stdin");
  verb->add_option("--key", wanted->keys, "Key of a page, 64 hexadecimal digits; repeat, in order");
  verb->add_option("--tenant", wanted->tenant, "Whose pages, such as uid:1000 (default: yours)");
  auto* plan = verb->add_option("--plan", wanted->plan,
                                "What an open of this plan would find (default: raw pages)");
  verb->add_option("--device", wanted->device, "Of the session that will open (default: the first)")
      ->needs(plan);
  verb->add_flag("--pages", wanted->pages, "Every page with its key and tier");
  Runs(verb, invocation, [&invocation, wanted] { return Lookup(invocation.options, *wanted); });
}

}  // namespace kvstrata::cli
