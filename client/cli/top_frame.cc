// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "client/cli/page_grid.h"
#include "client/cli/terminal.h"
#include "client/cli/top_view.h"

namespace kvstrata::cli {
namespace {

constexpr int kBarCells = 20;
constexpr int kWideColumns = 100;  // from here on with the client's name and host memory
constexpr int kFewestStripCells = 8;
constexpr int kMostStripCells = 64;
constexpr int kNameCells = 24;  // for an engine's name
constexpr size_t kMostEngines = 8;

std::string Painted(const TopLook& look, const char* colour, const std::string& text) {
  return look.colour ? colour + text + kReset : text;
}

std::string Fixed1(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), value < 1e6 ? "%.1f" : "%.3g", value);
  return text;
}
std::string WholePercent(double share) {
  return share < 0 ? "-" : std::to_string(std::lround(share * 100)) + " %";
}

std::string Padded(const std::string& text, size_t width, bool right) {
  const std::string shown = ClipLine(text, static_cast<int>(width));
  const std::string space(width - std::min(width, Width(shown)), ' ');
  return right ? space + shown : shown + space;
}

// The fields that fit into `columns` cells, whole, from the first on.
std::string Fitting(const std::vector<std::string>& fields, int columns) {
  std::string line;
  for (const std::string& field : fields) {
    if (Width(line) + 2 + Width(field) > static_cast<size_t>(columns)) break;
    line += (line.empty() ? "" : "  ") + field;
  }
  return line;
}

std::string Bar(const TopTier& tier, const TopLook& look) {
  const double part = tier.capacity_bytes == 0 ? 0
                                               : static_cast<double>(tier.used_bytes) /
                                                     static_cast<double>(tier.capacity_bytes);
  const int full = std::clamp(static_cast<int>(std::ceil(part * kBarCells)), 0, kBarCells);
  const std::string done(static_cast<size_t>(full), '#');
  return "[" + Painted(look, part > 0.95 ? kRed : kGreen, done) +
         std::string(static_cast<size_t>(kBarCells - full), '.') + "]";
}

struct TableColumn {
  const char* header;
  size_t width;
  bool right, wide;  // wide: only on a wide terminal
  std::string (*text)(const TopRow&);
};
std::string SelectedText(const TopRow& row) {
  if (row.uncounted == "full") return "all";
  return row.sampled && row.steps_per_second > 0 ? WholePercent(row.selected_share) : "-";
}
constexpr TableColumn kColumns[] = {
    {"SEQ", 7, true, false, [](const TopRow& row) { return std::to_string(row.sequence); }},
    {"CLIENT", 14, false, true, [](const TopRow& row) { return Printable(row.client); }},
    {"PLAN", 12, false, false, [](const TopRow& row) { return Printable(row.plan); }},
    {"TOKENS", 8, true, false, [](const TopRow& row) { return std::to_string(row.tokens); }},
    {"TOK/S", 7, true, false, [](const TopRow& row) { return Fixed1(row.tokens_per_second); }},
    {"DEVICE", 10, true, false, [](const TopRow& row) { return Bytes(row.device_bytes); }},
    {"HOST", 10, true, true, [](const TopRow& row) { return Bytes(row.host_bytes); }},
    {"SELECTED", 8, true, false, SelectedText},
};

// For the first column: numbers of other users than the first are long.
size_t NumberWidth(const TopView& view) {
  size_t width = kColumns[0].width;
  for (const TopRow& row : view.rows) {
    width = std::max(width, std::to_string(row.sequence).size() + 1);
  }
  return width;
}

// The columns of a row, or with null their headers.
std::string RowText(const TopRow* row, const TopLook& look, size_t number_width) {
  std::string line;
  for (const TableColumn& column : kColumns) {
    if (column.wide && look.columns < kWideColumns) continue;
    const size_t width = &column == &kColumns[0] ? number_width : column.width;
    line += (line.empty() ? "" : " ") +
            Padded(row == nullptr ? column.header : column.text(*row), width, column.right);
  }
  return line + "  ";
}

std::string StripOf(const TopRow& row, int cells, bool ascii) {
  if (row.uncounted == "full") return "attends everything";
  if (!row.in_full.empty()) return Printable(row.in_full);
  if (row.uncounted == "gpu") return "not counted on a GPU";
  if (!row.sampled) return "";
  return SelectionStrip(row.selected, cells, ascii);
}

