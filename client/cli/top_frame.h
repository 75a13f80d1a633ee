// SPDX-License-Identifier: Apache-2.0
// The frame of `kvstrata top`: lines of text made of a view. Pure functions.
#ifndef KVSTRATA_CLIENT_CLI_TOP_FRAME_H_
#define KVSTRATA_CLIENT_CLI_TOP_FRAME_H_

#include <cstddef>
#include <string>
#include <vector>

#include "client/cli/top_view.h"

namespace kvstrata::cli {

struct TopLook {
  int columns = 80;
  int rows = 0;  // rows of the screen; 0: as many as there are sequences
  bool colour = false, ascii = false;
  TopSort sort = TopSort::kTokensPerSecond;
  std::string filter;
  size_t first = 0;     // row of the table at its top
  int marked = -1;      // row under the cursor; -1: none
  std::string trouble;  // why what is shown is old; "": it is not
};

// Name and state, rates, tiers: what stands above every pane.
std::vector<std::string> TopHeader(const TopView& view, const TopLook& look);
// The header of the table and its rows, as many as fit below the header and above one line of keys.
std::vector<std::string> TopTable(const TopView& view, const TopLook& look);
// Rows of the table that fit beside the header.
size_t TopTableRoom(const TopView& view, const TopLook& look);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_TOP_FRAME_H_
