// SPDX-License-Identifier: Apache-2.0
// tier probe|purge: the servers that nodes share, and what they hold of a prompt.
#include <unistd.h>

#include <iostream>
#include <memory>

#include "client/cli/arguments.h"
#include "client/cli/connection.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

struct WantedPrompt {
  std::string model, file, tenant, plan;
};

// The rest of the CLI's own time is for the daemon's answer.
uint64_t TimeoutUs(const Options& options) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(options.timeout).count() * 4 / 5);
}

// The prompt's model.
Result<v1::Model> ReadPrompt(Connection* connection, const WantedPrompt& wanted,
                             v1::RemotePrompt* prompt) {
  if (wanted.file.empty()) {
    return InvalidArgument("LOOKUP_WHAT", "MODEL alone is given; name a FILE of token ids, too");
  }
  KVS_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, ReadTokens(wanted.file));
  KVS_ASSIGN_OR_RETURN(v1::Model model, NamedModel(connection, wanted.model));
  prompt->set_tenant(wanted.tenant);
  prompt->set_model(model.model());
  prompt->set_plan(wanted.plan);
  prompt->mutable_tokens()->Add(tokens.begin(), tokens.end());
  return model;
}

std::string RoundTrip(const Json& us) { return us == 0 ? "-" : us.dump() + " us"; }

constexpr Column kServers[] = {
    {"SERVER", "/address", nullptr, false, 0, 12},
    {"ROLE", "/role", nullptr, false, 4},
    {"ROUND-TRIP", "/round_trip_us", RoundTrip, true, 7},
    {"LEFT-ALONE", "/breaker_open", YesNo, false, 5},
    {"VALUES", "/values", nullptr, true, 2},
    {"HELD", "/held", nullptr, true, 3},
    {"WHY", "/why", OrDash, false, 6, 32},
};
constexpr Column kHeld[] = {
    {"TOKENS", "/tokens"},
    {"HELD-TOKENS", "/held_tokens"},
    {"VALUES", "/values"},
    {"HELD-VALUES", "/held"},
};

Result<int> Probe(const Options& options, const WantedPrompt& wanted) {
  v1::ProbeRemoteRequest request;
  request.set_timeout_us(TimeoutUs(options));
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  if (!wanted.model.empty()) {
    KVS_RETURN_IF_ERROR(ReadPrompt(connection.get(), wanted, request.mutable_prompt()).status());
  }
  KVS_ASSIGN_OR_RETURN(const auto answer, connection->Call(&v1::Admin::Stub::ProbeRemote, request));
  const Json document = ToJson(answer);
  PrintList(options.style, document, "servers", kServers, std::cout);
  if (options.style.IsTable() && !wanted.model.empty()) {
    std::cout << "\n";
    PrintRecord(options.style, document, kHeld, std::cout);
  }
  for (const v1::RemoteServer& server : answer.servers()) {
    if (!server.reason().empty()) return kFailed;
  }
  return kOk;
}

Status CheckMayAsk(bool yes) {
  if (yes || isatty(STDIN_FILENO) == 1) return OkStatus();
  return InvalidArgument("CONFIRMATION_MISSING",
                         "purge deletes what all nodes share of a prompt; without a terminal to "
                         "ask on it needs --yes");
}

bool Confirmed(const WantedPrompt& wanted, const v1::Model& model, int tokens) {
  std::cerr << "Delete the prompt of " << Printable(wanted.file) << ", " << tokens
            << " tokens of model " << model.model() << " (" << Printable(model.name())
            << ") of tenant "
            << (wanted.tenant.empty() ? "uid:" + std::to_string(geteuid())
                                      : Printable(wanted.tenant))
            << ", and what others have in common with it, from the servers that all nodes share? "
               "Memory and disks of nodes keep what they have. [y/N] "
            << std::flush;
  std::string answer;
  std::getline(std::cin, answer);
  return answer == "y" || answer == "Y" || answer == "yes";
}

constexpr Column kPurged[] = {
    {"VALUES", "/values"},
    {"WERE-HELD", "/held"},
    {"FAILED", "/failed"},
    {"WHY", "/why", OrDash},
};

Result<int> Purge(const Options& options, const WantedPrompt& wanted, bool yes) {
  KVS_RETURN_IF_ERROR(CheckMayAsk(yes));
  v1::PurgeRemoteRequest request;
  request.set_timeout_us(TimeoutUs(options));
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  KVS_ASSIGN_OR_RETURN(const v1::Model model,
                       ReadPrompt(connection.get(), wanted, request.mutable_prompt()));
  if (!yes && !Confirmed(wanted, model, request.prompt().tokens_size())) return kFailed;
  KVS_ASSIGN_OR_RETURN(const auto answer, connection->Call(&v1::Admin::Stub::PurgeRemote, request));
  PrintRecord(options.style, ToJson(answer), kPurged, std::cout);
  if (answer.held() == 0 && answer.failed() == 0) {
    std::cerr
        << "kvstrata: the servers had nothing of this prompt, so nothing was deleted; another "
           "--tenant, --plan or model may have it: kvstrata tier probe\n";
  }
  return answer.failed() == 0 ? kOk : kFailed;
}

std::shared_ptr<WantedPrompt> TakesPrompt(CLI::App* verb, bool required) {
  auto wanted = std::make_shared<WantedPrompt>();
  verb->add_option("MODEL", wanted->model, "Its number or name")->required(required);
  verb->add_option("FILE", wanted->file, "Token ids: text, a trace, or - for stdin")
      ->required(required);
  verb->add_option("--tenant", wanted->tenant,
                   "Whose values: uid:1000, or cluster:search (default: yours)");
  verb->add_option("--plan", wanted->plan,
                   "Its index blocks and artefact, too (default: raw pages alone)");
  return wanted;
}

}  // namespace

void AddRemoteTier(CLI::App& noun, Invocation& invocation) {
  CLI::App* probe = noun.add_subcommand(
      "probe",
      "Ask every server that nodes share for a sign of life, and what it holds of a "
      "prompt; exit 1 when one does not answer");
  auto asked = TakesPrompt(probe, false);
  Runs(probe, invocation, Probe, asked);

  CLI::App* purge =
      noun.add_subcommand("purge",
                          "Delete a prompt from the servers that nodes share; memory and disks of "
                          "nodes, this one's too, keep what they have");
  auto wanted = TakesPrompt(purge, true);
  auto yes = std::make_shared<bool>(false);
  purge->add_flag("-y,--yes", *yes, "Do not ask");
  Runs(purge, invocation, Purge, wanted, yes);
}

}  // namespace kvstrata::cli
