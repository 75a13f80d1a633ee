#include "kernels/plan_options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>

namespace kvstrata {
namespace {

constexpr unsigned Bit(SelectorKind s) { return 1u << static_cast<unsigned>(s); }
constexpr unsigned kFull = Bit(SelectorKind::kFull);
constexpr unsigned kWindow = Bit(SelectorKind::kWindow);
constexpr unsigned kMinMax = Bit(SelectorKind::kMinMax);
constexpr unsigned kCascade = Bit(SelectorKind::kCascade);
constexpr unsigned kAll = kFull | kWindow | kMinMax | kCascade;

// Three of these still add up below 2^31, so that no sum of lengths overflows.
constexpr int32_t kMaxTokens = 1 << 29;
constexpr int32_t kMaxPages = 1 << 19;  // times the largest page: kMaxTokens

// --- integers ---

template <int32_t Plan::*Field, int32_t Low, int32_t High>
SetResult SetInt(const OptionValue& value, Plan* plan) {
  const int64_t* v = std::get_if<int64_t>(&value);
  if (v == nullptr || *v < Low || *v > High) return SetResult::kRefused;
  plan->*Field = static_cast<int32_t>(*v);
  return SetResult::kOk;
}

template <int32_t Plan::*Field>
std::string IntText(const Plan& plan) {
  return std::to_string(plan.*Field);
}

template <int32_t Low, int32_t High>
std::string IntAllowed() {
  return "an integer from " + std::to_string(Low) + " to " + std::to_string(High);
}

template <int32_t Plan::*Field, int32_t Low, int32_t High>
constexpr PlanOption Int(std::string_view name, unsigned readers) {
  return {name, readers, SetInt<Field, Low, High>, IntText<Field>, IntAllowed<Low, High>};
}

// --- numbers ---

std::string NumberText(double x) {
  char buffer[32];
  const std::string text(buffer, std::to_chars(buffer, buffer + sizeof buffer, x).ptr);
  // A large number without point or exponent would be read as an integer, and overflow.
  return text.find_first_of(".ein") == std::string::npos ? text + ".0" : text;
}

template <size_t N>
std::string ListText(const std::array<double, N>& list) {
  std::string text = "[";
  for (size_t i = 0; i < N; ++i) text += (i > 0 ? ", " : "") + NumberText(list[i]);
  return text + "]";
}

template <size_t N, typename Ok>
SetResult SetList(const OptionValue& value, Ok ok, std::array<double, N>* out) {
  const auto* list = std::get_if<std::vector<double>>(&value);
  if (list == nullptr || list->size() != N || !std::all_of(list->begin(), list->end(), ok)) {
    return SetResult::kRefused;
  }
  std::copy(list->begin(), list->end(), out->begin());
  return SetResult::kOk;
}

struct RhoPreset {
  std::string_view name;
  std::array<double, 3> rho;
};
constexpr RhoPreset kRhoPresets[] = {{"aggressive", {0.5, 0.2, 0.1}},
                                     {"moderate", {0.8, 0.7, 0.7}},
                                     {"conservative", {0.9, 0.9, 0.9}}};

SetResult SetRho(const OptionValue& value, Plan* plan) {
  if (const auto* name = std::get_if<std::string>(&value)) {
    for (const RhoPreset& p : kRhoPresets) {
      if (p.name != *name) continue;
      plan->rho = p.rho;
      return SetResult::kOk;
    }
    return SetResult::kRefused;
  }
  return SetList(
      value, [](double x) { return x > 0 && x <= 1; }, &plan->rho);
}

SetResult SetThresholds(const OptionValue& value, Plan* plan) {
  return SetList(
      value, [](double x) { return x >= 0; }, &plan->thresholds);  // NaN is refused
}

// --- names ---

std::string Quoted(std::string_view name) { return '"' + std::string(name) + '"'; }

SetResult SetTier(const OptionValue& value, Plan* plan) {
  const auto* name = std::get_if<std::string>(&value);
  if (name == nullptr) return SetResult::kRefused;
  if (*name == "disk" || *name == "remote") return SetResult::kUnimplemented;
  if (*name != "device" && *name != "host") return SetResult::kRefused;
  plan->tier = *name == "host" ? TierKind::kHost : TierKind::kDevice;
  return SetResult::kOk;
}

SetResult SetCodec(const OptionValue& value, Plan*) {
  static constexpr std::string_view kFuture[] = {"lowrank", "packed", "fp8", "int4"};
  const auto* name = std::get_if<std::string>(&value);
  if (name == nullptr) return SetResult::kRefused;
  if (std::ranges::find(kFuture, *name) != std::end(kFuture)) return SetResult::kUnimplemented;
  return *name == "raw" ? SetResult::kOk : SetResult::kRefused;
}

SetResult SetCascade(const OptionValue& value, Plan* plan) {
  const auto* name = std::get_if<std::string>(&value);
  if (name == nullptr || (*name != "top" && *name != "literal")) return SetResult::kRefused;
  plan->cascade = *name == "top" ? Plan::Cascade::kTop : Plan::Cascade::kLiteral;
  return SetResult::kOk;
}

std::string CascadeText(const Plan& plan) {
  return Quoted(plan.cascade == Plan::Cascade::kTop ? "top" : "literal");
}

constexpr std::string_view kTriggers[] = {"entropy", "every", "always"};  // by Plan::Trigger

SetResult SetTrigger(const OptionValue& value, Plan* plan) {
  const auto* name = std::get_if<std::string>(&value);
  const auto* found = name == nullptr ? std::end(kTriggers) : std::ranges::find(kTriggers, *name);
  if (found == std::end(kTriggers)) return SetResult::kRefused;
  plan->trigger = static_cast<Plan::Trigger>(found - std::begin(kTriggers));
  return SetResult::kOk;
}

SetResult SetCombine(const OptionValue& value, Plan* plan) {
  const auto* name = std::get_if<std::string>(&value);
  if (name == nullptr || (*name != "and" && *name != "or")) return SetResult::kRefused;
  plan->trigger_or = *name == "or";
  return SetResult::kOk;
}

constexpr PlanOption kOptions[] = {
    {"codec", kAll, SetCodec, [](const Plan& p) { return Quoted(NameOf(p.codec)); },
     [] { return std::string("\"raw\""); }},
    {"tier", kAll, SetTier, [](const Plan& p) { return Quoted(NameOf(p.tier)); },
     [] { return std::string("\"device\" or \"host\""); }},
    Int<&Plan::min_tokens, 0, kMaxTokens>("min_tokens", kAll),
    Int<&Plan::n_dense_layers, 0, 512>("n_dense_layers", kAll),
    Int<&Plan::n_sink, 0, kMaxTokens>("n_sink", kWindow | kMinMax),
    Int<&Plan::n_recent, 1, kMaxTokens>("n_recent", kWindow | kMinMax),
    Int<&Plan::page, 1, 1024>("page", kMinMax | kCascade),
    Int<&Plan::budget, 0, kMaxTokens>("budget", kMinMax),
    Int<&Plan::pages_per_chunk, 1, 64>("pages_per_chunk", kCascade),
    Int<&Plan::chunks_per_grid, 1, 64>("chunks_per_grid", kCascade),
    Int<&Plan::sinks, 0, kMaxPages>("sinks", kCascade),
    Int<&Plan::window, 1, kMaxPages>("window", kCascade),
    {"rho", kCascade, SetRho, [](const Plan& p) { return ListText(p.rho); },
     [] {
       return std::string(
           "three numbers above 0 and at most 1 (grids, chunks, pages), or "
           "\"aggressive\", \"moderate\" or \"conservative\"");
     }},
    {"cascade", kCascade, SetCascade, CascadeText,
     [] { return std::string("\"top\" or \"literal\""); }},
    {"trigger", kCascade, SetTrigger,
     [](const Plan& p) { return Quoted(kTriggers[static_cast<size_t>(p.trigger)]); },
     [] { return std::string("\"entropy\", \"every\" or \"always\""); }},
    {"combine", kCascade, SetCombine,
     [](const Plan& p) { return Quoted(p.trigger_or ? "or" : "and"); },
     [] { return std::string("\"and\" or \"or\""); }},
    {"thresholds", kCascade, SetThresholds, [](const Plan& p) { return ListText(p.thresholds); },
     [] { return std::string("two numbers from 0 to inf (mean and variance of entropy, nats)"); }},
    Int<&Plan::every, 1, kMaxPages>("every", kCascade),
};

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

std::span<const PlanOption> PlanOptions() { return kOptions; }

bool IsFutureOption(std::string_view name) {
  static constexpr std::string_view kFuture[] = {"rest", "keep_raw", "group"};
  return std::ranges::find(kFuture, name) != std::end(kFuture);
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
