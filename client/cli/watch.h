// SPDX-License-Identifier: Apache-2.0
// -w, --watch: a verb that shows something shows it again and again.
//
// On a terminal each frame takes the place of the one before, `q` and Ctrl-C end it, and a daemon
// that went away is said and asked again for a minute. Elsewhere frames follow each other,
// until one fails: a table behind a line with its time, as JSON one line a frame, as YAML one
// document a frame, both with the key `time`; csv and names behind an empty line, without a time.
#ifndef KVSTRATA_CLIENT_CLI_WATCH_H_
#define KVSTRATA_CLIENT_CLI_WATCH_H_

#include <chrono>
#include <functional>
#include <memory>

#include "client/cli/invocation.h"

namespace kvstrata::cli {

// Runs `show`, which writes to std::cout, every so often.
Result<int> Watch(const Options& options, std::chrono::milliseconds every,
                  const std::function<Result<int>()>& show);

// What -w of `verb` was given: 0 without it.
std::shared_ptr<std::chrono::milliseconds> AddWatchOption(CLI::App* verb);

// As Runs, of a verb that only shows: it has -w.
template <typename Show>
void Shows(CLI::App* verb, Invocation& invocation, Show show) {
  const auto every = AddWatchOption(verb);
  Runs(verb, invocation, [&invocation, every, show]() -> Result<int> {
    return every->count() == 0 ? show() : Watch(invocation.options, *every, show);
  });
}

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_WATCH_H_
