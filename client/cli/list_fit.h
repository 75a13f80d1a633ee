// SPDX-License-Identifier: Apache-2.0
// Which columns of a list a terminal has room for. Pure functions; any thread.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "client/cli/printer.h"

namespace kvstrata::cli {

// `widths` of the columns, in cells, as they are in lines of at most `room` cells, two cells apart:
// 0 of one that falls away, less than before of one that is cut. What is cut shares the cells that
// are left: of the highest rank first, the first column last. The first one never falls away and
// is cut, if it must be, to `room`, but to no fewer than 8 cells. `room` 0: they fit.
std::vector<size_t> Fit(std::span<const Column> columns, std::vector<size_t> widths, size_t room);

// `text` in at most `width` cells, with "..." where it was cut. REQUIRES: width >= 3 if it is cut.
std::string Cut(std::string text, size_t width);

// `text` in lines of at most `width` cells, broken behind spaces and commas where there are any,
// else anywhere. REQUIRES: width > 0.
std::vector<std::string> Wrap(std::string_view text, size_t width);

// Cells of a line of stdout: COLUMNS of the environment, else what the terminal says. 0, any
// number, where stdout is none: a script counts columns, and they may not come and go with data.
size_t LineWidth();

}  // namespace kvstrata::cli
