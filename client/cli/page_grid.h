// SPDX-License-Identifier: Apache-2.0
// PageGrid: a sequence's pages as a picture of text, one cell a page, for `kvstrata seq map`.
//
// The glyph's weight says how often steps selected the page, its family and colour in which tier it
// lies; without colour the family alone does. Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvstrata::cli {

struct GridPage {
  bool host = false;      // else device
  bool shared = false;    // with another sequence
  uint32_t selected = 0;  // how often, over steps and layers
  bool absent = false;    // released: only a codec holds its rows
};

struct GridStyle {
  bool colour = false;
  bool ascii = false;       // for terminals without Unicode
  int columns = 64;         // cells a row; >= 1
  int64_t page_tokens = 0;  // labels rows by token position; 0: by page number
};

// 0 never selected, 1 .. 4 quarters of `most`. REQUIRES: selected <= most.
int Shade(uint32_t selected, uint32_t most);
// A cell of that weight, of a page on the device.
std::string ShadeGlyph(int shade, bool ascii);

// Rows of cells with a label each, an empty line, and the legend.
std::string DrawGrid(const std::vector<GridPage>& pages, const GridStyle& style);

// `cells` glyphs, ·░▒▓█ or .1234: buckets from left to right, each cell in quarters of the most
// selected one; · is nothing. A cell has the most selected of its buckets, so that none is missed.
// "" without buckets. REQUIRES: cells > 0.
std::string SelectionStrip(std::span<const uint32_t> selected, int cells, bool ascii);

// Which part of its pages a layer of a step selected on average: 0 .. 1.
// `selected` is summed over all pages, layers and steps.
double SelectedShare(uint64_t selected, uint64_t pages, uint64_t layers, uint64_t steps);

}  // namespace kvstrata::cli
