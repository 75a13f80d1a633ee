// SPDX-License-Identifier: Apache-2.0
// The shared-memory ring (proto/ring.h): order, wrap-around, hostile producers, wake-ups.
#include "proto/ring.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <thread>

namespace kvstrata::shm {
namespace {

using Outcome = RingConsumer::Outcome;

// Both ends of a ring in private memory.
struct Ring {
  explicit Ring(uint64_t capacity_bytes) : capacity(capacity_bytes), data(capacity_bytes) {}
  uint64_t capacity;
  std::unique_ptr<RingControl> control = std::make_unique<RingControl>();
  std::vector<std::byte> data;
  RingProducer producer{control.get(), data.data(), capacity};
  RingConsumer consumer{control.get(), data.data(), capacity};
};

std::vector<std::byte> Payload(size_t n, uint64_t seed) {
  std::vector<std::byte> out(n);
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<std::byte>(seed * 31 + i);
  return out;
}

// Writes a frame header straight into shared memory, as a hostile producer would.
void Forge(Ring* ring, uint64_t at, FrameHeader header, uint64_t tail) {
  std::memcpy(ring->data.data() + at, &header, sizeof(header));
  ring->control->tail.store(tail);
}

Outcome PopOne(Ring* ring) {
  FrameHeader header{};
  std::vector<std::byte> payload;
  return ring->consumer.Pop(&header, &payload);
}

TEST(Ring, EmptyUntilPushed) {
  Ring ring(256);
  EXPECT_TRUE(ring.consumer.Empty());
  EXPECT_EQ(PopOne(&ring), Outcome::kEmpty);
  ASSERT_TRUE(ring.producer.Push(7, 9, {}));
  EXPECT_FALSE(ring.consumer.Empty());
  FrameHeader header{};
  std::vector<std::byte> payload{std::byte{1}};
  ASSERT_EQ(ring.consumer.Pop(&header, &payload), Outcome::kFrame);
  EXPECT_EQ(header.type, 7u);
  EXPECT_EQ(header.id, 9u);
  EXPECT_EQ(header.bytes, sizeof(FrameHeader));
  EXPECT_TRUE(payload.empty());
  EXPECT_TRUE(ring.consumer.Empty());
}

// The other side can write to the word, but not make the producer go where it says.
TEST(Ring, ProducerBelievesItsOwnTailOnly) {
  Ring ring(256);
  for (uint64_t i = 0; i < 20; ++i) {
    ring.control->tail.store(i % 2 == 0 ? ~uint64_t{0} - 7 : 8 * i * i);
    EXPECT_TRUE(ring.producer.HasHalfFree(8));
    ASSERT_TRUE(ring.producer.Push(7, i, {Payload(24, i)})) << i;
    FrameHeader header{};
    std::vector<std::byte> payload;
    ASSERT_EQ(ring.consumer.Pop(&header, &payload), Outcome::kFrame) << i;
    EXPECT_EQ(header.id, i);
    EXPECT_EQ(payload, Payload(24, i));
    ring.producer.StartOver(200);
  }
}

TEST(Ring, LargeFramesStayUntilSomebodyTakesThem) {
  Ring ring(256);
  ASSERT_TRUE(ring.producer.Push(7, 1, {Payload(40, 1)}));
  ASSERT_TRUE(ring.producer.Push(8, 2, {Payload(8, 2)}));
  FrameHeader header{};
  std::vector<std::byte> payload;
  EXPECT_EQ(ring.consumer.Pop(&header, &payload, 55), Outcome::kLarge);
  EXPECT_EQ(ring.consumer.Pop(&header, &payload, 56), Outcome::kFrame);
  EXPECT_EQ(payload, Payload(40, 1));
  std::vector<std::byte> front(4);
  ASSERT_EQ(ring.consumer.PopFront(&header, front), Outcome::kFrame);
  EXPECT_EQ(header.id, 2u);
  EXPECT_EQ(front, Payload(4, 2));
  EXPECT_TRUE(ring.consumer.Empty());
}

TEST(Ring, HalfFreeIsWhatIsSaid) {
  Ring ring(256);
  EXPECT_TRUE(ring.producer.HasHalfFree(112));   // 128 with its header
  EXPECT_FALSE(ring.producer.HasHalfFree(113));  // padded to 136
  ASSERT_TRUE(ring.producer.Push(1, 1, {Payload(48, 1)}));
  EXPECT_TRUE(ring.producer.HasHalfFree(48));
  EXPECT_FALSE(ring.producer.HasHalfFree(49));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(ring.producer.Push(1, 1, {Payload(48, 1)}));
  EXPECT_FALSE(ring.producer.HasHalfFree(0));
  ring.control->head.store(1 << 20);  // a lie
  EXPECT_FALSE(ring.producer.HasHalfFree(0));
}

TEST(Ring, PartsAreJoined) {
  Ring ring(256);
  const auto a = Payload(5, 1), b = Payload(11, 2);
  ASSERT_TRUE(ring.producer.Push(1, 1, {a, {}, b}));
  FrameHeader header{};
  std::vector<std::byte> payload;
  ASSERT_EQ(ring.consumer.Pop(&header, &payload), Outcome::kFrame);
  std::vector<std::byte> both = a;
  both.insert(both.end(), b.begin(), b.end());
  EXPECT_EQ(payload, both);
}

TEST(Ring, FullRefusesAndKeepsWhatIsThere) {
  Ring ring(256);
  const auto payload = Payload(48, 3);  // 64 bytes a frame
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(ring.producer.Push(1, 1 + i, {payload}));
  EXPECT_FALSE(ring.producer.Push(1, 99, {payload}));
  EXPECT_FALSE(ring.producer.Push(1, 99, {}));
  FrameHeader header{};
  std::vector<std::byte> got;
  for (uint64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(ring.consumer.Pop(&header, &got), Outcome::kFrame);
    EXPECT_EQ(header.id, 1 + i);
    EXPECT_EQ(got, payload);
  }
  EXPECT_TRUE(ring.producer.Push(1, 5, {payload}));
}

// A frame that would cross the end is preceded by a pad; also when only 8 bytes are left.
TEST(Ring, WrapsAtEveryOffset) {
  for (uint64_t first = 16; first <= 128; first += 8) {
    Ring ring(256);
    FrameHeader header{};
    std::vector<std::byte> got;
    // Moves the tail to each multiple of 8 in turn, for more than two rounds of the ring.
    for (int i = 0; i < 100; ++i) {
      const auto payload = Payload((first - 16 + 8 * (i % 3)) % 104, i);
      ASSERT_TRUE(ring.producer.Push(2, i + 1, {payload})) << first << " " << i;
      ASSERT_EQ(ring.consumer.Pop(&header, &got), Outcome::kFrame) << first << " " << i;
      ASSERT_EQ(header.id, static_cast<uint64_t>(i + 1));
      ASSERT_EQ(got, payload);
    }
  }
}

TEST(Ring, LargestFrame) {
  Ring ring(1024);
  const auto payload = Payload(ring.producer.max_frame() - sizeof(FrameHeader), 5);
  FrameHeader header{};
  std::vector<std::byte> got;
  for (int i = 0; i < 9; ++i) {
    ASSERT_TRUE(ring.producer.Push(3, 1, {payload}));
    ASSERT_EQ(ring.consumer.Pop(&header, &got), Outcome::kFrame);
    ASSERT_EQ(got, payload);
    ASSERT_TRUE(ring.producer.Push(3, 1, {Payload(8, 1)}));  // shifts the next one
    ASSERT_EQ(ring.consumer.Pop(&header, &got), Outcome::kFrame);
  }
}

// An empty ring goes on at its beginning once it is past what is to be warm.
TEST(Ring, StartsOverWhenItIsEmpty) {
  for (uint64_t first = 16; first <= 128; first += 8) {
    Ring ring(256);
    FrameHeader header{};
    std::vector<std::byte> got;
    for (int i = 0; i < 100; ++i) {
      const uint64_t at = ring.control->tail.load() % 256;
      ring.producer.StartOver(96);
      const uint64_t next = ring.control->tail.load() % 256;
      ASSERT_EQ(next, at < 96 ? at : 0) << first << " " << i;
      const auto payload = Payload((first - 16 + 8 * (i % 3)) % 104, i);
      // Past a pad that is not taken yet, there is room for what lies before it alone.
      if (!ring.producer.Push(2, i + 1, {payload})) {
        ASSERT_EQ(PopOne(&ring), Outcome::kEmpty);
        ASSERT_TRUE(ring.producer.Push(2, i + 1, {payload})) << first << " " << i;
      }
      ASSERT_EQ(ring.consumer.Pop(&header, &got), Outcome::kFrame) << first << " " << i;
      ASSERT_EQ(header.id, static_cast<uint64_t>(i + 1));
      ASSERT_EQ(got, payload);
    }
  }
}

TEST(Ring, DoesNotStartOverWhileAFrameWaits) {
  Ring ring(256);
  ASSERT_TRUE(ring.producer.Push(1, 1, {Payload(112, 1)}));
  ring.producer.StartOver(64);
  EXPECT_EQ(ring.control->tail.load(), 128u);
  ASSERT_EQ(PopOne(&ring), Outcome::kFrame);
  ring.producer.StartOver(64);
  EXPECT_EQ(ring.control->tail.load(), 256u);
  ring.producer.StartOver(64);  // at its beginning already
  EXPECT_EQ(ring.control->tail.load(), 256u);
}

// Random sizes through a small ring from another thread: nothing lost, changed or reordered.
TEST(Ring, TwoThreadsRandomSizes) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  RecordProperty("seed", std::to_string(seed));
  constexpr uint64_t kFrames = 200'000;
  Ring ring(4096);
  std::thread producer([&] {
    std::mt19937_64 random(seed);
    for (uint64_t i = 1; i <= kFrames; ++i) {
      const auto payload = Payload(random() % 700, i);
      if (i % 8 == 0) ring.producer.StartOver(1024);
      while (!ring.producer.Push(1 + i % 60, i, {payload})) std::this_thread::yield();
    }
  });
  std::mt19937_64 random(seed);
  FrameHeader header{};
  std::vector<std::byte> got;
  uint64_t wrong = 0;
  for (uint64_t i = 1; i <= kFrames; ++i) {
    Outcome outcome;
    while ((outcome = ring.consumer.Pop(&header, &got)) == Outcome::kEmpty) {
      std::this_thread::yield();
    }
    wrong += outcome != Outcome::kFrame || header.id != i || header.type != 1 + i % 60 ||
             got != Payload(random() % 700, i);
  }
  producer.join();
  EXPECT_EQ(wrong, 0u);
  EXPECT_TRUE(ring.consumer.Empty());
}

TEST(RingCorrupt, Headers) {
  const struct {
    const char* what;
    FrameHeader header;
    uint64_t tail;
  } cases[] = {
      {"shorter than a header", {15, 1, 1}, 16},
      {"no bytes at all", {0, 1, 1}, 16},
      {"longer than what was published", {64, 1, 1}, 32},
      {"longer than half the ring", {136, 1, 1}, 136},
      {"size near 2^32", {0xFFFFFFFF, 1, 1}, 64},
      {"a pad that does not reach the end", {64, 0, 0}, 64},
      {"a pad that was not published", {256, 0, 0}, 64},
      {"tail not a multiple of 8", {16, 1, 1}, 17},
      {"tail beyond the capacity", {16, 1, 1}, 264},
      {"tail behind head", {16, 1, 1}, ~uint64_t{7}},
  };
  for (const auto& c : cases) {
    Ring ring(256);
    Forge(&ring, 0, c.header, c.tail);
    EXPECT_EQ(PopOne(&ring), Outcome::kCorrupt) << c.what;
  }
}

TEST(RingCorrupt, FrameAcrossTheEnd) {
  Ring ring(256);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(ring.producer.Push(1, 1, {Payload(64, i)}));
    ASSERT_EQ(PopOne(&ring), Outcome::kFrame);
  }
  Forge(&ring, 240, {32, 1, 1}, 240 + 32);
  EXPECT_EQ(PopOne(&ring), Outcome::kCorrupt);
}

