// SPDX-License-Identifier: Apache-2.0
// Text of manual pages, man(7). Pure functions; any thread.
#pragma once

#include <string>
#include <string_view>

namespace kvstrata {

// What troff would take for its own is escaped.
std::string Roff(std::string_view text);

// A term and what it means.
std::string RoffParagraph(std::string_view term, std::string_view meaning);

}  // namespace kvstrata
