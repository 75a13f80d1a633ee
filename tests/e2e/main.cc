// SPDX-License-Identifier: Apache-2.0
// Runs the tests, or, as `PROGRAM --client ROLE SOCKET ARG`, one of the client processes that tests
// kill, freeze or count. A client is a process of its own (exec, not fork alone), as engines are.
#include "tests/e2e/main.h"

#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstring>
#include <map>

extern char** environ;

namespace kvstrata::testing {
namespace {
std::map<std::string, ClientRole>& Roles() {
  static std::map<std::string, ClientRole> roles;
  return roles;
}
}  // namespace

bool RegisterRole(const char* name, ClientRole role) { return Roles().emplace(name, role).second; }

ClientProcess::ClientProcess(const char* role, const std::string& socket, int arg) {
  int out[2];
  EXPECT_EQ(pipe(out), 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclose(&actions, out[0]);
  const std::string number = std::to_string(arg);
  const char* argv[] = {"client", "--client", role, socket.c_str(), number.c_str(), nullptr};
  EXPECT_EQ(
      posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, const_cast<char**>(argv), environ),
      0);
  posix_spawn_file_actions_destroy(&actions);
  close(out[1]);
  said_.Reset(out[0]);
}

ClientProcess::~ClientProcess() {
  if (pid_ > 0) Kill();
}

bool ClientProcess::Says(char what) {
  char byte = 0;
  return read(said_.get(), &byte, 1) == 1 && byte == what;
}

void ClientProcess::Kill() {
  kill(pid_, SIGKILL);
  Wait();
}

int ClientProcess::Wait() {
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  return status;
}

void Say(char what) {
  if (write(STDOUT_FILENO, &what, 1) != 1) _exit(3);
}

int RunMain(int argc, char** argv) {
  if (argc == 5 && std::strcmp(argv[1], "--client") == 0) {
    return Roles().at(argv[2])(argv[3], std::atoi(argv[4]));
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace kvstrata::testing

int main(int argc, char** argv) { return kvstrata::testing::RunMain(argc, argv); }
