// SPDX-License-Identifier: Apache-2.0
// The grammar of sizes and durations.
#include "base/quantities.h"

#include <gtest/gtest.h>

#include <utility>

namespace kvstrata {
namespace {

TEST(Quantities, Sizes) {
  const std::pair<const char*, uint64_t> good[] = {{"0", 0},
                                                   {"17", 17},
                                                   {"17B", 17},
                                                   {"1KiB", 1024},
                                                   {"4 MiB", 4 << 20},
                                                   {"2GiB", uint64_t{2} << 30},
                                                   {"1TiB", uint64_t{1} << 40},
                                                   {"1.5GiB", uint64_t{3} << 29},
                                                   {"0.25 KiB", 256},
                                                   {"16GB", 16'000'000'000},
                                                   {"0.5KB", 500},
                                                   {"5MB", 5'000'000}};
  uint64_t n = 0;
  for (const auto& [text, bytes] : good) {
    EXPECT_TRUE(ParseSize(text, &n)) << text;
    EXPECT_EQ(n, bytes) << text;
  }
  for (const char* text : {"", "GiB", "-1", "1.5", "0.3KiB", "1gib", "1G", "1 GiB ", " 1", "0x10",
                           "1e6", "1.GiB", ".5GiB", "1.2.3GiB", "1  GiB", "0.0000000001TB",
                           "99999999999999999999", "18446744073709551615KiB", "16777216.5TiB"}) {
    EXPECT_FALSE(ParseSize(text, &n)) << text;
  }
}

TEST(Quantities, Durations) {
  std::chrono::microseconds n{};
  const std::pair<const char*, int64_t> good[] = {{"0", 0},
                                                  {"0.0", 0},
                                                  {"50us", 50},
                                                  {"500ms", 500'000},
                                                  {"0.25ms", 250},
                                                  {"2 s", 2'000'000},
                                                  {"0.5s", 500'000},
                                                  {"1.500000s", 1'500'000},
                                                  {"1min", 60'000'000},
                                                  {"1m", 60'000'000},
                                                  {"1.5h", int64_t{5400} * 1'000'000},
                                                  {"7d", int64_t{604'800} * 1'000'000}};
  for (const auto& [text, us] : good) {
    EXPECT_TRUE(ParseDuration(text, &n)) << text;
    EXPECT_EQ(n.count(), us) << text;
  }
  for (const char* text : {"", "5", "-1s", "1.5us", ".5s", "1.s", "1.2.3s", "s", "1y", "1M", "1S",
                           "1h30m", "99999999999999s", "106751992d"}) {
    EXPECT_FALSE(ParseDuration(text, &n)) << text;
  }
}

TEST(Quantities, MessagesNameTheUnits) {
  EXPECT_EQ(WithUnits("true, false"), "true, false");
  for (const char* unit : {"KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB", "B"}) {
    uint64_t bytes = 0;
    EXPECT_TRUE(ParseSize(std::string("1") + unit, &bytes)) << unit;
    EXPECT_NE(WithUnits("a size, 0 to 1PiB").find(unit), std::string::npos) << unit;
  }
  for (const char* unit : {"us", "ms", "s", "m", "min", "h", "d"}) {
    std::chrono::microseconds time{};
    EXPECT_TRUE(ParseDuration(std::string("1") + unit, &time)) << unit;
    EXPECT_NE(WithUnits("a duration, 1s to 1h").find(unit), std::string::npos) << unit;
  }
}

}  // namespace
}  // namespace kvstrata
