// SPDX-License-Identifier: Apache-2.0
// Invocation: what one run of `kvstrata` was asked to do. Every noun adds its verbs to the CLI11
// table (one AddX below, one row in main.cc); parsing fills the options and picks `run`; main runs
// it and turns what it returns into an exit code and, on failure, three lines: reason, message,
// next step.
//
// Ownership: the Invocation outlives the CLI11 table; callbacks capture it by reference.
#pragma once

#include <CLI/CLI.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "client/cli/printer.h"

namespace kvstrata::cli {

enum ExitCode : int {
  kOk = 0,
  kFailed = 1,
  kUsage = 2,
  kNotConnected = 3,
  kDenied = 4,
  kNotFound = 5,
  kTimeout = 6,
};

struct Options {
  Style style;
  std::string socket;  // resolved: --socket, KVSTRATA_SOCKET, else the default path
  std::chrono::milliseconds timeout{5000};  // for every wait for the daemon
  bool timeout_given = false;               // else a verb may have a default of its own
  std::string verb;                         // "pin ls"
};

struct Invocation {
  Options options;
  // Null until a verb was parsed. The exit code, or why there is no answer.
  std::function<Result<int>()> run;
};

// "seq map": the words that name it.
std::string PathOf(const CLI::App& verb);

// Makes `verb` the one that runs when it was parsed, as run(options, *arguments...): a Result<int>.
template <typename Run, typename... Arguments>
void Runs(CLI::App* verb, Invocation& invocation, Run run,
          const std::shared_ptr<Arguments>&... arguments) {
  verb->callback([&invocation, verb, run, arguments...] {
    invocation.options.verb = PathOf(*verb);
    invocation.run = [&invocation, run, arguments...]() -> Result<int> {
      return run(invocation.options, *arguments...);
    };
  });
}

void AddStatus(CLI::App& app, Invocation& invocation);  // status, health, version
void AddPlan(CLI::App& app, Invocation& invocation);
void AddModel(CLI::App& app, Invocation& invocation);
void AddSession(CLI::App& app, Invocation& invocation);
void AddSequence(CLI::App& app, Invocation& invocation);
void AddPool(CLI::App& app, Invocation& invocation);  // pool, evict
void AddPin(CLI::App& app, Invocation& invocation);
void AddLookup(CLI::App& app, Invocation& invocation);
void AddAudit(CLI::App& app, Invocation& invocation);
void AddValue(CLI::App& app, Invocation& invocation);
void AddTier(CLI::App& app, Invocation& invocation);
void AddRemoteTier(CLI::App& noun, Invocation& invocation);  // verbs of `tier`
void AddQuota(CLI::App& app, Invocation& invocation);
void AddWork(CLI::App& app, Invocation& invocation);
void AddConfig(CLI::App& app, Invocation& invocation);
void AddReplay(CLI::App& app, Invocation& invocation);
void AddCalibrate(CLI::App& app, Invocation& invocation);
void AddDoctor(CLI::App& app, Invocation& invocation);
void AddEvents(CLI::App& app, Invocation& invocation);
void AddTop(CLI::App& app, Invocation& invocation);
void AddExplain(CLI::App& app, Invocation& invocation);
void AddLog(CLI::App& app, Invocation& invocation);
void AddDebug(CLI::App& app, Invocation& invocation);
void AddCompletion(CLI::App& app, Invocation& invocation);
void AddReference(CLI::App& app, Invocation& invocation);  // hidden
void AddNames(CLI::App& app, Invocation& invocation);      // hidden

// The command table with everything above in it.
void BuildTable(CLI::App& app, Invocation& invocation);

// 0 .. 6 for a failure; docs/cli.md.
int ExitCodeOf(const Status& status);
// What to do about a failure (proto/reasons.h), "" if its message says it already.
std::string NextStep(const Status& status, const Options& options);
// Three lines, or with -o json one object {"error": {...}}.
void PrintError(const Status& status, const Options& options, std::ostream& out);

// base/quantities.h's "5s", "500ms", "2m", "36h", "7d" in milliseconds, 1 ms .. `longest`;
// INVALID_ARGUMENT otherwise.
Result<std::chrono::milliseconds> ParseDuration(const std::string& text,
                                                std::chrono::hours longest = std::chrono::hours(1));
// KVSTRATA_SOCKET, else $XDG_RUNTIME_DIR/kvstrata/kvstratad.sock, else /run/kvstrata/kvstratad.sock
// for root, else /tmp/kvstrata-UID/kvstratad.sock.
std::string DefaultSocket();
// Whether colour may be used on stdout: a terminal, no NO_COLOR, TERM not dumb.
bool ColourWanted();

// -w, --watch: a verb that shows something shows it again and again.
//
// On a terminal each frame takes the place of the one before, `q` and Ctrl-C end it, and a daemon
// that went away is said and asked again for a minute. Elsewhere frames follow each other,
// until one fails: a table behind a line with its time, as JSON one line a frame, as YAML one
// document a frame, both with the key `time`; csv and names behind an empty line, without a time.

// Runs `show`, which writes to std::cout, every so often.
Result<int> Watch(const Options& options, std::chrono::milliseconds every,
                  const std::function<Result<int>()>& show);

// An option of `verb` that sets `duration` by ParseDuration.
CLI::Option* AddDuration(CLI::App* verb, const std::string& name,
                         std::chrono::milliseconds* duration, const std::string& description,
                         std::chrono::hours longest = std::chrono::hours(1));

// What -w of `verb` was given: 0 without it.
std::shared_ptr<std::chrono::milliseconds> AddWatchOption(CLI::App* verb);

// As Runs, of a verb that only shows: it has -w.
template <typename Show, typename... Arguments>
void Shows(CLI::App* verb, Invocation& invocation, Show show,
           const std::shared_ptr<Arguments>&... arguments) {
  const auto every = AddWatchOption(verb);
  Runs(verb, invocation, [every, show, arguments...](const Options& options) -> Result<int> {
    const auto once = [&]() -> Result<int> { return show(options, *arguments...); };
    return every->count() == 0 ? once() : Watch(options, *every, once);
  });
}

// The verbs of a command table, as help shows them: without those that only programs call. Pure
// functions of the table.

// Those directly below `app`, in the table's order.
std::vector<CLI::App*> VerbsOf(const CLI::App& app);

// f(verb, "seq map") of every noun and verb below `app`, nouns before their verbs.
void EachVerb(const CLI::App& app, const std::function<void(CLI::App&, const std::string&)>& f,
              const std::string& path = "");

}  // namespace kvstrata::cli
