// replay TRACE --plan P: what a plan loses and reads on recorded data.
#include "client/cli/replay_command.h"

#include <unistd.h>

#include <iostream>
#include <memory>

#include "client/cli/invocation.h"
#include "kvstrata/kvstrata.h"

namespace kvstrata::cli {
namespace {

constexpr Column kTable[] = {
    {"PLAN", "/plan"},
    {"KV TOKENS", "/kv_tokens_per_step", Fixed2, true},
    {"KV BYTES", "/kv_bytes_per_step/total", Bytes, true},
    {"RECALL", "/mass_recall/mean", Fixed4, true},
    {"P5", "/mass_recall/p5", Fixed4, true},
    {"OVERLAP", "/oracle_overlap", Fixed4, true},
    {"ERROR", "/output_error/mean", Fixed4, true},
    {"P95", "/output_error/p95", Fixed4, true},
    {"SELECTIONS", "/selections", nullptr, true},
    {"MS/STEP", "/ms_per_step/median", Fixed2, true},
    {"STATUS", "/status"},
};

// The raw codec stores what it was given: all of the error is the selection's.
Json ErrorDocument(const Distribution& selection) {
  return {{"mean", selection.Mean()},
          {"p95", selection.Percentile(95)},
          {"selection", {{"mean", selection.Mean()}, {"p95", selection.Percentile(95)}}},
          {"codec", {{"mean", 0.0}, {"p95", 0.0}}}};
}

Json PlanDocument(const PlanReport& r, bool reference, int32_t steps) {
  Json document = {
      {"plan", r.plan},
      {"plan_text", r.plan_text},
      {"reference", reference},
      {"status", r.status},
      {"held_tokens", r.held_tokens},
      {"mass_recall", {{"mean", r.mass_recall.Mean()}, {"p5", r.mass_recall.Percentile(5)}}},
      {"oracle_overlap", r.oracle_overlap.Mean()},
      {"output_error", ErrorDocument(r.selection_error)},
      {"kv_tokens_per_step", r.kv_tokens.Mean()},
      {"kv_bytes_per_step",
       {{"total", r.device_bytes.Mean() + r.host_bytes.Mean()},
        {"device", r.device_bytes.Mean()},
        {"host", r.host_bytes.Mean()}}},
      {"selections", nullptr},
      {"selections_per_step", nullptr},
      {"prefill_ms", r.prefill_ms},
      {"ms_per_step",
       {{"median", r.step_ms.Percentile(50)},
        {"p10", r.step_ms.Percentile(10)},
        {"p90", r.step_ms.Percentile(90)}}},
  };
  if (r.selections) {
    document["selections"] = *r.selections;
    document["selections_per_step"] = static_cast<double>(*r.selections) / steps;
  }
  return document;
}

// One line on a terminal, rewritten; nothing elsewhere.
class ProgressLine {
 public:
  void operator()(const char* phase, int32_t done, int32_t of) const {
    if (enabled_) std::cerr << "\r\x1b[K" << phase << " " << done << "/" << of << std::flush;
  }
  void Clear() const {
    if (enabled_) std::cerr << "\r\x1b[K" << std::flush;
  }

 private:
  const bool enabled_ = isatty(STDERR_FILENO) == 1;
};

struct Arguments {
  std::string trace;
  std::vector<std::string> plans;
  int32_t steps = 0;
  std::vector<int32_t> layers;
};

Result<int> RunReplay(const Options& options, const Arguments& args) {
  KVS_ASSIGN_OR_RETURN(const Trace trace, Trace::Open(args.trace));
  const ReplayOptions replay{options.socket, options.timeout, args.plans, args.steps, args.layers};
  const ProgressLine progress;
  const auto report = Replay(trace, replay, progress);
  progress.Clear();
  if (!report.ok()) return report.status();
  PrintReplay(options.style, ReplayDocument(args.trace, trace, *report), std::cout);
  return kOk;
}

}  // namespace

Json ReplayDocument(const std::string& path, const Trace& trace, const ReplayReport& report) {
  const TraceShape& shape = trace.shape();
  Json plans = Json::array({PlanDocument(report.reference, true, report.steps)});
  for (const PlanReport& plan : report.plans)
    plans.push_back(PlanDocument(plan, false, report.steps));
  return {{"trace",
           {{"path", path},
            {"model", trace.Metadata("model")},
            {"source", trace.Metadata("source")},
            {"prompt_tokens", shape.prompt},
            {"steps", shape.steps},
            {"tail", shape.tail},
            {"query_heads", shape.query_heads},
            {"kv_heads", shape.kv_heads},
            {"head_dim", shape.head_dim},
            {"page_tokens", shape.page_tokens}}},
          {"road", kvs_road()},
          {"steps", report.steps},
          {"layers", report.layers},
          {"overlap_sample", {{"steps", report.overlap_steps}, {"layers", report.overlap_layers}}},
          {"plans", std::move(plans)}};
}

void PrintReplay(const Style& style, const Json& document, std::ostream& out) {
  PrintList(style, document, "plans", kTable, out);
  if (style.format != Format::kTable || !style.headers) return;
  const Json& sample = document["overlap_sample"];
  out << "\n"
      << document["trace"]["prompt_tokens"] << " tokens of prompt, " << document["steps"]
      << " steps, " << document["layers"].size() << " layers; overlap with the oracle top-k over "
      << sample["steps"].size() << " steps x " << sample["layers"].size() << " layers\n";
}

void AddReplay(CLI::App& app, Invocation& invocation) {
  auto args = std::make_shared<Arguments>();
  CLI::App* verb = app.add_subcommand(
      "replay", "Run a trace through the daemon under plans: recall, error, bytes, time");
  verb->add_option("TRACE", args->trace, "A .safetensors file; docs/traces.md")->required();
  verb->add_option("--plan", args->plans, "A plan's name or text; repeat for several")
      ->required()
      ->allow_extra_args(false);
  verb->add_option("--steps", args->steps, "Decode steps to run (default: all of the trace)")
      ->check(CLI::PositiveNumber);
  verb->add_option("--layers", args->layers,
                   "Layers to run, such as 0,9,19 (default: all of the trace)")
      ->delimiter(',')
      ->allow_extra_args(false);
  Runs(verb, invocation, [&invocation, args] { return RunReplay(invocation.options, *args); });
}

}  // namespace kvstrata::cli
