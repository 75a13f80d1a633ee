// SPDX-License-Identifier: Apache-2.0
// session ls: who is attached.

#include "client/cli/connection.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

// How long ago; "-" of one that never did one.
std::string LastStep(const Json& since) { return since == 0 ? "-" : Microseconds(since); }

constexpr Column kSessionList[] = {
    {"SESSION", "/session", nullptr, true},
    {"CLIENT", "/client_name", nullptr, false, 7, 12},
    {"PID", "/pid", nullptr, true, 6},
    {"UID", "/uid", nullptr, true, 1},
    {"TENANT", "/tenant", nullptr, false, 2},
    {"CLUSTER-TENANT", "/cluster_tenant", OrDash, false, 2},
    {"TRANSPORT", "/transport"},
    {"SEQUENCES", "/sequences", nullptr, true, 4},
    {"USED", "/used_bytes", Bytes, true, 5},
    {"STEPS", "/open_steps", nullptr, true, 1},
    {"AGE", "/age_us", Microseconds, true, 3},
    {"LAST-STEP", "/last_step_us", LastStep, true, 3},
    {"FENCED", "/fenced", YesNo, false, 3},
};

}  // namespace

void AddSession(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("session", "Sessions: attached engines and tools");
  Shows(noun->add_subcommand("ls",
                             "All sessions, what they hold, whether they are in a step or ended "
                             "while their process lives"),
        invocation, Lists(&v1::Admin::Stub::ListSessions, "sessions", kSessionList));
}

}  // namespace kvstrata::cli
