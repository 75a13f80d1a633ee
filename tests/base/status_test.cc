// SPDX-License-Identifier: Apache-2.0
#include "base/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

namespace kvstrata {
namespace {

TEST(Status, OkHasNoWords) {
  EXPECT_TRUE(OkStatus().ok());
  EXPECT_EQ(OkStatus().code(), Code::kOk);
  EXPECT_EQ(OkStatus().ToString(), "OK");
}

TEST(Status, CarriesCodeReasonAndMessage) {
  const Status status = InvalidArgument("PLAN_UNKNOWN", "plan is 'ches'");
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.reason(), "PLAN_UNKNOWN");
  EXPECT_EQ(status.ToString(), "INVALID_ARGUMENT PLAN_UNKNOWN: plan is 'ches'");
}

// The numbers are gRPC's and part of the C ABI.
TEST(Status, CodesAreGrpcNumbers) {
  EXPECT_EQ(static_cast<int>(NotFound("", "").code()), 5);
  EXPECT_EQ(static_cast<int>(ResourceExhausted("", "").code()), 8);
  EXPECT_EQ(static_cast<int>(FailedPrecondition("", "").code()), 9);
  EXPECT_EQ(static_cast<int>(Unimplemented("", "").code()), 12);
  EXPECT_EQ(static_cast<int>(Internal("", "").code()), 13);
  EXPECT_EQ(static_cast<int>(Unavailable("", "").code()), 14);
  EXPECT_EQ(CodeName(Code::kUnauthenticated), "UNAUTHENTICATED");
  EXPECT_EQ(CodeName(static_cast<Code>(99)), "UNKNOWN");
}

Result<int> Half(int x) {
  if (x % 2 != 0) return InvalidArgument("ODD", "x is " + std::to_string(x));
  return x / 2;
}

Result<int> Quarter(int x) {
  KVS_ASSIGN_OR_RETURN(const int half, Half(x));
  KVS_ASSIGN_OR_RETURN(const int quarter, Half(half));
  return quarter;
}

Status AllEven(int a, int b) {
  KVS_RETURN_IF_ERROR(Half(a).status());
  KVS_RETURN_IF_ERROR(Half(b).status());
  return OkStatus();
}

TEST(Result, ValueOrStatus) {
  EXPECT_EQ(*Quarter(12), 3);
  EXPECT_TRUE(Quarter(12).status().ok());
  EXPECT_EQ(Quarter(6).status().message(), "x is 3");
  EXPECT_EQ(AllEven(2, 3).reason(), "ODD");
  EXPECT_TRUE(AllEven(2, 4).ok());
}

TEST(Result, HoldsWhatCannotBeCopied) {
  Result<std::unique_ptr<int>> result(std::make_unique<int>(7));
  const std::unique_ptr<int> value = *std::move(result);
  EXPECT_EQ(*value, 7);
}

TEST(ResultDeathTest, MisuseAborts) {
  Result<int> failed = Half(3);
  EXPECT_DEATH(failed.value(), "broken invariant");
  EXPECT_DEATH((void)Result<int>{OkStatus()}, "broken invariant");
}

}  // namespace
}  // namespace kvstrata
