// SPDX-License-Identifier: Apache-2.0
#include "client/cli/help_format.h"

#include <algorithm>
#include <iostream>
#include <memory>
#include <sstream>

#include "base/roff.h"
#include "client/cli/invocation.h"
#include "client/cli/list_fit.h"
#include "kvstrata/kvstrata.h"

namespace kvstrata::cli {
namespace {

constexpr Examples kExamples[] = {
    {"status", "kvstrata status", "kvstrata status -o json --timeout 500ms"},
    {"health", "kvstrata health", "kvstrata health -q --live || systemctl restart kvstratad"},
    {"version", "kvstrata version", "kvstrata version -o json"},
    {"plan ls", "kvstrata plan ls", "kvstrata plan ls -o name"},
    {"plan show", "kvstrata plan show quest", "kvstrata plan show 'quest{budget = 1024}' -o yaml"},
    {"model ls", "kvstrata model ls", "kvstrata model ls -o wide"},
    {"model show", "kvstrata model show 1", "kvstrata model show llama -o json"},
    {"session ls", "kvstrata session ls", "kvstrata session ls -o csv > sessions.csv"},
    {"seq ls", "kvstrata seq ls", "kvstrata seq ls --session 3 -o wide"},
    {"seq show", "kvstrata seq show 17", "kvstrata seq show 17 --pages"},
    {"seq map", "kvstrata seq map 17", "kvstrata seq map 17 --columns 32 --ascii"},
    {"seq demote", "kvstrata seq demote 17",
     "kvstrata seq ls --session 3 -o name | xargs -n 1 kvstrata seq demote"},
    {"seq prefetch", "kvstrata seq prefetch 17", "kvstrata seq prefetch 17 -o json"},
    {"seq build", "kvstrata seq build 17", "kvstrata seq build 17 --plan quest --timeout 2m"},
    {"seq recompress", "kvstrata seq recompress 17", "kvstrata seq recompress 17 --cancel"},
    {"pool ls", "kvstrata pool ls", "kvstrata pool ls -o csv"},
    {"evict", "kvstrata evict --dry-run", "kvstrata evict --yes"},
    {"tier ls", "kvstrata tier ls", "kvstrata tier ls -o json"},
    {"tier show", "kvstrata tier show", "kvstrata tier show -o csv"},
    {"tier scrub", "kvstrata tier scrub", "kvstrata tier scrub --rate 200MiB --timeout 1h"},
    {"tier drain", "kvstrata tier drain --timeout 2m", "kvstrata tier drain --resume"},
    {"tier resize", "kvstrata tier resize 64GiB",
     "kvstrata tier resize 16GiB --tier device --device emulated"},
    {"tier probe", "kvstrata tier probe", "kvstrata tier probe llama prompt.ids --plan quest"},
    {"tier purge", "kvstrata tier purge llama prompt.ids --yes",
     "kvstrata tier purge llama prompt.ids --plan quest --tenant uid:1000 --yes"},
    {"value ls", "kvstrata value ls --tier disk --limit 20",
     "kvstrata value ls --model llama -o csv"},
    {"value get", "kvstrata value get pin/0000000000000001 --out pin.bin",
     "kvstrata value get pin/0000000000000001 --out pin.bin --force"},
    {"value verify", "kvstrata value verify pin/0000000000000001",
     "kvstrata value verify pin/0000000000000001 pin/0000000000000002 -o json"},
    {"lookup", "kvstrata lookup llama prompt.ids --cluster",
     "kvstrata lookup llama prompt.ids --plan sentencekv --pages"},
    {"pin ls", "kvstrata pin ls", "kvstrata pin ls -o json"},
    {"pin add", "kvstrata pin add llama system_prompt.ids --ttl 7d",
     "kvstrata pin add --seq 17 --ttl 12h"},
    {"pin rm", "kvstrata pin rm 1", "kvstrata pin ls -o name | xargs -n 1 kvstrata pin rm"},
    {"quota ls", "kvstrata quota ls", "kvstrata quota ls -o csv"},
    {"quota set", "kvstrata quota set uid:1000 sessions 5",
     "kvstrata quota set default host_bytes 8GiB"},
    {"quota reset", "kvstrata quota reset uid:1000 sessions",
     "kvstrata quota reset default host_bytes"},
    {"work ls", "kvstrata work ls", "kvstrata work ls -o wide"},
    {"audit", "kvstrata audit --recall 17 --every 4 --steps 16", "kvstrata audit --engine"},
    {"config show", "kvstrata config show", "kvstrata config show -o csv"},
    {"config reload", "kvstrata config reload --dry-run", "kvstrata config reload"},
    {"config check", "kvstrata config check kvstratad.toml",
     "kvstrata config check kvstratad.toml -o json"},
    {"replay", "kvstrata replay trace.safetensors --plan quest --plan chess",
     "kvstrata replay trace.safetensors --plan 'quest{budget = 1024}' --steps 100 -o json"},
    {"calibrate", "kvstrata calibrate prose.safetensors code.safetensors --out calibrated.toml",
     "kvstrata calibrate prose.safetensors --offline"},
    {"doctor", "kvstrata doctor",
     "kvstrata doctor --config kvstratad.toml --set pool.host_bytes=8GiB"},
    {"events", "kvstrata events", "kvstrata events -f -o json"},
    {"top", "kvstrata top -d 1s", "kvstrata top --once -o json"},
    {"explain", "kvstrata explain POOL_EXHAUSTED", "kvstrata explain value_lost"},
    {"log level", "kvstrata log level", "kvstrata log level debug"},
    {"debug dump", "kvstrata debug dump", "kvstrata debug dump /tmp/kvstrata-dump"},
    {"completion", "source <(kvstrata completion bash)",
     "kvstrata completion fish > ~/.config/fish/completions/kvstrata.fish"},
};

// Options that have a name on the command line, but --help, which help itself shows.
std::vector<const CLI::Option*> NamedOptions(const CLI::App& app) {
  return app.get_options([&app](const CLI::Option* option) {
    return option->nonpositional() && option != app.get_help_ptr();
  });
}

std::string OptionParagraph(const CLI::Option& option) {
  const CLI::Formatter formatter;
  const std::string name = formatter.make_option_name(&option, !option.nonpositional());
  return RoffParagraph(name + formatter.make_option_opts(&option), option.get_description());
}

std::string VerbSection(const CLI::App& verb, const std::string& name, const Examples& examples) {
  std::string out = ".SS " + Roff("kvstrata " + name) + "\n" + Roff(verb.get_description()) + "\n";
  for (const CLI::Option* option : verb.get_options()) {
    if (option != verb.get_help_ptr()) out += OptionParagraph(*option);
  }
  return out + ".PP\n.nf\n" + Roff(examples.first) + "\n" + Roff(examples.second) + "\n.fi\n";
}

constexpr char kEnvironment[] =
    ".SH ENVIRONMENT\n"
    ".TP\n.B KVSTRATA_SOCKET\nThe daemon's socket, where \\-\\-socket is not given.\n"
    ".TP\n.B COLUMNS\nCells of a line of a list.\n"
    ".TP\n.B NO_COLOR\nNo colour on terminals.\n";

// `text` in lines that begin `indent` cells from the left.
std::string Folded(const std::string& text, size_t indent) {
  constexpr size_t kMost = 100, kFewest = 20;  // less is worse to read than what a terminal folds
  const size_t width = std::min(LineWidth(), kMost);
  if (width < indent + kFewest) return text;  // 0, too
  std::string out;
  for (const std::string& line : Wrap(text, width - indent)) {
    out += (out.empty() ? "" : "\n") + line;
  }
  return out;
}

}  // namespace

std::span<const Examples> AllExamples() { return kExamples; }

const Examples* ExamplesOf(std::string_view verb) {
  const auto* const at = std::ranges::find(kExamples, verb, &Examples::verb);
  return at == std::end(kExamples) ? nullptr : at;
}

std::string HelpTail(const CLI::App& root, const std::string& verb) {
  std::string out;
  if (const Examples* examples = ExamplesOf(verb)) {
    out = "Examples:\n  " + std::string(examples->first) + "\n  " + std::string(examples->second) +
          "\n";
  }
  const HelpFormatter formatter;
  out += (out.empty() ? "" : "\n") + std::string("Options of every verb:\n");
  for (const CLI::Option* option : NamedOptions(root)) {
    if (option->get_name() != "--version") out += formatter.make_option(option, false);
  }
  return out;
}

std::string ManualPage(const CLI::App& root) {
  std::string out =
      ".TH KVSTRATA 1 \"\" \"kvstrata " + std::string(kvs_version()) +
      "\"\n.SH NAME\nkvstrata \\- ask a running kvstratad, and replay traces through "
      "it\n.SH SYNOPSIS\n.B kvstrata\n[OPTIONS] VERB ...\n.SH OPTIONS OF EVERY VERB\n";
  for (const CLI::Option* option : NamedOptions(root)) out += OptionParagraph(*option);
  out += ".SH VERBS\n";
  EachVerb(root, [&out](const CLI::App& verb, const std::string& name) {
    if (const Examples* examples = ExamplesOf(name)) out += VerbSection(verb, name, *examples);
  });
  out +=
      ".SH EXIT STATUS\n0 ok, 1 failed, 2 usage, 3 not connected, 4 denied, 5 not found, 6 "
      "timeout.\n";
  return out + kEnvironment;
}

std::string ExampleLines(const CLI::App& root) {
  std::string out;
  EachVerb(root, [&out](const CLI::App&, const std::string& name) {
    const Examples* examples = ExamplesOf(name);
    if (examples == nullptr) return;
    out += "    " + std::string(examples->first) + "\n    " + std::string(examples->second) + "\n";
  });
  return out;
}

void AddReference(CLI::App& app, Invocation& invocation) {
  CLI::App* verb = app.add_subcommand("__reference", "The command table as a document")->group("");
  auto form = std::make_shared<std::string>();
  verb->add_option("FORM", *form, "Which")->required()->check(CLI::IsMember({"man", "examples"}));
  Runs(verb, invocation, [&app, form](const Options&) -> Result<int> {
    std::cout << (*form == "man" ? ManualPage(app) : ExampleLines(app));
    return kOk;
  });
}

std::string HelpFormatter::make_description(const CLI::App* app) const {
  const std::string text = app->get_description();
  return text.empty() ? "" : Folded(text, 0) + "\n";
}

// CLI11 puts the lines below each other.
std::string HelpFormatter::make_option_desc(const CLI::Option* option) const {
  return Folded(option->get_description(), get_column_width());
}

std::string HelpFormatter::make_subcommand(const CLI::App* verb) const {
  std::ostringstream out;
  CLI::detail::format_help(out, verb->get_display_name(true),
                           Folded(verb->get_description(), get_column_width()), get_column_width());
  return out.str();
}

}  // namespace kvstrata::cli
