// SPDX-License-Identifier: Apache-2.0
// How the buffers of one value move to and from its slot: what its header and payload are on disk,
// and which requests move them. Pure functions; server/tier/disk/format/format.h says what a slot
// looks like.
//
// A small value goes through scratch whole: its header in the first block, its payload behind. A
// large one's whole blocks go from or to the caller's memory, the ends of its buffers through
// scratch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "server/tier/disk/files/io_queue.h"
#include "server/tier/disk/format/format.h"

namespace kvstrata::disk {

inline constexpr uint64_t kSmallBlocks = kMaxBuffers;  // values that go through scratch whole

template <typename Byte>
std::vector<uint64_t> SizesOf(const std::vector<std::span<Byte>>& buffers) {
  std::vector<uint64_t> sizes;
  for (const auto& buffer : buffers) sizes.push_back(buffer.size());
  return sizes;
}

template <typename Byte>
Status CheckBuffers(const std::vector<std::span<Byte>>& buffers) {
  if (buffers.empty() || buffers.size() > kMaxBuffers) {
    return InvalidArgument("DISK_VALUE", std::to_string(buffers.size()) +
                                             " buffers; a value has 1 to 16, join or split some");
  }
  const bool small = PayloadBlocks(SizesOf(buffers)) <= kSmallBlocks;
  for (const auto& buffer : buffers) {
    if (buffer.empty()) return InvalidArgument("DISK_VALUE", "a buffer is empty; leave it out");
    if (!small && reinterpret_cast<uintptr_t>(buffer.data()) % kBlockBytes != 0) {
      return InvalidArgument("DISK_VALUE",
                             "a buffer of a value above 64 KiB begins at no multiple of 4096");
    }
  }
  return OkStatus();
}

// What moves a value's payload: a small one in one piece behind the header in scratch; of a large
// one whole blocks from or to the caller's memory, and the ends of its buffers by scratch.
template <typename Byte>
std::vector<IoRequest> PayloadRequests(IoRequest::Op op, uint32_t file, const Place& place,
                                       const std::vector<std::span<Byte>>& buffers,
                                       std::byte* scratch) {
  const uint64_t blocks = PayloadBlocks(SizesOf(buffers));
  uint64_t offset = (uint64_t{place.block} + 1) * kBlockBytes;
  std::vector<IoRequest> requests;
  const auto add = [&](std::byte* data, uint64_t bytes) {
    if (bytes == 0) return;
    requests.push_back({op, file, static_cast<uint32_t>(bytes), offset, data});
    offset += bytes;
  };
  if (blocks <= kSmallBlocks) {
    add(scratch + kBlockBytes, blocks * kBlockBytes);
    return requests;
  }
  for (size_t i = 0; i < buffers.size(); ++i) {
    const uint64_t whole = buffers[i].size() / kBlockBytes * kBlockBytes;
    add(const_cast<std::byte*>(buffers[i].data()), whole);
    if (whole < buffers[i].size()) add(scratch + (1 + i) * kBlockBytes, kBlockBytes);
  }
  return requests;
}

// Where a value's header goes: before its payload, be that in scratch or the caller's memory.
template <typename Request>
std::byte* HeaderOf(const Request& request, std::byte* scratch) {
  const bool small = PayloadBlocks(SizesOf(request.buffers)) <= kSmallBlocks;
  if (small || !request.header_room) return scratch;
  return const_cast<std::byte*>(request.buffers.front().data()) - kBlockBytes;
}

// Header and payload that lie side by side in memory as on disk are one request.
inline void AddHeader(IoRequest::Op op, const Place& place, std::byte* header,
                      std::vector<IoRequest>* payload) {
  IoRequest& first = payload->front();
  if (first.data == header + kBlockBytes) {
    first.data -= kBlockBytes;
    first.offset -= kBlockBytes;
    first.bytes += kBlockBytes;
    return;
  }
  const uint64_t offset = uint64_t{place.block} * kBlockBytes;
  payload->push_back({op, first.file, kBlockBytes, offset, header});
}

// Copies what goes by scratch: small values, ends of buffers.
template <typename Byte, typename Copy>
void ForScratch(const std::vector<std::span<Byte>>& buffers, std::byte* scratch, const Copy& copy) {
  const bool small = PayloadBlocks(SizesOf(buffers)) <= kSmallBlocks;
  uint64_t block = 1;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const uint64_t whole = small ? 0 : buffers[i].size() / kBlockBytes * kBlockBytes;
    if (!small) block = 1 + i;
    copy(scratch + block * kBlockBytes, buffers[i].subspan(whole));
    block += BlocksOf(buffers[i].size());
  }
}

}  // namespace kvstrata::disk
