// SPDX-License-Identifier: Apache-2.0
// calibrate TRACE...: what a model's traces say about plans, and named plans that follow.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <memory>

#include "client/cli/calibrate.h"
#include "client/cli/calibration_document.h"
#include "client/cli/invocation.h"
#include "client/cli/terminal.h"
#include "kvstrata/kvstrata.h"

namespace kvstrata::cli {
namespace {

struct CalibrateArguments {
  std::vector<std::string> traces;
  std::string out;
  bool offline = false;
};

// A file that appears whole or not at all. Opening comes before minutes of measuring, so that a
// path that cannot be written is known at once. Removes what it began unless Commit was reached.
class PendingFile {
 public:
  explicit PendingFile(const std::string& path) : path_(path), part_(path + ".part") {}
  ~PendingFile() {
    if (stream_.is_open()) std::remove(part_.c_str());
  }
  PendingFile(PendingFile&&) = delete;

  Status Open() {
    stream_.open(part_, std::ios::trunc);
    return stream_ ? OkStatus() : Failure();
  }
  Status Commit(const std::string& text) {
    stream_ << text << std::flush;
    if (!stream_ || std::rename(part_.c_str(), path_.c_str()) != 0) return Failure();
    stream_.close();
    return OkStatus();
  }

 private:
  Status Failure() const {
    return InvalidArgument("CALIBRATE_OUT", "--out '" + path_ + "': " + std::strerror(errno));
  }
  const std::string path_, part_;
  std::ofstream stream_;
};

std::vector<std::string> OriginOf(const std::vector<Trace>& traces,
                                  const std::vector<std::string>& paths) {
  std::vector<std::string> lines = {std::string("Plans calibrated by kvstrata ") + kvs_version() +
                                    " from"};
  for (size_t i = 0; i < traces.size(); ++i) {
    lines.push_back("  " + paths[i] + " (model '" + traces[i].Metadata("model") + "', " +
                    std::to_string(traces[i].shape().prompt) + " tokens of prompt, " +
                    std::to_string(traces[i].shape().steps) + " steps)");
  }
  lines.push_back("Give this file to kvstratad --config, or copy [plans] into its own.");
  return lines;
}

Result<int> RunCalibrate(const Options& options, const CalibrateArguments& args) {
  std::vector<Trace> traces;
  for (const std::string& path : args.traces) {
    KVS_ASSIGN_OR_RETURN(Trace trace, Trace::Open(path));
    traces.push_back(std::move(trace));
  }
  PendingFile file(args.out);
  if (!args.out.empty()) KVS_RETURN_IF_ERROR(file.Open());
  const ProgressLine progress;
  const auto calibration =
      Calibrate(traces, args.traces, {options.socket, options.timeout, args.offline}, progress);
  progress.Clear();
  if (!calibration.ok()) return calibration.status();
  const std::vector<CalibratedPlan> plans = PlansOf(*calibration);
  if (!args.out.empty()) {
    KVS_RETURN_IF_ERROR(file.Commit(ToToml(plans, OriginOf(traces, args.traces))));
  }
  PrintCalibration(options.style,
                   CalibrationDocument(traces, args.traces, *calibration, plans, args.out),
                   std::cout);
  return kOk;
}

}  // namespace

void AddCalibrate(CLI::App& app, Invocation& invocation) {
  auto args = std::make_shared<CalibrateArguments>();
  CLI::App* verb = app.add_subcommand(
      "calibrate", "What a model's traces say about plans: thresholds, shares, break-even lengths");
  verb->add_option("TRACE", args->traces, "Traces of one model (.safetensors); docs/traces.md")
      ->required();
  verb->add_option("--out", args->out, "Write named plans to this TOML file for the daemon");
  verb->add_flag("--offline", args->offline, "Only what the traces alone say; needs no daemon");
  Runs(verb, invocation, RunCalibrate, args);
}

}  // namespace kvstrata::cli
