// SPDX-License-Identifier: Apache-2.0
// The two ends of a shared-memory ring (shm_layout.h, "rings"): single producer, single consumer,
// frames of any size up to half the ring.
//
// Thread-safety: one thread at a time on each end; the two ends run in different processes.
// Trust: neither end believes a word of shared memory that it owns itself: its counter is private.
// The consumer believes nothing it reads; a malformed frame is kCorrupt and the peer is to be
// disconnected. Cost: no system call unless the other side sleeps.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <span>
#include <vector>

#include "proto/shm_layout.h"

namespace kvstrata::shm {

inline constexpr uint64_t PaddedFrame(uint64_t bytes) { return (bytes + 7) & ~uint64_t{7}; }

class RingProducer {
 public:
  RingProducer() = default;
  // `capacity` is a power of two; `data` has that many bytes. REQUIRES: the ring is fresh.
  RingProducer(RingControl* control, std::byte* data, uint64_t capacity)
      : control_(control), data_(data), capacity_(capacity) {}

  // Largest frame, header included.
  uint64_t max_frame() const { return capacity_ / 2; }

  // Whether a frame of `payload` bytes would leave at least half the ring free, which is enough for
  // any other frame. For what may be lost rather than make others wait.
  bool HasHalfFree(uint64_t payload) const {
    const uint64_t used = tail_ - control_->head.load(std::memory_order_acquire);
    return used <= capacity_ / 2 &&
           PaddedFrame(sizeof(FrameHeader) + payload) <= capacity_ / 2 - used;
  }

  // Writes one frame made of `parts`. False when there is no room now; nothing is written then.
  // REQUIRES: header plus parts fit max_frame().
  bool Push(uint32_t type, uint64_t id, std::initializer_list<std::span<const std::byte>> parts) {
    uint64_t bytes = sizeof(FrameHeader);
    for (const auto& part : parts) bytes += part.size();
    const uint64_t padded = PaddedFrame(bytes);
    uint64_t tail = tail_;
    // A consumer that lies about head only harms itself: room is clamped to the capacity.
    const uint64_t used = tail - control_->head.load(std::memory_order_acquire);
    const uint64_t to_end = capacity_ - (tail & (capacity_ - 1));
    const uint64_t skip = padded > to_end ? to_end : 0;
    if (used > capacity_ || capacity_ - used < padded + skip) return false;
    if (skip != 0) {
      WriteHeader(tail, {static_cast<uint32_t>(skip), 0, 0});
      tail += skip;
    }
    std::byte* at = data_ + (tail & (capacity_ - 1));
    WriteHeader(tail, {static_cast<uint32_t>(bytes), type, id});
    at += sizeof(FrameHeader);
    for (const auto& part : parts) {
      if (!part.empty()) std::memcpy(at, part.data(), part.size());
      at += part.size();
    }
    Advance(tail + padded);
    return true;
  }

  // An empty ring that is `warm` bytes or more past its beginning goes on there, behind a pad. Who
  // mostly keeps it empty then stays within memory that both sides have touched already, instead of
  // faulting in all of a large ring. Until the consumer took the pad, room is what lies before it:
  // at least `warm`.
  void StartOver(uint64_t warm) {
    const uint64_t at = tail_ & (capacity_ - 1);
    if (at < warm || control_->head.load(std::memory_order_acquire) != tail_) return;
    WriteHeader(tail_, {static_cast<uint32_t>(capacity_ - at), 0, 0});
    Advance(tail_ + capacity_ - at);
  }

  // Whether the consumer said that it blocks; call after Push, then wake it. Sequentially
  // consistent with RingConsumer::PrepareSleep, so a wake-up is never lost.
  bool ConsumerSleeps() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return control_->sleeping.load(std::memory_order_relaxed) != 0;
  }

  // Wakes a consumer that waits in FutexWait.
  void FutexWake() {
    control_->sleeping.store(0, std::memory_order_release);
    syscall(SYS_futex, &control_->sleeping, FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }

 private:
  void Advance(uint64_t tail) {
    tail_ = tail;
    control_->tail.store(tail, std::memory_order_release);
  }
  void WriteHeader(uint64_t tail, FrameHeader h) {
    std::byte* at = data_ + (tail & (capacity_ - 1));
    const uint64_t room = capacity_ - (tail & (capacity_ - 1));
    // A pad of 8 bytes has room for its first two fields only.
    std::memcpy(at, &h, room < sizeof(h) ? 8 : sizeof(h));
  }

  RingControl* control_ = nullptr;
  std::byte* data_ = nullptr;
  uint64_t capacity_ = 0;
  uint64_t tail_ = 0;
};

class RingConsumer {
 public:
  enum class Outcome { kFrame, kEmpty, kCorrupt, kLarge };

