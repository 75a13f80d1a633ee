// SPDX-License-Identifier: Apache-2.0
// Addresses of trace collectors, as trace.endpoint has them.
#include <gtest/gtest.h>

#include <optional>

#include "server/http/trace_exporter.h"

namespace kvstrata {
namespace {

TEST(TraceEndpoints, AreAddresses) {
  const std::optional<TraceEndpoint> full = ParseTraceEndpoint("http://10.1.2.3:80/a/b");
  ASSERT_TRUE(full);
  EXPECT_EQ(full->host, "10.1.2.3");
  EXPECT_EQ(full->port, 80);
  EXPECT_EQ(full->path, "/a/b");
  const std::optional<TraceEndpoint> least = ParseTraceEndpoint("http://localhost");
  ASSERT_TRUE(least);
  EXPECT_EQ(least->host, "127.0.0.1");
  EXPECT_EQ(least->port, 4318);
  EXPECT_EQ(least->path, "/v1/traces");
  EXPECT_EQ(ParseTraceEndpoint("http://[::1]:1/x")->host, "::1");
  for (const char* wrong :
       {"", "127.0.0.1:4318", "https://127.0.0.1", "http://", "http://collector:4318",
        "http://127.0.0.1:0", "http://127.0.0.1:65536", "http://127.0.0.1:", "http://[::1",
        "http://[::1]x", "http://user:password@127.0.0.1/", "http://127.0.0.1/a b"}) {
    EXPECT_FALSE(ParseTraceEndpoint(wrong)) << wrong;
  }
}

}  // namespace
}  // namespace kvstrata