// The whole ring was published, yet the pad ends before the ring does.
TEST(RingCorrupt, PadOfAWrongSize) {
  for (const uint32_t bytes : {0u, 8u, 64u, 136u, 256u}) {
    Ring ring(256);
    ASSERT_TRUE(ring.producer.Push(1, 1, {Payload(112, 1)}));
    ASSERT_EQ(PopOne(&ring), Outcome::kFrame);
    Forge(&ring, 128, {bytes, 0, 0}, 128 + 256);
    EXPECT_EQ(PopOne(&ring), Outcome::kCorrupt) << bytes;
  }
}

// A producer may write to head too: the consumer believes its own counter.
TEST(RingCorrupt, RewrittenHead) {
  Ring ring(256);
  ASSERT_TRUE(ring.producer.Push(1, 1, {Payload(8, 1)}));
  ASSERT_EQ(PopOne(&ring), Outcome::kFrame);
  ring.control->head.store(123456);
  EXPECT_TRUE(ring.consumer.Empty()) << "a wrong head must not keep the consumer awake";
  EXPECT_EQ(PopOne(&ring), Outcome::kEmpty);
}

// A consumer may lie about head: the producer refuses rather than write outside.
TEST(RingCorrupt, ProducerBelievesNoHead) {
  Ring ring(256);
  ring.control->head.store(1 << 20);
  EXPECT_FALSE(ring.producer.Push(1, 1, {}));
}

