// SPDX-License-Identifier: Apache-2.0
// debug dump: what a bug report needs, in a folder of its own: a file for each subject (kFiles,
// docs/cli.md). Without contents: no token ids, no keys that engines gave, no environment.
//
// What cannot be had is left out and said; a daemon that is gone leaves what needs none.
#include <sys/stat.h>
#include <sys/utsname.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>
#include <memory>

#include "client/cli/connection.h"
#include "client/cli/daemon_program.h"
#include "client/cli/invocation.h"
#include "kvstrata/kvstrata.h"

namespace kvstrata::cli {
namespace {

class Dump {
 public:
  Dump(const Options& options, std::string folder)
      : options_(options), folder_(std::move(folder)), connection_(Connection::Dial(options)) {}

  template <typename Request, typename Response>
  Result<Response> Call(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*,
                                                                const Request&, Response*)) {
    KVS_RETURN_IF_ERROR(connection_.status());
    return connection_.value()->Call(method, Request());
  }
  // A call without arguments, as its answer's document.
  template <typename Request, typename Response>
  Result<std::string> Document(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*,
                                                                       const Request&, Response*)) {
    KVS_ASSIGN_OR_RETURN(const Response answer, Call(method));
    return Text(ToJson(answer));
  }
  static std::string Text(const Json& document) {
    return document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  }

  Result<std::string> Versions() {
    utsname kernel{};
    uname(&kernel);
    Json versions = {{"kvstrata", kvs_version()},
                     {"kernel", kernel.release},
                     {"machine", kernel.machine},
                     {"daemon", nullptr},
                     {"daemon_commit", nullptr}};
    if (const auto status = Call(&v1::Admin::Stub::GetStatus); status.ok()) {
      versions["daemon"] = status->version();
      versions["daemon_commit"] = status->commit();
    }
    return Text(versions);
  }

  // What its engine called a sequence may be a name of a person or a request.
  Result<std::string> Sequences() {
    KVS_ASSIGN_OR_RETURN(auto answer, Call(&v1::Admin::Stub::ListSequences));
    for (auto& sequence : *answer.mutable_sequences()) {
      if (!sequence.key().empty()) sequence.set_key("(left out)");
    }
    return Text(ToJson(answer));
  }

  Result<std::string> Events() {
    KVS_RETURN_IF_ERROR(connection_.status());
    Json document = {{"events", Json::array()}};
    const auto each = [&document](const v1::WatchResponse& batch) {
      for (const v1::Event& event : batch.events()) document["events"].push_back(ToJson(event));
    };
    const Status ended = connection_.value()->Stream(&v1::Admin::Stub::Watch, v1::WatchRequest(),
                                                     each, Connection::Lasts::kWait);
    if (!ended.ok()) return ended;
    return Text(document);
  }

  // The running values that are not defaults, as a file that kvstratad takes.
  Result<std::string> ConfigFile() {
    KVS_ASSIGN_OR_RETURN(const auto answer, Call(&v1::Admin::Stub::GetConfig));
    std::string text = "# What the daemon ran with and was given, whatever gave it.\n";
    for (const v1::ConfigEntry& entry : answer.entries()) {
      if (entry.origin() == "default") continue;
      std::string key = entry.key();
      if (const size_t user = key.find("uid:"); user != key.npos) {
        key.insert(key.rfind('.'), "\"").insert(user, "\"");  // limits.users."uid:7".sessions
      }
      text += key + " = " + Json(entry.value()).dump() + "\n";
    }
    return text;
  }

  Result<std::string> Metrics() {
    KVS_ASSIGN_OR_RETURN(const auto answer, Call(&v1::Admin::Stub::GetMetrics));
    return answer.text();
  }

  // With the daemon's values if it has told them: config.toml was made before.
  Result<std::string> Doctor() {
    std::vector<std::string> command = {DaemonProgram(), "--check-config", "--deep", "-o", "json"};
    const std::string file = folder_ + "/config.toml";
    struct stat st {};
    if (stat(file.c_str(), &st) == 0) command.insert(command.end(), {"--config", file});
    KVS_ASSIGN_OR_RETURN(const Finished finished, RunChild(std::move(command), options_.timeout));
    return finished.output;
  }

