// SPDX-License-Identifier: Apache-2.0
// What KVSTRATA_HOT_CACHE_BYTES may say.
#include "client/linked/gpu_session.h"

#include <gtest/gtest.h>

namespace kvstrata::client {
namespace {

TEST(HotCacheBytes, AreANumber) {
  EXPECT_EQ(ParseHotCacheBytes("0").value(), 0u);
  EXPECT_EQ(ParseHotCacheBytes("17179869184").value(), uint64_t{1} << 34);
}

TEST(HotCacheBytes, NothingElseIsTaken) {
  for (const char* text : {"", "-1", "1GiB", "1e9", " 1", "18446744073709551616"}) {
    const Result<uint64_t> bytes = ParseHotCacheBytes(text);
    ASSERT_FALSE(bytes.ok()) << text;
    EXPECT_EQ(bytes.status().reason(), "HOT_CACHE_BYTES");
    EXPECT_NE(bytes.status().message().find("0 for no hot caches"), std::string::npos);
  }
}

}  // namespace
}  // namespace kvstrata::client
