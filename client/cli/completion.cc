// completion bash|zsh|fish: scripts made from the command table itself, so that they cannot be
// stale.
#include "client/cli/completion.h"

#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <vector>

#include "client/cli/invocation.h"
#include "proto/reasons.h"

namespace kvstrata::cli {
namespace {

struct Word {
  std::string text;
  std::string description;
  bool value = false;  // an option that is followed by a value
  std::vector<std::string> choices;
};
// What may stand after the verbs of `path` ("", "seq", "seq map").
struct Place {
  std::string path;
  std::vector<Word> verbs, options, arguments;
};

// {"a", "b"} of the type name "TEXT:{a,b}" that CLI::IsMember gives; of REASON all there are, which
// no help should list.
std::vector<std::string> Choices(const CLI::Option& option) {
  if (option.get_name() == "REASON") {
    std::vector<std::string> names;
    for (const Reason& reason : AllReasons()) names.emplace_back(reason.name);
    return names;
  }
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
      place->arguments.push_back(
          {option->get_name(), option->get_description(), true, Choices(*option)});
      continue;
    }
    for (const std::string& name : option->get_snames()) {
      place->options.push_back({"-" + name, option->get_description(), value, Choices(*option)});
    }
    for (const std::string& name : option->get_lnames()) {
      place->options.push_back({"--" + name, option->get_description(), value, Choices(*option)});
    }
  }
}

void Walk(const CLI::App& root, const CLI::App& app, const std::string& path,
          std::vector<Place>* out) {
  Place place{path, {}, {}, {}};
  for (const CLI::App* verb : app.get_subcommands(nullptr)) {
    place.verbs.push_back({verb->get_name(), verb->get_description(), false, {}});
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
  for (const CLI::App* verb : app.get_subcommands(nullptr)) {
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
void EachValueOption(
    const std::vector<Place>& places,
    const std::function<void(const std::string&, const std::vector<std::string>&)>& f) {
  std::vector<std::string> seen;
  for (const Place& place : places) {
    for (const Word& word : place.options) {
      if (!word.value || std::find(seen.begin(), seen.end(), word.text) != seen.end()) continue;
      seen.push_back(word.text);
      f(word.text, word.choices);
    }
  }
}

std::string Join(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : " ") + word;
  return out;
}

std::string Bash(const std::vector<Place>& places) {
  std::string out = R"(# bash completion of kvstrata: source <(kvstrata completion bash)
_kvstrata() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} at='' words='' i
  COMPREPLY=()
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${at:+$at }${COMP_WORDS[i]}" in
      )" + Paths(places) +
                    R"() at="${at:+$at }${COMP_WORDS[i]}" ;;
    esac
  done
  case "$prev" in
)";
  EachValueOption(places,
                  [&out](const std::string& option, const std::vector<std::string>& choices) {
                    out += "    " + option + ") ";
                    if (!choices.empty())
                      out += "COMPREPLY=($(compgen -W " + Quote(Join(choices)) + " -- \"$cur\")); ";
                    out += "return ;;\n";
                  });
  out += "  esac\n  case \"$at\" in\n";
  for (const Place& place : places) {
    out += "    " + Quote(place.path) + ") words=" + Quote(Words(place)) + " ;;\n";
  }
  out += R"(  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _kvstrata kvstrata
)";
  return out;
}

std::string Zsh(const std::vector<Place>& places) {
  std::string out = R"(#compdef kvstrata
# zsh completion of kvstrata: source <(kvstrata completion zsh), or save as _kvstrata in fpath
_kvstrata() {
  local at='' next i
  local -a verbs options
  for ((i = 2; i < CURRENT; i++)); do
    next="${at:+$at }${words[i]}"
    case "$next" in
      )" + Paths(places) +
                    R"() at="$next" ;;
    esac
  done
  case "${words[CURRENT-1]}" in
)";
  EachValueOption(
      places, [&out](const std::string& option, const std::vector<std::string>& choices) {
        out += "    " + option + ") " +
               (choices.empty() ? "_files" : "compadd -- " + Join(choices)) + "; return ;;\n";
      });
  out += "  esac\n  case \"$at\" in\n";
  const auto described = [](const Word& word) {
    std::string text = word.text;
    return Quote(text + ":" + word.description);
  };
  for (const Place& place : places) {
    out += "    " + Quote(place.path) + ")\n      verbs=(";
    for (const Word& word : place.verbs) out += " " + described(word);
    for (const Word& word : place.arguments) {
      for (const std::string& choice : word.choices) out += " " + Quote(choice);
    }
    out += " )\n      options=(";
    for (const Word& word : place.options) out += " " + described(word);
    out += " ) ;;\n";
  }
  out += R"(  esac
  if (( $#verbs )); then _describe 'verb' verbs; else _files; fi
  _describe -o 'option' options
}
(( $+functions[compdef] )) && compdef _kvstrata kvstrata
)";
  return out;
}

// fish: '...' with \ and ' escaped.
std::string FishQuote(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += (c == '\'' || c == '\\' ? "\\" : "") + std::string(1, c);
  return out + "'";
}

std::string FishLine(const Place& place, const Word& word) {
  std::string out = "complete -c kvstrata -n \"__kvstrata_at '" + place.path + "'\"";
  if (!word.text.starts_with("-")) {
    out += " -f -a " + FishQuote(word.text);
  } else if (word.text.starts_with("--")) {
    out += " -l " + word.text.substr(2);
  } else {
    out += " -s " + word.text.substr(1);
  }
  if (word.value && word.choices.empty()) out += " -r";
  if (!word.choices.empty()) out += " -x -a " + FishQuote(Join(word.choices));
  return out + " -d " + FishQuote(word.description) + "\n";
}

std::string Fish(const std::vector<Place>& places) {
  std::string out = R"(# fish completion of kvstrata: kvstrata completion fish | source
function __kvstrata_at
  set -l at ''
  for word in (commandline -opc)[2..-1]
    switch (string trim -- "$at $word")
      case )";
  for (const Place& place : places) {
    if (!place.path.empty()) out += FishQuote(place.path) + " ";
  }
  out += R"(
        set at (string trim -- "$at $word")
    end
  end
  test "$at" = "$argv[1]"
end
)";
  for (const Place& place : places) {
    for (const Word& word : place.verbs) out += FishLine(place, word);
    for (const Word& word : place.arguments) {
      for (const std::string& choice : word.choices)
        out += FishLine(place, {choice, word.description, false, {}});
    }
    for (const Word& word : place.options) out += FishLine(place, word);
  }
  return out;
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
  Runs(noun, invocation, [&app, shell]() -> Result<int> {
    std::cout << CompletionScript(app, *shell);
    return kOk;
  });
}

}  // namespace kvstrata::cli
