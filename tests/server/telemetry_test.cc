// SPDX-License-Identifier: Apache-2.0
// What the daemon tells and keeps of what happened: lines of its log, the last events, refusals by
// reason, times, changes of its state.
#include <gtest/gtest.h>

#include <algorithm>
#include <thread>

#include "proto/reasons.h"
#include "server/telemetry/event_ring.h"
#include "server/telemetry/log.h"
#include "server/telemetry/refusals.h"
#include "server/telemetry/state_watch.h"
#include "server/telemetry/traffic.h"

namespace kvstrata {
namespace {

// The process's events behind `after`.
std::vector<RecordedEvent> EventsAfter(uint64_t after) {
  std::vector<RecordedEvent> out;
  uint64_t missed = 0;
  while (const auto event = RecentEvents().Next(after, &missed)) {
    out.push_back(*event);
    after = event->number;
  }
  return out;
}

uint64_t Newest() {
  const auto events = EventsAfter(RecentEvents().Begin());
  return events.empty() ? 0 : events.back().number;
}

std::string FieldOf(const RecordedEvent& event, std::string_view key) {
  for (const auto& field : event.fields) {
    if (field.key == key) return field.value;
  }
  return "";
}

TEST(EventRingTest, KeepsTheLastAndTellsWhatIsGone) {
  EventRing ring;
  uint64_t missed = 7;
  EXPECT_EQ(ring.Next(0, &missed), std::nullopt);
  EXPECT_EQ(missed, 0u);
  for (size_t i = 0; i < EventRing::kEvents + 5; ++i) {
    ring.Add(LogLevel::kInfo, "event", {{"i", i}});
  }
  const auto oldest = ring.Next(2, &missed);
  ASSERT_TRUE(oldest);
  EXPECT_EQ(oldest->number, 6u);
  EXPECT_EQ(missed, 3u);
  EXPECT_EQ(FieldOf(*oldest, "i"), "5");
  EXPECT_EQ(ring.Next(6, &missed)->number, 7u);
  EXPECT_EQ(missed, 0u);
  EXPECT_EQ(ring.Next(EventRing::kEvents + 5, &missed), std::nullopt);
  // Who has none, or numbers of another daemon, begins with what there is and misses nothing.
  for (const uint64_t after : {uint64_t{0}, uint64_t{1} << 40}) {
    EXPECT_EQ(ring.Next(ring.Begin(after), &missed)->number, 6u);
    EXPECT_EQ(missed, 0u);
  }
  EXPECT_EQ(ring.Begin(9), 9u);
}

TEST(EventRingTest, LongValuesAreCut) {
  EventRing ring;
  ring.Add(LogLevel::kWarn, "event", {{"why", std::string(100000, 'x')}, {"n", 3}});
  uint64_t missed = 0;
  const auto event = ring.Next(0, &missed);
  EXPECT_EQ(FieldOf(*event, "why").size(), EventRing::kMostValueBytes);
  EXPECT_TRUE(event->fields[0].quoted);
  EXPECT_FALSE(event->fields[1].quoted);
  EXPECT_EQ(NameOf(event->level), "warning");
}

// Whoever reads slowly, or not at all, is in nobody's way.
TEST(EventRingTest, WritersDoNotWaitForReaders) {
  EventRing ring;
  std::vector<std::thread> writers;
  for (int t = 0; t < 4; ++t) {
    writers.emplace_back([&ring] {
      for (int i = 0; i < 5000; ++i) ring.Add(LogLevel::kInfo, "event", {{"i", i}});
    });
  }
  uint64_t seen = 0, lost = 0, at = 0, missed = 0;
  while (at < 20000) {
    const auto event = ring.Next(at, &missed);
    if (!event) continue;
    EXPECT_EQ(event->number, at + missed + 1);
    lost += missed;
    ++seen;
    at = event->number;
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(seen + lost, 20000u);
}

// A value is one word of one line, and repaints nobody's terminal.
TEST(LogTest, ControlCharactersAreEscaped) {
  for (const char* value : {"\x1b[2J", "a\nb", "\x7f", "\x01"}) {
    const std::string line = FormatEvent(LogFormat::kText, "event", {{"client", value}});
    EXPECT_NE(line.find("client=\""), std::string::npos) << line;
    EXPECT_NE(line.find("\\u00"), std::string::npos) << line;
    for (const char c : line) EXPECT_TRUE(c >= 0x20 && c != 0x7F) << line;
  }
  EXPECT_EQ(FormatEvent(LogFormat::kText, "event", {{"client", "vllm"}}),
            "event=event client=vllm");
}

TEST(LogTest, TheRingHasInfoWhateverTheLogLeavesOut) {
  InitLog(LogLevel::kError, LogFormat::kText);
  const uint64_t before = Newest();
  LogEvent(LogLevel::kDebug, "test_debug", {});
  LogEvent(LogLevel::kInfo, "test_info", {});
  InitLog(LogLevel::kDebug, LogFormat::kText);
  LogEvent(LogLevel::kDebug, "test_debug", {});
  LogEvent(LogLevel::kTrace, "test_trace", {});
  InitLog(LogLevel::kInfo, LogFormat::kText);
  const auto events = EventsAfter(before);
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].name, "test_info");
  EXPECT_EQ(events[1].name, "test_debug");
}

TEST(LogTest, TextAndJson) {
  const std::string text =
      FormatEvent(LogFormat::kText, "attached",
                  {{"session", 7}, {"client", "two words"}, {"quote", "a\"b"}, {"ok", true}});
  EXPECT_EQ(text, R"(event=attached session=7 client="two words" quote="a\"b" ok=true)");
  const std::string json = FormatEvent(LogFormat::kJson, "attached",
                                       {{"session", 7}, {"client", "new\nline"}, {"ok", true}});
  EXPECT_EQ(json.substr(1), R"("event":"attached","session":7,"client":"new\u000aline","ok":true)");
}

TEST(LogTest, LimiterCountsWhatItHolds) {
  LogLimiter limiter(2);
  uint64_t suppressed = 99;
  EXPECT_TRUE(limiter.Allow(1, &suppressed));
  EXPECT_EQ(suppressed, 0u);
  EXPECT_TRUE(limiter.Allow(1, &suppressed));
  EXPECT_FALSE(limiter.Allow(1, &suppressed));
  EXPECT_FALSE(limiter.Allow(1, &suppressed));
  EXPECT_TRUE(limiter.Allow(2, &suppressed));
  EXPECT_EQ(suppressed, 2u);
}

uint64_t CountOf(std::string_view reason) {
  for (const auto& [name, count] : Refusals()) {
    if (name == reason) return count;
  }
  return ~uint64_t{0};
}

TEST(RefusalsTest, EveryReasonOfADaemonIsThereFromTheStart) {
  for (const Reason& reason : AllReasons()) {
    if (!SaidByDaemon(reason.area)) continue;
    EXPECT_NE(CountOf(reason.name), ~uint64_t{0}) << reason.name;
  }
  EXPECT_EQ(CountOf("HANDLE_INVALID"), ~uint64_t{0});  // the library's
  EXPECT_EQ(CountOf("PIN_UNKNOWN"), 0u);
}

TEST(RefusalsTest, CountsAllTellsSomeAndHasNoLabelOfAPeer) {
  const uint64_t before = Newest(), others = CountOf("other");
  for (uint32_t i = 0; i < 10 * kRefusalBurst; ++i) {
    NoteRefusal(NotFound("PIN_MISS", "none"), {"Admin/Pin", 1000, 17, 3, "model=1"});
  }
  NoteRefusal(Internal("NO_SUCH_REASON", "?"), {});
  CountRefusal("SOME_TEXT");
  EXPECT_EQ(CountOf("PIN_MISS"), 10 * kRefusalBurst);
  EXPECT_EQ(CountOf("other"), others + 2);
  auto events = EventsAfter(before);
  std::erase_if(events, [](const auto& e) { return FieldOf(e, "reason") != "PIN_MISS"; });
  EXPECT_GE(events.size(), kRefusalBurst);
  EXPECT_LE(events.size(), 3 * kRefusalBurst);  // a busy machine may take some seconds
  EXPECT_EQ(FieldOf(events[0], "uid"), "1000");
  EXPECT_EQ(FieldOf(events[0], "pid"), "17");
  EXPECT_EQ(FieldOf(events[0], "session"), "3");
  EXPECT_EQ(FieldOf(events[0], "call"), "Admin/Pin");
}

TEST(TrafficTest, TimesFallIntoTheirBins) {
  const LatencyHistogram before = TimesOf(Timed::kPublish);
  for (const int64_t us : {-1, 0, 16, 17, 64, 100'000'000}) {
    NoteTime(Timed::kPublish, std::chrono::microseconds(us));
  }
  const LatencyHistogram after = TimesOf(Timed::kPublish);
  EXPECT_EQ(after.count() - before.count(), 6u);
  EXPECT_EQ(after.counts[0] - before.counts[0], 3u);
  EXPECT_EQ(after.counts[1] - before.counts[1], 2u);
  EXPECT_EQ(after.counts[kLatencyBounds] - before.counts[kLatencyBounds], 1u);
  EXPECT_EQ(after.sum_us - before.sum_us, 100'000'097u);
  NoteBytes(BytePath::kEngineToMemory, 5);
  EXPECT_EQ(BytesOf(BytePath::kEngineToMemory), 5u);
  EXPECT_EQ(BytesOf(BytePath::kDiskToMemory), 0u);
}

DaemonState StateOf(const std::string& health, uint64_t evicted = 0, uint32_t fullest = 0) {
  DaemonState state;
  state.health = health;
  state.evicted_pages = evicted;
  state.fullest_percent = fullest;
  return state;
}

TEST(StateChangesTest, AChangeIsToldOnceWithBothStates) {
  const uint64_t before = Newest();
  StateChanges changes(StateOf("serving"));
  for (const char* health : {"serving", "hangs: kvs-move has not answered for 3 s",
                             "hangs: kvs-move has not answered for 4 s", "serving", "serving"}) {
    changes.Note(StateOf(health));
  }
  DaemonState draining = StateOf("serving");
  draining.draining = true;
  changes.Note(draining);
  const auto events = EventsAfter(before);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].level, LogLevel::kWarn);
  EXPECT_EQ(FieldOf(events[0], "from"), "serving");
  EXPECT_EQ(FieldOf(events[0], "to"), "hangs: kvs-move has not answered for 3 s");
  EXPECT_EQ(events[1].level, LogLevel::kInfo);
  EXPECT_EQ(FieldOf(events[2], "to"), "serving, draining the disk");
}

