// SPDX-License-Identifier: Apache-2.0
// The command table: global options and one row per noun. Help, completions and docs/cli.md follow
// it.
#include <algorithm>
#include <array>
#include <memory>

#include "client/cli/help_format.h"
#include "client/cli/invocation.h"
#include "kvstrata/kvstrata.h"

namespace kvstrata::cli {
namespace {

using AddNoun = void (*)(CLI::App&, Invocation&);
constexpr std::array<AddNoun, 25> kNouns = {
    AddStatus, AddPlan,       AddModel,     AddSession, AddSequence, AddPool,    AddTier,
    AddValue,  AddLookup,     AddPin,       AddQuota,   AddWork,     AddAudit,   AddConfig,
    AddReplay, AddCalibrate,  AddDoctor,    AddEvents,  AddTop,      AddExplain, AddLog,
    AddDebug,  AddCompletion, AddReference, AddNames};

struct Form {
  const char* name;
  Format format;
};
constexpr std::array<Form, 6> kForms = {{{"table", Format::kTable},
                                         {"wide", Format::kWide},
                                         {"json", Format::kJson},
                                         {"yaml", Format::kYaml},
                                         {"csv", Format::kCsv},
                                         {"name", Format::kName}}};

std::vector<std::string> FormNames() {
  std::vector<std::string> names;
  for (const Form& form : kForms) names.emplace_back(form.name);
  return names;
}

// REQUIRES: `name` is one of kForms.
void SetFormat(Invocation& invocation, const std::string& name) {
  const auto* const form = std::ranges::find(kForms, name, &Form::name);
  invocation.options.style.format = form->format;
}

void AddGlobalOptions(CLI::App& app, Invocation& invocation) {
  app.add_option_function<std::string>(
         "-o,--output", [&invocation](const std::string& name) { SetFormat(invocation, name); },
         "Form of the answer (default: table)")
      ->check(CLI::IsMember(FormNames()));
  app.add_option("--socket", invocation.options.socket,
                 "The daemon's socket (default: KVSTRATA_SOCKET, else the daemon's own default)");
  AddDuration(&app, "--timeout", &invocation.options.timeout,
              "Longest wait for the daemon: 500ms, 5s, 2m (default: 5s)")
      ->each([&invocation](const std::string&) { invocation.options.timeout_given = true; });
  app.add_flag_callback(
      "--no-headers", [&invocation] { invocation.options.style.headers = false; },
      "Tables without their headers");
}

}  // namespace

void BuildTable(CLI::App& app, Invocation& invocation) {
  app.formatter(std::make_shared<HelpFormatter>());  // verbs take it from here
  app.description("kvstrata: ask a running kvstratad, and replay traces through it");
  app.footer(
      "Exit codes: 0 ok, 1 failed, 2 usage, 3 not connected, 4 denied, 5 not found,\n"
      "6 timeout.\n"
      "Every verb has --help with examples; docs/cli.md has the JSON keys.");
  app.set_version_flag("--version", std::string("kvstrata ") + kvs_version());
  app.fallthrough();  // global options may follow the verb
  app.require_subcommand(1);
  AddGlobalOptions(app, invocation);
  for (const AddNoun add : kNouns) add(app, invocation);
  for (CLI::App* noun : app.get_subcommands(nullptr)) {
    if (!noun->get_subcommands(nullptr).empty()) noun->require_subcommand(1);
  }
  EachVerb(app, [&app](CLI::App& verb, const std::string& name) {
    verb.footer([&app, name] { return HelpTail(app, name); });
  });
}

}  // namespace kvstrata::cli
