// SPDX-License-Identifier: Apache-2.0
// audit: the books; audit --recall SEQ: what a live sequence's plan loses; audit --engine: what
// plans lose in engines that attend by them over their own blocks.
#include <algorithm>
#include <array>
#include <cstdio>
#include <iostream>
#include <memory>

#include "client/cli/connection.h"
#include "client/cli/invocation.h"
#include "client/cli/terminal.h"

namespace kvstrata::cli {
namespace {

constexpr Column kBooks[] = {{"CLEAN", "/clean", YesNo},
                             {"PAGES", "/pages"},
                             {"BYTES", "/bytes", Bytes},
                             {"SEQUENCES", "/sequences"},
                             {"SESSIONS", "/sessions"}};

Result<int> AuditBooks(const Options& options) {
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       Ask(options, &v1::Admin::Stub::Audit, v1::AuditRequest()));
  PrintRecord(options.style, ToJson(answer), kBooks, std::cout);
  if (options.style.IsTable()) {
    for (const std::string& finding : answer.findings()) {
      std::cout << "finding: " << Printable(finding) << "\n";
    }
  }
  return answer.clean() ? kOk : kFailed;
}

// Decode steps take as long as the engine takes: the default of other verbs would end most audits.
constexpr std::chrono::milliseconds kRecallTimeout = std::chrono::seconds(60);

struct RecallArguments {
  uint64_t sequence = 0;  // 0: not given
  uint32_t every = 16, steps = 8;
};

std::string LayerName(const Json& value) { return value.get<int32_t>() < 0 ? "all" : value.dump(); }
std::string Error(const Json& value) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.3g", value.get<double>());
  return text.data();
}

constexpr Column kLayers[] = {
    {"LAYER", "/layer", LayerName, true},  {"SAMPLES", "/recall/samples", nullptr, true},
    {"MISSED", "/missed", Fixed4, true},   {"RECALL", "/recall/mean", Fixed4, true},
    {"P5", "/recall/p5", Fixed4, true},    {"MIN", "/recall/min", Fixed4, true},
    {"ERROR", "/error/mean", Error, true}, {"P95", "/error/p95", Error, true},
    {"MAX", "/error/max", Error, true},
};

// One line a bin, from the first that has samples to the last.
void PrintHistogram(const char* name, const Json& histogram, const Json& bounds,
                    std::ostream& out) {
  constexpr uint64_t kWidth = 50;
  const auto counts = histogram.get<std::vector<uint64_t>>();
  const auto filled = [](uint64_t n) { return n != 0; };
  const auto first = std::ranges::find_if(counts, filled);
  if (first == counts.end()) return;
  const auto last = std::find_if(counts.rbegin(), counts.rend(), filled).base();
  const uint64_t most = *std::ranges::max_element(counts);
  out << "\n" << name << "\n";
  for (auto it = first; it != last; ++it) {
    const auto bin = static_cast<size_t>(it - counts.begin());
    std::array<char, 64> line;
    std::snprintf(line.data(), line.size(), "%9.3g .. %-9.3g %8llu ", bounds[bin].get<double>(),
                  bounds[bin + 1].get<double>(), static_cast<unsigned long long>(*it));
    const uint64_t bar = (*it * kWidth + most - 1) / most;  // what is there shows
    out << line.data() << std::string(bar, '#') << "\n";
  }
}

// With `missed` in each layer, which is what max_missed limits.
Json RecallDocument(const v1::AuditRecallResponse& response) {
  Json document = ToJson(response);
  const auto add = [](Json* row) { (*row)["missed"] = 1 - (*row)["recall"]["mean"].get<double>(); };
  for (Json& layer : document["layers"]) add(&layer);
  add(&document["all"]);
  return document;
}

void PrintRecall(const Style& style, const Json& document, std::ostream& out) {
  if (style.IsDocument()) return PrintDocument(style.format, document, out);
  if (style.headers && style.IsTable()) {
    out << "sequence " << document["sequence"] << ", plan "
        << Printable(document["plan"].get<std::string>()) << ", "
        << document["transport"].get<std::string>() << ": " << document["steps"] << " of "
        << document["wanted_steps"] << " decode steps, one in " << document["every"]
        << ", at positions " << document["first_position"] << " .. " << document["last_position"]
        << "; " << document["dropped_steps"]
        << " dropped\na sample is one step, layer and query head\n\n";
  }
  Json rows = {{"rows", document["layers"]}};
  rows["rows"].push_back(document["all"]);
  PrintList(style, rows, "rows", kLayers, out);
  if (!style.headers || !style.IsTable()) return;
  const Json& all = document["all"];
  if (all["recall"]["min"] == 1.0 && document["plan"] != "full") {
    out << "\nEvery sampled step attended everything, so this says nothing of the plan: the "
           "sequence "
           "is shorter than\nits min_tokens, or has nothing yet that the plan could choose from "
           "(surprisal, packed blocks).\n";
  }
  PrintHistogram("recall", all["recall"]["histogram"], document["recall_bounds"], out);
  PrintHistogram("output error", all["error"]["histogram"], document["error_bounds"], out);
}

