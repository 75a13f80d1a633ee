// SPDX-License-Identifier: Apache-2.0
// kvstrata: the admin CLI. Parses, runs one verb, exits 0 .. 6 (docs/cli.md).
#include <exception>
#include <iostream>
#include <string>

#include "client/cli/invocation.h"
#include "client/cli/list_fit.h"
#include "client/cli/spelling.h"

namespace kvstrata::cli {
namespace {

// Tells a command line without a verb what there is.
void PrintVerbs(const CLI::App& app) {
  std::string names;
  for (const CLI::App* verb : VerbsOf(app)) names += (names.empty() ? "" : " ") + verb->get_name();
  std::cerr << app.get_description() << "\nverbs:\n";
  for (const std::string& line : Wrap(names, 76)) std::cerr << "  " << line << "\n";
}

int UsageError(const CLI::App& app, const CLI::ParseError& error, int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string hint = UnknownVerb(app, words), verb = VerbNamed(app, words);
  if (hint.empty() && verb.empty() && error.get_name() == "RequiredError") {
    PrintVerbs(app);
    std::cerr << "kvstrata: USAGE: no verb is given\n"
              << "next: kvstrata status; kvstrata --help says what each verb does\n";
    return kUsage;
  }
  std::cerr << "kvstrata: USAGE: " << (hint.empty() ? error.what() : hint) << "\n"
            << "next: kvstrata " << (verb.empty() ? "" : verb + " ") << "--help"
            << (verb.empty() ? ", or --help after a verb" : "") << "\n";
  return kUsage;
}

int RunVerb(Invocation& invocation) {
  if (invocation.options.socket.empty()) invocation.options.socket = DefaultSocket();
  invocation.options.style.width = LineWidth();
  const Result<int> result = invocation.run();
  if (result.ok()) return *result;
  PrintError(result.status(), invocation.options, std::cerr);
  return ExitCodeOf(result.status());
}

int Run(int argc, char** argv) {
  CLI::App app("", "kvstrata");
  Invocation invocation;
  BuildTable(app, invocation);
  try {
    app.parse(argc, argv);
    return RunVerb(invocation);
  } catch (const CLI::ParseError& error) {  // the verb's, too: options that make no sense together
    // Help and version are "errors" with code 0.
    if (error.get_exit_code() == 0) return app.exit(error);
    return UsageError(app, error, argc, argv);
  }
}

}  // namespace
}  // namespace kvstrata::cli

int main(int argc, char** argv) {
  try {
    const int code = kvstrata::cli::Run(argc, argv);
    std::cout.flush();
    return std::cout ? code : kvstrata::cli::kFailed;  // a full disk is no success
  } catch (const std::exception& error) {
    std::cerr << "kvstrata: INTERNAL: " << error.what() << "\n";
    return kvstrata::cli::kFailed;
  }
}
