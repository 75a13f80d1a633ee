// SPDX-License-Identifier: Apache-2.0
#include "server/tier/disk/state/tier_state.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "server/tier/disk/files/tier_place.h"

namespace kvstrata::disk {
namespace {

constexpr uint32_t kSegmentErrors = 4;  // then a segment takes no more writes

// "read 0 of 4096 bytes at offset 8192: Input/output error".
std::string CauseOf(const IoOutcome& outcome) {
  const std::string error = std::strerror(outcome.error);
  if (outcome.op == IoRequest::Op::kFlush) return "fdatasync: " + error;
  return std::string(outcome.op == IoRequest::Op::kRead ? "read " : "wrote ") +
         std::to_string(outcome.done_bytes) + " of " + std::to_string(outcome.wanted_bytes) +
         " bytes at offset " + std::to_string(outcome.offset) + ": " + error;
}

}  // namespace

Status IoError(const IoOutcome& outcome, std::string_view file) {
  if (outcome.error == ETIMEDOUT) return DeadlineExceeded("the disk");
  const std::string why = std::string(file) + ": " + CauseOf(outcome);
  if (outcome.error == ENOSPC || outcome.error == EDQUOT) {
    return ResourceExhausted("DISK_SPACE", why);
  }
  return {Code::kDataLoss, "DISK_IO", why};
}

Status DeadlineExceeded(const char* what) {
  return {Code::kDeadlineExceeded, "DISK_DEADLINE", std::string(what) + " did not answer in time"};
}

Status TierState::MayAsk() {
  MutexLock lock(mu);
  if (breaker.Allow(std::chrono::steady_clock::now())) return OkStatus();
  return Unavailable("DISK_BREAKER", options.directory + " failed repeatedly and is left alone");
}

void TierState::Failed(std::string what) {
  using std::chrono::duration_cast, std::chrono::microseconds, std::chrono::system_clock;
  stats.last_error = std::move(what);
  stats.last_error_time_us =
      duration_cast<microseconds>(system_clock::now().time_since_epoch()).count();
  const bool was_open = breaker.open();
  breaker.Failed(std::chrono::steady_clock::now());
  if (!was_open && breaker.open()) stats.left_alone_since_us = stats.last_error_time_us;
}

void TierState::Observe(const IoOutcome& outcome, uint32_t segment) {
  const int error = outcome.error;
  MutexLock lock(mu);
  if (error == 0) return breaker.Succeeded();
  if (error == ETIMEDOUT || error == ENOSPC || error == EDQUOT) return;
  ++stats.io_errors;
  Failed(SegmentName(segment) + ": " + CauseOf(outcome));
  if (++table.at(segment).errors >= kSegmentErrors) table.Stop(segment);
}

void TierState::ObserveDeadline() {
  MutexLock lock(mu);
  ++stats.deadlines;
  Failed("no answer in time");
}

Place TierState::PlaceOf(SlotId at) const {
  return {store, at.segment, table.BlockOf(at), table.at(at.segment).slot_blocks};
}

SlotId TierState::Forget(Index::iterator it) {
  const SlotId at = it->second.at;
  table.at(at.segment).keys[at.slot] = nullptr;
  index.erase(it);
  return at;
}

void TierState::Probe(std::span<TierProbe> probes) const {
  MutexLock lock(mu);
  for (TierProbe& probe : probes) {
    const auto it = index.find(probe.key);
    probe.sizes = it == index.end() ? ValueSizes() : ValueSizes(it->second.sizes);
  }
}

std::vector<TierValue> TierState::Scan(uint64_t* cursor, size_t slots) const {
  std::vector<TierValue> found;
  auto segment = static_cast<uint32_t>(*cursor >> 32);
  auto slot = static_cast<uint32_t>(*cursor);
  MutexLock lock(mu);
  for (; segment < table.size(); ++segment, slot = 0) {
    const std::vector<const std::string*>& keys = table.at(segment).keys;
    for (; slot < keys.size(); ++slot) {
      if (slots-- == 0) {
        *cursor = uint64_t{segment} << 32 | slot;
        return found;
      }
      if (keys[slot] == nullptr) continue;
      found.push_back({*keys[slot], index.find(*keys[slot])->second.sizes});
    }
  }
  *cursor = kWalkEnd;
  return found;
}

std::vector<std::string> TierState::Victims(std::span<const uint64_t> sizes) {
  const uint32_t blocks = SlotBlocks(sizes);
  MutexLock lock(mu);
  if (table.HasRoom(blocks)) return {};
  const std::vector<uint32_t> segments = table.OfClass(blocks);
  const auto stays = [this](const std::string& key)
                         KVS_NO_THREAD_SAFETY_ANALYSIS { return pinned.contains(key); };
  if (segments.empty()) return table.KeysOfEmptiest(stays);
  const uint64_t slots = table.SlotsOf(blocks);
  uint64_t& hand = hands[blocks];
  for (uint64_t i = 0; i < 2 * slots * segments.size(); ++i) {
    hand = (hand + 1) % (slots * segments.size());
    const std::string* key = table.at(segments[hand / slots]).keys[hand % slots];
    if (key == nullptr || stays(*key)) continue;
    if (!std::exchange(index.find(*key)->second.used, false)) return {*key};
  }
  return table.KeysOfEmptiest(stays);  // all of its size are beyond use, or pinned
}

void TierState::Pin(std::span<const std::string> keys) {
  MutexLock lock(mu);
  for (const std::string& key : keys) ++pinned[key];
}

void TierState::Unpin(std::span<const std::string> keys) {
  MutexLock lock(mu);
  for (const std::string& key : keys) {
    const auto it = pinned.find(key);
    if (it != pinned.end() && --it->second == 0) pinned.erase(it);
  }
}

}  // namespace kvstrata::disk
