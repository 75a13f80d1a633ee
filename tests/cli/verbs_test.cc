// SPDX-License-Identifier: Apache-2.0
// The command table: every verb has help, completions of it parse, errors have their exit codes.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>

#include "client/cli/arguments.h"
#include "client/cli/completion.h"
#include "client/cli/connection.h"
#include "client/cli/event_text.h"
#include "client/cli/help_format.h"
#include "client/cli/invocation.h"
#include "client/cli/spelling.h"
#include "proto/reasons.h"

namespace kvstrata::cli {
namespace {

TEST(EventText, FoldsAtSpaces) {
  const Json event = {{"number", 17},
                      {"time", "2026-11-21T12:00:00.000123Z"},
                      {"level", "warning"},
                      {"event", "refused"},
                      {"fields", {{"reason", "POOL_EXHAUSTED"}, {"zero", 0}, {"why", "no room"}}}};
  const std::string head = "17  12:00:00.000  warning  refused\n";
  EXPECT_EQ(FoldedEvent(event, 80), head + "    reason=POOL_EXHAUSTED why=\"no room\"");
  EXPECT_EQ(FoldedEvent(event, 34), head + "    reason=POOL_EXHAUSTED why=\"no\n    room\"");
  EXPECT_EQ(FoldedEvent(event, 22), head + "    reason=POOL_EXHAUS\n    TED why=\"no room\"");
  EXPECT_EQ(FoldedEvent(event, 5), head + "    reason=POOL_EXHAUSTED\n    why=\"no\n    room\"");
}

struct Table {
  CLI::App app{"", "kvstrata"};
  Invocation invocation;
  Table() { BuildTable(app, invocation); }

