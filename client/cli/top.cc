// SPDX-License-Identifier: Apache-2.0
// top: a daemon live: state, rates, tiers, and of each sequence what its steps select.
#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdint>
#include <deque>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "client/cli/event_text.h"
#include "client/cli/invocation.h"
#include "client/cli/page_grid.h"
#include "client/cli/terminal.h"
#include "client/cli/top_source.h"
#include "client/cli/top_view.h"

namespace kvstrata::cli {
namespace {

// The panes that `kvstrata top` shows instead of its table: a live map of a sequence, the proof of
// the books, events, help. Each asks when it is drawn and keeps what it needs for the next time.
//
// Thread-safety: one thread. Cost: one call a draw.

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
    lines_.push_back(bad && look.colour ? kRed + line + kReset : line);
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

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

struct TopOptions {
  milliseconds every{2000};
  milliseconds patience{60000};  // with a daemon that went away
  bool once = false, ascii = false;
  TopSort sort = TopSort::kTokensPerSecond;
  std::string filter;
};

// Sorted and filtered, sampled as far as `room` rows from `first` on show them.
Status Prepare(TopSource* source, const TopOptions& wanted, size_t first, size_t room,
               TopView* view) {
  Arrange(wanted.sort, wanted.filter, &view->rows);
  first = std::min(first, view->rows.size());
  const size_t n = std::min(room, view->rows.size() - first);
  return source->Sample(std::span(view->rows).subspan(first, n));
}

// One frame as text, of the time between two looks.
Result<int> Once(const Options& options, const TopOptions& wanted) {
  TopSource source(options);
  KVS_ASSIGN_OR_RETURN(TopView view, source.Look());
  KVS_RETURN_IF_ERROR(source.Sample(view.rows));
  std::this_thread::sleep_for(wanted.every);
  KVS_ASSIGN_OR_RETURN(view, source.Look());
  KVS_RETURN_IF_ERROR(Prepare(&source, wanted, 0, SIZE_MAX, &view));
  if (options.style.IsDocument()) {
    PrintDocument(options.style.format, ToJson(view), std::cout);
    return kOk;
  }
  TopLook look;
  constexpr size_t kOfPipe = 100;
  const size_t width = options.style.width == 0 ? kOfPipe : options.style.width;
  look.columns = static_cast<int>(std::min<size_t>(width, SHRT_MAX));
  look.colour = ColourWanted();
  look.ascii = wanted.ascii;
  look.filter = wanted.filter;
  std::vector<std::string> lines = TopHeader(view, look);
  for (std::string& line : TopTable(view, look)) lines.push_back(std::move(line));
  for (const std::string& line : lines) std::cout << ClipLine(line, look.columns) << "\n";
  return kOk;
}

class LiveTop {
 public:
  LiveTop(const Options& options, const TopOptions& wanted, Terminal* terminal)
      : source_(Impatient(options)), wanted_(wanted), terminal_(*terminal) {
    look_.colour = ColourWanted();
    look_.ascii = wanted.ascii;
  }

  // Until `q`, or the daemon is away for too long.
  Result<int> Run() {
    KVS_RETURN_IF_ERROR(Refresh());  // what never was there is no daemon that went away
    auto next = Clock::now() + std::min(wanted_.every, kFirstLook);
    for (;;) {
      Draw();
      const auto left = std::chrono::ceil<milliseconds>(next - Clock::now());
      const int key = terminal_.ReadKey(std::max(left, milliseconds(0)));
      if (key == kEnd || (key == 'q' && !typing_)) return kOk;
      if (key != kNoKey) Handle(key);
      if (Clock::now() < next) continue;
      next = Clock::now() + wanted_.every;
      if (!held_) KVS_RETURN_IF_ERROR(RefreshOrWait());
    }
  }

 private:
  enum class Pane { kTable, kMap, kAudit, kEvents, kHelp };
  static constexpr milliseconds kFirstLook{500};  // rates want two
  static constexpr milliseconds kLongestCall{2000};

  static Options Impatient(Options options) {
    if (!options.timeout_given) options.timeout = std::min(options.timeout, kLongestCall);
    return options;
  }

  Status Refresh() {
    KVS_ASSIGN_OR_RETURN(TopView view, source_.Look());
    const size_t room = RoomFor(view);
    KVS_RETURN_IF_ERROR(Prepare(&source_, wanted_, look_.first, room, &view));
    view_ = std::move(view);
    if (pane_ != Pane::kTable) KVS_RETURN_IF_ERROR(RefreshPane());
    look_.trouble.clear();
    return OkStatus();
  }

