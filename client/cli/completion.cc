// SPDX-License-Identifier: Apache-2.0
// completion bash|zsh|fish: scripts made from the command table itself, so that they cannot be
// stale.
#include "client/cli/completion.h"

#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <span>
#include <sstream>
#include <vector>

#include "client/cli/invocation.h"
#include "proto/events.h"
#include "proto/reasons.h"

namespace kvstrata::cli {
namespace {

struct Word {
  std::string text;
  std::string description;
  bool value = false;  // an option that is followed by a value
  std::vector<std::string> choices;
  std::string live;      // which names of the daemon: completion.h
  bool repeats = false;  // an argument that may come again
};
// What may stand after the verbs of `path` ("", "seq", "seq map").
struct Place {
  std::string path;
  std::vector<Word> verbs, options, arguments;
};

template <typename Row>
void AddNames(std::span<const Row> rows, std::vector<std::string>* names) {
  for (const Row& row : rows) names->emplace_back(row.name);
}

// {"a", "b"} of the type name "TEXT:{a,b}" that CLI::IsMember gives; of explain's NAME all reasons
// and events, which no help should list, and events of --event.
std::vector<std::string> Choices(const CLI::Option& option) {
  const std::string name = option.get_name();
  std::vector<std::string> names;
  if (name == "NAME") AddNames(AllReasons(), &names);
  if (name == "NAME" || name == "--event") AddNames(AllEvents(), &names);
  if (!names.empty()) return names;
  const std::string type = option.get_type_name();
  const size_t open = type.find('{'), close = type.rfind('}');
  std::vector<std::string> out;
  if (open == std::string::npos || close == std::string::npos) return out;
  std::istringstream list(type.substr(open + 1, close - open - 1));
  for (std::string item; std::getline(list, item, ',');) out.push_back(item);
  return out;
}

void AddOptions(const CLI::App& app, Place* place) {
  for (const CLI::Option* option : app.get_options()) {
    const bool value = option->get_items_expected_max() > 0;
    if (!option->nonpositional()) {
      place->arguments.push_back({option->get_name(), option->get_description(), true,
                                  Choices(*option), std::string(LiveKindOf(*option)),
                                  option->get_items_expected_max() > 1});
      continue;
    }
    Word word{"", option->get_description(), value, Choices(*option),
              std::string(LiveKindOf(*option))};
    for (const std::string& name : option->get_snames()) {
      word.text = "-" + name;
      place->options.push_back(word);
    }
    for (const std::string& name : option->get_lnames()) {
      word.text = "--" + name;
      place->options.push_back(word);
    }
  }
}

void Walk(const CLI::App& root, const CLI::App& app, const std::string& path,
          std::vector<Place>* out) {
  Place place{path, {}, {}, {}};
  for (const CLI::App* verb : VerbsOf(app)) {
    place.verbs.push_back({verb->get_name(), verb->get_description()});
  }
  AddOptions(app, &place);
  if (&app != &root) {
    Place global;
    AddOptions(root, &global);
    for (Word& word : global.options) {
      const auto same = [&](const Word& w) { return w.text == word.text; };
      if (std::none_of(place.options.begin(), place.options.end(), same))
        place.options.push_back(word);
    }
  }
  out->push_back(place);
  for (const CLI::App* verb : VerbsOf(app)) {
    Walk(root, *verb, path.empty() ? verb->get_name() : path + " " + verb->get_name(), out);
  }
}

// Every word that may come next, for shells that take one list.
std::string Words(const Place& place) {
  std::string out;
  const auto add = [&out](const std::string& word) { out += (out.empty() ? "" : " ") + word; };
  for (const Word& word : place.verbs) add(word.text);
  for (const Word& word : place.arguments) {
    for (const std::string& choice : word.choices) add(choice);
  }
  for (const Word& word : place.options) add(word.text);
  return out;
}

// 'text' with quotes inside closed, escaped and reopened: sh, zsh.
std::string Quote(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

// Patterns "seq|seq map|..." that move from one place to the next.
std::string Paths(const std::vector<Place>& places) {
  std::string out;
  for (const Place& place : places) {
    if (!place.path.empty()) out += (out.empty() ? "" : "|") + Quote(place.path);
  }
  return out;
}

// Options whose value completes from a list, or (no list) as a file; once each.
void EachValueOption(const std::vector<Place>& places, const std::function<void(const Word&)>& f) {
  std::vector<std::string> seen;
  for (const Place& place : places) {
    for (const Word& word : place.options) {
      if (!word.value || std::find(seen.begin(), seen.end(), word.text) != seen.end()) continue;
      seen.push_back(word.text);
      f(word);
    }
  }
}

// "-o|--output|...": options of any place that a value follows, but --socket.
std::string ValueOptions(const std::vector<Place>& places, const char* between) {
  std::string out;
  EachValueOption(places, [&](const Word& option) {
    if (option.text != "--socket") out += (out.empty() ? "" : between) + option.text;
  });
  return out;
}

std::string Join(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : " ") + word;
  return out;
}

// Values of an option: from the daemon, from a list, else files.
std::string BashValue(const Word& option) {
  if (!option.live.empty()) return "_kvstrata_live \"${1:-kvstrata}\" " + option.live + "; return";
  if (option.choices.empty()) return "return";
  return "COMPREPLY=($(compgen -W " + Quote(Join(option.choices)) + " -- \"$cur\")); return";
}

// For each argument that the daemon has names for: the verb, the place among its arguments. `does`:
// what stands before the names' kind.
std::string LiveArguments(const Place& place, const std::string& does) {
  std::string out;
  for (size_t i = 0; i < place.arguments.size(); ++i) {
    const Word& word = place.arguments[i];
    if (word.live.empty()) continue;
    out += "    " + Quote(place.path + " ") + (word.repeats ? "*" : std::to_string(i)) + ") " +
           does + word.live + " ;;\n";
  }
  return out;
}

// Names are other people's text: they are never expanded, and quoted where they are inserted.
constexpr char kBashLive[] = R"sh(# bash completion of kvstrata: source <(kvstrata completion bash)
_kvstrata_live() {
  local name names=()
  while IFS= read -r name; do
    [[ $name == "$cur"* ]] && names+=("$(printf '%q' "$name")")
  done < <("$1" __names "$2" "${socket[@]}" 2>/dev/null)
  [[ ${#names[@]} == 0 ]] || COMPREPLY=("${names[@]}")
}
)sh";

// For the daemon's own flags: its --help is the table.
constexpr char kBashDaemon[] = R"sh(_kvstratad() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} help choices socket=()
  COMPREPLY=()
  help=$("${1:-kvstratad}" --help 2>/dev/null)
  case "$prev" in
    --set) _kvstrata_live kvstrata settings; compopt -o nospace 2>/dev/null
           COMPREPLY=("${COMPREPLY[@]/%/=}"); return ;;
    --log-level) COMPREPLY=($(compgen -W 'trace debug info warn error' -- "$cur")); return ;;
    -*) choices=$(sed -nE "s/^ *([^ ]*,)?$prev(,[^ ]*)? TEXT:\{([^}]*)\}.*/\3/p" <<<"$help")
        if [[ $choices ]]; then
          COMPREPLY=($(compgen -W "${choices//,/ }" -- "$cur")); return
        fi
        # What is followed by a value has its kind behind its name.
        grep -qE -- "^ *([^ ]*,)?$prev(,[^ ]*)? [A-Z=]+( |$)" <<<"$help" && return ;;
  esac
  COMPREPLY=($(compgen -W "$(grep -oE -- '(^ +|,)--?[a-z][a-z-]*' <<<"$help" | tr -d ' ,')" -- "$cur"))
}
complete -o default -F _kvstratad kvstratad
)sh";

