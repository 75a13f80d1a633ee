// SPDX-License-Identifier: Apache-2.0
// What was selected of a sequence, as a strip of text: a few cells for all of its tokens.
//
// Pure functions.
#ifndef KVSTRATA_CLIENT_CLI_SELECTION_STRIP_H_
#define KVSTRATA_CLIENT_CLI_SELECTION_STRIP_H_

#include <cstdint>
#include <span>
#include <string>

namespace kvstrata::cli {

// `cells` glyphs, ·░▒▓█ or .1234: buckets from left to right, each cell in quarters of the most
// selected one; · is nothing. A cell has the most selected of its buckets, so that none is missed.
// "" without buckets. REQUIRES: cells > 0.
std::string SelectionStrip(std::span<const uint32_t> selected, int cells, bool ascii);

// Which part of its pages a layer of a step selected on average: 0 .. 1.
// `selected` is summed over all pages, layers and steps.
double SelectedShare(uint64_t selected, uint64_t pages, uint64_t layers, uint64_t steps);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_SELECTION_STRIP_H_
