// SPDX-License-Identifier: Apache-2.0
// seq ls|show|map|demote|prefetch|build|recompress: what sequences hold, where it lies, what steps
// read of it, and what workers make of it.
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <memory>

#include "client/cli/connection.h"
#include "client/cli/invocation.h"
#include "client/cli/page_grid.h"
#include "client/cli/terminal.h"

namespace kvstrata::cli {
namespace {

struct SequenceArguments {
  uint64_t sequence = 0, session = 0;
  std::string plan;
  bool cancel = false;
  bool pages = false, ascii = false;
  int columns = 0;
};

std::string YesIfAny(const Json& value) { return value.empty() || value == "" ? "no" : "yes"; }

constexpr Column kSequenceList[] = {
    {"SEQUENCE", "/sequence", nullptr, true},
    {"SESSION", "/session", nullptr, true, 5},
    {"MODEL", "/model_name", nullptr, false, 3, 12},
    {"PLAN", "/plan", nullptr, false, 7, 12},
    {"TOKENS", "/tokens", nullptr, true, 8},
    {"PAGES", "/pages", nullptr, true, 1},
    {"SHARED", "/shared_pages", nullptr, true},
    {"DEVICE", "/device_bytes", Bytes, true, 6},
    {"HOST", "/host_bytes", Bytes, true, 6},
    {"AGE", "/age_us", Microseconds, true, 2},
    {"KEY", "/key", OrDash},
    {"PRIVATE", "/private_pages", YesNo},
    {"IN-FULL", "/in_full", YesIfAny},
    {"PLAN-TEXT", "/plan_text"},
};
std::string OrOk(const Json& value) {
  const std::string text = value.is_string() ? value.get<std::string>() : "";
  return text.empty() ? "ok" : Printable(text);
}

// What its decode steps read.
std::string Attends(const Json& value) {
  const std::string why = value.is_string() ? value.get<std::string>() : "";
  return why.empty() ? "what its selector chooses" : Printable(why);
}
// From how many tokens on choosing is predicted to pay.
std::string BreakEven(const Json& value) {
  constexpr uint64_t kNever = uint64_t{1} << 29;  // the largest min_tokens
  const auto tokens = value.get<uint64_t>();
  if (tokens == 0) return "-";
  return tokens >= kNever ? "never" : std::to_string(tokens) + " tokens";
}

constexpr Column kSequenceRecord[] = {
    {"SEQUENCE", "/sequence"},
    {"SESSION", "/session"},
    {"KEY", "/key", OrDash},
    {"PRIVATE", "/private_pages", YesNo},
    {"MODEL", "/model_name"},
    {"PLAN", "/plan_text"},
    {"ATTENDS", "/in_full", Attends},
    {"BREAK-EVEN", "/break_even_tokens", BreakEven},
    {"TOKENS", "/tokens"},
    {"PROMPT-TOKENS", "/prompt_tokens"},
    {"HELD-AT-OPEN", "/held_tokens"},
    {"CAPACITY-TOKENS", "/capacity_tokens"},
    {"PAGES", "/pages"},
    {"SHARED-PAGES", "/shared_pages"},
    {"INDEX-BLOCKS", "/index_blocks"},
    {"TABLE-VERSION", "/version"},
    {"DEVICE", "/device_bytes", Bytes},
    {"HOST", "/host_bytes", Bytes},
    {"EXTENTS", "/extents"},
    {"EXTENTS-ON-DEVICE", "/extent_device_bytes", Bytes},
    {"EXTENTS-ON-HOST", "/extent_host_bytes", Bytes},
    {"PAGES-RELEASED", "/absent_pages"},
    {"RECOMPRESSION", "/work_error", OrOk},
    {"ARRIVING", "/arriving", OrDash},
    {"AGE", "/age_us", Microseconds},
};
// A page that was released lies nowhere.
std::string TierOrAbsent(const Json& value) {
  const std::string text = value.is_string() ? value.get<std::string>() : "";
  return text.empty() ? "released" : text;
}

constexpr Column kExtents[] = {
    {"EXTENT", "/extent", nullptr, true},
    {"KIND", "/kind"},
    {"TIER", "/tier"},
    {"BEGIN", "/begin", nullptr, true},
    {"END", "/end", nullptr, true},
    {"BYTES", "/bytes", Bytes, true},
    {"ARENA", "/arena", nullptr, true},
    {"OFFSET", "/offset", nullptr, true},
    {"REFS", "/references", nullptr, true},
};
constexpr Column kSequencePages[] = {
    {"PAGE", "/page", nullptr, true},       {"TIER", "/tier", TierOrAbsent},
    {"ARENA", "/arena", nullptr, true},     {"OFFSET", "/offset", nullptr, true},
    {"SEALED", "/sealed", YesNo},           {"SHARED", "/shared", YesNo},
    {"REFS", "/references", nullptr, true}, {"SELECTED", "/selected", nullptr, true},
};

Result<int> ListSequences(const Options& options, const SequenceArguments& args) {
  v1::ListSequencesRequest request;
  request.set_session(args.session);
  KVS_ASSIGN_OR_RETURN(const auto answer, Ask(options, &v1::Admin::Stub::ListSequences, request));
  PrintList(options.style, ToJson(answer), "sequences", kSequenceList, std::cout);
  return kOk;
}

Result<v1::ShowSequenceResponse> FetchSequence(const Options& options, uint64_t sequence) {
  v1::ShowSequenceRequest request;
  request.set_sequence(sequence);
  return Ask(options, &v1::Admin::Stub::ShowSequence, request);
}

// The sequence's own fields, then pages, index blocks and extents, numbered.
Json Document(const v1::ShowSequenceResponse& answer) {
  Json document = ToJson(answer.sequence());
  document["pages_in_order"] = Json::array();
  for (const v1::PageInfo& page : answer.pages()) {
    Json row = {{"page", document["pages_in_order"].size()}};
    row.update(ToJson(page));
    document["pages_in_order"].push_back(std::move(row));
  }
  document["index_blocks_in_order"] = Json::array();
  for (const v1::PageInfo& block : answer.index_blocks()) {
    document["index_blocks_in_order"].push_back(ToJson(block));
  }
  document["extents_in_order"] = Json::array();
  for (const v1::ExtentInfo& extent : answer.extents()) {
    Json row = {{"extent", document["extents_in_order"].size()}};
    row.update(ToJson(extent));
    document["extents_in_order"].push_back(std::move(row));
  }
  return document;
}

Result<int> ShowSequence(const Options& options, const SequenceArguments& args) {
  KVS_ASSIGN_OR_RETURN(const auto answer, FetchSequence(options, args.sequence));
  const Json document = Document(answer);
  PrintRecord(options.style, document, kSequenceRecord, std::cout);
  if (answer.extents_size() > 0) {
    PrintBelow(options.style, document, "extents_in_order", kExtents, std::cout);
  }
  if (args.pages) PrintBelow(options.style, document, "pages_in_order", kSequencePages, std::cout);
  return kOk;
}

// Cells that fit beside a row's label, a multiple of 8.
int GridColumns(int asked) {
  if (asked > 0) return asked;
  constexpr int kLabel = 10;
  winsize size{};
  const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > kLabel + 8;
  return known ? std::min((size.ws_col - kLabel) / 8 * 8, 128) : 64;
}

int64_t PageTokens(const v1::Sequence& sequence) {
  return sequence.pages() == 0 ? 0 : sequence.capacity_tokens() / sequence.pages();
}

Result<int> Map(const Options& options, const SequenceArguments& args) {
  KVS_ASSIGN_OR_RETURN(const auto answer, FetchSequence(options, args.sequence));
  if (!options.style.IsTable()) {
    PrintList(options.style, Document(answer), "pages_in_order", kSequencePages, std::cout);
    return kOk;
  }
  std::vector<GridPage> pages;
  for (const v1::PageInfo& page : answer.pages()) {
    pages.push_back({page.tier() == "host", page.shared(), page.selected(), page.absent()});
  }
  const v1::Sequence& s = answer.sequence();
  if (options.style.headers) {
    std::cout << "sequence " << s.sequence() << ", plan " << Printable(s.plan()) << ", "
              << s.tokens() << " tokens\n";
  }
  std::cout << DrawGrid(pages,
                        {ColourWanted(), args.ascii, GridColumns(args.columns), PageTokens(s)});
  return kOk;
}

// What was done to a sequence.
int Report(const Options& options, uint64_t sequence, const google::protobuf::Message& answer,
           std::span<const Column> columns) {
  Json document = {{"sequence", sequence}};
  document.update(ToJson(answer));
  PrintRecord(options.style, document, columns, std::cout);
  return kOk;
}

constexpr Column kMoved[] = {{"SEQUENCE", "/sequence"},
                             {"PAGES", "/pages"},
                             {"BYTES", "/bytes", Bytes},
                             {"TABLE-VERSION", "/version"}};

// kMethod: Admin's Demote or Prefetch.
template <auto kMethod>
Result<int> Move(const Options& options, const SequenceArguments& args) {
  v1::MoveRequest request;
  request.set_sequence(args.sequence);
  KVS_ASSIGN_OR_RETURN(const auto answer, Ask(options, kMethod, request));
  return Report(options, args.sequence, answer, kMoved);
}

constexpr Column kBuilt[] = {{"SEQUENCE", "/sequence"},
                             {"PLAN", "/plan"},
                             {"INDEXED-TOKENS", "/indexed_tokens"},
                             {"BLOCKS-BUILT", "/built_blocks"},
                             {"EXTENTS", "/extents"}};

Result<int> Build(const Options& options, const SequenceArguments& args) {
  v1::BuildSequenceRequest request;
  request.set_sequence(args.sequence);
  request.set_plan(args.plan);
  const auto answer = Ask(options, &v1::Admin::Stub::BuildSequence, request);
  if (!answer.ok()) return GoesOn(answer.status(), "WORK_DEADLINE");
  return Report(options, args.sequence, *answer, kBuilt);
}

constexpr Column kRecompressed[] = {
    {"SEQUENCE", "/sequence"}, {"EXTENTS", "/extents"}, {"GIVEN-UP", "/released_bytes", Bytes}};

// Waits until nothing is due; who stops it leaves the work going on.
Result<int> Recompress(const Options& options, uint64_t sequence) {
  v1::RecompressSequenceRequest request;
  request.set_sequence(sequence);
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  const ProgressLine progress;
  v1::RecompressSequenceResponse last;
  const Status ended = connection->Stream(
      &v1::Admin::Stub::RecompressSequence, request,
      [&](const v1::RecompressSequenceResponse& response) {
        last = response;
        const auto mib = [](uint64_t bytes) {
          return static_cast<int32_t>(std::min<uint64_t>(bytes >> 20, INT32_MAX));
        };
        const auto left = static_cast<uint64_t>(response.work().releasable_bytes());
        progress(("MiB given up (" + response.work().state() + ")").c_str(),
                 mib(response.released_bytes()), mib(response.released_bytes() + left));
      },
      options.timeout_given ? Connection::Lasts::kWait : Connection::Lasts::kForever);
  progress.Clear();
  if (!ended.ok()) return GoesOn(ended, "WORK_DEADLINE");
  return Report(options, sequence, last, kRecompressed);
}

constexpr Column kCancelled[] = {{"SEQUENCE", "/sequence"}, {"WAS-RUNNING", "/was_running", YesNo}};

Result<int> Cancel(const Options& options, uint64_t sequence) {
  v1::CancelWorkRequest request;
  request.set_sequence(sequence);
  KVS_ASSIGN_OR_RETURN(const auto answer, Ask(options, &v1::Admin::Stub::CancelWork, request));
  return Report(options, sequence, answer, kCancelled);
}

}  // namespace

void AddSequence(CLI::App& app, Invocation& invocation) {
  CLI::App* noun =
      app.add_subcommand("seq", "Sequences: their pages, where they lie, what is read");
  auto args = std::make_shared<SequenceArguments>();
  const auto add = [&](const char* name, const char* description) {
    CLI::App* verb = noun->add_subcommand(name, description);
    verb->add_option("SEQ", args->sequence, "Its number in `kvstrata seq ls`")->required();
    return verb;
  };

  CLI::App* ls = noun->add_subcommand("ls", "All sequences");
  ls->add_option("--session", args->session, "Only those of this session");
  Shows(ls, invocation, ListSequences, args);

  CLI::App* show = add("show", "One sequence");
  show->add_flag("--pages", args->pages, "And every page (always there with -o json and yaml)");
  Shows(show, invocation, ShowSequence, args);

  CLI::App* map = add("map", "Draw its pages by tier and by how often steps selected them");
  map->add_option("--columns", args->columns,
                  "Pages a row (default: what the terminal fits, or 64)")
      ->check(CLI::Range(1, 1024));
  map->add_flag("--ascii", args->ascii, "Without Unicode");
  Shows(map, invocation, Map, args);

  Runs(add("demote", "Move its sealed pages from device to host memory"), invocation,
       Move<&v1::Admin::Stub::Demote>, args);
  Runs(add("prefetch", "Move its sealed pages from host to device memory"), invocation,
       Move<&v1::Admin::Stub::Prefetch>, args);

  CLI::App* build = add("build", "Make what a plan keeps beside its tokens now, without a step");
  build->add_option("--plan", args->plan,
                    "For this plan, beside its own, for who opens it (default: its own plan)");
  Runs(build, invocation, Build, args);
  CLI::App* recompress =
      add("recompress", "Recompress now what its codec may, and follow that to the end");
  recompress->add_flag("--cancel", args->cancel, "End what is queued or running of it instead");
  Runs(
      recompress, invocation,
      [](const Options& options, const SequenceArguments& given) {
        return given.cancel ? Cancel(options, given.sequence) : Recompress(options, given.sequence);
      },
      args);
}

}  // namespace kvstrata::cli
