// SPDX-License-Identifier: Apache-2.0
// Shared memory between the daemon and one attached client: byte-exact, fixed here, described in
// docs/shm_layout.md. PODs and checked offsets only; no lock ever lives here (ADR 8).
//
// Two sealed memfds per session:
//   session segment  written by both sides: SessionHeader, request ring (client to daemon), reply
//                    ring (daemon to client), reader slots, access counters
//   table segment    written by the daemon only, mapped read-only by clients: TableHeader, one
//                    SequenceSlot per sequence of the session, SequenceTables
// Both start at a 4096-byte boundary; offsets count bytes from the segment's start.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace kvstrata::shm {

inline constexpr uint32_t kMagic = 0x4B565331;  // "KVS1"
inline constexpr uint32_t kVersion = 11;        // a client of another version is refused at attach

inline constexpr int kMaxReaders = 64;      // steps of one session open at the same time
inline constexpr int kMaxSequences = 4096;  // sequences of one session

inline constexpr uint64_t kRequestRingBytes = uint64_t{16} << 20;
inline constexpr uint64_t kReplyRingBytes = uint64_t{1} << 20;
inline constexpr uint64_t kAccessCounters = uint64_t{1} << 20;
inline constexpr uint64_t kTableSegmentBytes = uint64_t{64} << 20;

static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// --- rings --------------------------------------------------------------------------------------
// A ring carries frames of 8-byte aligned size through `capacity` bytes (a power of two); head and
// tail count bytes since the beginning and never wrap. One producer, one consumer. A frame that
// would cross the end is preceded by a kPad frame that fills it. The consumer copies a frame to
// private memory before it looks at it, and disconnects a producer whose frame is malformed.
struct alignas(64) RingControl {
  alignas(64) std::atomic<uint64_t> tail;      // written by the producer
  alignas(64) std::atomic<uint64_t> head;      // written by the consumer
  alignas(64) std::atomic<uint32_t> sleeping;  // consumer: 1 before it blocks; futex word
  uint32_t reserved[15];
};
static_assert(sizeof(RingControl) == 192);
static_assert(offsetof(RingControl, head) == 64);
static_assert(offsetof(RingControl, sleeping) == 128);

struct FrameHeader {
  uint32_t bytes;  // the whole frame, header included, before padding to 8
  uint32_t type;   // a MessageType
  uint64_t id;     // id of a request, repeated in its reply; 0 for an event
};
static_assert(sizeof(FrameHeader) == 16);

// --- session segment ----------------------------------------------------------------------------
// A reader slot holds 0 when free or quiescent, else the epoch its step entered at.
struct alignas(64) ReaderSlot {
  std::atomic<uint64_t> epoch;
  uint64_t reserved[7];
};
static_assert(sizeof(ReaderSlot) == 64);

// What the session's steps did since it began, counted by whoever runs them
// (session/access_counts.h) for telemetry; they only grow. Nothing depends on them, so a client
// that leaves them 0, or lies, spoils its share of a statistic.
struct alignas(64) StepCounts {
  std::atomic<uint64_t> decoded;    // decode steps, one for each member
  std::atomic<uint64_t> in_full;    // those of members shorter than their plan's min_tokens
  std::atomic<uint64_t> selected;   // selections of a layer, by selectors that keep theirs
  std::atomic<uint64_t> reused;     // those that kept an earlier step's
  std::atomic<uint64_t> ring_full;  // requests and events that found no room in the request ring
  uint64_t reserved[3];
};
static_assert(sizeof(StepCounts) == 64);

struct alignas(4096) SessionHeader {
  uint32_t magic;
  uint32_t version;
  uint64_t session_id;
  uint64_t daemon_epoch;  // names this daemon process; differs after a restart
  uint64_t request_ring_offset;
  uint64_t reply_ring_offset;
  uint64_t access_counters_offset;  // uint32 counters: how often a page was selected
  uint64_t segment_bytes;
  alignas(64) RingControl request;
  RingControl reply;
  ReaderSlot readers[kMaxReaders];
  StepCounts steps;
};
static_assert(offsetof(SessionHeader, request) == 64);
static_assert(offsetof(SessionHeader, reply) == 256);
static_assert(offsetof(SessionHeader, readers) == 448);
static_assert(offsetof(SessionHeader, steps) == 4544);
static_assert(sizeof(SessionHeader) == 8192);

// --- table segment ------------------------------------------------------------------------------
enum PageFlags : uint16_t {
  kPageShared = 1,  // do not write: ask for a private copy first (kGrow)
  kPageSealed = 2,  // full and immutable
  kPageAbsent = 4,  // its rows were released: only extents hold them; nothing else is set
};

