// SPDX-License-Identifier: Apache-2.0
// How users and their limits are shown.
#include <gtest/gtest.h>

#include <sstream>

#include "client/cli/quota_table.h"

namespace kvstrata::cli {
namespace {

Json User(const char* name, uint64_t sessions, uint64_t host_bytes, uint64_t refused) {
  return {{"user", name},
          {"limits", {{"sessions", 10}, {"host_bytes", 4096}, {"models", 0}}},
          {"used", {{"sessions", sessions}, {"host_bytes", host_bytes}, {"models", 9}}},
          {"refused", refused}};
}

std::string AtLimits(const Json& document, Style style = {}) {
  std::ostringstream out;
  PrintUsersAtLimits(style, document, out);
  return out.str();
}

TEST(QuotaTable, HoldsAndLimitsStandTogether) {
  Json document = {{"defaults", {{"sessions", 512}, {"host_bytes", 1024}}},
                   {"users", {User("uid:7", 3, 1536, 1)}}};
  document["users"][0]["cluster_tenant"] = "cluster:search";
  std::ostringstream out;
  PrintQuotas({}, document, out);
  EXPECT_EQ(out.str(),
            "USER     SESSIONS  ATTACHES/S  CONNECTIONS  MODELS  SEQUENCES   DEVICE               "
            "HOST  QUEUED  REFUSED  CLUSTER-TENANT\n"
            "default       512           -            -       -          -        -            "
            "1.0 KiB       -        -  -\n"
            "uid:7      3 / 10       0 / -        0 / -   9 / -      0 / -  0 B / -  1.5 KiB / "
            "4.0 KiB   0 / -        1  cluster:search\n");
}

TEST(QuotaTable, WhoIsNearALimitOrWasRefusedIsShown) {
  const Json document = {
      {"users", {User("uid:1", 7, 0, 0), User("uid:2", 8, 4096, 0), User("uid:3", 0, 0, 2)}}};
  EXPECT_EQ(AtLimits(document),
            "\n"
            "USER   REFUSED  NEAR-ITS-LIMITS\n"
            "uid:2        0  sessions 8 of 10, host_bytes 4.0 KiB of 4.0 KiB\n"
            "uid:3        2  -\n");
  EXPECT_EQ(AtLimits({{"users", {User("uid:1", 7, 0, 0)}}}), "") << "nobody: no table";
  EXPECT_EQ(AtLimits(document, {.headers = false}), "") << "its rows would be taken for others";
}

}  // namespace
}  // namespace kvstrata::cli
