// SPDX-License-Identifier: Apache-2.0
// work ls: what the daemon's workers recompress, and what waits for them.

#include "client/cli/connection.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

constexpr Column kWorkList[] = {
    {"SEQUENCE", "/sequence", nullptr, true},
    {"SESSION", "/session", nullptr, true, 1},
    {"PLAN", "/plan", nullptr, false, 3, 12},
    {"STATE", "/state", nullptr, false, 6},
    {"WAITING", "/waiting_us", Microseconds, true, 4},
    {"RELEASABLE", "/releasable_bytes", Bytes, true, 2},
    {"RUNS", "/runs", nullptr, true},
    {"LAST-ERROR", "/error", OrDash, false, 5, 20},
};

}  // namespace

void AddWork(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("work", "Work: sequences that are being recompressed");
  Shows(noun->add_subcommand("ls", "What runs, what waits, and why something failed"), invocation,
        Lists(&v1::Admin::Stub::ListWork, "work", kWorkList));
}

}  // namespace kvstrata::cli
