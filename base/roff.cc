// SPDX-License-Identifier: Apache-2.0
#include "base/roff.h"

namespace kvstrata {

std::string Roff(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool begins = out.empty() || out.back() == '\n';
    if (begins && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
  }
  return out;
}

std::string RoffParagraph(std::string_view term, std::string_view meaning) {
  return ".TP\n.B " + Roff(term) + "\n" + Roff(meaning) + "\n";
}

}  // namespace kvstrata
