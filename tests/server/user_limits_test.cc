// SPDX-License-Identifier: Apache-2.0
// How much one user may hold.
#include "server/store/options/user_limits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvstrata {
namespace {

using std::chrono::milliseconds;

class UserLimitsTest : public ::testing::Test {
 protected:
  UserLimitsTest() {
    UserLimitsOptions options;
    options.defaults[Limit::kSessions] = 3;
    options.defaults[Limit::kAttachesPerSecond] = 2;
    options.defaults[Limit::kDeviceBytes] = 1000;
    options.users["uid:7"] = {{Limit::kSessions, 5}, {Limit::kModels, 1}};
    options.operators = {"uid:0"};
    options.now = [this] { return now_; };
    limits_ = std::make_shared<UserLimits>(options);
  }
  uint64_t Sessions(const std::string& user) {
    uint64_t n = 0;
    while (n < 100 && limits_->Take(limits_->For(user), Limit::kSessions).ok()) ++n;
    return n;
  }

  std::chrono::steady_clock::time_point now_ = std::chrono::steady_clock::now();
  std::shared_ptr<UserLimits> limits_;
};

TEST_F(UserLimitsTest, EveryUserHasItsOwn) {
  EXPECT_EQ(Sessions("uid:1"), 3u);
  EXPECT_EQ(Sessions("uid:2"), 3u);
  EXPECT_EQ(Sessions("uid:7"), 5u) << "of the configuration";
  EXPECT_EQ(Sessions("uid:0"), 100u) << "an operator";
}

TEST_F(UserLimitsTest, ARefusalNamesLimitHolderAndNextStep) {
  Sessions("uid:1");
  const Status refused = limits_->Take(limits_->For("uid:1"), Limit::kSessions);
  EXPECT_EQ(refused.code(), Code::kResourceExhausted);
  EXPECT_EQ(refused.reason(), "SESSION_LIMIT");
  EXPECT_THAT(std::string(refused.message()),
              ::testing::HasSubstr("uid:1 has 3 sessions; its limit is 3 (limits.sessions): "));
  EXPECT_THAT(std::string(refused.message()),
              ::testing::HasSubstr("kvstrata quota set uid:1 sessions N"));
  EXPECT_EQ(limits_->ReportOf("uid:1").refused, 2u);
}

TEST_F(UserLimitsTest, AllOrNothing) {
  UserLimits::User* const user = limits_->For("uid:1");
  EXPECT_TRUE(limits_->Take(user, Limit::kDeviceBytes, 600).ok());
  EXPECT_FALSE(limits_->Take(user, Limit::kDeviceBytes, 401).ok());
  EXPECT_FALSE(limits_->Take(user, Limit::kDeviceBytes, ~uint64_t{0}).ok()) << "nor by a wrap";
  EXPECT_EQ(limits_->Room(user, Limit::kDeviceBytes), 400u);
  EXPECT_TRUE(limits_->Take(user, Limit::kDeviceBytes, 400).ok());
  limits_->Note(user, Limit::kDeviceBytes, 50);
  EXPECT_EQ(limits_->Room(user, Limit::kDeviceBytes), 0u);
  limits_->Give(user, Limit::kDeviceBytes, 1050);
  EXPECT_EQ(limits_->Used(user, Limit::kDeviceBytes), 0u);
}

TEST_F(UserLimitsTest, ARateComesBack) {
  UserLimits::User* const user = limits_->For("uid:1");
  const auto attach = [&] { return limits_->Take(user, Limit::kAttachesPerSecond).ok(); };
  EXPECT_TRUE(attach());
  now_ += milliseconds(600);
  EXPECT_TRUE(attach());
  EXPECT_FALSE(attach());
  now_ += milliseconds(399);
  EXPECT_FALSE(attach());
  now_ += milliseconds(1);
  EXPECT_TRUE(attach()) << "the first is a second old";
  EXPECT_FALSE(attach());
}

TEST_F(UserLimitsTest, ChangedLive) {
  limits_->Set("uid:1", Limit::kSessions, 1);
  EXPECT_EQ(Sessions("uid:1"), 1u);
  limits_->Set("default", Limit::kSessions, 2);
  EXPECT_EQ(Sessions("uid:2"), 2u);
  EXPECT_EQ(Sessions("uid:7"), 5u) << "it has one of its own";
  EXPECT_EQ(Sessions("uid:0"), 100u);
  limits_->Set("uid:0", Limit::kSessions, 100);
  EXPECT_EQ(Sessions("uid:0"), 0u) << "an operator may limit itself";
  limits_->Set("uid:1", Limit::kSessions, 0);
  EXPECT_EQ(Sessions("uid:1"), 100u) << "none";
  EXPECT_EQ(limits_->defaults()[Limit::kSessions], 2u);
  limits_->Reset("default", Limit::kSessions);
  EXPECT_EQ(limits_->defaults()[Limit::kSessions], 3u);
  EXPECT_EQ(Sessions("uid:3"), 3u);
}

TEST_F(UserLimitsTest, WhatAnOperatorSetOutlivesAnotherConfiguration) {
  limits_->Set("uid:1", Limit::kSessions, 4);
  LimitNumbers defaults;
  defaults[Limit::kSessions] = 2;
  limits_->Configure(defaults, {{"uid:9", {{Limit::kSessions, 1}}}});
  EXPECT_EQ(Sessions("uid:1"), 4u);
  EXPECT_EQ(Sessions("uid:2"), 2u);
  EXPECT_EQ(Sessions("uid:7"), 2u) << "it has none of its own any more";
  EXPECT_EQ(Sessions("uid:9"), 1u);
  limits_->Reset("uid:1", Limit::kSessions);
  EXPECT_EQ(limits_->ReportOf("uid:1").limits[Limit::kSessions], 2u);
}

TEST_F(UserLimitsTest, AReportSaysWhatDiffers) {
  limits_->Set("uid:1", Limit::kQueuedWork, 9);
  const std::vector<UserReport> reports = limits_->Report();
  ASSERT_EQ(reports.size(), 2u) << "one was configured, one was set";
  EXPECT_EQ(reports[0].user, "uid:1");
  EXPECT_THAT(reports[0].changed, ::testing::ElementsAre(Limit::kQueuedWork));
  EXPECT_THAT(reports[1].changed, ::testing::ElementsAre(Limit::kSessions, Limit::kModels));
}

TEST_F(UserLimitsTest, APlaceIsGivenBackOnce) {
  UserLimits::User* const user = limits_->For("uid:7");
  {
    Result<UserPlace> place = UserPlace::Take(limits_, "uid:7", Limit::kModels);
    ASSERT_TRUE(place.ok());
    UserPlace other = std::move(*place);
    EXPECT_EQ(UserPlace::Take(limits_, "uid:7", Limit::kModels).status().reason(), "MODEL_LIMIT");
    const UserPlace copy(other);
    EXPECT_EQ(limits_->Used(user, Limit::kModels), 1u) << "a copy has none";
  }
  EXPECT_EQ(limits_->Used(user, Limit::kModels), 0u);
}

TEST(LimitNames, AreFoundAgain) {
  for (size_t i = 0; i < kLimits; ++i) {
    const auto limit = static_cast<Limit>(i);
    EXPECT_EQ(LimitOf(NameOf(limit)), limit);
    EXPECT_FALSE(ReasonOf(limit).empty());
  }
  EXPECT_EQ(LimitOf("session"), std::nullopt);
}

}  // namespace
}  // namespace kvstrata
