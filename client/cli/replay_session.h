// SPDX-License-Identifier: Apache-2.0
// ReplaySession: attached to a daemon with the geometry of a trace registered as a model of its
// own. Move-only; detaches when destroyed. Threads: one. Errors: those of the C ABI.
#ifndef KVSTRATA_CLIENT_CLI_REPLAY_SESSION_H_
#define KVSTRATA_CLIENT_CLI_REPLAY_SESSION_H_

#include <chrono>
#include <memory>
#include <string>

#include "base/status.h"
#include "client/cli/trace.h"
#include "kvstrata/kvstrata.h"

namespace kvstrata::cli {

// The calling thread's last failure; OK for KVS_OK.
Status FromAbi(int code);

class ReplaySession {
 public:
  // `layers`: how many of the trace's are replayed. `keep`: the daemon keeps pages and model when
  // the session ends, as any model's.
  static Result<ReplaySession> Attach(const std::string& socket, std::chrono::milliseconds timeout,
                                      const Trace& trace, size_t layers, bool keep);

  kvs_session* session() const { return session_.get(); }
  kvs_model model() const { return model_; }

 private:
  struct Detach {
    void operator()(kvs_session* session) const { kvs_detach(session); }
  };
  explicit ReplaySession(kvs_session* session) : session_(session) {}
  Status Register(const TraceShape& shape, size_t layers, bool keep);

  std::unique_ptr<kvs_session, Detach> session_;
  kvs_model model_ = 0;
};

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_REPLAY_SESSION_H_