// Random bytes in a ring: never a crash, never a frame larger than what was published.
TEST(RingCorrupt, RandomBytes) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  for (int round = 0; round < 20'000; ++round) {
    Ring ring(256);
    for (std::byte& b : ring.data) b = static_cast<std::byte>(random() % 3 == 0 ? random() : 0);
    ring.control->tail.store(random() % 2 == 0 ? random() % 264 : random());
    FrameHeader header{};
    std::vector<std::byte> payload;
    for (int i = 0; i < 64; ++i) {
      if (ring.consumer.Pop(&header, &payload) != Outcome::kFrame) break;
      ASSERT_LE(payload.size() + sizeof(header), ring.capacity / 2);
    }
  }
}

// Ping-pong where both sides sleep between messages: a lost wake-up would be a wait that runs into
// its deadline while a frame is there.
TEST(RingWake, NoneIsLost) {
  static constexpr uint64_t kRounds = 20'000;
  static constexpr int64_t kDeadlineUs = 10'000'000;
  Ring there(4096), back(4096);
  std::atomic<uint64_t> lost{0};
  const auto receive = [&lost](Ring* ring) {
    FrameHeader header{};
    std::vector<std::byte> payload;
    while (ring->consumer.Pop(&header, &payload) == Outcome::kEmpty) {
      ring->consumer.PrepareSleep();
      if (!ring->consumer.Empty()) {
        ring->consumer.CancelSleep();
        continue;
      }
      const auto start = std::chrono::steady_clock::now();
      ring->consumer.FutexWait(kDeadlineUs);
      const auto waited = std::chrono::steady_clock::now() - start;
      if (waited >= std::chrono::microseconds(kDeadlineUs)) lost.fetch_add(1);
      if (lost.load() != 0) return;
    }
  };
  const auto send = [](Ring* ring, uint64_t id) {
    if (!ring->producer.Push(1, id, {})) return;
    if (ring->producer.ConsumerSleeps()) ring->producer.FutexWake();
  };
  std::thread echo([&] {
    for (uint64_t i = 1; i <= kRounds && lost.load() == 0; ++i) {
      receive(&there);
      send(&back, i);
    }
  });
  for (uint64_t i = 1; i <= kRounds && lost.load() == 0; ++i) {
    send(&there, i);
    receive(&back);
  }
  echo.join();
  EXPECT_EQ(lost.load(), 0u);
}

}  // namespace
}  // namespace kvstrata::shm
