// SPDX-License-Identifier: Apache-2.0
#include "kernels/plan/plan.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <vector>

#define TOML_EXCEPTIONS 0
#include <toml++/toml.h>

#include "kernels/plan/plan_axes.h"
#include "kernels/plan/plan_options.h"

namespace kvstrata {
namespace {

constexpr size_t kMaxText = 4096;  // characters of a plan's text form

std::string Join(Names names) {
  std::string text;
  for (const std::string_view n : names) text += (text.empty() ? "" : ", ") + std::string(n);
  return text;
}

std::string DidYouMean(std::string_view name, Names known) {
  const auto nearest = Nearest(name, known);
  return nearest ? "; did you mean '" + std::string(*nearest) + "'?" : "";
}

std::string Shortened(std::string_view text) {
  constexpr size_t kShown = 60;
  return std::string(text.substr(0, kShown)) + (text.size() > kShown ? "..." : "");
}

// --- TOML ---

std::string TextOf(const toml::node& node) {
  std::ostringstream text;
  node.visit([&](const auto& value) { text << value; });
  return Shortened(text.str());
}

OptionValue ListOf(const toml::array& array) {
  std::vector<double> list;
  for (const toml::node& item : array) {
    if (!item.is_number()) return {};
    list.push_back(*item.value<double>());
  }
  return list;
}

OptionValue ValueOf(const toml::node& node) {
  if (const auto* i = node.as_integer()) return i->get();
  if (const auto* f = node.as_floating_point()) return f->get();
  if (const auto* s = node.as_string()) return s->get();
  if (const auto* b = node.as_boolean()) return b->get();
  if (const auto* a = node.as_array()) return ListOf(*a);
  return {};
}

Status SyntaxError(std::string why) {
  return InvalidArgument("PLAN_SYNTAX",
                         std::move(why) +
                             "; write a preset (quest), a preset with options (quest{budget = "
                             "1024}) or a plan of your own ({selector = \"minmax\", ...})");
}

Result<toml::table> ParseOptions(std::string_view body) {
  if (body.empty()) return toml::table{};
  const toml::parse_result parsed = toml::parse("plan = " + std::string(body));
  if (!parsed) {
    return SyntaxError(
        "plan options are no TOML inline table: " + std::string(parsed.error().description()) +
        " at column " + std::to_string(parsed.error().source().begin.column));
  }
  const toml::table* table = parsed.table()["plan"].as_table();
  KVS_CHECK(table != nullptr);  // the body starts with '{'
  return *table;
}

// --- parsing ---

// A name on an axis: its enumerator, nothing when the plan does not name one, or the Status that
// says what is wrong with it.
Result<std::optional<size_t>> FindName(const PlanAxis& axis, const toml::table& options) {
  const toml::node* node = options.get(axis.option);
  if (node == nullptr) return std::optional<size_t>();
  const std::string name = node->value<std::string>().value_or("");
  if (const auto found = std::ranges::find(axis.known, name); found != axis.known.end()) {
    return std::optional<size_t>(found - axis.known.begin());
  }
  const std::string option(axis.option);
  return InvalidArgument("PLAN_OPTION_INVALID", "option '" + option + "' = " + TextOf(*node) +
                                                    ": allowed is one of " + Join(axis.known) +
                                                    DidYouMean(name, axis.known));
}

// Which preset has a selector or a codec of this name; "" if none has.
std::string PresetWith(std::string_view name) {
  for (const PresetRow& row : PresetRows()) {
    const bool has_selector = row.selector_name == name;
    const bool has_codec =
        row.preset != nullptr && NameOf(row.preset->codecs.front().codec) == name;
    if (!has_selector && !has_codec) continue;
    return "; '" + std::string(name) + "' is the " + (has_selector ? "selector" : "codec") +
           " of preset '" + std::string(row.name) + "'";
  }
  return "";
}

Result<const PresetRow*> FindPreset(std::string_view name) {
  const auto rows = PresetRows();
  const auto found = std::ranges::find(rows, name, &PresetRow::name);
  if (found != rows.end()) return &*found;
  const Names known = PresetNames();
  return InvalidArgument("PLAN_UNKNOWN", "plan '" + Shortened(name) + "' is unknown; known are " +
                                             Join(known) + DidYouMean(name, known) +
                                             PresetWith(name));
}

// The selector that a plan's text asks for; `preset` is empty for a plan of one's own.
Result<SelectorKind> ChooseSelector(std::string_view preset, const toml::table& options) {
  KVS_ASSIGN_OR_RETURN(const std::optional<size_t> named, FindName(kSelectorAxis, options));
  if (preset.empty()) {
    if (named) return static_cast<SelectorKind>(*named);
    return InvalidArgument("PLAN_OPTION_INVALID",
                           "option 'selector' is missing: a plan of one's own names one of " +
                               Join(kSelectorAxis.known));
  }
  KVS_ASSIGN_OR_RETURN(const PresetRow* row, FindPreset(preset));
  const SelectorKind selector = row->selector;
  if (!named || static_cast<SelectorKind>(*named) == selector) return selector;
  return InvalidArgument("PLAN_COMBINATION",
                         "preset '" + std::string(preset) + "' has selector '" +
                             std::string(NameOf(selector)) + "', not '" +
                             std::string(kSelectorAxis.known[*named]) +
                             "'; for a plan of your own leave out the preset's name");
}

// The plan with its axes chosen and all else at its defaults.
Result<Plan> StartOf(std::string_view preset, const toml::table& options) {
  AxisChoice choice;
  KVS_ASSIGN_OR_RETURN(choice.selector, ChooseSelector(preset, options));
  KVS_ASSIGN_OR_RETURN(const std::optional<size_t> codec, FindName(kCodecAxis, options));
  KVS_ASSIGN_OR_RETURN(const std::optional<size_t> segmenter, FindName(kSegmenterAxis, options));
  if (codec) {
    choice.codec = static_cast<CodecKind>(*codec);
  } else if (!preset.empty()) {  // a preset's segmenter is not to be changed: see docs/plans.md
    KVS_ASSIGN_OR_RETURN(const Combination* own, Combine({choice.selector, {}, {}}));
    choice.codec = own->codec;
  }
  if (segmenter) choice.segmenter = static_cast<SegmenterKind>(*segmenter);
  KVS_ASSIGN_OR_RETURN(const Combination* combination, Combine(choice));
  Plan plan = DefaultsOf(choice.selector, *combination);
  plan.name = preset.empty() ? "custom" : preset;
  return plan;
}

// The options that the plan reads, both of their words.
std::vector<std::string_view> KnownOptions(const Plan& plan) {
  std::vector<std::string_view> known = {"selector"};
  for (const OptionTable* table : TablesOf(plan)) {
    for (const PlanOption& o : table->rows) {
      if (!o.ReadBy(plan)) continue;
      known.push_back(o.name);
      if (!o.native.empty()) known.push_back(o.native);
    }
  }
  return known;
}

Status UnknownOption(std::string_view name, const Plan& plan) {
  const std::vector<std::string_view> known = KnownOptions(plan);
  std::string text = "option '" + Shortened(name) + "' is unknown to plan '" + plan.name + "'";
  if (IsOption(name)) {
    text += ": selector '" + std::string(NameOf(plan.selector)) + "' over codec '" +
            std::string(NameOf(plan.codec)) + "' does not read it";
  } else {
    text += DidYouMean(name, known);
  }
  return InvalidArgument("PLAN_OPTION_UNKNOWN", text + "; its options are " + Join(known));
}

// Whether the plan reads an option that is called so, and calls it that alone.
Status CheckKnown(std::string_view name, const toml::table& options, const Plan& plan) {
  if (name == kSelectorAxis.option || name == kSegmenterAxis.option) return OkStatus();
  const PlanOption* const option = FindOption(plan, name);
  if (option == nullptr) return UnknownOption(name, plan);
  if (name != option->native || !options.contains(option->name)) return OkStatus();
  return InvalidArgument("PLAN_OPTION_INVALID", "option '" + std::string(name) +
                                                    "' is another word for '" +
                                                    std::string(option->name) +
                                                    "', and the plan has both; use one of them");
}

// Messages call an option what the plan calls it.
Status SetOption(const PlanOption& option, std::string_view written, const toml::node& node,
                 Plan* plan) {
  const std::string what = "option '" + std::string(written) + "' = " + TextOf(node);
  if (!option.UsedBy(*plan)) {
    return InvalidArgument("PLAN_COMBINATION",
                           what + " says something only with " + std::string(option.needs));
  }
  if (option.set(ValueOf(node), plan) == SetResult::kOk) return OkStatus();
  return InvalidArgument("PLAN_OPTION_INVALID", what + ": allowed is " + option.allowed());
}

Status SetOptions(const toml::table& options, Plan* plan) {
  for (const auto& [key, node] : options) {
    KVS_RETURN_IF_ERROR(CheckKnown(key.str(), options, *plan));
  }
  for (const OptionTable* table : TablesOf(*plan)) {
    for (const PlanOption& option : table->rows) {
      if (!option.ReadBy(*plan)) continue;
      for (const std::string_view word : {option.name, option.native}) {
        const toml::node* node = word.empty() ? nullptr : options.get(word);
        if (node != nullptr) KVS_RETURN_IF_ERROR(SetOption(option, word, *node, plan));
      }
    }
  }
  return OkStatus();
}

Status CheckTogether(const Plan& plan) {
  for (const OptionTable* table : TablesOf(plan)) {
    if (table->check != nullptr) KVS_RETURN_IF_ERROR(table->check(plan));
  }
  return OkStatus();
}

std::string_view Trimmed(std::string_view text) {
  constexpr std::string_view kBlank = " \t";
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

// A '#' outside of quotes would hide what follows it.
bool HasComment(std::string_view body) {
  char quote = 0;
  for (size_t i = 0; i < body.size(); ++i) {
    const char c = body[i];
    if (quote == '"' && c == '\\') {
      ++i;
    } else if (quote != 0) {
      if (c == quote) quote = 0;
    } else if (c == '"' || c == '\'') {
      quote = c;
    } else if (c == '#') {
      return true;
    }
  }
  return false;
}

Status CheckText(std::string_view text) {
  if (text.empty()) return SyntaxError("plan is empty");
  if (text.size() > kMaxText) {
    return SyntaxError("plan has " + std::to_string(text.size()) + " characters, at most " +
                       std::to_string(kMaxText) + " are allowed");
  }
  const auto control = [](char c) { return static_cast<unsigned char>(c) < 0x20 && c != '\t'; };
  if (std::ranges::any_of(text, control)) return SyntaxError("plan is more than one line");
  return OkStatus();
}

}  // namespace

Result<Plan> ParsePlan(std::string_view text) {
  text = Trimmed(text);
  KVS_RETURN_IF_ERROR(CheckText(text));
  const size_t brace = std::min(text.find('{'), text.size());
  const std::string_view name = Trimmed(text.substr(0, brace));
  const std::string_view body = text.substr(brace);
  if (!body.empty() && body.back() != '}') return SyntaxError("plan options end without '}'");
  if (HasComment(body)) return SyntaxError("plan options hold a comment");
  KVS_ASSIGN_OR_RETURN(const toml::table options, ParseOptions(body));
  KVS_ASSIGN_OR_RETURN(Plan plan, StartOf(name, options));
  KVS_RETURN_IF_ERROR(SetOptions(options, &plan));
  KVS_RETURN_IF_ERROR(CheckTogether(plan));
  return plan;
}

std::string FormatPlan(const Plan& plan) {
  const bool custom = plan.name == "custom";
  std::string text = custom ? "" : plan.name;
  text += "{";
  if (custom) {
    text += "segmenter = \"" + std::string(NameOf(plan.segmenter())) + "\", selector = \"" +
            std::string(NameOf(plan.selector)) + "\", ";
  }
  std::string_view separator;
  for (const OptionTable* table : TablesOf(plan)) {
    for (const PlanOption& o : table->rows) {
      if (!o.PrintedFor(plan)) continue;
      text += std::string(separator) + std::string(o.name) + " = " + o.text(plan);
      separator = ", ";
    }
  }
  return text + "}";
}

Status CheckGeometry(const Plan& plan, const Geometry& geometry) {
  for (const OptionTable* table : TablesOf(plan)) {
    if (table->check_geometry == nullptr) continue;
    KVS_RETURN_IF_ERROR(table->check_geometry(plan, geometry));
  }
  return OkStatus();
}

Names PresetNames() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> list;
    for (const PresetRow& row : PresetRows()) {
      if (row.preset != nullptr) list.push_back(row.name);
    }
    return list;
  }();
  return names;
}

std::string_view DescribePreset(std::string_view name) {
  const Result<const PresetRow*> row = FindPreset(name);
  return row.ok() && (*row)->preset != nullptr ? (*row)->preset->description : "";
}

}  // namespace kvstrata
