#include "kernels/plan_options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <type_traits>

namespace kvstrata {
namespace {

constexpr unsigned kAll = 0xFF;  // every selector
constexpr unsigned kWindow = Reader(SelectorKind::kWindow);
constexpr unsigned kMinMax = Reader(SelectorKind::kMinMax);
constexpr unsigned kCascade = Reader(SelectorKind::kCascade);
constexpr unsigned kVote = Reader(SelectorKind::kVote);
constexpr unsigned kBucket = Reader(SelectorKind::kBucket);
constexpr unsigned kZoom = Reader(SelectorKind::kZoom);
constexpr unsigned kBlock = Reader(SelectorKind::kBlock);
constexpr unsigned kLowRank = Reader(CodecKind::kLowRank);
constexpr unsigned kPacked = Reader(CodecKind::kPacked);
constexpr unsigned kPage = Reader(SegmenterKind::kPage);  // minmax; block over raw pages
constexpr unsigned kHierarchy = Reader(SegmenterKind::kHierarchy);
constexpr unsigned kSentence = Reader(SegmenterKind::kSentence);

constexpr int32_t kMaxTokens = kMostMinTokens;
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

struct NumberRange {
  double low, high;
  bool above = false;  // low itself is not allowed
};
constexpr NumberRange kShare = {0, 1, true};
constexpr NumberRange kCosine = {-1, 1};
constexpr NumberRange kLoss = {0, 1};
constexpr NumberRange kTotalLoss = {0, 1e9};
constexpr NumberRange kFactor = {0, 1e6, true};
constexpr NumberRange kDeviations = {0, 100};

template <double Plan::*Field, const NumberRange& R>
SetResult SetNumber(const OptionValue& value, Plan* plan) {
  const int64_t* i = std::get_if<int64_t>(&value);
  const double* f = std::get_if<double>(&value);
  if (i == nullptr && f == nullptr) return SetResult::kRefused;
  const double x = f != nullptr ? *f : static_cast<double>(*i);
  if (!(x >= R.low && x <= R.high) || (R.above && x == R.low)) return SetResult::kRefused;
  plan->*Field = x + 0.0;  // no -0, which would be printed
  return SetResult::kOk;
}

template <double Plan::*Field>
std::string NumberFieldText(const Plan& plan) {
  return NumberText(plan.*Field);
}

std::string Plain(double x) {
  char buffer[32];
  return {buffer, std::to_chars(buffer, buffer + sizeof buffer, x).ptr};
}

template <const NumberRange& R>
std::string NumberAllowed() {
  return R.above ? "a number above " + Plain(R.low) + " and at most " + Plain(R.high)
                 : "a number from " + Plain(R.low) + " to " + Plain(R.high);
}

template <double Plan::*Field, const NumberRange& R>
constexpr PlanOption Number(std::string_view name, unsigned readers) {
  return {name, readers, SetNumber<Field, R>, NumberFieldText<Field>, NumberAllowed<R>};
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

// Names by value: of an enumeration in its order, or of false and true.
using NameList = std::span<const std::string_view>;
constexpr std::string_view kTiers[] = {"device", "host"};
constexpr std::string_view kCascades[] = {"top", "literal"};
constexpr std::string_view kTriggers[] = {"entropy", "every", "always"};
constexpr std::string_view kCombines[] = {"and", "or"};
constexpr std::string_view kRests[] = {"drop", "mean"};
constexpr std::string_view kGroups[] = {"max", "softmax"};
constexpr std::string_view kCosines[] = {"flat", "head"};
constexpr std::string_view kStrategies[] = {"fixed", "search"};
constexpr std::string_view kClosings[] = {"loss", "drift"};
constexpr std::string_view kKeepRaws[] = {"auto", "no", "host"};

std::optional<size_t> IndexIn(NameList names, const OptionValue& value) {
  const auto* name = std::get_if<std::string>(&value);
  if (name == nullptr) return std::nullopt;
  const auto found = std::ranges::find(names, *name);
  if (found == names.end()) return std::nullopt;
  return static_cast<size_t>(found - names.begin());
}

template <auto Field, const auto& Known>
SetResult SetName(const OptionValue& value, Plan* plan) {
  const auto index = IndexIn(Known, value);
  if (!index) return SetResult::kRefused;
  plan->*Field = static_cast<std::remove_reference_t<decltype(plan->*Field)>>(*index);
  return SetResult::kOk;
}

template <auto Field, const auto& Known>
std::string NameText(const Plan& plan) {
  return Quoted(Known[static_cast<size_t>(plan.*Field)]);
}

std::string AnyOf(NameList names) {  // "a", "b" or "c"
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " or " : ", ";
    text += Quoted(names[i]);
  }
  return text;
}

template <const auto& Known>
std::string NamesAllowed() {
  return AnyOf(Known);
}

template <auto Field, const auto& Known>
constexpr PlanOption Name(std::string_view name, unsigned readers) {
  return {name, readers, SetName<Field, Known>, NameText<Field, Known>, NamesAllowed<Known>};
}

// --- truth values ---

template <bool Plan::*Field>
SetResult SetFlag(const OptionValue& value, Plan* plan) {
  const bool* v = std::get_if<bool>(&value);
  if (v == nullptr) return SetResult::kRefused;
  plan->*Field = *v;
  return SetResult::kOk;
}

template <bool Plan::*Field>
constexpr PlanOption Flag(std::string_view name, unsigned readers) {
  return {name, readers, SetFlag<Field>,
          [](const Plan& p) { return std::string(p.*Field ? "true" : "false"); },
          [] { return std::string("true or false"); }};
}

// --- options with rules of their own ---

// Few values far apart.
template <int32_t Plan::*Field, int32_t... Values>
constexpr PlanOption OneOf(std::string_view name, unsigned readers) {
  return {name, readers,
          [](const OptionValue& value, Plan* plan) {
            const int64_t* v = std::get_if<int64_t>(&value);
            if (v == nullptr || !((*v == Values) || ...)) return SetResult::kRefused;
            plan->*Field = static_cast<int32_t>(*v);
            return SetResult::kOk;
          },
          IntText<Field>,
          [] {
            std::string text;
            ((text += (text.empty() ? "" : ", ") + std::to_string(Values)), ...);
            return "one of " + text;
          }};
}

constexpr std::string_view kAutoName = "auto";

SetResult SetMinTokens(const OptionValue& value, Plan* plan) {
  const auto* name = std::get_if<std::string>(&value);
  if (name == nullptr) return SetInt<&Plan::min_tokens, 0, kMaxTokens>(value, plan);
  if (*name != kAutoName) return SetResult::kRefused;
  plan->min_tokens = kAutoTokens;
  return SetResult::kOk;
}

std::string MinTokensText(const Plan& plan) {
  return plan.min_tokens == kAutoTokens ? Quoted(kAutoName) : std::to_string(plan.min_tokens);
}

// How far a segment may drift unless the plan says (our choice).
constexpr double kDrift = 1.5;

SetResult SetClosing(const OptionValue& value, Plan* plan) {
  const auto index = IndexIn(kClosings, value);
  if (!index) return SetResult::kRefused;
  plan->drift = *index == 0 ? 0 : kDrift;
  return SetResult::kOk;
}

// A file in the daemon's folder: a plan comes from clients and must not name a path.
SetResult SetParameters(const OptionValue& value, Plan* plan) {
  constexpr size_t kMaxName = 128;
  const auto* name = std::get_if<std::string>(&value);
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '_' || c == '-';
  };
  if (name == nullptr || name->size() > kMaxName || name->starts_with('.') ||
      !std::ranges::all_of(*name, plain)) {
    return SetResult::kRefused;
  }
  plan->parameters = *name;
  return SetResult::kOk;
}

constexpr auto kAuto = [](const Plan& p) { return p.min_tokens == kAutoTokens; };
constexpr auto kRawRows = [](const Plan& p) { return p.codec == CodecKind::kRaw; };
constexpr auto kFixed = [](const Plan& p) { return !p.search; };
constexpr auto kSearch = [](const Plan& p) { return p.search; };
constexpr auto kByLoss = [](const Plan& p) { return p.drift == 0; };
constexpr auto kByDrift = [](const Plan& p) { return p.drift > 0; };
constexpr std::string_view kNeedsFixed = "strategy = \"fixed\"";
constexpr std::string_view kNeedsSearch = "strategy = \"search\"";

constexpr PlanOption kOptions[] = {
    // plan.cc has set the codec, an axis; here it is printed.
    {"codec", kAll, [](const OptionValue&, Plan*) { return SetResult::kOk; },
     [](const Plan& p) { return Quoted(NameOf(p.codec)); }, nullptr},
    Name<&Plan::tier, kTiers>("tier", kAll),
    {"min_tokens", kAll, SetMinTokens, MinTokensText,
     [] { return IntAllowed<0, kMaxTokens>() + ", or \"auto\""; }},
    Int<&Plan::batch, 1, 4096>("batch", kAll).When(kAuto, "min_tokens = \"auto\""),
    Int<&Plan::n_dense_layers, 0, 512>("n_dense_layers", kAll),
    Flag<&Plan::compact>("compact", kWindow | kMinMax | kCascade | kVote | kBucket | kBlock)
        .When(kRawRows, "codec = \"raw\""),
    Int<&Plan::n_sink, 0, kMaxTokens>("n_sink", kWindow | kMinMax),
    Int<&Plan::n_recent, 1, kMaxTokens>("n_recent", kWindow | kPage),
    Int<&Plan::page, 1, 1024>("page", kPage | kHierarchy),
    Int<&Plan::budget, 0, kMaxTokens>("budget", kMinMax),
    Int<&Plan::pages_per_chunk, 1, 64>("pages_per_chunk", kHierarchy),
    Int<&Plan::chunks_per_grid, 1, 64>("chunks_per_grid", kHierarchy),
    Int<&Plan::sinks, 0, kMaxPages>("sinks", kCascade),
    Int<&Plan::window, 1, kMaxPages>("window", kCascade),
    {"rho", kCascade, SetRho, [](const Plan& p) { return ListText(p.rho); },
     [] {
       return std::string(
           "three numbers above 0 and at most 1 (grids, chunks, pages), or "
           "\"aggressive\", \"moderate\" or \"conservative\"");
     }},
    Name<&Plan::cascade, kCascades>("cascade", kCascade),
    Name<&Plan::trigger, kTriggers>("trigger", kCascade),
    Name<&Plan::trigger_or, kCombines>("combine", kCascade),
    {"thresholds", kCascade, SetThresholds, [](const Plan& p) { return ListText(p.thresholds); },
     [] { return std::string("two numbers from 0 to inf (mean and variance of entropy, nats)"); }},
    Int<&Plan::every, 1, kMaxPages>("every", kCascade),
    Flag<&Plan::centred>("centred", kCascade),

    Int<&Plan::k, 0, kMaxTokens>("k", kVote),
    Int<&Plan::n_init, 0, kMaxTokens>("n_init", kVote),
    Int<&Plan::n_local, 1, kMaxTokens>("n_local", kVote),
    Number<&Plan::theta, kCosine>("theta", kVote),
    Name<&Plan::cosine_per_head, kCosines>("cosine", kVote),
    Flag<&Plan::append_departed>("append_departed", kVote),
    Int<&Plan::max_pool, 1, 1024>("max_pool", kVote),
    Flag<&Plan::scale_votes>("scale", kVote),
    Int<&Plan::chunk, 1, 65536>("chunk", kVote),

    Int<&Plan::tau, 0, kMaxTokens>("tau", kBucket),
    Number<&Plan::r, kFactor>("r", kSentence),
    Int<&Plan::n_obs, 1, 1024>("n_obs", kSentence),
    Int<&Plan::start, 0, kMaxTokens>("start", kSentence),
    Int<&Plan::recent, 1, kMaxTokens>("recent", kSentence),
    Int<&Plan::pool, 1, 1024>("pool", kSentence),
    Int<&Plan::max_length, 1, 65536>("max_length", kBucket),
    Flag<&Plan::keep_rest>("keep_rest", kSentence),
    Flag<&Plan::per_query_head>("per_query_head", kBucket),

    Int<&Plan::rows, -1, kMaxTokens>("rows", kZoom),
    Number<&Plan::rows_share, kShare>("rows_share", kZoom),
    Number<&Plan::alpha, kDeviations>("alpha", kLowRank),
    Int<&Plan::l_min, 1, kMaxTokens>("l_min", kLowRank),
    Int<&Plan::r_max, 1, 256>("r_max", kLowRank),
    Int<&Plan::d_route, 1, 256>("d_route", kLowRank),
    Int<&Plan::local, 0, kMaxTokens>("local", kLowRank),
    {"parameters", kLowRank, SetParameters, [](const Plan& p) { return Quoted(p.parameters); },
     [] {
       return std::string(
           "a file's name in the daemon's folder of parameters (letters, digits, '.', '_', '-'), "
           "or "
           "\"\" for none");
     }},
    Name<&Plan::factors, kTiers>("factors", kLowRank),

    Number<&Plan::share, kShare>("share", kBlock),
    Name<&Plan::group_softmax, kGroups>("group", kMinMax | kBlock),
    Name<&Plan::rest, kRests>("rest", kPage | kHierarchy),
    Flag<&Plan::tree>("tree", kCascade),

    Name<&Plan::search, kStrategies>("strategy", kPacked),
    Int<&Plan::keep, 0, 256>("keep", kPacked).When(kFixed, kNeedsFixed),
    OneOf<&Plan::neighbours, 1, 2, 4>("neighbours", kPacked).When(kFixed, kNeedsFixed),
    OneOf<&Plan::block, 4, 8, 16>("block", kPacked).When(kFixed, kNeedsFixed),
    Number<&Plan::max_channel_loss, kLoss>("max_channel_loss", kPacked).When(kSearch, kNeedsSearch),
    Number<&Plan::max_block_loss, kLoss>("max_block_loss", kPacked).When(kSearch, kNeedsSearch),
    Flag<&Plan::truncate>("truncate", kPacked),
    Int<&Plan::segment, 16, 1 << 20>("segment", kPacked),
    Int<&Plan::buffer, 16, 4096>("buffer", kPacked),
    {"closing", kPacked, SetClosing,
     [](const Plan& p) { return Quoted(kClosings[p.drift > 0 ? 1 : 0]); }, NamesAllowed<kClosings>},
    Number<&Plan::close_loss, kTotalLoss>("close_loss", kPacked)
        .When(kByLoss, "closing = \"loss\""),
    Number<&Plan::drift, kFactor>("drift", kPacked).When(kByDrift, "closing = \"drift\""),
    Int<&Plan::min_segment, 16, 1 << 20>("min_segment", kPacked)
        .When(kByDrift, "closing = \"drift\""),
    Number<&Plan::max_loss, kShare>("max_loss", kLowRank | kPacked),
    Name<&Plan::keep_raw, kKeepRaws>("keep_raw", kLowRank | kPacked),
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

std::string_view NameOf(TierKind k) { return kTiers[static_cast<size_t>(k)]; }
std::string_view NameOf(RestKind k) { return kRests[static_cast<size_t>(k)]; }
std::string_view NameOf(KeepRaw k) { return kKeepRaws[static_cast<size_t>(k)]; }

std::span<const PlanOption> PlanOptions() { return kOptions; }

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