  int Parse(std::vector<std::string> words) {
    std::reverse(words.begin(), words.end());  // as CLI11 takes a vector
    try {
      app.parse(words);
      return 0;
    } catch (const CLI::ParseError& error) {
      return error.get_exit_code();
    }
  }
};

// Nouns and verbs, in the order of docs/cli.md. A new one belongs here and there.
TEST(Verbs, AreThese) {
  Table table;
  std::vector<std::string> names;
  EachVerb(table.app, [&](const CLI::App&, const std::string& name) { names.push_back(name); });
  std::vector<std::string> expected = {
      "status",        "health",       "version",      "plan",        "plan ls",
      "plan show",     "model",        "model ls",     "model show",  "session",
      "session ls",    "seq",          "seq ls",       "seq show",    "seq map",
      "seq demote",    "seq prefetch", "pool",         "seq build",   "seq recompress",
      "pool ls",       "tier",         "tier ls",      "work",        "work ls",
      "evict",         "audit",        "config",       "config show", "config check",
      "config reload", "log",          "log level",    "debug",       "debug dump",
      "replay",        "calibrate",    "completion",   "lookup",      "pin",
      "pin ls",        "pin add",      "pin rm",       "tier show",   "value",
      "value ls",      "value get",    "value verify", "tier scrub",  "tier drain",
      "tier resize",   "quota",        "quota ls",     "events",      "doctor",
      "quota set",     "quota reset",  "explain",      "top",         "tier probe",
      "tier purge"};
  std::sort(names.begin(), names.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(names, expected);
}

TEST(Verbs, EveryVerbAndOptionHasHelp) {
  Table table;
  EachVerb(table.app, [&](const CLI::App& verb, const std::string& name) {
    EXPECT_GT(verb.get_description().size(), 5u) << name;
    EXPECT_NE(verb.help().find("Usage"), std::string::npos) << name;
    for (const CLI::Option* option : verb.get_options()) {
      EXPECT_GT(option->get_description().size(), 3u) << name << " " << option->get_name();
    }
  });
}

TEST(Verbs, TheIssuesVerbsExist) {
  for (const char* line : {"status",
                           "health -q",
                           "plan ls",
                           "plan show quest",
                           "model ls",
                           "model show 1",
                           "session ls",
                           "seq ls",
                           "seq show 1",
                           "seq map 1",
                           "seq demote 1",
                           "seq prefetch 1",
                           "seq build 1 --plan quest",
                           "seq recompress 1",
                           "seq recompress 1 --cancel",
                           "pool ls",
                           "tier ls",
                           "work ls",
                           "config show",
                           "config check x.toml",
                           "config reload --dry-run",
                           "log level",
                           "log level debug",
                           "debug dump x.tar -o json",
                           "replay x --plan quest --plan full --steps 4 --layers 0,2",
                           "calibrate x",
                           "calibrate x y --out z.toml --offline -o json",
                           "audit",
                           "audit --recall 17 --every 4 --steps 2 --timeout 1m -o json",
                           "evict --dry-run",
                           "version",
                           "completion bash",
                           "explain",
                           "doctor --config x.toml --set a=b --set c=d -o json",
                           "events",
                           "events -f --after 7 -o json",
                           "explain POOL_EXHAUSTED -o json",
                           "top -d 500ms --filter quest --retry 5s --ascii",
                           "top --once -o json",
                           "seq map 1 -w",
                           "seq map 1 --watch=500ms",
                           "pool ls -w 1s -o yaml",
                           "status -o json --timeout 500ms --socket /x",
                           "-o yaml seq ls --no-headers"}) {
    std::istringstream words(line);
    const std::vector<std::string> all(std::istream_iterator<std::string>{words}, {});
    Table table;
    EXPECT_EQ(table.Parse(all), 0) << line;
    EXPECT_TRUE(table.invocation.run != nullptr) << line;
  }
}

// Each command of ours in "source <(kvstrata completion bash)" or "kvstrata pin ls | xargs kvstrata
// pin rm", which gets a word from xargs.
std::vector<std::string> OwnCommands(const std::string& line) {
  std::vector<std::string> commands;
  const std::string name = "kvstrata ";
  for (size_t at = line.find(name); at != std::string::npos; at = line.find(name, at + 1)) {
    const std::string rest = line.substr(at);
    const size_t end =
        std::min({rest.find(" | "), rest.find(" || "), rest.find(" > "), rest.find(')')});
    const bool fed = line.substr(0, at).find("xargs") != std::string::npos;
    commands.push_back(rest.substr(0, end) + (fed ? " 17" : ""));
  }
  return commands;
}

TEST(Verbs, EveryVerbHasTwoExamplesThatParse) {
  Table table;
  size_t verbs = 0;
  EachVerb(table.app, [&](const CLI::App& verb, const std::string& name) {
    const Examples* examples = ExamplesOf(name);
    if (!VerbsOf(verb).empty()) return;
    ++verbs;
    ASSERT_NE(examples, nullptr) << name;
    EXPECT_NE(examples->first, examples->second) << name;
    const std::string help = verb.help();
    for (const std::string_view example : {examples->first, examples->second}) {
      EXPECT_NE(help.find("  " + std::string(example) + "\n"), std::string::npos) << help;
      EXPECT_NE(example.find("kvstrata " + name), std::string::npos) << example;
      for (const std::string& command : OwnCommands(std::string(example))) {
        Table fresh;
        EXPECT_NO_THROW(fresh.app.parse(command, true)) << command;
        EXPECT_TRUE(fresh.invocation.run != nullptr) << command;
      }
    }
    for (const char* global : {"--output", "--socket", "--timeout", "--no-headers", "--help"}) {
      EXPECT_NE(help.find(global), std::string::npos) << name << ": " << global;
    }
  });
  EXPECT_EQ(AllExamples().size(), verbs) << "an example of no verb";
}

TEST(Verbs, TheManualPageHasEveryVerbAndOption) {
  Table table;
  const std::string page = ManualPage(table.app);
  EachVerb(table.app, [&](const CLI::App& verb, const std::string& name) {
    if (!VerbsOf(verb).empty()) return;
    EXPECT_NE(page.find(".SS kvstrata " + name + "\n"), std::string::npos) << name;
    EXPECT_NE(page.find("seq map 17 \\-\\-columns 32"), std::string::npos);
  });
  EXPECT_EQ(page.find("__"), std::string::npos) << "a hidden verb";
}

TEST(Verbs, UsageErrors) {
  for (const char* line :
       {"", "sttaus", "seq", "seq show", "seq show x", "status -o xml", "replay x", "calibrate",
        "calibrate --out x", "status --timeout 5y", "status health", "completion csh",
        "status --nope", "audit --every 4", "audit --steps 4", "audit --recall x",
        "audit --recall 1 --every 0", "audit --recall 1 --steps 1025"}) {
    std::istringstream words(line);
    const std::vector<std::string> all(std::istream_iterator<std::string>{words}, {});
    Table table;
    EXPECT_NE(table.Parse(all), 0) << line;
  }
}

TEST(Verbs, DidYouMean) {
  Table table;
  EXPECT_NE(UnknownVerb(table.app, {"sttaus"}).find("did you mean 'status'?"), std::string::npos);
  EXPECT_NE(
      UnknownVerb(table.app, {"-o", "json", "seq", "mpa", "3"}).find("did you mean 'seq map'?"),
      std::string::npos);
  const std::string unlike_any = UnknownVerb(table.app, {"frobnicate"});
  EXPECT_EQ(unlike_any.find("did you mean"), std::string::npos);
  EXPECT_NE(unlike_any.find("There are status"), std::string::npos);
  EXPECT_EQ(UnknownVerb(table.app, {"seq", "show", "x"}), "");
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3u);
}

// Words of long names may be further away.
TEST(Verbs, AnEventThatSaysZeroAloneSaysIt) {
  EXPECT_EQ(EventDetails({{"records", 0}}), "records=0");
  EXPECT_EQ(EventDetails({{"records", 0}, {"why", "full"}, {"of", ""}}), "why=full");
  EXPECT_EQ(EventDetails(Json::object()), "-");
}

TEST(Verbs, NearestNames) {
  const std::vector<std::string_view> names = {"POOL_EXHAUSTED", "POOL_SIZE", "PIN_MISS"};
  EXPECT_EQ(Nearest("POOL_EXAUSTED", names), "POOL_EXHAUSTED");
  EXPECT_EQ(Nearest("POL_EXAUSTD", names), "POOL_EXHAUSTED");
  EXPECT_EQ(Nearest("PIN_MIS", names), "PIN_MISS");
  EXPECT_EQ(Nearest("FROBNICATE", names), "");
}

std::string Shell(const std::string& script, const std::string& command) {
  const std::string path = testing::TempDir() + "kvs_completion." + std::to_string(getpid());
  std::ofstream(path) << script;
  FILE* pipe = popen((command + " " + path + " 2>&1; echo rc=$?").c_str(), "r");
  std::string out;
  std::array<char, 4096> part;
  for (size_t n; (n = fread(part.data(), 1, part.size(), pipe)) > 0;) out.append(part.data(), n);
  pclose(pipe);
  unlink(path.c_str());
  return out;
}

TEST(Completion, BashParsesAndCompletes) {
  Table table;
  const std::string script = CompletionScript(table.app, "bash");
  EXPECT_EQ(Shell(script, "bash -n"), "rc=0\n");
  const auto complete = [&](const std::string& words, int at) {
    return Shell(script + "\nCOMP_WORDS=(" + words + ") COMP_CWORD=" + std::to_string(at) +
                     "\n_kvstrata\necho \"${COMPREPLY[*]}\"\n",
                 "bash");
  };
  EXPECT_EQ(complete("kvstrata seq m", 2), "map\nrc=0\n");
  EXPECT_EQ(complete("kvstrata -o y", 2), "yaml\nrc=0\n");
  EXPECT_EQ(complete("kvstrata -o json se", 3), "session seq\nrc=0\n");
  EXPECT_EQ(complete("kvstrata completion f", 2), "fish\nrc=0\n");
  EXPECT_EQ(complete("kvstrata evict --dr", 2), "--dry-run\nrc=0\n");
}

TEST(Completion, EveryVerbIsInEveryScript) {
  Table table;
  for (const char* shell : {"bash", "zsh", "fish"}) {
    const std::string script = CompletionScript(table.app, shell);
    EachVerb(table.app, [&](const CLI::App&, const std::string& name) {
      EXPECT_NE(script.find("'" + name + "'"), std::string::npos) << shell << ": " << name;
    });
  }
}

TEST(Completion, ZshAndFishParseWhereTheyExist) {
  Table table;
  for (const char* shell : {"zsh", "fish"}) {
    if (system((std::string("command -v ") + shell + " >/dev/null").c_str()) != 0) {
      std::cout << "not checked: no " << shell << " on this machine\n";
      continue;
    }
    EXPECT_EQ(Shell(CompletionScript(table.app, shell), std::string(shell) + " -n"), "rc=0\n");
  }
}

TEST(Errors, ExitCodes) {
  const auto exit = [](Code code, const char* reason) {
    return ExitCodeOf(Status(code, reason, ""));
  };
  EXPECT_EQ(ExitCodeOf(OkStatus()), 0);
  EXPECT_EQ(exit(Code::kInternal, "X"), 1);
  EXPECT_EQ(exit(Code::kUnimplemented, "X"), 1);
  EXPECT_EQ(exit(Code::kResourceExhausted, "POOL_EXHAUSTED"), 1);
  EXPECT_EQ(exit(Code::kInvalidArgument, "TRACE_TENSOR"), 1);
  EXPECT_EQ(exit(Code::kInvalidArgument, "PLAN_OPTION_INVALID"), 2);
  EXPECT_EQ(exit(Code::kUnavailable, "DAEMON_UNREACHABLE"), 3);
  EXPECT_EQ(exit(Code::kInvalidArgument, "SOCKET_INVALID"), 3);
  EXPECT_EQ(exit(Code::kPermissionDenied, "X"), 4);
  EXPECT_EQ(exit(Code::kNotFound, "SEQUENCE_UNKNOWN"), 5);
  EXPECT_EQ(exit(Code::kInvalidArgument, "PLAN_UNKNOWN"), 5);
  EXPECT_EQ(exit(Code::kDeadlineExceeded, "DEADLINE"), 6);
}

// The next step of an error is that of the table.
TEST(Errors, NextStepsAreThoseOfTheTable) {
  for (const Reason& reason : AllReasons()) {
    if (reason.next.empty()) continue;
    EXPECT_EQ(NextStep({Code::kAborted, reason.name, "why"}, Options{}), reason.next);
  }
  EXPECT_EQ(FindReason("POOL_EXHAUSTE"), std::nullopt);
  EXPECT_EQ(FindReason(""), std::nullopt);
}

TEST(Errors, PrintReasonMessageAndNextStep) {
  Options options;
  options.socket = "/run/x.sock";
  std::ostringstream text, json;
  PrintError(Unavailable("DAEMON_UNREACHABLE", "no daemon"), options, text);
  EXPECT_EQ(text.str().substr(0, 40), "kvstrata: DAEMON_UNREACHABLE: no daemon\n");
  EXPECT_NE(text.str().find("next: start a daemon: kvstratad --socket /run/x.sock"),
            std::string::npos);
  options.style.format = Format::kJson;
  PrintError(NotFound("SEQUENCE_UNKNOWN", "sequence 9"), options, json);
  const Json error = Json::parse(json.str())["error"];
  EXPECT_EQ(error["code"], "NOT_FOUND");
  EXPECT_EQ(error["next"], "list them: kvstrata seq ls");
}

// A reload has lines; from any other verb's daemon a line feed is as any control character.
TEST(Errors, MistakesOfAReloadAreALineEach) {
  const Status several = InvalidArgument("CONFIG_VALUE", "a = 'x\x1b'\nCONFIG_KEY: b");
  Options options;
  options.verb = "config reload";
  std::ostringstream reload, other;
  PrintError(several, options, reload);
  EXPECT_EQ(reload.str().substr(0, reload.str().find("next: ")),
            "kvstrata: CONFIG_VALUE: a = 'x\\x1b'\nkvstrata: CONFIG_KEY: b\n");
  options.verb = "status";
  PrintError(several, options, other);
  EXPECT_EQ(other.str().substr(0, other.str().find("next: ")),
            "kvstrata: CONFIG_VALUE: a = 'x\\x1b'\\x0aCONFIG_KEY: b\n");
}

TEST(Errors, AModelThatTheDaemonForgotIsRegisteredByAnEngine) {
  Options options;
  options.verb = "tier purge";
  EXPECT_NE(NextStep(NotFound("MODEL_UNKNOWN", "why"), options).find("attach the engine"),
            std::string::npos);
}

// One grammar with the configuration: base/quantities.h.
TEST(Options, Sizes) {
  EXPECT_EQ(ParseBytes("1GB"), 1'000'000'000u);
  EXPECT_EQ(ParseBytes("1.5 GiB"), uint64_t{3} << 29);
  EXPECT_EQ(ParseBytes("4096"), 4096u);
  for (const char* bad : {"", "0", "much", "1G", "-1", "2000000TiB"}) {
    EXPECT_THROW(ParseBytes(bad), CLI::ValidationError) << bad;
  }
}

TEST(Options, Durations) {
  EXPECT_EQ(ParseDuration("5s")->count(), 5000);
  EXPECT_EQ(ParseDuration("500ms")->count(), 500);
  EXPECT_EQ(ParseDuration("1.5s")->count(), 1500);
  EXPECT_EQ(ParseDuration("5 s")->count(), 5000);
  EXPECT_EQ(ParseDuration("2m")->count(), 120000);
  for (const char* bad : {"", "s", "0", "5", "-1s", "2h", "500us", "nan", "1e9", "5seconds"}) {
    EXPECT_FALSE(ParseDuration(bad).ok()) << bad;
  }
}

TEST(Json, MessagesKeepTheirFieldNamesAndNumbers) {
  v1::ListModelsResponse message;
  message.add_models()->mutable_geometry()->set_dtype(v1::DTYPE_BF16);
  message.mutable_models(0)->set_page_bytes(int64_t{2} << 40);
  const Json json = ToJson(message);
  EXPECT_EQ(json["models"][0]["geometry"]["dtype"], "bf16");
  EXPECT_EQ(json["models"][0]["page_bytes"], int64_t{2} << 40);
  EXPECT_EQ(json["models"][0]["name"], "");
}

}  // namespace
}  // namespace kvstrata::cli
