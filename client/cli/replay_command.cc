// SPDX-License-Identifier: Apache-2.0
// replay TRACE --plan P: what a plan loses and reads on recorded data.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <memory>

#include "client/cli/invocation.h"
#include "client/cli/replay.h"
#include "client/cli/terminal.h"
#include "kvstrata/kvstrata.h"

namespace kvstrata::cli {
namespace {

std::string Whole(const Json& value) { return std::to_string(std::llround(value.get<double>())); }

constexpr Column kTable[] = {
    {"PLAN", "/plan"},
    {"KV-TOKENS", "/kv_tokens_per_step", Fixed2, true, 5},
    {"ROWS", "/cost_per_step/rows", Whole, true, 1},
    {"COARSE", "/cost_per_step/coarse_rows", Whole, true},
    {"ATTEND", "/cost_per_step/attend_bytes", Bytes, true, 4},
    {"SELECT", "/cost_per_step/select_bytes", Bytes, true, 2},
    {"RECALL", "/mass_recall/mean", Fixed4, true, 7},
    {"P5", "/mass_recall/p5", Fixed4, true, 2},
    {"OVERLAP", "/oracle_overlap", Fixed4, true, 3},
    {"ERROR", "/output_error/mean", Fixed4, true, 6},
    {"P95", "/output_error/p95", Fixed4, true, 2},
    {"CODEC", "/output_error/codec/mean", Fixed4, true},
    {"SELECTIONS", "/selections", nullptr, true},
    {"MS/STEP", "/ms_per_step/median", Fixed2, true, 6},
    {"STATUS", "/status", nullptr, false, 8, 16},
};

Json Spread(const Distribution& d) { return {{"mean", d.Mean()}, {"p95", d.Percentile(95)}}; }

Json ErrorDocument(const PlanReport& r) {
  Json document = Spread(r.output_error);
  document["selection"] = Spread(r.selection_error);
  document["codec"] = Spread(r.codec_error);
  return document;
}

// Bytes of rows as they were given; in another form only their sum is known.
Json BytesDocument(const PlanReport& r) {
  if (!r.raw) {
    return {{"total", r.costs.attend_bytes.Mean()}, {"device", nullptr}, {"host", nullptr}};
  }
  return {{"total", r.device_bytes.Mean() + r.host_bytes.Mean()},
          {"device", r.device_bytes.Mean()},
          {"host", r.host_bytes.Mean()}};
}

Json CostDocument(const StepCosts& costs) {
  return {{"rows", costs.rows.Mean()},
          {"coarse_rows", costs.coarse_rows.Mean()},
          {"attend_bytes", costs.attend_bytes.Mean()},
          {"select_bytes", costs.select_bytes.Mean()}};
}

Json PlanDocument(const PlanReport& r, bool reference, int32_t steps) {
  Json document = {
      {"plan", r.plan},
      {"plan_text", r.plan_text},
      {"reference", reference},
      {"status", r.status},
      {"held_tokens", r.held_tokens},
      {"sampled", r.sampled},
      {"mass_recall", {{"mean", r.mass_recall.Mean()}, {"p5", r.mass_recall.Percentile(5)}}},
      {"oracle_overlap", r.oracle_overlap.Mean()},
      {"output_error", ErrorDocument(r)},
      {"kv_tokens_per_step", r.kv_tokens.Mean()},
      {"kv_bytes_per_step", BytesDocument(r)},
      {"cost_per_step", CostDocument(r.costs)},
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

// docs/cli.md, "replay", is the contract of the document and of its table.
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
          {"transport", kvs_transport()},
          {"steps", report.steps},
          {"layers", report.layers},
          {"overlap_sample", {{"steps", report.overlap_steps}, {"layers", report.overlap_layers}}},
          {"plans", std::move(plans)}};
}

void PrintReplay(const Style& style, const Json& document, std::ostream& out) {
  PrintList(style, document, "plans", kTable, out);
  if (!style.IsTable() || !style.headers) return;
  const Json& sample = document["overlap_sample"];
  out << "\n"
      << document["trace"]["prompt_tokens"] << " tokens of prompt, " << document["steps"]
      << " steps, " << document["layers"].size() << " layers; overlap with the oracle top-k over "
      << sample["steps"].size() << " steps x " << sample["layers"].size()
      << " layers; rows and bytes are a step's, all layers\n";
  const auto sampled = [](const Json& plan) { return plan["sampled"].get<bool>(); };
  if (std::ranges::any_of(document["plans"], sampled)) {
    out << "lossy plans: recall and the codec's part of the error over the same sample\n";
  }
}

struct ReplayArguments {
  std::string trace;
  std::vector<std::string> plans;
  int32_t steps = 0;
  std::vector<int32_t> layers;
  bool keep = false;
};

Result<int> RunReplay(const Options& options, const ReplayArguments& args) {
  KVS_ASSIGN_OR_RETURN(const Trace trace, Trace::Open(args.trace));
  const ReplayOptions replay{options.socket, options.timeout, args.plans, args.steps,
                             args.layers,    false,           args.keep};
  const ProgressLine progress;
  const auto report = Replay(trace, replay, progress);
  progress.Clear();
  if (!report.ok()) return report.status();
  PrintReplay(options.style, ReplayDocument(args.trace, trace, *report), std::cout);
  return kOk;
}

}  // namespace

void AddReplay(CLI::App& app, Invocation& invocation) {
  auto args = std::make_shared<ReplayArguments>();
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
  verb->add_flag("--keep", args->keep,
                 "Leave its pages and its model in the daemon, as an engine's would stay");
  Runs(verb, invocation, RunReplay, args);
}

}  // namespace kvstrata::cli
