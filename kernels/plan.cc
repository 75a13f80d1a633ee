#include "kernels/plan.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <vector>

#define TOML_EXCEPTIONS 0
#include <toml++/toml.h>

#include "kernels/plan_axes.h"
#include "kernels/plan_options.h"
#include "kernels/segment/segmenter.h"

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

Result<const PresetRow*> FindPreset(std::string_view name) {
  const auto rows = PresetRows();
  const auto found = std::ranges::find(rows, name, &PresetRow::name);
  if (found != rows.end()) return &*found;
  const Names known = PresetNames();
  return InvalidArgument("PLAN_UNKNOWN", "plan '" + Shortened(name) + "' is unknown; known are " +
                                             Join(known) + DidYouMean(name, known));
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
  Plan plan = DefaultsOf(*combination);
  plan.name = preset.empty() ? "custom" : preset;
  if (preset.empty()) return plan;
  KVS_ASSIGN_OR_RETURN(const PresetRow* row, FindPreset(preset));
  if (row->adjust != nullptr) row->adjust(&plan);
  return plan;
}

Status UnknownOption(std::string_view name, const Plan& plan, const PlanOption* elsewhere) {
  std::vector<std::string_view> known = {"segmenter", "selector"};
  for (const PlanOption& o : PlanOptions()) {
    if (o.ReadBy(plan)) known.push_back(o.name);
  }
  std::string text = "option '" + Shortened(name) + "' is unknown to plan '" + plan.name + "'";
  if (elsewhere != nullptr) {
    text += ": selector '" + std::string(NameOf(plan.selector)) + "' over codec '" +
            std::string(NameOf(plan.codec)) + "' does not read it";
  } else {
    text += DidYouMean(name, known);
  }
  return InvalidArgument("PLAN_OPTION_UNKNOWN", text + "; its options are " + Join(known));
}

Status CheckKnown(std::string_view name, const Plan& plan) {
  if (name == "selector" || name == "segmenter") return OkStatus();
  const auto options = PlanOptions();
  const auto found = std::ranges::find(options, name, &PlanOption::name);
  if (found == options.end()) return UnknownOption(name, plan, nullptr);
  return found->ReadBy(plan) ? OkStatus() : UnknownOption(name, plan, &*found);
}

Status SetOption(const PlanOption& option, const toml::node& node, Plan* plan) {
  const std::string name(option.name);
  if (!option.UsedBy(*plan)) {
    return InvalidArgument("PLAN_COMBINATION", "option '" + name + "' = " + TextOf(node) +
                                                   " says something only with " +
                                                   std::string(option.needs));
  }
  if (option.set(ValueOf(node), plan) == SetResult::kOk) return OkStatus();
  return InvalidArgument("PLAN_OPTION_INVALID", "option '" + name + "' = " + TextOf(node) +
                                                    ": allowed is " + option.allowed());
}

Status SetOptions(const toml::table& options, Plan* plan) {
  for (const auto& [key, node] : options) KVS_RETURN_IF_ERROR(CheckKnown(key.str(), *plan));
  for (const PlanOption& option : PlanOptions()) {
    const toml::node* node = options.get(option.name);
    if (node != nullptr) KVS_RETURN_IF_ERROR(SetOption(option, *node, plan));
  }
  return OkStatus();
}

// --- options that are fine alone and cannot work together ---

std::string Assigned(std::string_view name, int64_t value) {
  return std::string(name) + " = " + std::to_string(value);
}

// An index block holds whole grids; beyond this a block outgrows what a pool can hand out.
Status CheckGrid(const Plan& plan) {
  constexpr int64_t kMaxGridTokens = 65536;
  const int64_t grid = int64_t{plan.page} * plan.pages_per_chunk * plan.chunks_per_grid;
  if (grid <= kMaxGridTokens) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION",
                         Assigned("page", plan.page) + " times " +
                             Assigned("pages_per_chunk", plan.pages_per_chunk) + " times " +
                             Assigned("chunks_per_grid", plan.chunks_per_grid) +
                             " makes a grid of " + std::to_string(grid) + " tokens; at most " +
                             std::to_string(kMaxGridTokens) + " can be indexed");
}

Status CheckTree(const Plan& plan) {
  if (!plan.tree || plan.rest != RestKind::kDrop) return OkStatus();
  return InvalidArgument(
      "PLAN_COMBINATION",
      "tree = true shows what is not selected at the resolution of the tree, and "
      "rest = \"drop\" drops it; use rest = \"mean\"");
}

Status CheckCompact(const Plan& plan) {
  if (!plan.compact || plan.rest == RestKind::kDrop) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION",
                         "compact = true gives every attended row a place of its own, and rest = "
                         "\"" +
                             std::string(NameOf(plan.rest)) +
                             "\" attends one row for many; use rest = \"drop\"");
}