  RingConsumer() = default;
  RingConsumer(RingControl* control, const std::byte* data, uint64_t capacity)
      : control_(control), data_(data), capacity_(capacity) {}

  // Judged by the private counter: a producer that rewrites head cannot keep this side awake.
  bool Empty() const { return control_->tail.load(std::memory_order_acquire) == head_; }

  // Copies the next frame's payload to `payload` (resized) and removes the frame. Own counters are
  // private, so a producer that rewrites shared memory meanwhile changes nothing already checked. A
  // frame of more than `most` bytes is kLarge and stays.
  Outcome Pop(FrameHeader* header, std::vector<std::byte>* payload, uint64_t most = ~uint64_t{0}) {
    const Outcome outcome = Look(header);
    if (outcome != Outcome::kFrame) return outcome;
    if (header->bytes > most) return Outcome::kLarge;
    payload->resize(header->bytes - sizeof(*header));
    Take(*header, *payload);
    return outcome;
  }

  // Removes a frame of which only the beginning of the payload is wanted, as far as it goes.
  Outcome PopFront(FrameHeader* header, std::span<std::byte> front) {
    const Outcome outcome = Look(header);
    if (outcome != Outcome::kFrame) return outcome;
    Take(*header, front.first(std::min<size_t>(front.size(), header->bytes - sizeof(*header))));
    return outcome;
  }

  // Announces that this side is about to block. Check Empty() once more after it.
  void PrepareSleep() {
    control_->sleeping.store(1, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  void CancelSleep() { control_->sleeping.store(0, std::memory_order_relaxed); }

  // Blocks until FutexWake or `timeout_us`. REQUIRES: PrepareSleep was called and Empty() held.
  void FutexWait(int64_t timeout_us) {
    const timespec t{static_cast<time_t>(timeout_us / 1000000), (timeout_us % 1000000) * 1000};
    syscall(SYS_futex, &control_->sleeping, FUTEX_WAIT, 1, &t, nullptr, 0);
    CancelSleep();
  }

 private:
  // The header of the next frame, behind a pad, checked: all of the frame may be read.
  Outcome Look(FrameHeader* header) {
    for (;;) {
      const uint64_t tail = control_->tail.load(std::memory_order_acquire);
      const uint64_t available = tail - head_;
      if (available == 0) return Outcome::kEmpty;
      if (available > capacity_ || available % 8 != 0) return Outcome::kCorrupt;
      const uint64_t at = head_ & (capacity_ - 1);
      const uint64_t to_end = capacity_ - at;
      FrameHeader h{};
      std::memcpy(&h, data_ + at, to_end < sizeof(h) ? 8 : sizeof(h));
      if (h.type == 0) {  // pad to the end
        if (h.bytes != to_end || to_end > available) return Outcome::kCorrupt;
        Advance(to_end);
        continue;
      }
      const uint64_t padded = PaddedFrame(h.bytes);
      if (h.bytes < sizeof(h) || h.bytes > capacity_ / 2 || padded > available || padded > to_end) {
        return Outcome::kCorrupt;
      }
      *header = h;
      return Outcome::kFrame;
    }
  }
  // REQUIRES: `header` is Look's; `payload` is no longer than its frame's.
  void Take(const FrameHeader& header, std::span<std::byte> payload) {
    const std::byte* const at = data_ + (head_ & (capacity_ - 1)) + sizeof(header);
    if (!payload.empty()) std::memcpy(payload.data(), at, payload.size());
    Advance(PaddedFrame(header.bytes));
  }
  void Advance(uint64_t bytes) {
    head_ += bytes;
    control_->head.store(head_, std::memory_order_release);
  }

  RingControl* control_ = nullptr;
  const std::byte* data_ = nullptr;
  uint64_t capacity_ = 0;
  uint64_t head_ = 0;  // REQUIRES: the ring is fresh when a consumer is made
};

}  // namespace kvstrata::shm
