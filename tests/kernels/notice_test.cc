// SPDX-License-Identifier: Apache-2.0
#include "kernels/select/notice.h"

#include <fstream>
#include <set>
#include <string>

#include "gtest/gtest.h"

namespace kvstrata {
namespace {

// The texts between backticks in the first column of the table under "## Status".
std::multiset<std::string> Documented() {
  std::ifstream file(KVS_PLANS_DOCUMENT);
  std::multiset<std::string> texts;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("## ")) inside = line == "## Status";
    const size_t end = line.find("` |");
    if (inside && line.starts_with("| `") && end != std::string::npos) {
      texts.insert(line.substr(3, end - 3));
    }
  }
  return texts;
}

TEST(Notice, TheDocumentListsEveryTextVerbatimAndNoOther) {
  std::multiset<std::string> texts;
  for (int i = 0; i < static_cast<int>(Notice::kNotices); ++i) {
    texts.insert(std::string(TextOf(static_cast<Notice>(i))));
  }
  EXPECT_EQ(Documented(), texts);
}

TEST(Notice, NumbersTakeTheirPlacesInOrder) {
  EXPECT_EQ(Say(Notice::kShort, {40, 4096}),
            "attends in full: 40 tokens are fewer than min_tokens = 4096");
  EXPECT_EQ(Say(Notice::kPromptOpen), TextOf(Notice::kPromptOpen));
  EXPECT_DEATH((void)Say(Notice::kShort, {40}), "");
  EXPECT_DEATH((void)Say(Notice::kShort, {40, 41, 42}), "");
}

}  // namespace
}  // namespace kvstrata
