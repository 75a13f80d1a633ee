// SPDX-License-Identifier: Apache-2.0
// lookup: how much of a prompt is held, and in which tier; --cluster: on which node.
#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>

#include "client/cli/arguments.h"
#include "client/cli/connection.h"
#include "client/cli/invocation.h"
#include "kvstrata/v1/nodes.grpc.pb.h"
#include "proto/status_map.h"

namespace kvstrata::cli {
namespace {

struct WantedLookup {
  std::string model, file, tenant, plan, device;
  std::vector<std::string> keys;
  bool pages = false, cluster = false;
};

std::string OrRawPages(const Json& plan) {
  const std::string text = plan.get<std::string>();
  return text.empty() ? "none: raw pages" : Printable(text);
}

constexpr Column kLookupRecord[] = {
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
constexpr Column kLookupPages[] = {{"PAGE", "/page", nullptr, true},
                                   {"KEY", "/key", nullptr, false, 1},
                                   {"TIER", "/tier", OrDash}};

Result<v1::LookupPrefixRequest> RequestOf(const WantedLookup& wanted) {
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

// Nothing is known about a node that did not answer.
std::string UnlessUnreachable(const Json& row, std::string_view field) {
  if (!row.value("unreachable", std::string()).empty()) return "-";
  return std::to_string(row.value(std::string(field), uint64_t{0}));
}
std::string Gpu(const Json& row) { return UnlessUnreachable(row, "device_tokens"); }
std::string Host(const Json& row) { return UnlessUnreachable(row, "host_tokens"); }
std::string Disk(const Json& row) { return UnlessUnreachable(row, "disk_tokens"); }
std::string BehindIt(const Json& row) {
  if (!row.value("unreachable", std::string()).empty()) return "-";
  const uint64_t held = row.value("held_tokens", uint64_t{0});
  return std::to_string(std::max(row.value("with_remote_tokens", uint64_t{0}), held) - held);
}
std::string NodeName(const Json& address) {
  const std::string text = address.get<std::string>();
  return text.empty() ? "not-announced" : Printable(text);
}
// The node itself, and one that announced nothing, have none.
std::string Age(const Json& us) { return us == 0 ? "-" : Microseconds(us); }
constexpr Column kNodes[] = {
    {"NODE", "/address", NodeName, false, 0, 16},
    {"GPU", "", Gpu, true, 6},
    {"HOST", "", Host, true, 6},
    {"DISK", "", Disk, true, 6},
    {"REMOTE", "", BehindIt, true, 6},
    {"AGE", "/age_us", Age, true, 2},
    {"UNREACHABLE", "/unreachable", OrDash, false, 5},
    {"WHY", "/why", OrDash, false, 1, 12},
};

// The daemon's socket was dialled before: what ails it was said then.
Result<v1::LookupClusterResponse> AskCluster(const Options& options,
                                             const v1::LookupClusterRequest& request) {
  const auto stub = v1::Cluster::NewStub(
      grpc::CreateChannel("unix:" + options.socket, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + options.timeout);
  v1::LookupClusterResponse answer;
  const grpc::Status status = stub->LookupCluster(&context, request, &answer);
  if (!status.ok()) return FromGrpc(status);
  return answer;
}

Result<int> LookupCluster(const Options& options, const WantedLookup& wanted) {
  if (!wanted.plan.empty() || wanted.pages) {
    return InvalidArgument(
        "LOOKUP_WHAT", "--cluster looks up raw pages of all nodes; leave out --plan and --pages");
  }
  KVS_ASSIGN_OR_RETURN(v1::LookupPrefixRequest prompt, RequestOf(wanted));
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  KVS_ASSIGN_OR_RETURN(const v1::Model model, NamedModel(connection.get(), wanted.model));
  v1::LookupClusterRequest request;
  request.set_tenant(wanted.tenant);
  request.set_model(model.model());
  request.mutable_tokens()->Swap(prompt.mutable_tokens());
  request.mutable_page_keys()->Swap(prompt.mutable_page_keys());
  // Nodes have most of the time that was given, so that the answer comes within it.
  if (options.timeout_given) {
    request.set_timeout_us(static_cast<uint64_t>(std::max(options.timeout.count(), 1L)) * 800);
  }
  KVS_ASSIGN_OR_RETURN(const v1::LookupClusterResponse answer, AskCluster(options, request));
  const Json document = ToJson(answer);
  PrintList(options.style, document, "nodes", kNodes, std::cout);
  if (!options.style.IsTable() || !options.style.headers) return kOk;
  std::cout << "\n" << answer.tokens() << " tokens in whole pages of " << answer.page_tokens();
  std::cout << "; the remote tier alone has " << answer.remote_tokens() << "\n";
  if (!answer.remote_error().empty()) {
    std::cout << "remote tier: " << Printable(answer.remote_error()) << "\n";
  }
  if (!answer.nodes_error().empty()) {
    std::cout << "other nodes: " << Printable(answer.nodes_error()) << "\n";
  }
  if (answer.refused_announcements() != 0) {
    std::cout << answer.refused_announcements()
              << " announcements are of no node of this cluster\n";
  }
  return kOk;
}

Result<int> Lookup(const Options& options, const WantedLookup& wanted) {
  if (wanted.cluster) return LookupCluster(options, wanted);
  KVS_ASSIGN_OR_RETURN(v1::LookupPrefixRequest request, RequestOf(wanted));
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  KVS_ASSIGN_OR_RETURN(const v1::Model model, NamedModel(connection.get(), wanted.model));
  request.set_model(model.model());
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       connection->Call(&v1::Admin::Stub::LookupPrefix, request));
  const Json document = Document(request, answer);
  PrintRecord(options.style, document,
              wanted.plan.empty() ? std::span<const Column>(kLookupRecord) : kPlanned, std::cout);
  if (wanted.pages) PrintBelow(options.style, document, "pages", kLookupPages, std::cout);
  return kOk;
}

}  // namespace

void AddLookup(CLI::App& app, Invocation& invocation) {
  CLI::App* verb = app.add_subcommand("lookup", "How much of a prompt is held, and where");
  auto wanted = std::make_shared<WantedLookup>();
  verb->add_option("MODEL", wanted->model, "Its number or name")->required();
  verb->add_option("FILE", wanted->file, "Token ids: text, a trace, or - for stdin");
  verb->add_option("--key", wanted->keys, "Key of a page, 64 hexadecimal digits; repeat, in order");
  verb->add_option("--tenant", wanted->tenant,
                   "Whose pages: uid:1000, or cluster:search (default: yours)");
  auto* plan = verb->add_option("--plan", wanted->plan,
                                "What an open of this plan would find (default: raw pages)");
  verb->add_option("--device", wanted->device, "Of the session that will open (default: the first)")
      ->needs(plan);
  verb->add_flag("--pages", wanted->pages, "Every page with its key and tier");
  verb->add_flag("--cluster", wanted->cluster,
                 "What each node of the cluster has, and its remote tier");
  Runs(verb, invocation, Lookup, wanted);
}

}  // namespace kvstrata::cli