TEST(StateChangesTest, AServerThatWasLeftAloneIsBackOrGone) {
  const uint64_t before = Newest();
  StateChanges changes(StateOf("serving"));
  DaemonState state = StateOf("serving");
  state.servers = {"a:1", "b:2"};
  state.left_alone = {{"a:1", "why"}, {"b:2", "why"}};
  changes.Note(state);
  state.servers = {"a:1"};
  state.left_alone.clear();
  changes.Note(state);
  const auto events = EventsAfter(before);
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[2].name, "remote_back");
  EXPECT_EQ(FieldOf(events[2], "server"), "a:1");
  EXPECT_EQ(events[3].name, "remote_unlisted");
  EXPECT_EQ(FieldOf(events[3], "server"), "b:2");
}

TEST(StateChangesTest, ABurstOfEvictionsIsOneEvent) {
  const uint64_t before = Newest();
  StateChanges changes(StateOf("serving"));
  changes.Note(StateOf("serving", 5, 95));
  changes.Note(StateOf("serving", 25, 80));
  EXPECT_TRUE(EventsAfter(before).empty());
  changes.Note(StateOf("serving", 25, 70));
  changes.Note(StateOf("serving", 25, 70));
  auto events = EventsAfter(before);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].name, "evicted");
  EXPECT_EQ(FieldOf(events[0], "pages"), "25");
  EXPECT_EQ(FieldOf(events[0], "fullest_pool_percent"), "95");
  // One that does not end is told now and again, and at the end.
  for (uint64_t i = 0; i < 15; ++i) changes.Note(StateOf("serving", 26 + i));
  changes.End();
  changes.End();
  events = EventsAfter(before);
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(FieldOf(events[1], "pages"), "10");
  EXPECT_EQ(FieldOf(events[2], "pages"), "5");
}

TEST(StateChangesTest, ChunksThatGoAreCountedToo) {
  const uint64_t before = Newest();
  StateChanges changes(StateOf("serving"));
  DaemonState state = StateOf("serving");
  for (state.evicted_chunks = 7; state.evicted_chunks < 28; state.evicted_chunks += 7) {
    changes.Note(state);
  }
  EXPECT_TRUE(EventsAfter(before).empty());
  state.evicted_chunks = 21;
  changes.Note(state);
  const auto events = EventsAfter(before);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].name, "evicted");
  EXPECT_EQ(FieldOf(events[0], "chunks"), "21");
  EXPECT_EQ(FieldOf(events[0], "pages"), "0");
}

}  // namespace
}  // namespace kvstrata
