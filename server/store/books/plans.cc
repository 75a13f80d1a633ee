// SPDX-License-Identifier: Apache-2.0
#include "server/store/books/plans.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "server/store/books/sequence.h"

namespace kvstrata {
namespace {

std::string_view Trim(std::string_view text) {
  const auto space = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
  while (!text.empty() && space(text.front())) text.remove_prefix(1);
  while (!text.empty() && space(text.back())) text.remove_suffix(1);
  return text;
}

}  // namespace

Plans::Plans(const StoreOptions& options, Named named)
    : options_(options),
      named_(std::move(named)),
      parameters_({options.parameters_directory, options.shipped_parameters},
                  options.parse_parameters) {}

Result<Plans::Named> Plans::Parse(const StoreOptions& options) {
  Named plans;
  for (const auto& [name, text] : options.named_plans) {
    Result<Plan> plan = ParsePlan(text);
    if (!plan.ok()) {
      return InvalidArgument("PLAN_NAMED_INVALID",
                             "plan '" + name + "': " + plan.status().message());
    }
    plans.insert_or_assign(name, *plan);
  }
  return plans;
}

void Plans::SetNamed(Named named) {
  MutexLock lock(mu_);
  named_ = std::move(named);
}

Result<Plan> Plans::ResolvePlan(std::string_view text) const {
  const std::string_view trimmed = Trim(text);
  const size_t brace = std::min(trimmed.find('{'), trimmed.size());
  MutexLock lock(mu_);
  const auto it = named_.find(Trim(trimmed.substr(0, brace)));
  if (it == named_.end()) return ParsePlan(text);
  if (brace == trimmed.size()) return it->second;
  return InvalidArgument("PLAN_OPTION_INVALID",
                         "plan '" + it->first +
                             "' is a named plan of the daemon's configuration and takes no options "
                             "here; write its preset with options, or change [plans." +
                             it->first + "]");
}

Result<Plan> Plans::PlanFor(const Plan& named, const Geometry& geometry) const {
  const Plan plan = WithMinTokens(named, geometry, options_.steps_on);
  KVS_RETURN_IF_ERROR(CheckGeometry(plan, geometry));
  if (options_.serves) KVS_RETURN_IF_ERROR(options_.serves(plan, geometry));
  return plan;
}

uint32_t Plans::BreakEven(const Plan& plan, const Geometry& geometry) const {
  return static_cast<uint32_t>(BreakEvenTokens(plan, geometry, options_.steps_on));
}

Result<std::optional<CodecState>> Plans::NewCodec(const Plan& plan, const Geometry& geometry,
                                                  Files files) {
  if (!options_.new_recompressor) return std::optional<CodecState>();
  KVS_ASSIGN_OR_RETURN(Parameters parameters, parameters_.Get(plan, geometry, files));
  std::unique_ptr<Recompressor> recompressor =
      options_.new_recompressor(plan, geometry, std::move(parameters.values));
  if (recompressor == nullptr) return std::optional<CodecState>();
  CodecState codec;
  codec.recompressor = std::move(recompressor);
  codec.parameters_digest = std::move(parameters.digest);
  return std::optional<CodecState>(std::move(codec));
}

}  // namespace kvstrata
