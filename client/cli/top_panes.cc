// SPDX-License-Identifier: Apache-2.0
#include "client/cli/top_panes.h"

#include <algorithm>
#include <iterator>
#include <sstream>

#include "client/cli/event_text.h"
#include "client/cli/page_grid.h"

namespace kvstrata::cli {
namespace {

constexpr int kLabelColumns = 10;  // width of a grid row's label

std::vector<std::string> LinesOf(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// `lines` from room->first on, as many as fit above `below`, which always shows.
std::vector<std::string> Scrolled(const std::vector<std::string>& lines,
                                  const std::vector<std::string>& below, PaneRoom* room) {
  const size_t fit = static_cast<size_t>(std::max(1, room->rows)) -
                     std::min(below.size(), static_cast<size_t>(std::max(0, room->rows - 1)));
  room->first = std::min(room->first, lines.size() - std::min(lines.size(), fit));
  const auto begin = lines.begin() + static_cast<ptrdiff_t>(room->first);
  const size_t shown = std::min(fit, lines.size() - room->first);
  std::vector<std::string> out(begin, begin + static_cast<ptrdiff_t>(shown));
  out.insert(out.end(), below.begin(), below.end());
  return out;
}

// What a word of 32 bits counted meanwhile.
uint32_t Since(uint32_t before, uint32_t now) {
  return now - before > UINT32_MAX / 2 ? 0 : now - before;
}

}  // namespace

Result<std::vector<std::string>> MapPane::Draw(TopSource* source, const TopLook& look,
                                               PaneRoom* room) {
  KVS_ASSIGN_OR_RETURN(const v1::ShowSequenceResponse shown, source->Show(sequence_));
  std::vector<GridPage> pages;
  std::vector<uint32_t> now;
  for (const v1::PageInfo& page : shown.pages()) {
    const size_t i = now.size();
    now.push_back(page.selected());
    const uint32_t selected =
        before_.empty() ? 0 : Since(i < before_.size() ? before_[i] : 0, now[i]);
    pages.push_back({page.tier() == "host", page.shared(), selected, page.absent()});
  }
  const bool first = before_.empty();
  before_ = std::move(now);
  const v1::Sequence& s = shown.sequence();
  const int columns = std::clamp((room->columns - kLabelColumns) / 8 * 8, 8, 128);
  const int64_t page_tokens = s.pages() == 0 ? 0 : s.capacity_tokens() / s.pages();
  std::vector<std::string> grid =
      LinesOf(DrawGrid(pages, {look.colour, look.ascii, columns, page_tokens}));
  constexpr size_t kLegendLines = 3;  // an empty one, the scale, the counts
  std::vector<std::string> legend(grid.end() - std::min(kLegendLines, grid.size()), grid.end());
  grid.resize(grid.size() - legend.size());
  std::vector<std::string> lines = Scrolled(grid, legend, room);
  lines.insert(lines.begin(), "sequence " + std::to_string(s.sequence()) + ", plan " +
                                  Printable(s.plan()) + ", " + std::to_string(s.tokens()) +
                                  " tokens" +
                                  (first ? ": the next frame is the first with weights"
                                         : ": selected since the last frame"));
  return lines;
}

Result<std::vector<std::string>> EventsPane::Draw(TopSource* source, const TopLook& look,
                                                  PaneRoom* room) {
  uint64_t missed = 0;
  KVS_ASSIGN_OR_RETURN(const std::vector<v1::Event> events, source->EventsAfter(last_, &missed));
  for (const v1::Event& event : events) {
    last_ = event.number();
    const Json told = cli::ToJson(event);
    const auto time = told.at("time").get<std::string>();
    const std::string line = time.substr(11, 12) + " " + told.at("level").get<std::string>() + " " +
                             Printable(event.name()) + "  " + EventDetails(told.at("fields"));
    const bool bad = event.level() == "warning" || event.level() == "error";
    lines_.push_back(bad && look.colour ? "\x1b[31m" + line + "\x1b[0m" : line);
    if (lines_.size() > kKept) lines_.pop_front();
  }
  const size_t fit = static_cast<size_t>(std::max(1, room->rows));
  const size_t most = lines_.size() - std::min(lines_.size(), fit);
  room->first = std::min(room->first, most);
  const auto begin = lines_.begin() + static_cast<ptrdiff_t>(most - room->first);
  std::vector<std::string> lines(begin,
                                 begin + static_cast<ptrdiff_t>(std::min(fit, lines_.size())));
  if (lines.empty()) lines.emplace_back("no events");
  return lines;
}

Result<std::vector<std::string>> AuditPane(TopSource* source) {
  KVS_ASSIGN_OR_RETURN(const v1::AuditResponse audit, source->Audit());
  std::vector<std::string> lines{std::string("the books ") +
                                 (audit.clean() ? "balance" : "DO NOT BALANCE") + ": " +
                                 std::to_string(audit.pages()) + " pages, " + Bytes(audit.bytes()) +
                                 ", " + std::to_string(audit.sequences()) + " sequences, " +
                                 std::to_string(audit.sessions()) + " sessions"};
  for (const std::string& finding : audit.findings()) lines.push_back(Printable(finding));
  lines.emplace_back("what a plan loses: kvstrata audit --recall SEQ");
  return lines;
}

std::vector<std::string> HelpPane() {
  return {
      "Up, Down, PgUp, PgDn  the marked sequence; in a pane, scroll",
      "Enter                 a map of its pages, weighted by what was selected last",
      "s                     sort by tokens/s, tokens, memory, age, number",
      "f                     only sequences with this text in number, client, model, plan, key",
      "p                     hold what is shown, or go on",
      "a                     prove the books again",
      "e                     events, the newest at the bottom",
      "Esc                   back to the table",
      "q, Ctrl-C             the end; Ctrl-Z stops, fg goes on",
      "",
      "SELECTED  pages that a layer of a step selected on average, of all of the sequence",
      "kept      selections that a plan took over from an earlier step",
      "in full   decode steps of sequences shorter than their plan's min_tokens",
      "The strip has the sequence's tokens from left to right, in quarters of the most selected.",
  };
}

}  // namespace kvstrata::cli