 private:
  const Options& options_;
  const std::string folder_;
  Result<std::unique_ptr<Connection>> connection_;
};

struct Part {
  std::string_view file, what;
  Result<std::string> (*make)(Dump&);
};
constexpr Part kFiles[] = {
    {"version.json", "versions of both programs, the daemon's commit, the kernel",
     [](Dump& d) { return d.Versions(); }},
    {"status.json", "kvstrata status",
     [](Dump& d) { return d.Document(&v1::Admin::Stub::GetStatus); }},
    {"config.json", "kvstrata config show: every key, its value and where it comes from",
     [](Dump& d) { return d.Document(&v1::Admin::Stub::GetConfig); }},
    {"config.toml", "of these what is no default, as a file",
     [](Dump& d) { return d.ConfigFile(); }},
    {"sessions.json", "kvstrata session ls",
     [](Dump& d) { return d.Document(&v1::Admin::Stub::ListSessions); }},
    {"sequences.json", "kvstrata seq ls, without the names that engines gave",
     [](Dump& d) { return d.Sequences(); }},
    {"work.json", "kvstrata work ls",
     [](Dump& d) { return d.Document(&v1::Admin::Stub::ListWork); }},
    {"pins.json", "kvstrata pin ls",
     [](Dump& d) { return d.Document(&v1::Admin::Stub::ListPins); }},
    {"quotas.json", "kvstrata quota ls",
     [](Dump& d) { return d.Document(&v1::Admin::Stub::ListQuotas); }},
    {"events.json", "the last 1,000 events", [](Dump& d) { return d.Events(); }},
    {"metrics.txt", "the page /metrics", [](Dump& d) { return d.Metrics(); }},
    {"doctor.json", "kvstrata doctor, of the daemon's configuration",
     [](Dump& d) { return d.Doctor(); }},
};

constexpr Column kDumpList[] = {{"FILE", "/file"},
                                {"BYTES", "/bytes", nullptr, true, 1},
                                {"WHAT", "/what", nullptr, false, 2, 20},
                                {"LEFT-OUT-BECAUSE", "/error", OrDash, false, 3, 20}};

std::string NameOfNow() {
  const time_t now = time(nullptr);
  tm utc{};
  gmtime_r(&now, &utc);
  std::array<char, 64> name;
  std::strftime(name.data(), name.size(), "kvstrata-dump-%Y%m%dT%H%M%SZ", &utc);
  return name.data();
}

Status FolderError(const std::string& folder) {
  return InvalidArgument("DUMP_FOLDER", "'" + folder + "': " + std::strerror(errno));
}

Result<int> Write(const Options& options, std::string folder) {
  if (folder.empty()) folder = NameOfNow();
  if (mkdir(folder.c_str(), 0700) != 0) return FolderError(folder);
  Dump dump(options, folder);
  Json document = {{"folder", folder}, {"complete", true}, {"files", Json::array()}};
  for (const Part& part : kFiles) {
    const Result<std::string> text = part.make(dump);
    if (text.ok()) {
      std::ofstream file(folder + "/" + std::string(part.file));
      if (!(file << *text).flush()) return FolderError(folder + "/" + std::string(part.file));
    } else {
      document["complete"] = false;
    }
    document["files"].push_back({{"file", part.file},
                                 {"bytes", text.ok() ? text->size() : 0},
                                 {"what", part.what},
                                 {"error", text.ok() ? "" : text.status().ToString()}});
  }
  PrintList(options.style, document, "files", kDumpList, std::cout);
  if (options.style.IsTable()) {
    std::cout << "written to " << folder << "; read it before you send it\n";
  }
  return document["complete"] == true ? kOk : kFailed;
}

}  // namespace

void AddDebug(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("debug", "For reports of bugs");
  auto folder = std::make_shared<std::string>();
  CLI::App* verb = noun->add_subcommand(
      "dump", "Write what a bug report needs into a new folder; no contents, no secrets");
  verb->add_option("FOLDER", *folder, "Made by it (default: kvstrata-dump-TIME here)");
  Runs(verb, invocation, Write, folder);
}

}  // namespace kvstrata::cli