std::string Bash(const std::vector<Place>& places) {
  std::string values, words, arguments;
  EachValueOption(places, [&](const Word& option) {
    values += "    " + option.text + ") " + BashValue(option) + " ;;\n";
  });
  for (const Place& place : places) {
    words += "    " + Quote(place.path) + ") words=" + Quote(Words(place)) + " ;;\n";
    arguments += LiveArguments(place, "_kvstrata_live \"${1:-kvstrata}\" ");
  }
  return kBashLive + std::string(R"(_kvstrata() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} at='' words='' n=0 i socket=()
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${COMP_WORDS[i]}" in
      --socket) socket=(--socket "${COMP_WORDS[++i]}"); continue ;;
      )") +
         ValueOptions(places, "|") +
         R"() ((++i)); continue ;;
      -*) continue ;;
    esac
    case "${at:+$at }${COMP_WORDS[i]}" in
      )" +
         Paths(places) +
         R"() at="${at:+$at }${COMP_WORDS[i]}" ;;
      *) ((++n)) ;;
    esac
  done
  case "$prev" in
)" + values +
         "  esac\n  case \"$at\" in\n" + words + R"(  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  case "$at $n" in
)" + arguments +
         "  esac\n}\ncomplete -o default -F _kvstrata kvstrata\n" + kBashDaemon;
}

