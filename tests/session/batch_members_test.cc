// SPDX-License-Identifier: Apache-2.0
#include "gtest/gtest.h"
#include "session/member_codes.h"
#include "tests/session/published_tables.h"

namespace kvstrata::test {
namespace {

std::unique_ptr<SessionSequence> OfModel(uint64_t model) {
  auto s = SequenceOf(0, 10 + model, 20);
  s->model = model;
  return s;
}

TEST(BatchMembers, ASequenceIsAMemberOnce) {
  BatchMembers batch;
  EXPECT_TRUE(batch.Name(3).ok());
  EXPECT_TRUE(batch.Name(4).ok());
  const Status again = batch.Name(3);
  EXPECT_EQ(again.code(), Code::kFailedPrecondition);
  EXPECT_EQ(again.reason(), "SEQUENCE_BUSY");
}

TEST(BatchMembers, OneModelAndNoMoreTokensThanAPositionCounts) {
  const auto a = OfModel(1), b = OfModel(2);
  BatchMembers batch;
  EXPECT_TRUE(batch.Extend(*a, 0, 1).ok());
  EXPECT_TRUE(batch.Extend(*a, 1, (size_t{1} << 31) - 1 - 20).ok());
  const Status mixed = batch.Extend(*b, 2, 1);
  EXPECT_EQ(mixed.code(), Code::kInvalidArgument);
  EXPECT_EQ(mixed.reason(), "MODELS_MIXED");
  const Status longer = batch.Extend(*a, 3, (size_t{1} << 31) - 20);
  EXPECT_EQ(longer.code(), Code::kInvalidArgument);
  EXPECT_EQ(longer.reason(), "SEQUENCE_TOO_LONG");
  EXPECT_NE(longer.message().find("members[3]"), std::string::npos) << longer.message();
}

// A member that is too long is a member: the batch is of its model.
TEST(BatchMembers, TheFirstMemberSaysOfWhichModelTheBatchIs) {
  const auto a = OfModel(1), b = OfModel(2);
  BatchMembers batch;
  EXPECT_EQ(batch.Extend(*a, 0, size_t{1} << 31).reason(), "SEQUENCE_TOO_LONG");
  EXPECT_EQ(batch.Extend(*b, 1, 1).reason(), "MODELS_MIXED");
}

}  // namespace
}  // namespace kvstrata::test
