// SPDX-License-Identifier: Apache-2.0
// The panes that `kvstrata top` shows instead of its table: a live map of a sequence, the proof of
// the books, events, help. Each asks when it is drawn and keeps what it needs for the next time.
//
// Thread-safety: one thread. Cost: one call a draw.
#ifndef KVSTRATA_CLIENT_CLI_TOP_PANES_H_
#define KVSTRATA_CLIENT_CLI_TOP_PANES_H_

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "client/cli/top_frame.h"
#include "client/cli/top_source.h"

namespace kvstrata::cli {

// What a pane may use.
struct PaneRoom {
  int columns = 80, rows = 20;
  size_t first = 0;  // the line at the top of what scrolls; a pane lowers it to what there is
};

// Pages of one sequence; weights are of what was selected since the last draw.
class MapPane {
 public:
  explicit MapPane(uint64_t sequence) : sequence_(sequence) {}
  Result<std::vector<std::string>> Draw(TopSource* source, const TopLook& look, PaneRoom* room);

 private:
  const uint64_t sequence_;
  std::vector<uint32_t> before_;  // by page; empty: nothing yet
};

class EventsPane {
 public:
  // The last ones, the newest at the bottom; `first` scrolls back.
  Result<std::vector<std::string>> Draw(TopSource* source, const TopLook& look, PaneRoom* room);

 private:
  static constexpr size_t kKept = 1000;

  uint64_t last_ = 0;
  std::deque<std::string> lines_;
};

Result<std::vector<std::string>> AuditPane(TopSource* source);
std::vector<std::string> HelpPane();

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_TOP_PANES_H_