// Where the cursor is: the verbs so far, how many of their arguments stand before it.
std::string ZshWalk(const std::vector<Place>& places) {
  return R"sh(#compdef kvstrata
# zsh completion of kvstrata: source <(kvstrata completion zsh), or save as _kvstrata in fpath
_kvstrata_live() { compadd -- ${(f)"$(kvstrata __names $1 $socket 2>/dev/null)"} }
_kvstrata() {
  local at='' next i n=0 live=''
  local -a verbs options socket
  for ((i = 2; i < CURRENT; i++)); do
    case "${words[i]}" in
      --socket) socket=(--socket "${(Q)words[++i]}"); continue ;;
      )sh" +
         ValueOptions(places, "|") +
         R"sh() ((++i)); continue ;;
      -*) continue ;;
    esac
    next="${at:+$at }${words[i]}"
    case "$next" in
      )sh" +
         Paths(places) +
         R"sh() at="$next" ;;
      *) ((++n)) ;;
    esac
  done
)sh";
}

std::string ZshPlace(const Place& place) {
  const auto described = [](const Word& word) { return Quote(word.text + ":" + word.description); };
  std::string out = "    " + Quote(place.path) + ")\n      verbs=(";
  for (const Word& word : place.verbs) out += " " + described(word);
  for (const Word& word : place.arguments) {
    for (const std::string& choice : word.choices) out += " " + Quote(choice);
  }
  out += " )\n      options=(";
  for (const Word& word : place.options) out += " " + described(word);
  return out + " ) ;;\n";
}

std::string Zsh(const std::vector<Place>& places) {
  std::string out = ZshWalk(places) + "  case \"${words[CURRENT-1]}\" in\n";
  EachValueOption(places, [&out](const Word& option) {
    const std::string values =
        option.choices.empty() ? "_files" : "compadd -- " + Join(option.choices);
    out += "    " + option.text + ") " +
           (option.live.empty() ? values : "_kvstrata_live " + option.live) + "; return ;;\n";
  });
  out += "  esac\n  case \"$at\" in\n";
  for (const Place& place : places) out += ZshPlace(place);
  out += "  esac\n  case \"$at $n\" in\n";
  for (const Place& place : places) out += LiveArguments(place, "live=");
  return out + R"(  esac
  if [[ $live ]]; then
    _kvstrata_live $live
  elif (( $#verbs )); then
    _describe 'verb' verbs
  else
    _files
  fi
  _describe -o 'option' options
}
(( $+functions[compdef] )) && compdef _kvstrata kvstrata && compdef _gnu_generic kvstratad
)";
}

// fish: '...' with \ and ' escaped.
std::string FishQuote(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += (c == '\'' || c == '\\' ? "\\" : "") + std::string(1, c);
  return out + "'";
}

