// SPDX-License-Identifier: Apache-2.0
#include "client/cli/calibration_document.h"

#include <string_view>

namespace kvstrata::cli {
namespace {

// null where there are no samples.
Json Quantiles(const Distribution& d, std::initializer_list<int> percents) {
  Json out = {{"mean", d.size() > 0 ? Json(d.Mean()) : Json()}};
  for (const int p : percents) {
    out["p" + std::to_string(p)] = d.size() > 0 ? Json(d.Percentile(p)) : Json();
  }
  return out;
}

Json ChessSection(const EntropyPages& e) {
  const bool ok = e.status == "ok";
  return {{"status", e.status},
          {"page_tokens", EntropyPages::kPage},
          {"pages", e.means.size()},
          {"percentile", EntropyPages::kPercentile},
          {"thresholds", ok ? Json(e.thresholds) : Json()},
          {"share_over", ok ? Json(e.share_over) : Json()},
          {"mean", Quantiles(e.means, {50, 90, 95, 99})},
          {"variance", Quantiles(e.variances, {50, 90, 95, 99})}};
}

Json AlphaRow(const AlphaShare& a) {
  Json lengths = Json::array();
  for (const LengthBin& b : a.lengths) {
    lengths.push_back({{"from", b.from},
                       {"to", b.to == 0 ? Json() : Json(b.to)},
                       {"spans", b.spans},
                       {"tokens", b.tokens}});
  }
  return {{"alpha", a.alpha},
          {"anchor_share", a.anchor_share},
          {"persistent_share", a.persistent_share},
          {"smallest_budget", {{"rows", a.budget_rows}, {"share", a.budget_share}}},
          {"spans", a.spans},
          {"span_lengths", std::move(lengths)}};
}

Json SekvSection(const SpanShares& s) {
  Json alphas = Json::array();
  for (const AlphaShare& a : s.alphas) alphas.push_back(AlphaRow(a));
  return {{"status", s.status},
          {"tokens", s.tokens},
          {"l_min", kShortestSpan},
          {"local", kLocalWindow},
          {"alphas", std::move(alphas)}};
}

Json TokenSelectSection(const QueryCosines& q) {
  Json layers = Json::array(), rates = Json::array();
  for (const LayerCosines& l : q.layers) {
    layers.push_back({{"layer", l.layer},
                      {"flattened", Quantiles(l.flattened, {5, 25, 50, 75, 95})},
                      {"smallest_head", Quantiles(l.smallest, {5, 25, 50, 75, 95})}});
  }
  for (const HitRate& r : q.hit_rates) {
    rates.push_back(
        {{"theta", r.theta}, {"hit_rate", r.flattened}, {"hit_rate_per_head", r.per_head}});
  }
  return {{"status", q.status},
          {"steps", q.steps},
          {"cosine", std::move(layers)},
          {"cache", std::move(rates)}};
}

Json MosaicSection(const PackingLosses& p) {
  Json strategies = Json::array(), losses = Json::array();
  for (const StrategyCount& s : p.strategies) {
    strategies.push_back({{"keep", s.strategy[0]},
                          {"neighbours", s.strategy[1]},
                          {"block", s.strategy[2]},
                          {"count", s.count}});
  }
  for (const ChannelLoss& l : p.losses) {
    Json row = {{"keep", l.keep}, {"samples", l.loss.size()}};
    row["loss"] = Quantiles(l.loss, {50, 90, 95, 100});
    losses.push_back(std::move(row));
  }
  return {{"status", p.status},
          {"plan", p.plan},
          {"strategies", std::move(strategies)},
          {"losses_status", p.losses_status},
          {"losses", std::move(losses)}};
}

Json BreakEvenRow(const BreakEvenPlan& p) {
  Json points = Json::array();
  for (const BreakEvenPoint& point : p.points) {
    points.push_back({{"tokens", point.tokens},
                      {"full_ms", point.full_ms},
                      {"plan_ms", point.plan_ms},
                      {"ratio", point.ratio()},
                      {"sparse", point.sparse}});
  }
  return {{"plan", p.plan},
          {"status", p.status},
          {"break_even_tokens", p.tokens ? Json(*p.tokens) : Json()},
          {"points", std::move(points)}};
}

Json BreakEvenSection(const BreakEven& b, const std::vector<std::string>& paths) {
  Json plans = Json::array();
  for (const BreakEvenPlan& p : b.plans) plans.push_back(BreakEvenRow(p));
  return {{"status", b.status},
          {"trace", b.plans.empty() ? Json() : Json(paths[b.trace])},
          {"steps", b.steps},
          {"plans", std::move(plans)}};
}

Json TraceRow(const Trace& trace, const std::string& path) {
  const TraceShape& shape = trace.shape();
  return {{"path", path},
          {"model", trace.Metadata("model")},
          {"source", trace.Metadata("source")},
          {"prompt_tokens", shape.prompt},
          {"steps", shape.steps},
          {"layers", trace.layers().size()}};
}

// ---- tables ----

std::string Tokens(const Json& value) {
  return std::to_string(static_cast<int64_t>(value.get<double>() + 0.5));
}

constexpr Column kChess[] = {
    {"PAGES", "/pages"},
    {"THRESHOLDS", "/thresholds"},
    {"EXCEED-BOTH", "/share_over", Percent},
    {"MEAN-P50", "/mean/p50", Fixed4},
    {"MEAN-P99", "/mean/p99", Fixed4},
    {"VARIANCE-P50", "/variance/p50", Fixed4},
    {"VARIANCE-P99", "/variance/p99", Fixed4},
};
constexpr Column kSekv[] = {
    {"ALPHA", "/alpha", Fixed2, true},
    {"ANCHORS", "/anchor_share", Percent, true},
    {"PERSISTENT", "/persistent_share", Percent, true},
    {"SPANS", "/spans", nullptr, true},
    {"SMALLEST-BUDGET", "/smallest_budget/rows", nullptr, true},
    {"SHARE", "/smallest_budget/share", Percent, true},
};
constexpr Column kLengths[] = {
    {"ALPHA", "/alpha", Fixed2, true},    {"LENGTH", "/from", nullptr, true},
    {"BELOW", "/to", nullptr, true},      {"SPANS", "/spans", nullptr, true},
    {"TOKENS", "/tokens", nullptr, true},
};
constexpr Column kCosine[] = {
    {"LAYER", "/layer", nullptr, true},
    {"P5", "/flattened/p5", Fixed4, true},
    {"P50", "/flattened/p50", Fixed4, true},
    {"P95", "/flattened/p95", Fixed4, true},
    {"SMALLEST-P5", "/smallest_head/p5", Fixed4, true},
    {"SMALLEST-P50", "/smallest_head/p50", Fixed4, true},
    {"SMALLEST-P95", "/smallest_head/p95", Fixed4, true},
};
constexpr Column kCache[] = {
    {"THETA", "/theta", Fixed2, true},
    {"HITS", "/hit_rate", Percent, true},
    {"HITS-PER-HEAD", "/hit_rate_per_head", Percent, true},
};
constexpr Column kStrategies[] = {
    {"KEEP", "/keep", nullptr, true},
    {"NEIGHBOURS", "/neighbours", nullptr, true},
    {"BLOCK", "/block", nullptr, true},
    {"SEGMENTS-X-HEADS", "/count", nullptr, true},
};
constexpr Column kLosses[] = {
    {"KEEP", "/keep", nullptr, true},        {"LOSS", "/loss/mean", Fixed4, true},
    {"P50", "/loss/p50", Fixed4, true},      {"P90", "/loss/p90", Fixed4, true},
    {"LARGEST", "/loss/p100", Fixed4, true},
};
constexpr Column kPoints[] = {
    {"PLAN", "/plan"},
    {"TOKENS", "/tokens", nullptr, true},
    {"FULL-MS", "/full_ms", Fixed2, true},
    {"PLAN-MS", "/plan_ms", Fixed2, true},
    {"RATIO", "/ratio", Fixed2, true},
    {"SPARSE", "/sparse", YesNo},
};
constexpr Column kBreakEven[] = {{"PLAN", "/plan"},
                                 {"BREAK-EVEN-TOKENS", "/break_even_tokens", Tokens, true},
                                 {"STATUS", "/status", nullptr, false, 1, 16}};
constexpr Column kPlans[] = {{"NAME", "/name"}, {"TEXT", "/text", nullptr, false, 1, 24}};

class Tables {
 public:
  Tables(const Style& style, std::ostream& out) : style_(style), out_(out) {}