// Where a page or an index block lies.
struct PageEntry {
  uint32_t arena;   // id of an arena whose descriptor the client was passed
  uint16_t flags;   // PageFlags
  uint16_t tier;    // 0 device, 1 host
  uint64_t offset;  // bytes from the arena's start
};
static_assert(sizeof(PageEntry) == 16);

// Flags of an ExtentEntry: the extent that belongs behind it is on its way from a tier; it will not
// come, and the sequence answers no step any more.
inline constexpr uint16_t kExtentRestDue = 1;
inline constexpr uint16_t kExtentRestLost = 2;

// Where an extent lies (kernels/codec/extent.h says what is in it) and which tokens it is about.
struct ExtentEntry {
  uint32_t arena;
  uint16_t flags;
  uint16_t tier;
  uint64_t offset;
  uint64_t bytes;  // size of the extent, its header included
  int32_t begin;   // token positions [begin, end)
  int32_t end;
};
static_assert(sizeof(ExtentEntry) == 32);

// One version of a sequence's table. Immutable once published, but for entries beyond the counts:
// those are filled first and the count is stored after them (release). Extents change with the
// version alone; they are ordered by `begin`.
struct SequenceTable {
  uint64_t version;
  uint64_t sequence_id;
  uint64_t bytes;                      // size of the whole table
  uint32_t page_capacity;              // entries of `entries` that are pages
  uint32_t index_capacity;             // entries after them that are index blocks
  std::atomic<uint32_t> pages;         // published pages
  std::atomic<uint32_t> index_blocks;  // published index blocks
  uint64_t first_access_counter;       // first access counter of this sequence
  uint32_t access_counter_count;       // its counters, one per page; 0: none
  uint32_t extent_count;               // immutable
  // PageEntry entries[page_capacity + index_capacity] follows, then ExtentEntry[extent_count].
};
static_assert(sizeof(SequenceTable) == 56);

struct alignas(64) SequenceSlot {
  std::atomic<uint64_t> table_offset;  // 0: no sequence here
  std::atomic<uint64_t> sequence_id;
  std::atomic<uint64_t> recall_audit;  // a RecallRequest; 0: no audit is running
  std::atomic<uint64_t> truncate_to;   // 1 + the tokens that another session wants left; 0: none
  uint64_t reserved[4];
};
static_assert(sizeof(SequenceSlot) == 64);
static_assert(offsetof(SequenceSlot, recall_audit) == 16);
static_assert(offsetof(SequenceSlot, truncate_to) == 24);

// What a recall audit asks of whoever runs the sequence's steps. It lies in the line that a step
// reads anyway for its table, so a step that is not audited pays one relaxed load. A client that
// never looks is right too: the audit then ends at its deadline.
struct RecallRequest {
  uint32_t audit = 0;  // its number, repeated in every answer; 0: none
  uint32_t every = 0;  // sample the decode steps at positions that are multiples of it; >= 1

  uint64_t Packed() const { return uint64_t{every} << 32 | audit; }
  static RecallRequest Of(uint64_t packed) {
    return {static_cast<uint32_t>(packed), static_cast<uint32_t>(packed >> 32)};
  }
  // `position` is the decode token's.
  bool Samples(int32_t position) const {
    return audit != 0 && every != 0 && static_cast<uint32_t>(position) % every == 0;
  }
};

struct alignas(4096) TableHeader {
  uint32_t magic;
  uint32_t version;
  uint64_t segment_bytes;
  alignas(64) std::atomic<uint64_t> global_epoch;  // starts at 1, only grows
  uint8_t pad[4096 - 72];
  SequenceSlot slots[kMaxSequences];
};
static_assert(offsetof(TableHeader, global_epoch) == 64);
static_assert(offsetof(TableHeader, slots) == 4096);

inline const PageEntry* Entries(const SequenceTable* t) {
  return reinterpret_cast<const PageEntry*>(t + 1);
}
inline PageEntry* Entries(SequenceTable* t) { return reinterpret_cast<PageEntry*>(t + 1); }
inline uint64_t EntryCount(const SequenceTable* t) {
  return uint64_t{t->page_capacity} + t->index_capacity;
}
inline const ExtentEntry* Extents(const SequenceTable* t) {
  return reinterpret_cast<const ExtentEntry*>(Entries(t) + EntryCount(t));
}
inline ExtentEntry* Extents(SequenceTable* t) {
  return reinterpret_cast<ExtentEntry*>(Entries(t) + EntryCount(t));
}
inline uint64_t TableBytes(uint32_t page_capacity, uint32_t index_capacity, uint32_t extents) {
  return sizeof(SequenceTable) + (uint64_t{page_capacity} + index_capacity) * sizeof(PageEntry) +
         extents * sizeof(ExtentEntry);
}

}  // namespace kvstrata::shm