std::string EngineLine(const TopEngine& e, int columns) {
  return Fitting({ClipLine(Printable(e.engine), kNameCells), "recall " + Fixed4(e.recall),
                  "worst layer " + std::to_string(e.worst_layer) + ": " + Fixed4(e.worst_recall),
                  Printable(e.plan), "samples " + std::to_string(e.samples), Printable(e.model)},
                 columns);
}

}  // namespace

std::vector<std::string> TopHeader(const TopView& view, const TopLook& look) {
  const bool serves = view.health == "serving" && look.trouble.empty();
  std::vector<std::string> lines;
  lines.push_back(Painted(look, kBold, "kvstratad " + Printable(view.version)) + "  " +
                  Painted(look, serves ? kGreen : kRed,
                          Printable(look.trouble.empty() ? view.health : look.trouble)) +
                  "  up " + Microseconds(view.uptime_us) + "  sessions " +
                  std::to_string(view.sessions) + "  sequences " + std::to_string(view.sequences) +
                  "  models " + std::to_string(view.models));
  lines.push_back(Fitting(
      {"steps " + Fixed1(view.steps_per_second) + "/s",
       "tokens " + Fixed1(view.tokens_per_second) + "/s",
       "moved " + Bytes(view.moved_bytes_per_second) + "/s",
       "in full " + WholePercent(view.in_full_share), "prefix hits " + WholePercent(view.hit_share),
       "kept " + WholePercent(view.kept_share)},
      look.columns));
  for (const TopTier& tier : view.tiers) {
    if (tier.capacity_bytes == 0) {  // others' memory
      lines.push_back(Padded(tier.name, 7, false) + tier.note);
      continue;
    }
    lines.push_back(Padded(tier.name, 7, false) + Bar(tier, look) + " " +
                    Padded(Bytes(tier.used_bytes), 10, true) + " of " +
                    Padded(Bytes(tier.capacity_bytes), 10, true) + "  " + tier.note);
  }
  if (const auto& chunks = view.chunks) {
    lines.push_back(
        Padded("", 7, false) +
        Fitting({"hits " + Fixed1(chunks->hits) + "/s", "misses " + Fixed1(chunks->misses) + "/s",
                 "stored " + Fixed1(chunks->stored) + "/s", "read " + Fixed1(chunks->read) + "/s",
                 "evicted " + Fixed1(chunks->evicted) + "/s"},
                look.columns - 7));
  }
  const size_t shown = std::min(view.engines.size(), kMostEngines);
  for (size_t i = 0; i < shown; ++i) {
    lines.push_back(Padded("", 7, false) + EngineLine(view.engines[i], look.columns - 7));
  }
  if (shown < view.engines.size()) {
    lines.push_back(Padded("", 7, false) + std::to_string(view.engines.size() - shown) +
                    " more: kvstrata audit --engine");
  }
  return lines;
}

size_t TopTableRoom(const TopView& view, const TopLook& look) {
  if (look.rows == 0) return view.rows.size();
  // An empty line, headers; keys.
  const int taken = static_cast<int>(TopHeader(view, look).size()) + 2 + 1;
  return static_cast<size_t>(std::max(1, look.rows - taken));
}

std::vector<std::string> TopTable(const TopView& view, const TopLook& look) {
  const size_t number_width = NumberWidth(view);
  const std::string headers = RowText(nullptr, look, number_width);
  const int strip = std::clamp(look.columns - static_cast<int>(Width(headers)), kFewestStripCells,
                               kMostStripCells);
  std::string title = "selected in the last " + Fixed1(view.seconds) + " s";
  if (static_cast<int>(title.size()) > strip) title = "in " + Fixed1(view.seconds) + " s";
  std::vector<std::string> lines{"", Painted(look, kBold, headers + title)};
  const size_t end = std::min(view.rows.size(), look.first + TopTableRoom(view, look));
  for (size_t i = look.first; i < end; ++i) {
    const TopRow& row = view.rows[i];
    std::string cells = RowText(&row, look, number_width);
    if (static_cast<int>(i) == look.marked) {
      cells[0] = '>';  // numbers have fewer digits than the column
      cells = Painted(look, kInverse, cells);
    } else if (!look.trouble.empty()) {
      cells = Painted(look, kDim, cells);  // these are the last answer's that came
    }
    lines.push_back(cells + StripOf(row, strip, look.ascii));
  }
  if (view.rows.empty()) {
    lines.emplace_back(look.filter.empty() ? "no sequences"
                                           : "no sequence has '" + Printable(look.filter) + "'");
  }
  return lines;
}

}  // namespace kvstrata::cli