  // False: the section has nothing but its status.
  bool Heading(const char* title, const Json& section) {
    const std::string status = section["status"];
    if (style_.headers) {
      out_ << (first_ ? "" : "\n") << title << (status == "ok" ? "" : ": " + Printable(status))
           << "\n";
    }
    first_ = false;
    return status == "ok";
  }
  void List(const Json& document, std::string_view rows, std::span<const Column> columns) {
    if (!document[std::string(rows)].empty()) PrintList(style_, document, rows, columns, out_);
  }
  void Record(const Json& document, std::span<const Column> columns) {
    PrintRecord(style_, document, columns, out_);
  }
  void Note(const std::string& text) {
    if (style_.headers) out_ << Printable(text) << "\n";
  }

 private:
  const Style& style_;
  std::ostream& out_;
  bool first_ = true;
};

// The rows of a list within each row of a list, with one key of the outer row in front.
Json Flattened(const Json& outer, const char* key, const char* inner) {
  Json rows = Json::array();
  for (const Json& row : outer) {
    for (const Json& part : row[inner]) {
      Json joined = {{key, row[key]}};
      joined.update(part);
      rows.push_back(std::move(joined));
    }
  }
  return {{"rows", std::move(rows)}};
}

void PrintSekv(const Json& section, Tables* tables) {
  if (!tables->Heading("sekv: what stays at full resolution", section)) return;
  tables->List(section, "alphas", kSekv);
  Json lengths = {{"rows", Json::array()}};  // those that occur
  const Json bins = Flattened(section["alphas"], "alpha", "span_lengths");
  for (const Json& bin : bins["rows"]) {
    if (bin["spans"] > 0) lengths["rows"].push_back(bin);
  }
  tables->List(lengths, "rows", kLengths);
}

void PrintTokenSelect(const Json& section, Tables* tables) {
  if (!tables->Heading("tokenselect: cosine of consecutive queries", section)) return;
  tables->List(section, "cosine", kCosine);
  tables->List(section, "cache", kCache);
}

void PrintMosaic(const Json& section, Tables* tables) {
  if (!tables->Heading("mosaickv: strategies found, loss by channels kept", section)) return;
  tables->List(section, "strategies", kStrategies);
  tables->List(section, "losses", kLosses);
  if (section["losses"].empty()) {
    tables->Note("no loss curve: " + section["losses_status"].get<std::string>());
  }
}

void PrintBreakEven(const Json& section, Tables* tables) {
  if (!tables->Heading("break-even with full attention, on this machine", section)) return;
  tables->List(section, "plans", kBreakEven);
  tables->List(Flattened(section["plans"], "plan", "points"), "rows", kPoints);
}

}  // namespace

Json CalibrationDocument(const std::vector<Trace>& traces, const std::vector<std::string>& paths,
                         const Calibration& calibration, const std::vector<CalibratedPlan>& plans,
                         const std::string& file) {
  Json trace_rows = Json::array(), plan_rows = Json::array();
  for (size_t i = 0; i < traces.size(); ++i) trace_rows.push_back(TraceRow(traces[i], paths[i]));
  for (const CalibratedPlan& plan : plans) {
    plan_rows.push_back({{"name", plan.name}, {"text", plan.text}, {"why", plan.why}});
  }
  return {{"traces", std::move(trace_rows)},
          {"chess", ChessSection(calibration.entropy)},
          {"sekv", SekvSection(calibration.spans)},
          {"tokenselect", TokenSelectSection(calibration.cosines)},
          {"mosaickv", MosaicSection(calibration.packing)},
          {"break_even", BreakEvenSection(calibration.break_even, paths)},
          {"plans", std::move(plan_rows)},
          {"file", file}};
}

void PrintCalibration(const Style& style, const Json& document, std::ostream& out) {
  if (style.IsDocument()) return PrintDocument(style.format, document, out);
  if (!style.IsTable()) return PrintList(style, document, "plans", kPlans, out);
  Tables tables(style, out);
  if (tables.Heading("chess: entropy of pages of 32 generated tokens", document["chess"])) {
    tables.Record(document["chess"], kChess);
  }
  PrintSekv(document["sekv"], &tables);
  PrintTokenSelect(document["tokenselect"], &tables);
  PrintMosaic(document["mosaickv"], &tables);
  PrintBreakEven(document["break_even"], &tables);
  tables.Heading("plans", {{"status", document["plans"].empty() ? "none" : "ok"}});
  tables.List(document, "plans", kPlans);
  const std::string file = document["file"];
  if (!file.empty()) tables.Note("written to " + file);
}

}  // namespace kvstrata::cli
