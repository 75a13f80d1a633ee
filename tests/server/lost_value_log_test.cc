// SPDX-License-Identifier: Apache-2.0
// value_lost: of a broken segment some lines are told, by reason, and the rest is counted.
#include "server/work/tiers/lost_value_log.h"

#include <gtest/gtest.h>

#include <map>

#include "server/telemetry/event_ring.h"

namespace kvstrata::test {
namespace {

std::map<std::string, std::string> FieldsOf(const RecordedEvent& event) {
  std::map<std::string, std::string> fields;
  for (const auto& [key, value, quoted] : event.fields) fields[key] = value;
  return fields;
}

TEST(LostValueLogTest, ABrokenSegmentLeavesRoomForOtherEvents) {
  uint64_t last = RecentEvents().Begin(), missed = 0;
  while (const auto event = RecentEvents().Next(last, &missed)) last = event->number;
  LostValueLog log;
  const Status unread{Code::kDataLoss, "DISK_IO", "segment.000000: Input/output error"};
  const Status corrupt{Code::kDataLoss, "DISK_CORRUPT", "a value failed its check on disk"};
  for (int i = 0; i < 249; ++i) log.Tell("key", 0, unread, 100);
  log.Tell("other", 7, corrupt, 100);
  log.Tell("late", 1, unread, 101);
  std::vector<std::map<std::string, std::string>> told;
  while (const auto event = RecentEvents().Next(last, &missed)) {
    last = event->number;
    told.push_back(FieldsOf(*event));
    EXPECT_EQ(event->name, "value_lost");
    EXPECT_EQ(event->level, LogLevel::kError);
  }
  ASSERT_EQ(told.size(), LostValueLog::kBurst + 2);
  EXPECT_EQ(told[0]["reason"], "DISK_IO");
  EXPECT_EQ(told[0]["why"], unread.message());
  EXPECT_EQ(told[LostValueLog::kBurst]["reason"], "DISK_CORRUPT") << "another's limit is its own";
  EXPECT_EQ(told[LostValueLog::kBurst]["segment"], "7");
  EXPECT_EQ(told.back()["suppressed"], std::to_string(249 - LostValueLog::kBurst));
}

}  // namespace
}  // namespace kvstrata::test
