// SPDX-License-Identifier: Apache-2.0
#include "client/cli/spelling.h"

#include <algorithm>

#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

const CLI::App* Find(const std::vector<CLI::App*>& verbs, const std::string& word) {
  for (const CLI::App* verb : verbs) {
    if (verb->get_name() == word) return verb;
  }
  return nullptr;
}

std::string Describe(const std::string& path, const std::string& word,
                     const std::vector<CLI::App*>& verbs) {
  std::string known;
  std::vector<std::string> names;
  for (const CLI::App* verb : verbs) {
    names.push_back(verb->get_name());
    known += (known.empty() ? "" : ", ") + names.back();
  }
  const std::string best(Nearest(word, std::vector<std::string_view>(names.begin(), names.end())));
  return "no verb '" + path + word + "'; " +
         (best.empty() ? "" : "did you mean '" + path + best + "'? ") + "There are " + known;
}

// Options of the root, which may stand anywhere, that are followed by a value.
bool TakesValue(const CLI::App& root, const std::string& word) {
  const CLI::Option* option = root.get_option_no_throw(word);
  return option != nullptr && option->get_items_expected_max() > 0;
}

// How far a command line names verbs.
struct Walked {
  const CLI::App* verb;
  std::string path;     // "seq map "
  std::string unknown;  // the word behind them that is no option; "": there is none
};

Walked Walk(const CLI::App& app, const std::vector<std::string>& words) {
  Walked walked{&app, "", ""};
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i].starts_with("-")) {
      i += TakesValue(app, words[i]) ? 1 : 0;
      continue;
    }
    const CLI::App* next = Find(VerbsOf(*walked.verb), words[i]);
    walked.unknown = next == nullptr ? words[i] : "";
    if (next == nullptr) break;
    walked.verb = next;
    walked.path += words[i] + " ";
  }
  return walked;
}

}  // namespace

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substitute = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({substitute, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

std::string_view Nearest(std::string_view word, std::span<const std::string_view> names) {
  std::string_view best;
  size_t least = std::max<size_t>(2, word.size() / 3) + 1;
  for (const std::string_view name : names) {
    const size_t distance = EditDistance(name, word);
    if (distance >= least) continue;
    least = distance;
    best = name;
  }
  return best;
}

std::string VerbNamed(const CLI::App& app, const std::vector<std::string>& words) {
  std::string path = Walk(app, words).path;
  if (!path.empty()) path.pop_back();
  return path;
}

std::string UnknownVerb(const CLI::App& app, const std::vector<std::string>& words) {
  const Walked walked = Walk(app, words);
  const auto verbs = VerbsOf(*walked.verb);
  if (walked.unknown.empty() || verbs.empty()) return "";
  return Describe(walked.path, walked.unknown, verbs);
}

}  // namespace kvstrata::cli
