// SPDX-License-Identifier: Apache-2.0
#include "kernels/plan/plan_options.h"

#include <algorithm>
#include <numeric>

#include "kernels/plan/plan_axes.h"
#include "kernels/plan/plan_rows.h"

namespace kvstrata {
namespace {

using Rows = RowsOf<>;

constexpr std::string_view kAutoName = "auto";

SetResult SetMinTokens(const OptionValue& value, Plan* plan) {
  const auto* name = std::get_if<std::string>(&value);
  if (name == nullptr) return SetInt(value, 0, kMaxTokens, &plan->min_tokens);
  if (*name != kAutoName) return SetResult::kRefused;
  plan->min_tokens = kAutoTokens;
  return SetResult::kOk;
}

std::string MinTokensText(const Plan& plan) {
  return plan.min_tokens == kAutoTokens ? Quoted(kAutoName) : std::to_string(plan.min_tokens);
}

bool IsAuto(const Plan& plan) { return plan.min_tokens == kAutoTokens; }

// Whether the selector leaves rows out, over some codec as they are, of models whose keys are
// stored before rotary embedding (selector bits serves no such model).
bool CanCompact(const Plan& plan) {
  return plan.selector != SelectorKind::kFull && plan.selector != SelectorKind::kZoom &&
         plan.selector != SelectorKind::kBits && plan.selector != SelectorKind::kFine;
}

constexpr PlanOption kCommonRows[] = {
    // plan.cc has set the codec, an axis; here it is printed.
    {"codec", [](const OptionValue&, Plan*) { return SetResult::kOk; },
     [](const Plan& p) { return Quoted(NameOf(p.codec)); }, nullptr},
    Rows::Name<&Plan::tier, kTierNames>("tier"),
    {"min_tokens", SetMinTokens, MinTokensText,
     [] { return IntAllowed(0, kMaxTokens) + ", or \"auto\""; }},
    Rows::Int<&Plan::batch, 1, 4096>("batch").When(IsAuto, "min_tokens = \"auto\""),
    Rows::Int<&Plan::n_dense_layers, 0, 512>("n_dense_layers"),
    Rows::Flag<&Plan::compact>("compact").If(CanCompact).When(OverRaw, "codec = \"raw\""),
};

Status CheckCompact(const Plan& plan) {
  const RestKind rest = plan.index.rest;
  if (!plan.compact || rest == RestKind::kDrop) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION",
                         "compact = true gives every attended row a place of its own, and rest = "
                         "\"" +
                             std::string(NameOf(rest)) +
                             "\" attends one row for many; use rest = \"drop\"");
}

// Keys that are stored after rotary embedding have their positions.
Status CheckStoredAfter(const Plan& plan) {
  if (!plan.compact) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION",
                         "compact = true moves rows to other rotary positions, and this model's "
                         "keys are stored after rotary embedding; register it with "
                         "keys_pre_rope = 1, or use compact = false");
}

// What keys that are stored before rotary embedding rule out, or what needs them.
Status CheckRotary(const Plan& plan, const Geometry& geometry) {
  if (!geometry.pre_rope()) return CheckStoredAfter(plan);
  if (plan.codec != CodecKind::kRaw) {
    return Unimplemented("PLAN_UNIMPLEMENTED",
                         "codec '" + std::string(NameOf(plan.codec)) +
                             "' over keys stored before rotary embedding (keys_pre_rope = 1) does "
                             "not exist in this build: it would have to rotate what it unpacks; "
                             "use codec \"raw\", or register the model with keys_pre_rope = 0");
  }
  if (plan.index.rest == RestKind::kDrop) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION",
                         "rest = \"" + std::string(NameOf(plan.index.rest)) +
                             "\" attends means of keys, and a mean of keys stored before rotary "
                             "embedding (keys_pre_rope = 1) has no position to be rotated to; use "
                             "rest = \"drop\"");
}

// Null: not in this build.
const OptionTable* TableOf(const PresetRow& row) {
  return row.preset == nullptr ? nullptr : &row.preset->options;
}

int EditDistance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 0; i < a.size(); ++i) {
    int diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const int replaced = diagonal + (a[i] != b[j]);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, diagonal + 1, row[j] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

constinit const OptionTable kNoOptions = {};
constinit const OptionTable kCommonTable = {kCommonRows, CheckCompact, CheckRotary};

std::array<const OptionTable*, 4> TablesOf(const Plan& plan) {
  return {&kCommonTable, TableOf(PresetRows()[static_cast<size_t>(plan.selector)]),
          CodecNameRows()[static_cast<size_t>(plan.codec)].options,
          plan.codec == CodecKind::kRaw ? &kNoOptions : &kStoredTable};
}

const PlanOption* FindOption(const Plan& plan, std::string_view name) {
  for (const OptionTable* table : TablesOf(plan)) {
    for (const PlanOption& o : table->rows) {
      if (o.IsCalled(name) && o.ReadBy(plan)) return &o;
    }
  }
  return nullptr;
}

bool IsOption(std::string_view name) {
  const auto in = [name](const OptionTable* table) {
    return table != nullptr &&
           std::ranges::any_of(table->rows, [&](const PlanOption& o) { return o.IsCalled(name); });
  };
  return in(&kCommonTable) || std::ranges::any_of(PresetRows(), in, TableOf) ||
         std::ranges::any_of(CodecNameRows(), in, &CodecNameRow::options) || in(&kStoredTable);
}

std::optional<std::string_view> Nearest(std::string_view name,
                                        std::span<const std::string_view> known) {
  std::optional<std::string_view> nearest;
  int best = 1 + static_cast<int>(std::max<size_t>(2, name.size() / 3));
  if (name.size() > 64) return nearest;  // nobody mistypes that much
  for (const std::string_view k : known) {
    const int distance = EditDistance(name, k);
    if (distance >= best || distance >= static_cast<int>(k.size())) continue;
    best = distance;
    nearest = k;
  }
  return nearest;
}

}  // namespace kvstrata
