#include "server/tier/tier_state.h"

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>

namespace kvstrata::disk {
namespace {

constexpr uint32_t kSegmentErrors = 4;  // then a segment takes no more writes

}  // namespace

Status IoError(int error) {
  if (error == ETIMEDOUT) return DeadlineExceeded("the disk");
  if (error == ENOSPC || error == EDQUOT) {
    return ResourceExhausted("DISK_SPACE", std::string("write: ") + std::strerror(error));
  }
  return {Code::kDataLoss, "DISK_IO", std::strerror(error)};
}

Status DeadlineExceeded(const char* what) {
  return {Code::kDeadlineExceeded, "DISK_DEADLINE", std::string(what) + " did not answer in time"};
}

Status TierState::MayAsk() {
  MutexLock lock(mu);
  if (breaker.Allow(std::chrono::steady_clock::now())) return OkStatus();
  return Unavailable("DISK_BREAKER", options.directory + " failed repeatedly and is left alone");
}

void TierState::Observe(int error, uint32_t segment) {
  MutexLock lock(mu);
  if (error == 0) return breaker.Succeeded();
  if (error == ETIMEDOUT || error == ENOSPC || error == EDQUOT) return;
  ++stats.io_errors;
  breaker.Failed(std::chrono::steady_clock::now());
  if (++table.at(segment).errors >= kSegmentErrors) table.Stop(segment);
}

void TierState::ObserveDeadline() {
  MutexLock lock(mu);
  ++stats.deadlines;
  breaker.Failed(std::chrono::steady_clock::now());
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

}  // namespace kvstrata::disk