// What keys that are stored before rotary embedding rule out, or what needs them.
Status CheckRotary(const Plan& plan, const Geometry& geometry) {
  if (!geometry.pre_rope()) {
    if (!plan.compact) return OkStatus();
    return InvalidArgument("PLAN_COMBINATION",
                           "compact = true moves rows to other rotary positions, and this model's "
                           "keys are stored after rotary embedding; register it with "
                           "keys_pre_rope = 1, or use compact = false");
  }
  if (plan.codec != CodecKind::kRaw) {
    return Unimplemented("PLAN_UNIMPLEMENTED",
                         "codec '" + std::string(NameOf(plan.codec)) +
                             "' over keys stored before rotary embedding (keys_pre_rope = 1) does "
                             "not exist in this build: it would have to rotate what it unpacks; "
                             "use codec \"raw\", or register the model with keys_pre_rope = 0");
  }
  if (plan.rest != RestKind::kDrop) {
    return InvalidArgument(
        "PLAN_COMBINATION",
        "rest = \"" + std::string(NameOf(plan.rest)) +
            "\" attends means of keys, and a mean of keys stored before rotary "
            "embedding (keys_pre_rope = 1) has no position to be rotated to; use "
            "rest = \"drop\"");
  }
  return OkStatus();
}

// Kept tokens are counted in 32 bits.
Status CheckKept(const Plan& plan) {
  constexpr double kMaxKept = 1 << 30;
  if (plan.r * plan.tau <= kMaxKept) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION", Assigned("tau", plan.tau) +
                                                 " times r keeps more than 2^30 tokens; r or tau "
                                                 "must be smaller");
}

Status CheckBuffer(const Plan& plan) {
  constexpr int kLargestBlock = 16;
  if (plan.buffer % kLargestBlock != 0) {
    return InvalidArgument("PLAN_COMBINATION", Assigned("buffer", plan.buffer) +
                                                   " holds no whole number of the largest blocks "
                                                   "of 16 tokens; use a multiple of 16");
  }
  if (plan.segment < plan.buffer) {
    return InvalidArgument("PLAN_COMBINATION", Assigned("segment", plan.segment) +
                                                   " is less than one flush of " +
                                                   Assigned("buffer", plan.buffer));
  }
  if (plan.drift > 0 && plan.min_segment > plan.segment) {
    return InvalidArgument("PLAN_COMBINATION", Assigned("min_segment", plan.min_segment) +
                                                   " is more than " +
                                                   Assigned("segment", plan.segment));
  }
  return OkStatus();
}

Status CheckKeep(const Plan& plan, int head_dim) {
  const int stored = plan.truncate ? head_dim - head_dim / 4 : head_dim;
  if (plan.keep > stored) {
    return InvalidArgument("PLAN_COMBINATION",
                           Assigned("keep", plan.keep) + " is more than the " +
                               std::to_string(stored) + " channels of " +
                               Assigned("head_dim", head_dim) + " that may be stored" +
                               (plan.truncate ? "; truncate = true drops the lowest quarter" : ""));
  }
  if (plan.keep % plan.neighbours == 0) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION", Assigned("keep", plan.keep) +
                                                 " elements are no whole number of groups of " +
                                                 Assigned("neighbours", plan.neighbours));
}

Status CheckTogether(const Plan& plan) {
  constexpr int kLargestHeadDim = 256;
  if (plan.segmenter == SegmenterKind::kHierarchy) KVS_RETURN_IF_ERROR(CheckGrid(plan));
  if (plan.segmenter == SegmenterKind::kSentence) KVS_RETURN_IF_ERROR(CheckKept(plan));
  KVS_RETURN_IF_ERROR(CheckTree(plan));
  KVS_RETURN_IF_ERROR(CheckCompact(plan));
  if (plan.codec != CodecKind::kPacked) return OkStatus();
  KVS_RETURN_IF_ERROR(CheckBuffer(plan));
  return CheckKeep(plan, kLargestHeadDim);
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
    text += "segmenter = \"" + std::string(NameOf(plan.segmenter)) + "\", selector = \"" +
            std::string(NameOf(plan.selector)) + "\", ";
  }
  std::string_view separator;
  for (const PlanOption& o : PlanOptions()) {
    if (!o.UsedBy(plan)) continue;
    text += std::string(separator) + std::string(o.name) + " = " + o.text(plan);
    separator = ", ";
  }
  return text + "}";
}

Status CheckGeometry(const Plan& plan, const Geometry& geometry) {
  KVS_RETURN_IF_ERROR(CheckRotary(plan, geometry));
  if (plan.codec == CodecKind::kPacked && !plan.search) {
    KVS_RETURN_IF_ERROR(CheckKeep(plan, geometry.head_dim));
  }
  if (plan.codec == CodecKind::kLowRank && plan.d_route > geometry.head_dim) {
    return InvalidArgument("PLAN_COMBINATION",
                           Assigned("d_route", plan.d_route) + " directions are more than " +
                               Assigned("head_dim", geometry.head_dim) + " has");
  }
  return OkStatus();
}

Names PresetNames() {
  static const std::vector<std::string_view> names = [] {
    std::vector<std::string_view> list;
    for (const PresetRow& row : PresetRows()) list.push_back(row.name);
    return list;
  }();
  return names;
}

std::string_view DescribePreset(std::string_view name) {
  const auto rows = PresetRows();
  const auto found = std::ranges::find(rows, name, &PresetRow::name);
  return found == rows.end() ? std::string_view() : found->description;
}

IndexLayout IndexOf(const Plan& plan, const Geometry& geometry) {
  return SegmenterOf(plan.segmenter).Layout(plan, geometry);
}

}  // namespace kvstrata
