// SPDX-License-Identifier: Apache-2.0
// The verbs of a command table, as help shows them: without those that only programs call. Pure
// functions of the table.
#ifndef KVSTRATA_CLIENT_CLI_VERB_WALK_H_
#define KVSTRATA_CLIENT_CLI_VERB_WALK_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace kvstrata::cli {

// Those directly below `app`, in the table's order.
std::vector<CLI::App*> VerbsOf(const CLI::App& app);

// f(verb, "seq map") of every noun and verb below `app`, nouns before their verbs.
void EachVerb(const CLI::App& app, const std::function<void(CLI::App&, const std::string&)>& f,
              const std::string& path = "");

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_VERB_WALK_H_