  // A daemon that went away is said, and asked again each time, until patience ends.
  Status RefreshOrWait() {
    const Status status = Refresh();
    if (status.ok()) {
      away_since_.reset();
      return status;
    }
    if (status.code() != Code::kUnavailable && status.code() != Code::kDeadlineExceeded) {
      return status;
    }
    if (!away_since_) away_since_ = Clock::now();
    const auto away = Clock::now() - *away_since_;
    if (away > wanted_.patience) return status;
    using std::chrono::seconds;
    const auto left = std::chrono::duration_cast<seconds>(wanted_.patience - away);
    look_.trouble = "AWAY (" + std::string(status.reason()) + "), asked again for " +
                    std::to_string(left.count()) + " s";
    return OkStatus();
  }

  Status RefreshPane() {
    PaneRoom room = RoomOfPane();
    Result<std::vector<std::string>> lines = HelpPane();
    if (pane_ == Pane::kMap) lines = map_->Draw(&source_, look_, &room);
    if (pane_ == Pane::kEvents) lines = events_.Draw(&source_, look_, &room);
    if (pane_ == Pane::kAudit) {
      if (audited_) return OkStatus();
      lines = AuditPane(&source_);
      audited_ = lines.ok();
    }
    scroll_ = room.first;
    if (!lines.ok() && lines.status().code() == Code::kNotFound) {
      pane_lines_ = {Printable(lines.status().message())};
      return OkStatus();
    }
    KVS_RETURN_IF_ERROR(lines.status());
    pane_lines_ = std::move(lines).value();
    return OkStatus();
  }

  TopLook LookNow() const {
    TopLook look = look_;
    const ScreenSize size = SizeOfScreen();
    look.columns = size.columns;
    look.rows = size.rows;
    look.sort = wanted_.sort;
    look.filter = wanted_.filter;
    return look;
  }
  size_t RoomFor(const TopView& view) const { return TopTableRoom(view, LookNow()); }
  PaneRoom RoomOfPane() const {
    const TopLook look = LookNow();
    const int header = static_cast<int>(TopHeader(view_, look).size());
    return {look.columns, std::max(1, look.rows - header - 3), scroll_};
  }

  void Draw() {
    Mark();
    TopLook look = LookNow();
    look.marked = view_.rows.empty() ? -1 : static_cast<int>(marked_);
    std::vector<std::string> lines = TopHeader(view_, look);
    std::vector<std::string> body = pane_ == Pane::kTable ? TopTable(view_, look) : pane_lines_;
    if (pane_ != Pane::kTable) lines.emplace_back();
    lines.insert(lines.end(), body.begin(), body.end());
    lines.resize(static_cast<size_t>(std::max(look.rows - 1, 1)));
    lines.push_back(KeyLine());
    terminal_.Draw(lines);
  }

  std::string KeyLine() const {
    if (typing_) return "filter: " + Printable(typed_) + "_   Enter applies, Esc leaves it";
    std::string line = pane_ == Pane::kTable ? "q quit  Enter map  a audit  e events  s sort: "
                                             : "q quit  Esc table  a audit  e events  s sort: ";
    line += NameOf(wanted_.sort);
    line += "  f filter";
    if (!wanted_.filter.empty()) line += ": " + Printable(wanted_.filter);
    return line + (held_ ? "  p HELD" : "  p hold") + "  ? help";
  }

  // Keeps the mark on its sequence and in sight.
  void Mark() {
    const auto is_it = [&](const TopRow& row) { return row.sequence == marked_sequence_; };
    const auto at = std::find_if(view_.rows.begin(), view_.rows.end(), is_it);
    if (at != view_.rows.end()) marked_ = static_cast<size_t>(at - view_.rows.begin());
    marked_ = std::min(marked_, view_.rows.empty() ? 0 : view_.rows.size() - 1);
    const size_t room = RoomFor(view_);
    if (marked_ < look_.first) look_.first = marked_;
    if (marked_ >= look_.first + room) look_.first = marked_ - room + 1;
    if (view_.rows.size() <= room) look_.first = 0;
    if (!view_.rows.empty()) marked_sequence_ = view_.rows[marked_].sequence;
  }

