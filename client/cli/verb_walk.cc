// SPDX-License-Identifier: Apache-2.0
#include "client/cli/verb_walk.h"

namespace kvstrata::cli {

std::vector<CLI::App*> VerbsOf(const CLI::App& app) {
  std::vector<CLI::App*> verbs;
  for (const CLI::App* verb : app.get_subcommands(nullptr)) {
    // By name: only that gives what may be changed.
    if (!verb->get_group().empty()) verbs.push_back(app.get_subcommand(verb->get_name()));
  }
  return verbs;
}

void EachVerb(const CLI::App& app, const std::function<void(CLI::App&, const std::string&)>& f,
              const std::string& path) {
  for (CLI::App* verb : VerbsOf(app)) {
    const std::string name = path.empty() ? verb->get_name() : path + " " + verb->get_name();
    f(*verb, name);
    EachVerb(*verb, f, name);
  }
}

}  // namespace kvstrata::cli
