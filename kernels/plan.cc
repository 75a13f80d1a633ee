#include "kernels/plan.h"

#include <algorithm>
#include <optional>
#include <sstream>
#include <vector>

#define TOML_EXCEPTIONS 0
#include <toml++/toml.h>

#include "kernels/plan_options.h"
#include "kernels/segment/segmenter.h"

namespace kvstrata {
namespace {

using Names = std::span<const std::string_view>;

constexpr size_t kMaxText = 4096;  // characters of a plan's text form

// --- the axes and what goes together ---

struct SelectorRow {
  SelectorKind kind;
  std::string_view name;
  std::string_view preset;
  SegmenterKind segmenter;   // the only one whose summaries it reads
  std::string_view because;  // why no other
  std::string_view description;
};

// In the order of SelectorKind, which is also the order in which tables show the presets.
constexpr SelectorRow kSelectors[] = {
    {SelectorKind::kFull, "full", "full", SegmenterKind::kNone,
     "it reads no summaries, so an index would cost memory and serve nothing",
     "every token, every step: the baseline that the others are measured against"},
    {SelectorKind::kWindow, "window", "window", SegmenterKind::kNone,
     "it reads no summaries, so an index would cost memory and serve nothing",
     "StreamingLLM: the first 4 and the last 2044 tokens"},
    {SelectorKind::kMinMax, "minmax", "quest", SegmenterKind::kPage,
     "it ranks pages by the element-wise minimum and maximum of their keys, which only segmenter "
     "'page' keeps",
     "Quest: per layer and KV head, the pages with the largest possible logit, 2048 tokens"},
    {SelectorKind::kCascade, "cascade", "chess", SegmenterKind::kHierarchy,
     "it cascades over grids, chunks and pages, whose means only segmenter 'hierarchy' keeps",
     "CHESS: one page list for all layers and heads, chosen anew when the model is uncertain"},
};
constexpr std::string_view kPresetNames[] = {"full", "window", "quest", "chess"};
constexpr std::string_view kSelectorNames[] = {"full", "window", "minmax", "cascade"};
constexpr std::string_view kSegmenterNames[] = {"none", "page", "hierarchy"};

// Of the design, not of this build.
constexpr std::string_view kFuturePresets[] = {"tokenselect", "sentencekv", "sekv", "mosaickv",
                                               "strata"};
constexpr std::string_view kFutureSelectors[] = {"vote", "bucket", "zoom", "block"};
constexpr std::string_view kFutureSegmenters[] = {"sentence", "span", "loss"};

const SelectorRow& RowOf(SelectorKind k) { return kSelectors[static_cast<size_t>(k)]; }

bool Contains(Names names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

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

Plan DefaultsOf(SelectorKind selector) {
  Plan plan;
  plan.selector = selector;
  plan.segmenter = RowOf(selector).segmenter;
  plan.name = RowOf(selector).preset;
  switch (selector) {
    case SelectorKind::kFull:
      break;
    case SelectorKind::kWindow:
      plan.n_sink = 4, plan.n_recent = 2044;
      break;
    case SelectorKind::kMinMax:
      plan.n_recent = 1;
      break;
    case SelectorKind::kCascade:
      plan.page = 32;
      break;
    default:
      break;
  }
  return plan;
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

// A name on an axis: its index in `known`, or the Status that says what is wrong with it.
Result<size_t> FindName(std::string_view option, const toml::node& node, Names known,
                        Names future) {
  const std::string name = node.value<std::string>().value_or("");
  if (const auto found = std::ranges::find(known, name); found != known.end()) {
    return static_cast<size_t>(found - known.begin());
  }
  if (Contains(future, name)) {
    return Unimplemented("PLAN_UNIMPLEMENTED",
                         std::string(option) + " '" + name +
                             "' is in the design but not in this build; this build has " +
                             Join(known));
  }
  return InvalidArgument("PLAN_OPTION_INVALID", "option '" + std::string(option) +
                                                    "' = " + TextOf(node) + ": allowed is one of " +
                                                    Join(known) + DidYouMean(name, known));
}

Result<Plan> StartOfPreset(std::string_view name) {
  const auto found = std::ranges::find(kPresetNames, name);
  if (found != std::end(kPresetNames)) return DefaultsOf(kSelectors[found - kPresetNames].kind);
  if (Contains(kFuturePresets, name)) {
    return Unimplemented("PLAN_UNIMPLEMENTED",
                         "plan '" + std::string(name) +
                             "' is in the design but not in this build; this build has " +
                             Join(kPresetNames));
  }
  return InvalidArgument("PLAN_UNKNOWN", "plan '" + Shortened(name) + "' is unknown; known are " +
                                             Join(kPresetNames) + DidYouMean(name, kPresetNames));
}

Result<Plan> StartOfOwn(const toml::table& options) {
  const toml::node* selector = options.get("selector");
  if (selector == nullptr) {
    return InvalidArgument(
        "PLAN_OPTION_INVALID",
        "option 'selector' is missing: a plan of one's own names one of " + Join(kSelectorNames));
  }
  KVS_ASSIGN_OR_RETURN(const size_t i,
                       FindName("selector", *selector, kSelectorNames, kFutureSelectors));
  Plan plan = DefaultsOf(kSelectors[i].kind);
  plan.name = "custom";
  return plan;
}

// The axes that a plan's start has fixed: what is written must agree with it.
Status CheckAxes(const toml::table& options, const Plan& plan) {
  const SelectorRow& row = RowOf(plan.selector);
  if (const toml::node* node = options.get("selector")) {
    KVS_ASSIGN_OR_RETURN(const size_t i,
                         FindName("selector", *node, kSelectorNames, kFutureSelectors));
    if (kSelectors[i].kind != plan.selector) {
      return InvalidArgument("PLAN_COMBINATION",
                             "preset '" + plan.name + "' has selector '" + std::string(row.name) +
                                 "', not '" + std::string(kSelectorNames[i]) +
                                 "'; for a plan of your own leave out the preset's name");
    }
  }
  if (const toml::node* node = options.get("segmenter")) {
    KVS_ASSIGN_OR_RETURN(const size_t i,
                         FindName("segmenter", *node, kSegmenterNames, kFutureSegmenters));
    if (static_cast<SegmenterKind>(i) != row.segmenter) {
      return InvalidArgument("PLAN_COMBINATION", "selector '" + std::string(row.name) +
                                                     "' cannot work with segmenter '" +
                                                     std::string(kSegmenterNames[i]) +
                                                     "': " + std::string(row.because));
    }
  }
  return OkStatus();
}

Status UnknownOption(std::string_view name, const Plan& plan, const PlanOption* elsewhere) {
  std::vector<std::string_view> known = {"segmenter", "selector"};
  for (const PlanOption& o : PlanOptions()) {
    if (o.ReadBy(plan.selector)) known.push_back(o.name);
  }
  std::string text = "option '" + Shortened(name) + "' is unknown to plan '" + plan.name + "'";
  if (elsewhere != nullptr) {
    text += ": selector '" + std::string(RowOf(plan.selector).name) + "' does not read it";
  } else {
    text += DidYouMean(name, known);
  }
  return InvalidArgument("PLAN_OPTION_UNKNOWN", text + "; its options are " + Join(known));
}

Status SetOption(std::string_view name, const toml::node& node, Plan* plan) {
  if (name == "selector" || name == "segmenter") return OkStatus();  // CheckAxes did
  const auto options = PlanOptions();
  const auto found = std::ranges::find(options, name, &PlanOption::name);
  if (found == options.end()) {
    if (!IsFutureOption(name)) return UnknownOption(name, *plan, nullptr);
    return Unimplemented("PLAN_UNIMPLEMENTED", "option '" + std::string(name) +
                                                   "' is in the design but not in this build");
  }
  if (!found->ReadBy(plan->selector)) return UnknownOption(name, *plan, &*found);
  switch (found->set(ValueOf(node), plan)) {
    case SetResult::kOk:
      return OkStatus();
    case SetResult::kUnimplemented:
      return Unimplemented("PLAN_UNIMPLEMENTED",
                           std::string(name) + " " + TextOf(node) +
                               " is in the design but not in this build; this build has " +
                               found->allowed());
    case SetResult::kRefused:
      break;
  }
  return InvalidArgument(
      "PLAN_OPTION_INVALID",
      "option '" + std::string(name) + "' = " + TextOf(node) + ": allowed is " + found->allowed());
}

// Options that are fine alone and cannot work together.
Status CheckTogether(const Plan& plan) {
  // An index block holds whole grids; beyond this a block outgrows what a pool can hand out.
  constexpr int64_t kMaxGridTokens = 65536;
  const int64_t grid = int64_t{plan.page} * plan.pages_per_chunk * plan.chunks_per_grid;
  if (plan.segmenter != SegmenterKind::kHierarchy || grid <= kMaxGridTokens) return OkStatus();
  return InvalidArgument("PLAN_COMBINATION",
                         "page = " + std::to_string(plan.page) +
                             " times pages_per_chunk = " + std::to_string(plan.pages_per_chunk) +
                             " times chunks_per_grid = " + std::to_string(plan.chunks_per_grid) +
                             " makes a grid of " + std::to_string(grid) + " tokens; at most " +
                             std::to_string(kMaxGridTokens) + " can be indexed");
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

std::string_view NameOf(SegmenterKind k) { return kSegmenterNames[static_cast<size_t>(k)]; }
std::string_view NameOf(SelectorKind k) { return RowOf(k).name; }
std::string_view NameOf(CodecKind) { return "raw"; }
std::string_view NameOf(RestKind k) {
  return k == RestKind::kDrop ? "drop" : k == RestKind::kMean ? "mean" : "variance";
}
std::string_view NameOf(KeepRaw k) {
  return k == KeepRaw::kAuto ? "auto" : k == KeepRaw::kNo ? "no" : "host";
}
std::string_view NameOf(TierKind k) { return k == TierKind::kHost ? "host" : "device"; }

Result<Plan> ParsePlan(std::string_view text) {
  text = Trimmed(text);
  KVS_RETURN_IF_ERROR(CheckText(text));
  const size_t brace = std::min(text.find('{'), text.size());
  const std::string_view name = Trimmed(text.substr(0, brace));
  const std::string_view body = text.substr(brace);
  if (!body.empty() && body.back() != '}') return SyntaxError("plan options end without '}'");
  if (HasComment(body)) return SyntaxError("plan options hold a comment");
  KVS_ASSIGN_OR_RETURN(const toml::table options, ParseOptions(body));
  KVS_ASSIGN_OR_RETURN(Plan plan, name.empty() ? StartOfOwn(options) : StartOfPreset(name));
  KVS_RETURN_IF_ERROR(CheckAxes(options, plan));
  for (const auto& [key, node] : options) {
    KVS_RETURN_IF_ERROR(SetOption(key.str(), node, &plan));
  }
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
    if (!o.ReadBy(plan.selector)) continue;
    text += std::string(separator) + std::string(o.name) + " = " + o.text(plan);
    separator = ", ";
  }
  return text + "}";
}

std::span<const std::string_view> PresetNames() { return kPresetNames; }

std::string_view DescribePreset(std::string_view name) {
  const auto found = std::ranges::find(kSelectors, name, &SelectorRow::preset);
  return found == std::end(kSelectors) ? std::string_view() : found->description;
}

IndexLayout IndexOf(const Plan& plan, const Geometry& geometry) {
  return SegmenterOf(plan.segmenter).Layout(plan, geometry);
}

}  // namespace kvstrata
