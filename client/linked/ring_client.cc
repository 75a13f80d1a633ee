// SPDX-License-Identifier: Apache-2.0
#include "client/linked/ring_client.h"

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

namespace kvstrata::client {
namespace {

constexpr std::chrono::microseconds kPause{4};  // a reply of an awake daemon takes about one
constexpr std::chrono::microseconds kSpin{20};
constexpr std::chrono::milliseconds kSlice{10};
constexpr uint64_t kWarmBytes = 1 << 20;  // bytes of the request ring, unless the daemon is behind

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

Status Deadline(std::chrono::milliseconds timeout) {
  return {Code::kDeadlineExceeded, "DEADLINE",
          "the daemon did not answer within " + std::to_string(timeout.count()) +
              " ms; raise timeout_ms or look at its log"};
}

shm::RingProducer ProducerOf(shm::SessionHeader* s) {
  return {&s->request, reinterpret_cast<std::byte*>(s) + s->request_ring_offset,
          shm::kRequestRingBytes};
}

shm::RingConsumer ConsumerOf(shm::SessionHeader* s) {
  return {&s->reply, reinterpret_cast<std::byte*>(s) + s->reply_ring_offset, shm::kReplyRingBytes};
}

// The status that a reply carries; its payload follows the ErrorReply.
Status StatusOf(const std::vector<std::byte>& frame) {
  shm::ErrorReply reply{};
  if (frame.size() < sizeof(reply)) {
    return Internal("REPLY_INVALID", "the daemon's reply is shorter than its header");
  }
  std::memcpy(&reply, frame.data(), sizeof(reply));
  if (reply.code == 0) return OkStatus();
  const auto text = [](const auto& a) { return std::string(a, strnlen(a, sizeof(a))); };
  const Code code = static_cast<Code>(reply.code);
  return {CodeName(code) == "UNKNOWN" ? Code::kInternal : code, text(reply.reason),
          text(reply.message)};
}

}  // namespace

Status DaemonGone() {
  return Unavailable("DAEMON_GONE",
                     "the daemon closed this session or died; mapped memory stays readable, "
                     "detach and attach anew");
}

RingClient::RingClient(Connection* connection, std::chrono::milliseconds timeout)
    : connection_(connection),
      timeout_(timeout),
      consumer_(ConsumerOf(connection->session())),
      producer_(ProducerOf(connection->session())) {}

Status RingClient::Call(shm::MessageType type, Parts parts, std::vector<std::byte>* payload) {
  if (connection_->gone()) return DaemonGone();
  const auto deadline = Clock::now() + timeout_;
  Waiting own{type};
  uint64_t id = 0;
  {
    std::lock_guard lock(calls_mu_);
    id = next_id_++;
    waiting_.emplace(id, &own);
  }
  const Status pushed = Post(type, parts, id, deadline);
  const Status answered = pushed.ok() ? AwaitReply(&own, deadline) : pushed;
  {
    std::lock_guard lock(calls_mu_);
    waiting_.erase(id);
    if (pushed.ok() && !own.answered) timed_out_[id] = type;
    PassOnReading();
    if (!own.answered) return answered;
  }
  KVS_RETURN_IF_ERROR(StatusOf(own.frame));
  if (payload != nullptr) {
    payload->assign(own.frame.begin() + sizeof(shm::ErrorReply), own.frame.end());
  }
  return OkStatus();
}

bool RingClient::Offer(shm::MessageType type, Parts parts) {
  uint64_t bytes = 0;
  for (const auto& part : parts) bytes += part.size();
  std::unique_lock<std::timed_mutex> lock(post_mu_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  if (!producer_.HasHalfFree(bytes) || !producer_.Push(type, 0, parts)) {
    NoteFull();
    return false;
  }
  if (producer_.ConsumerSleeps()) connection_->RingDoorbell();
  return true;
}

void RingClient::NoteFull() {
  connection_->session()->steps.ring_full.fetch_add(1, std::memory_order_relaxed);
}

Status RingClient::Post(shm::MessageType type, Parts parts, uint64_t id,
                        std::optional<Clock::time_point> until) {
  if (connection_->gone()) return DaemonGone();
  const Clock::time_point deadline = until.value_or(Clock::now() + timeout_);
  std::unique_lock<std::timed_mutex> lock(post_mu_, deadline);
  if (!lock.owns_lock()) return Deadline(timeout_);
  // Not for an event: it should not have to wait for the daemon to take the pad.
  if (id != 0) producer_.StartOver(kWarmBytes);
  const auto spin_until = Clock::now() + kSpin;
  for (bool found_full = false; !producer_.Push(type, id, parts);) {  // full: the daemon is behind
    if (!std::exchange(found_full, true)) NoteFull();
    const auto now = Clock::now();
    if (now >= deadline) return Deadline(timeout_);
    if (!connection_->Poll()) return DaemonGone();
    if (producer_.ConsumerSleeps()) connection_->RingDoorbell();
    if (now >= spin_until) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (producer_.ConsumerSleeps()) connection_->RingDoorbell();
  return OkStatus();
}

Status RingClient::AwaitReply(Waiting* own, Clock::time_point deadline) {
  std::unique_lock lock(calls_mu_);
  const auto is_ready = [&] { return own->answered || !reading_; };
  if (!own->ready.wait_until(lock, deadline, is_ready)) return Deadline(timeout_);
  if (own->answered) return OkStatus();
  reading_ = true;
  lock.unlock();
  const Status read = Read(own, deadline);
  lock.lock();
  reading_ = false;
  return read;
}

void RingClient::PassOnReading() {
  if (reading_) return;
  const auto next =
      std::ranges::find_if(waiting_, [](const auto& w) { return !w.second->answered; });
  if (next != waiting_.end()) next->second->ready.notify_one();
}

Result<bool> RingClient::TakeFrame() {
  using Outcome = shm::RingConsumer::Outcome;
  shm::FrameHeader header{};
  const Outcome outcome = consumer_.Pop(&header, &frame_);
  if (outcome == Outcome::kCorrupt) {
    connection_->GiveUp();
    return DaemonGone();
  }
  if (outcome != Outcome::kFrame) return false;
  std::lock_guard lock(calls_mu_);
  const auto found = waiting_.find(header.id);
  if (found == waiting_.end()) {
    DropStale(header.id, frame_);
  } else {
    std::swap(found->second->frame, frame_);
    found->second->answered = true;
    found->second->ready.notify_one();
  }
  return true;
}

Status RingClient::Read(Waiting* own, Clock::time_point deadline) {
  const auto called = Clock::now();
  for (bool last_look = false;;) {
    // Written by this thread alone while it reads.
    if (own->answered) return OkStatus();
    KVS_ASSIGN_OR_RETURN(const bool taken, TakeFrame());
    if (taken) continue;
    if (last_look) return DaemonGone();
    const auto now = Clock::now();
    if (now < called + kPause) {
      Pause();
      continue;
    }
    if (now < called + kSpin) {
      std::this_thread::yield();  // the daemon may be waiting for this very core
      continue;
    }
    if (now >= deadline) return Deadline(timeout_);
    if (!connection_->Poll()) {
      last_look = true;  // it may have replied before it went
      continue;
    }
    consumer_.PrepareSleep();
    if (!consumer_.Empty()) {
      consumer_.CancelSleep();
      continue;
    }
    const auto wait = std::min<Clock::duration>(kSlice, deadline - now);
    consumer_.FutexWait(std::chrono::duration_cast<std::chrono::microseconds>(wait).count() + 1);
  }
}

void RingClient::DropStale(uint64_t id, const std::vector<std::byte>& frame) {
  const auto it = timed_out_.find(id);
  if (it == timed_out_.end()) return;
  const uint32_t type = it->second;
  timed_out_.erase(it);
  const bool opened = type == shm::kOpenSequence || type == shm::kForkSequence;
  if (!opened || !StatusOf(frame).ok() ||
      frame.size() < sizeof(shm::ErrorReply) + sizeof(shm::SequenceReply)) {
    return;
  }
  shm::SequenceReply reply{};
  std::memcpy(&reply, frame.data() + sizeof(shm::ErrorReply), sizeof(reply));
  const shm::SequenceRef ref{reply.sequence};
  // Best effort: the session's end closes it too. The reply is stale when it comes.
  (void)Post(shm::kCloseSequence, {BytesOf(ref)}, next_id_++, Clock::now());
}

Status RingClient::ReplyInvalid() {
  return Internal("REPLY_INVALID",
                  "the daemon's reply is shorter than its struct; daemon and library differ");
}

}  // namespace kvstrata::client