std::string FishLive(const std::string& kind) {
  return FishQuote("(__kvstrata_live " + kind + ")");
}

// The condition that the verbs so far are the place's, with `arguments` of them behind: "" any.
std::string FishAt(const Place& place, const std::string& arguments = "") {
  return "complete -c kvstrata -n \"__kvstrata_at '" + place.path + "'" +
         (arguments.empty() ? "" : " " + arguments) + "\"";
}

std::string FishLine(const Place& place, const Word& word) {
  std::string out = FishAt(place);
  if (!word.text.starts_with("-")) {
    out += " -f -a " + FishQuote(word.text);
  } else if (word.text.starts_with("--")) {
    out += " -l " + word.text.substr(2);
  } else {
    out += " -s " + word.text.substr(1);
  }
  const bool listed = !word.choices.empty() || !word.live.empty();
  if (word.value && !listed) out += " -r";
  if (!word.live.empty()) out += " -x -a " + FishLive(word.live);
  if (!word.choices.empty()) out += " -x -a " + FishQuote(Join(word.choices));
  return out + " -d " + FishQuote(word.description) + "\n";
}

std::string FishPlace(const Place& place) {
  std::string out;
  for (const Word& word : place.verbs) out += FishLine(place, word);
  for (size_t i = 0; i < place.arguments.size(); ++i) {
    const Word& word = place.arguments[i];
    for (const std::string& choice : word.choices) {
      out += FishLine(place, {choice, word.description});
    }
    if (word.live.empty()) continue;
    out += FishAt(place, word.repeats ? "" : std::to_string(i)) + " -f -a " + FishLive(word.live) +
           "\n";
  }
  for (const Word& word : place.options) out += FishLine(place, word);
  return out;
}

std::string Fish(const std::vector<Place>& places) {
  std::string out = R"(# fish completion of kvstrata: kvstrata completion fish | source
function __kvstrata_live
  set -l words (commandline -opc)
  set -l at (contains -i -- --socket $words)
  and set -l socket --socket $words[(math $at + 1)]
  kvstrata __names $argv[1] $socket 2>/dev/null
end
function __kvstrata_at
  set -l at ''
  set -l n 0
  set -l skip 0
  for word in (commandline -opc)[2..-1]
    if test $skip = 1
      set skip 0
      continue
    end
    switch $word
      case --socket )" +
                    ValueOptions(places, " ") +
                    R"(
        set skip 1
        continue
      case '-*'
        continue
    end
    switch (string trim -- "$at $word")
      case )";
  for (const Place& place : places) {
    if (!place.path.empty()) out += FishQuote(place.path) + " ";
  }
  out += R"(
        set at (string trim -- "$at $word")
      case '*'
        set n (math $n + 1)
    end
  end
  test "$at" = "$argv[1]"; and begin
    test (count $argv) = 1; or test $n = $argv[2]
  end
end
)";
  for (const Place& place : places) out += FishPlace(place);
  return out +
         "complete -c kvstratad -a '(kvstratad --help 2>/dev/null | string match -ra -- "
         "\"--[a-z-]+\")'\n";
}

}  // namespace

std::string CompletionScript(const CLI::App& root, const std::string& shell) {
  std::vector<Place> places;
  Walk(root, root, "", &places);
  return shell == "zsh" ? Zsh(places) : shell == "fish" ? Fish(places) : Bash(places);
}

void AddCompletion(CLI::App& app, Invocation& invocation) {
  CLI::App* noun =
      app.add_subcommand("completion", "Completions: source <(kvstrata completion bash)");
  auto shell = std::make_shared<std::string>();
  noun->add_option("SHELL", *shell, "Which shell")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}));
  Runs(noun, invocation, [&app, shell](const Options&) -> Result<int> {
    std::cout << CompletionScript(app, *shell);
    return kOk;
  });
}

}  // namespace kvstrata::cli
