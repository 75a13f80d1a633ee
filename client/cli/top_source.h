// SPDX-License-Identifier: Apache-2.0
// TopSource: asks a daemon for what `kvstrata top` shows, and makes rates of two answers. Holds a
// connection and, for each sequence that was sampled, the cursor of its last sample.
//
// Thread-safety: one thread. Cost: three calls a look, one for each sequence that is sampled.
// Errors: those of the connection; the next call dials anew.
#pragma once

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "client/cli/connection.h"
#include "client/cli/invocation.h"
#include "client/cli/top_view.h"

namespace kvstrata::cli {

class TopSource {
 public:
  explicit TopSource(const Options& options) : options_(options) {}

  // All sequences, none sampled. Rates are of the time since the look before, if that was of the
  // same daemon process.
  Result<TopView> Look();
  // Fills in what steps selected of `rows` since they were sampled last. A sequence that is gone
  // stays as it is.
  Status Sample(std::span<TopRow> rows);

  // What else the panes show.
  Result<v1::ShowSequenceResponse> Show(uint64_t sequence);
  Result<v1::AuditResponse> Audit();
  // Events behind number `after`, and how many were missed.
  Result<std::vector<v1::Event>> EventsAfter(uint64_t after, uint64_t* missed);

 private:
  struct Seen {
    std::chrono::steady_clock::time_point at;
    v1::GetStatusResponse status;
    std::map<uint64_t, v1::Sequence> sequences;
  };

  Status Dial();
  template <typename T>
  Result<T> Kept(Result<T> answer);
  TopView ViewOf(const Seen& now, const v1::ListSessionsResponse& sessions) const;

  const Options options_;
  std::unique_ptr<Connection> connection_;
  std::optional<Seen> last_;
  std::map<uint64_t, v1::SelectionCursor> cursors_;
};

}  // namespace kvstrata::cli