Result<int> AuditRecall(Options options, const RecallArguments& args) {
  if (!options.timeout_given) options.timeout = kRecallTimeout;
  v1::AuditRecallRequest request;
  request.set_sequence(args.sequence);
  request.set_every(args.every);
  request.set_steps(args.steps);
  request.set_timeout_us(static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(options.timeout).count()));
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  const ProgressLine progress;
  v1::AuditRecallResponse last;
  const Status ended = connection->Stream(
      &v1::Admin::Stub::AuditRecall, request, [&](const v1::AuditRecallResponse& response) {
        last = response;
        progress("sampled steps", static_cast<int32_t>(response.steps()),
                 static_cast<int32_t>(response.wanted_steps()));
      });
  progress.Clear();
  // What was sampled before it ended early is worth its table too.
  if (last.has_all() && last.steps() > 0)
    PrintRecall(options.style, RecallDocument(last), std::cout);
  if (!ended.ok()) return ended;
  return kOk;
}

constexpr Column kEngines[] = {
    {"ENGINE", "/engine", nullptr, false, 0, 12},
    {"PLAN", "/plan", nullptr, false, 5, 12},
    {"MODEL", "/model_name", OrDash, false, 3, 12},
    {"SAMPLES", "/all/samples", nullptr, true, 2},
    {"MISSED", "/all/missed", Fixed4, true, 4},
    {"RECALL", "/all/recall", Fixed4, true, 6},
    {"LEAST", "/all/least", Fixed4, true, 3},
    {"ERROR", "/all/error", Error, true, 3},
    {"WORST-LAYER", "/worst/layer", nullptr, true, 5},
    {"ITS-RECALL", "/worst/recall", Fixed4, true, 5},
};
constexpr Column kEngineLayers[] = {
    {"LAYER", "/layer", LayerName, true}, {"SAMPLES", "/samples", nullptr, true},
    {"MISSED", "/missed", Fixed4, true},  {"RECALL", "/recall", Fixed4, true},
    {"LEAST", "/least", Fixed4, true},    {"ERROR", "/error", Error, true},
};

// The layers of one engine; with an empty `name` a line for each engine. As a document both are
// the same.
Result<int> AuditEngines(const Options& options, const std::string& name) {
  v1::ListEngineRecallsRequest request;
  request.set_engine(name);
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       Ask(options, &v1::Admin::Stub::ListEngineRecalls, request));
  Json document = ToJson(answer);
  const auto add = [](Json* row) { (*row)["missed"] = 1 - (*row)["recall"].get<double>(); };
  for (Json& engine : document["engines"]) {
    for (Json& layer : engine["layers"]) add(&layer);
    add(&engine["all"]);
    add(&engine["worst"]);
  }
  if (name.empty() || options.style.IsDocument()) {
    PrintList(options.style, document, "engines", kEngines, std::cout);
    return kOk;
  }
  Json& engine = document["engines"][0];
  if (options.style.headers && options.style.IsTable()) {
    const auto text = [&engine](const char* key) {
      return Printable(engine[key].get<std::string>());
    };
    std::cout << "engine " << text("engine") << ", plan " << text("plan") << ", model "
              << OrDash(engine["model_name"]) << "\na sample is one step, layer and query head\n\n";
  }
  engine["layers"].push_back(engine["all"]);
  PrintList(options.style, engine, "layers", kEngineLayers, std::cout);
  return kOk;
}

}  // namespace

void AddAudit(CLI::App& app, Invocation& invocation) {
  CLI::App* audit = app.add_subcommand(
      "audit",
      "Prove the books: every page reachable exactly once, every lease owned by a live session; "
      "exit 1 on a finding. With --recall, what a live sequence's plan loses; with --engine, what "
      "plans lose in engines that attend by them over their own blocks");
  auto args = std::make_shared<RecallArguments>();
  CLI::Option* recall =
      audit->add_option("--recall", args->sequence,
                        "Shadow full attention on sampled decode steps of this sequence: mass "
                        "recall and output error by layer");
  recall->type_name("SEQ");
  audit->add_option("--every", args->every, "Sample one decode step in N (default: 16)")
      ->check(CLI::Range(1, 65536))
      ->needs(recall);
  audit->add_option("--steps", args->steps, "Sampled steps wanted (default: 8)")
      ->check(CLI::Range(1, 1024))
      ->needs(recall);
  auto name = std::make_shared<std::string>();
  CLI::Option* engine =
      audit->add_option("--engine", *name,
                        "What this engine's plan loses by layer, as the engine measures it; "
                        "without NAME all engines, a line each");
  engine->type_name("NAME")->expected(0, 1)->excludes(recall);
  Runs(audit, invocation, [args, recall, name, engine](const Options& options) {
    if (engine->count() != 0) return AuditEngines(options, *name);
    return recall->count() == 0 ? AuditBooks(options) : AuditRecall(options, *args);
  });
}

}  // namespace kvstrata::cli
