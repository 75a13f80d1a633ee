// SPDX-License-Identifier: Apache-2.0
// plan ls|show: the plans that the daemon knows, and what a plan's text means with every option.
#include <iostream>
#include <memory>

#include "client/cli/connection.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

constexpr Column kPlanList[] = {
    {"NAME", "/name"},
    {"SEGMENTER", "/segmenter", nullptr, false, 3},
    {"SELECTOR", "/selector", nullptr, false, 4},
    {"CODEC", "/codec", nullptr, false, 4},
    {"TIER", "/tier", nullptr, false, 1},
    {"ORIGIN", "/origin", nullptr, false, 0},
    {"DESCRIPTION", "/description", nullptr, false, 5, 24},
};
constexpr Column kPlanRecord[] = {
    {"NAME", "/name"},           {"DESCRIPTION", "/description"},
    {"SEGMENTER", "/segmenter"}, {"SELECTOR", "/selector"},
    {"CODEC", "/codec"},         {"TIER", "/tier"},
    {"ORIGIN", "/origin"},       {"TEXT", "/text"},
};

constexpr Column kNeeds[] = {{"NEEDS", "/name"}, {"WHAT", "/text", nullptr, false, 1, 24}};

Result<int> ShowPlan(const Options& options, const std::string& plan) {
  v1::ShowPlanRequest request;
  request.set_plan(plan);
  KVS_ASSIGN_OR_RETURN(const auto answer, Ask(options, &v1::Control::Stub::ShowPlan, request));
  const Json document = ToJson(answer);
  PrintRecord(options.style, document, kPlanRecord, std::cout);
  PrintBelow(options.style, document, "needs", kNeeds, std::cout);
  return kOk;
}

}  // namespace

void AddPlan(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("plan", "Plans: how sequences are cut, selected and stored");
  Runs(noun->add_subcommand("ls", "Presets and the configuration's named plans"), invocation,
       Lists(&v1::Control::Stub::ListPlans, "plans", kPlanList));
  auto plan = std::make_shared<std::string>();
  CLI::App* show = noun->add_subcommand(
      "show", "A plan with every option and its value, and what it needs of the engine");
  show->add_option("PLAN", *plan, "A name, or text such as 'quest{budget = 1024}'")->required();
  Runs(show, invocation, ShowPlan, plan);
}

}  // namespace kvstrata::cli
