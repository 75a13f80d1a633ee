// SPDX-License-Identifier: Apache-2.0
// Token ids and page keys as operators write them.

#include <gtest/gtest.h>

#include "client/cli/arguments.h"

namespace kvstrata::cli {
namespace {

TEST(TokenFile, TakesNumbersHoweverTheyAreSeparated) {
  const std::vector<int32_t> want = {1, -2, 300, 2147483647};
  for (const char* text : {"1 -2 300 2147483647", "[1, -2, 300, 2147483647]\n",
                           "1\n-2\r\n300,2147483647", " [1,-2],[300],\t2147483647"}) {
    EXPECT_EQ(ParseTokens(text).value(), want) << text;
  }
  EXPECT_TRUE(ParseTokens("").value().empty());
  EXPECT_TRUE(ParseTokens("[]\n").value().empty());
}

TEST(TokenFile, NamesWhatIsNoTokenId) {
  for (const char* text : {"1 2 three", "1 2 3.5", "1 2 2147483648", "1 2 0x10", "1 2 {"}) {
    const Status status = ParseTokens(text).status();
    EXPECT_EQ(status.reason(), "TOKENS_TEXT") << text;
    EXPECT_NE(status.message().find("after 2 token ids"), std::string::npos) << status.message();
  }
}

TEST(TokenFile, AMissingFileIsNotFound) {
  const Status missing = ReadTokens("/nonexistent/tokens").status();
  EXPECT_EQ(missing.reason(), "TOKENS_UNREADABLE");
  EXPECT_NE(missing.message().find("No such file or directory"), std::string::npos);
  const Status folder = ReadTokens("/").status();
  EXPECT_EQ(folder.reason(), "TOKENS_UNREADABLE");
  EXPECT_NE(folder.message().find("Is a directory"), std::string::npos) << folder.message();
  EXPECT_EQ(ReadTokens("/nonexistent/t.safetensors").status().reason(), "TRACE_UNREADABLE");
}

TEST(Hex, IsItsOwnInverse) {
  const std::string bytes("\0\x7f\xff\x1a", 4);
  EXPECT_EQ(ToHex(bytes), "007fff1a");
  EXPECT_EQ(FromHex("007FFF1a").value(), bytes);
  for (const char* text : {"", "1", "123", "zz", "1g", "+1", " 1"}) {
    EXPECT_EQ(FromHex(text).status().reason(), "KEY_TEXT") << text;
  }
}

}  // namespace
}  // namespace kvstrata::cli
