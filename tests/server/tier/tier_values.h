// SPDX-License-Identifier: Apache-2.0
// Values for tests of the disk tier: bytes that tell which key, version and buffer they are of.
#pragma once

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "server/tier/disk/disk_tier.h"

namespace kvstrata {

inline Deadline Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

// Buffers of some sizes that begin at multiples of 4096, perhaps with room for a header before.
class AlignedBuffers {
 public:
  explicit AlignedBuffers(const std::vector<uint64_t>& sizes, bool header_room = false)
      : header_room_(header_room) {
    uint64_t bytes = header_room ? 4096 : 0;
    for (const uint64_t size : sizes) bytes += (size + 4095) / 4096 * 4096;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)), std::free);
    std::byte* at = data_.get() + (header_room ? 4096 : 0);
    for (const uint64_t size : sizes) {
      buffers_.emplace_back(at, size);
      at += (size + 4095) / 4096 * 4096;
    }
  }
  const std::vector<std::span<std::byte>>& buffers() const { return buffers_; }
  std::vector<std::span<const std::byte>> readable() const {
    return {buffers_.begin(), buffers_.end()};
  }
  std::shared_ptr<void> owner() const { return data_; }
  bool header_room() const { return header_room_; }

 private:
  bool header_room_;
  std::shared_ptr<std::byte> data_;
  std::vector<std::span<std::byte>> buffers_;
};

// The value of a version of a key.
inline AlignedBuffers ValueOf(const std::string& key, uint64_t version,
                              const std::vector<uint64_t>& sizes, bool header_room = false) {
  AlignedBuffers value(sizes, header_room);
  std::mt19937_64 random(std::hash<std::string>()(key) * 31 + version);
  for (const std::span<std::byte>& buffer : value.buffers()) {
    for (size_t i = 0; i < buffer.size(); i += 8) {
      const uint64_t word = random();
      std::memcpy(&buffer[i], &word, std::min<size_t>(8, buffer.size() - i));
    }
  }
  return value;
}

inline bool SameBytes(const AlignedBuffers& a, const AlignedBuffers& b) {
  for (size_t i = 0; i < a.buffers().size(); ++i) {
    const auto &x = a.buffers()[i], &y = b.buffers()[i];
    if (x.size() != y.size() || std::memcmp(x.data(), y.data(), x.size()) != 0) return false;
  }
  return a.buffers().size() == b.buffers().size();
}

inline TierPut PutOf(const std::string& key, const AlignedBuffers& value) {
  return {key, value.readable(), value.owner(), {}, value.header_room()};
}
inline Status PutOne(DiskTier* tier, const std::string& key, const AlignedBuffers& value,
                     Deadline deadline = Soon()) {
  TierPut put = PutOf(key, value);
  tier->Put({&put, 1}, deadline);
  return put.status;
}
inline Status GetOne(DiskTier* tier, const std::string& key, const AlignedBuffers& into,
                     Deadline deadline = Soon()) {
  TierGet get{key, into.buffers(), into.owner(), {}, into.header_room()};
  tier->Get({&get, 1}, deadline);
  return get.status;
}

}  // namespace kvstrata
