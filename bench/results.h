// SPDX-License-Identifier: Apache-2.0
// Rows and files of results (bench/results), which all benchmarks write alike.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "bench/cuda/command_line.h"
#include "bench/machine.h"

namespace kvstrata::bench {

using Json = nlohmann::ordered_json;

// `scale`: how much of `unit` a microsecond is.
inline Json RowOf(std::string id, const Timing& t, const char* unit = "us", double scale = 1) {
  return {{"id", std::move(id)},  {"value", t.median * scale}, {"unit", unit},
          {"p10", t.p10 * scale}, {"p90", t.p90 * scale},      {"n", t.n}};
}

// The first line that a command prints; "unknown" where there is none.
inline std::string FirstLine(const char* command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command, "r"), pclose);
  char line[256] = "";
  if (pipe == nullptr || fgets(line, sizeof line, pipe.get()) == nullptr) return "unknown";
  const std::string text = line;
  return text.substr(0, text.find('\n'));
}

// Writes a result file where --json-out names one; commit and date are those of --commit and
// --date, or of now.
inline void WriteResults(int argc, char** argv, const std::string& suite, const std::string& device,
                         const std::string& command, const Json& context, const Json& rows,
                         const Json& ceilings = Json::object()) {
  const std::string file = Option(argc, argv, "--json-out");
  if (file.empty()) return;
  std::string commit = Option(argc, argv, "--commit"), date = Option(argc, argv, "--date");
  const char* const given = std::getenv("KVSTRATA_COMMIT");
  if (commit.empty()) commit = given ? given : FirstLine("git rev-parse HEAD 2>/dev/null");
  if (date.empty()) date = FirstLine("date +%F");
  const Json results = {{"suite", suite},       {"device", device},   {"commit", commit},
                        {"date", date},         {"command", command}, {"context", context},
                        {"ceilings", ceilings}, {"rows", rows}};
  std::ofstream(file) << results.dump(1) << "\n";
}

}  // namespace kvstrata::bench
