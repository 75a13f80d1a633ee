// SPDX-License-Identifier: Apache-2.0
// Client processes of the end-to-end tests: a role is a function that a test program runs when it
// is started as `PROGRAM --client ROLE SOCKET ARG`; it talks to the test through its standard
// output.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <string>

#include "base/unique_fd.h"

namespace kvstrata::testing {

// The exit code of the client process.
using ClientRole = int (*)(const std::string& socket, int arg);
bool RegisterRole(const char* name, ClientRole role);

// In a client: one byte to the test.
void Say(char what);

class ClientProcess {
 public:
  ClientProcess(const char* role, const std::string& socket, int arg = 0);
  ClientProcess(const ClientProcess&) = delete;
  ClientProcess& operator=(const ClientProcess&) = delete;
  ~ClientProcess();  // kills it if it lives

  // Blocks until the client says a byte; false if it was another one, or the client ended.
  bool Says(char what);
  void Kill();  // SIGKILL, and reaps it
  int Wait();   // exit status as of waitpid
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  UniqueFd said_;
};

}  // namespace kvstrata::testing