  void Move(ptrdiff_t by) {
    if (pane_ != Pane::kTable) {
      // Events scroll back from their end.
      if (pane_ == Pane::kEvents) by = -by;
      scroll_ = by < 0 ? scroll_ - std::min(scroll_, static_cast<size_t>(-by))
                       : scroll_ + static_cast<size_t>(by);
      return Now();
    }
    if (view_.rows.empty()) return;
    const auto last = static_cast<ptrdiff_t>(view_.rows.size()) - 1;
    marked_ =
        static_cast<size_t>(std::clamp<ptrdiff_t>(static_cast<ptrdiff_t>(marked_) + by, 0, last));
    marked_sequence_ = view_.rows[marked_].sequence;
  }

  void Open(Pane pane) {
    pane_ = pane;
    scroll_ = 0;
    audited_ = false;
    if (pane == Pane::kMap) map_.emplace(marked_sequence_);
    if (pane != Pane::kTable) Now();
  }

  // Asks for the pane again; what fails shows at the next look.
  void Now() { (void)RefreshPane(); }

  void Type(int key) {
    if (key == kEnter) wanted_.filter = typed_;
    if (key == kEnter || key == kEscape) {
      typing_ = false;
      if (key == kEnter) (void)Refresh();
    } else if (key == kBackspace) {
      if (!typed_.empty()) typed_.pop_back();
    } else if (key >= ' ' && key < 256) {
      typed_ += static_cast<char>(key);
    }
  }

  void Handle(int key) {
    const auto page = static_cast<ptrdiff_t>(RoomFor(view_));
    if (typing_) return Type(key);
    switch (key) {
      case kUp:
      case 'k':
        return Move(-1);
      case kDown:
      case 'j':
        return Move(1);
      case kPageUp:
        return Move(-page);
      case kPageDown:
      case ' ':
        return Move(page);
      case kHome:
        return Move(-(ptrdiff_t{1} << 30));
      case kLast:
        return Move(ptrdiff_t{1} << 30);
      case kEscape:
        return Open(Pane::kTable);
      case kEnter:
        return view_.rows.empty() ? Open(Pane::kTable) : Open(Pane::kMap);
      case 'a':
        return Open(Pane::kAudit);
      case 'e':
        return Open(Pane::kEvents);
      case '?':
      case 'h':
        return Open(Pane::kHelp);
      case 'p':
        held_ = !held_;
        return;
      case 's':
        wanted_.sort = static_cast<TopSort>((static_cast<int>(wanted_.sort) + 1) % kTopSorts);
        return Arrange(wanted_.sort, "", &view_.rows);
      case 'f':
      case '/':
        typing_ = true;
        typed_ = wanted_.filter;
        return;
      default:
        return;
    }
  }

  TopSource source_;
  TopOptions wanted_;
  Terminal& terminal_;
  TopLook look_;
  TopView view_;
  Pane pane_ = Pane::kTable;
  std::optional<MapPane> map_;
  EventsPane events_;
  bool audited_ = false;
  std::vector<std::string> pane_lines_;
  size_t scroll_ = 0, marked_ = 0;
  uint64_t marked_sequence_ = 0;
  std::optional<Clock::time_point> away_since_;
  bool held_ = false, typing_ = false;
  std::string typed_;
};

Result<int> Live(const Options& options, const TopOptions& wanted) {
  // The error of a daemon that goes for good is printed on the terminal as it was before.
  KVS_ASSIGN_OR_RETURN(const std::unique_ptr<Terminal> terminal, Terminal::Open());
  return LiveTop(options, wanted, terminal.get()).Run();
}

}  // namespace

void AddTop(CLI::App& app, Invocation& invocation) {
  CLI::App* noun =
      app.add_subcommand("top", "Live: state, rates, tiers, and what steps select of sequences");
  auto wanted = std::make_shared<TopOptions>();
  AddDuration(noun, "-d,--delay", &wanted->every, "Time between two looks (default: 2s)");
  AddDuration(noun, "--retry", &wanted->patience,
              "How long a daemon that went away is asked again (default: 60s)");
  noun->add_option("--filter", wanted->filter,
                   "Only sequences with this text in number, client, model, plan or key");
  noun->add_flag("-b,--once", wanted->once, "One frame as text, after one delay");
  noun->add_flag("--ascii", wanted->ascii, "Without Unicode");
  Runs(noun, invocation, [wanted](const Options& options) -> Result<int> {
    if (!options.style.IsTable() && !options.style.IsDocument()) {
      throw CLI::ValidationError("--output", "top is a frame or a document: table, json or yaml");
    }
    const bool one = wanted->once || options.style.IsDocument();
    return one ? Once(options, *wanted) : Live(options, *wanted);
  });
}

}  // namespace kvstrata::cli
