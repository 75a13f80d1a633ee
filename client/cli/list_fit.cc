// SPDX-License-Identifier: Apache-2.0
#include "client/cli/list_fit.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace kvstrata::cli {
namespace {

constexpr size_t kGap = 2;
constexpr size_t kFewestOfName = 8;  // characters of the first column, however short the line
constexpr size_t kUnknownTerminal = 80;

// Cells of a column that must be there for it to be there.
size_t Least(const Column& column, size_t width) {
  return column.shortest == 0 ? width : std::min<size_t>(width, column.shortest);
}

// Cells of a line in which every column is as short as it may be.
size_t LineOf(std::span<const Column> columns, const std::vector<size_t>& widths) {
  size_t total = 0;
  for (size_t i = 0; i < widths.size(); ++i) {
    if (widths[i] != 0) total += Least(columns[i], widths[i]) + (i == 0 ? 0 : kGap);
  }
  return total;
}

// The column that falls away next; 0: none is left that may.
size_t Lowest(std::span<const Column> columns, const std::vector<size_t>& widths) {
  size_t lowest = 0;
  for (size_t i = 1; i < widths.size(); ++i) {
    if (widths[i] == 0) continue;
    if (lowest == 0 || columns[i].rank <= columns[lowest].rank) lowest = i;
  }
  return lowest;
}

// The columns, the highest rank first; the first column, which says what is known, is the last.
std::vector<size_t> ByRank(std::span<const Column> columns) {
  std::vector<size_t> order;
  for (size_t i = 1; i < columns.size(); ++i) order.push_back(i);
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [columns](size_t i) { return columns[i].rank; });
  order.push_back(0);
  return order;
}

}  // namespace

std::vector<size_t> Fit(std::span<const Column> columns, std::vector<size_t> widths, size_t room) {
  if (room == 0) return widths;
  while (LineOf(columns, widths) > room) {
    const size_t lowest = Lowest(columns, widths);
    if (lowest == 0) break;
    widths[lowest] = 0;
  }
  size_t spare = room - std::min(room, LineOf(columns, widths));
  for (const size_t i : ByRank(columns)) {  // what is cut shares what the others leave
    const size_t least = Least(columns[i], widths[i]);
    const size_t more = std::min(widths[i] - least, spare);
    widths[i] = least + more;
    spare -= more;
  }
  // Nothing stands beside a first column that is too long alone.
  widths[0] = std::min(widths[0], std::max(room, kFewestOfName));
  return widths;
}

std::string Cut(std::string text, size_t width) {
  constexpr std::string_view kDots = "...";
  if (Width(text) <= width) return text;
  size_t at = 0;
  for (size_t cells = 0; at < text.size(); ++at) {
    const bool begins = (static_cast<unsigned char>(text[at]) & 0xC0) != 0x80;
    if (begins && cells++ == width - kDots.size()) break;
  }
  return text.erase(at).append(kDots);
}

std::vector<std::string> Wrap(std::string_view text, size_t width) {
  std::vector<std::string> lines;
  size_t begin = 0, breaks = 0, cells = 0;  // breaks: where the line may end; 0: nowhere yet
  for (size_t at = 0; at < text.size(); ++at) {
    const bool starts = (static_cast<unsigned char>(text[at]) & 0xC0) != 0x80;
    if (starts && cells >= width && text[at] != ' ') {
      const size_t end = breaks > begin ? breaks : at;
      lines.emplace_back(text.substr(begin, end - begin));
      begin = end;
      cells = Width(text.substr(begin, at - begin));
    }
    cells += starts ? 1 : 0;
    if (text[at] == ' ' || text[at] == ',') breaks = at + 1;
  }
  lines.emplace_back(text.substr(begin));
  for (std::string& line : lines) line.erase(line.find_last_not_of(' ') + 1);
  return lines;
}

size_t LineWidth() {
  if (const char* columns = std::getenv("COLUMNS"); columns != nullptr) {
    const std::string_view text = columns;
    size_t width = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), width);
    if (error == std::errc() && end == text.data() + text.size() && width > 0) return width;
  }
  if (isatty(STDOUT_FILENO) != 1) return 0;
  winsize size{};
  const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kUnknownTerminal;
}

}  // namespace kvstrata::cli
