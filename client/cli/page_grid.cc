// SPDX-License-Identifier: Apache-2.0
#include "client/cli/page_grid.h"

#include <algorithm>

#include "client/cli/terminal.h"

namespace kvstrata::cli {
namespace {

constexpr int kShades = 5;
using Glyphs = const char* const[kShades];
constexpr Glyphs kDevice = {"·", "░", "▒", "▓", "█"};
constexpr Glyphs kHost = {"∘", "○", "◔", "◑", "●"};
constexpr Glyphs kDeviceAscii = {".", "1", "2", "3", "4"};
constexpr Glyphs kHostAscii = {",", "a", "b", "c", "d"};

const char* Glyph(bool host, int shade, bool ascii) {
  if (ascii) return host ? kHostAscii[shade] : kDeviceAscii[shade];
  return host ? kHost[shade] : kDevice[shade];
}

std::string PageCell(const GridPage& page, int shade, const GridStyle& style) {
  if (page.absent) return " ";
  const std::string glyph = Glyph(page.host, shade, style.ascii);
  if (!style.colour) return glyph;
  return std::string(page.host ? kYellow : kGreen) + (page.shared ? kUnderline : "") + glyph +
         kReset;
}

std::string Label(size_t page, const GridStyle& style) {
  const int64_t value = static_cast<int64_t>(page) * std::max<int64_t>(style.page_tokens, 1);
  std::string text = std::to_string(value);
  return std::string(8 - std::min<size_t>(8, text.size()), ' ') + text + "  ";
}

std::string Scale(bool host, const GridStyle& style) {
  std::string out = host ? "host   " : "device ";
  for (int shade = 0; shade < kShades; ++shade) {
    out += PageCell({.host = host}, shade, style);
  }
  return out;
}

std::string Legend(const std::vector<GridPage>& pages, uint32_t most, const GridStyle& style) {
  size_t never = 0, shared = 0, host = 0, absent = 0;
  for (const GridPage& page : pages) {
    never += page.selected == 0;
    shared += page.shared;
    host += page.host;
    absent += page.absent;
  }
  std::string out = Scale(false, style) + "  " + Scale(true, style) + "   never .. up to " +
                    std::to_string(most) + " times selected\n";
  out += std::to_string(pages.size()) + " pages: " + std::to_string(pages.size() - host - absent) +
         " device, " + std::to_string(host) + " host, " + std::to_string(shared) + " shared" +
         (style.colour && shared > 0 ? " (underlined)" : "") + ", " + std::to_string(never) +
         " never selected" +
         (absent > 0 ? ", " + std::to_string(absent) + " released (blank)" : "") + "\n";
  return out;
}

}  // namespace

int Shade(uint32_t selected, uint32_t most) {
  if (selected == 0) return 0;
  return 1 + static_cast<int>((uint64_t{selected} * 4 - 1) / most);
}

std::string ShadeGlyph(int shade, bool ascii) { return Glyph(false, shade, ascii); }

std::string DrawGrid(const std::vector<GridPage>& pages, const GridStyle& style) {
  uint32_t most = 0;
  for (const GridPage& page : pages) most = std::max(most, page.selected);
  std::string out = style.page_tokens > 0 ? "   token\n" : "    page\n";
  const auto columns = static_cast<size_t>(style.columns);
  for (size_t first = 0; first < pages.size(); first += columns) {
    out += Label(first, style);
    for (size_t i = first; i < std::min(pages.size(), first + columns); ++i) {
      out += PageCell(pages[i], Shade(pages[i].selected, most), style);
    }
    out += "\n";
  }
  return out + "\n" + Legend(pages, most, style);
}

std::string SelectionStrip(std::span<const uint32_t> selected, int cells, bool ascii) {
  if (selected.empty()) return "";
  const uint32_t most = *std::max_element(selected.begin(), selected.end());
  std::string out;
  const size_t n = selected.size();
  const auto wanted = static_cast<size_t>(cells);
  for (size_t cell = 0; cell < wanted; ++cell) {
    const size_t first = cell * n / wanted;
    const size_t end = std::max(first + 1, (cell + 1) * n / wanted);
    const uint32_t here = *std::max_element(selected.begin() + static_cast<ptrdiff_t>(first),
                                            selected.begin() + static_cast<ptrdiff_t>(end));
    out += ShadeGlyph(Shade(here, most), ascii);
  }
  return out;
}

double SelectedShare(uint64_t selected, uint64_t pages, uint64_t layers, uint64_t steps) {
  const double all = static_cast<double>(pages) * static_cast<double>(layers * steps);
  // Words of steps that have not committed are in the sum, too.
  return all == 0 ? 0 : std::min(1.0, static_cast<double>(selected) / all);
}

}  // namespace kvstrata::cli
