// SPDX-License-Identifier: Apache-2.0
// __reference man|examples: the command table as documents, for the build and the tests.
#include "client/cli/reference.h"

#include <iostream>
#include <memory>

#include "base/roff.h"
#include "client/cli/examples.h"
#include "client/cli/help_format.h"
#include "client/cli/invocation.h"
#include "client/cli/verb_walk.h"
#include "kvstrata/kvstrata.h"

namespace kvstrata::cli {
namespace {

// Options that have a name on the command line, but --help, which help itself shows.
std::vector<const CLI::Option*> NamedOptions(const CLI::App& app) {
  return app.get_options([&app](const CLI::Option* option) {
    return option->nonpositional() && option != app.get_help_ptr();
  });
}

std::string OptionParagraph(const CLI::Option& option) {
  const CLI::Formatter formatter;
  const std::string name = formatter.make_option_name(&option, !option.nonpositional());
  return RoffParagraph(name + formatter.make_option_opts(&option), option.get_description());
}

std::string VerbSection(const CLI::App& verb, const std::string& name, const Examples& examples) {
  std::string out = ".SS " + Roff("kvstrata " + name) + "\n" + Roff(verb.get_description()) + "\n";
  for (const CLI::Option* option : verb.get_options()) {
    if (option != verb.get_help_ptr()) out += OptionParagraph(*option);
  }
  return out + ".PP\n.nf\n" + Roff(examples.first) + "\n" + Roff(examples.second) + "\n.fi\n";
}

constexpr char kEnvironment[] =
    ".SH ENVIRONMENT\n"
    ".TP\n.B KVSTRATA_SOCKET\nThe daemon's socket, where \\-\\-socket is not given.\n"
    ".TP\n.B COLUMNS\nCells of a line of a list.\n"
    ".TP\n.B NO_COLOR\nNo colour on terminals.\n";

}  // namespace

std::string HelpTail(const CLI::App& root, const std::string& verb) {
  std::string out;
  if (const Examples* examples = ExamplesOf(verb)) {
    out = "Examples:\n  " + std::string(examples->first) + "\n  " + std::string(examples->second) +
          "\n";
  }
  const HelpFormatter formatter;
  out += (out.empty() ? "" : "\n") + std::string("Options of every verb:\n");
  for (const CLI::Option* option : NamedOptions(root)) {
    if (option->get_name() != "--version") out += formatter.make_option(option, false);
  }
  return out;
}

std::string ManualPage(const CLI::App& root) {
  std::string out =
      ".TH KVSTRATA 1 \"\" \"kvstrata " + std::string(kvs_version()) +
      "\"\n.SH NAME\nkvstrata \\- ask a running kvstratad, and replay traces through "
      "it\n.SH SYNOPSIS\n.B kvstrata\n[OPTIONS] VERB ...\n.SH OPTIONS OF EVERY VERB\n";
  for (const CLI::Option* option : NamedOptions(root)) out += OptionParagraph(*option);
  out += ".SH VERBS\n";
  EachVerb(root, [&out](const CLI::App& verb, const std::string& name) {
    if (const Examples* examples = ExamplesOf(name)) out += VerbSection(verb, name, *examples);
  });
  out +=
      ".SH EXIT STATUS\n0 ok, 1 failed, 2 usage, 3 not connected, 4 denied, 5 not found, 6 "
      "timeout.\n";
  return out + kEnvironment;
}

std::string ExampleLines(const CLI::App& root) {
  std::string out;
  EachVerb(root, [&out](const CLI::App&, const std::string& name) {
    const Examples* examples = ExamplesOf(name);
    if (examples == nullptr) return;
    out += "    " + std::string(examples->first) + "\n    " + std::string(examples->second) + "\n";
  });
  return out;
}

void AddReference(CLI::App& app, Invocation& invocation) {
  CLI::App* verb = app.add_subcommand("__reference", "The command table as a document")->group("");
  auto form = std::make_shared<std::string>();
  verb->add_option("FORM", *form, "Which")->required()->check(CLI::IsMember({"man", "examples"}));
  Runs(verb, invocation, [&app, form]() -> Result<int> {
    std::cout << (*form == "man" ? ManualPage(app) : ExampleLines(app));
    return kOk;
  });
}

}  // namespace kvstrata::cli
