// SPDX-License-Identifier: Apache-2.0
// Packets of a chunk socket (proto/chunk_messages.h), read and made: a head, and a list whose
// length the head says. Pure functions; any thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "proto/chunk_messages.h"

namespace kvstrata {

// To one connection.
struct ChunkPacket {
  uint64_t connection = 0;
  std::vector<std::byte> bytes;
};

inline Status MalformedPacket(std::string_view what) {
  return InvalidArgument("CHUNK_PACKET", std::string(what));
}

// False: the packet is shorter than a Head.
template <typename Head>
bool ReadHead(std::span<const std::byte> packet, Head* head) {
  if (packet.size() < sizeof(Head)) return false;
  std::memcpy(head, packet.data(), sizeof(Head));
  return true;
}

// The list behind a Head with head->count elements; false: that is not what the packet has.
template <typename T, typename Head>
bool ReadList(std::span<const std::byte> packet, Head* head, std::vector<T>* list) {
  if (!ReadHead(packet, head)) return false;
  if (packet.size() != sizeof(Head) + uint64_t{head->count} * sizeof(T)) return false;
  list->resize(head->count);
  if (head->count > 0)
    std::memcpy(list->data(), packet.data() + sizeof(Head), head->count * sizeof(T));
  return true;
}

template <typename Head, typename T>
ChunkPacket NewPacket(uint64_t connection, const Head& head, std::span<const T> list) {
  ChunkPacket packet{connection, std::vector<std::byte>(sizeof(Head) + list.size_bytes())};
  std::memcpy(packet.bytes.data(), &head, sizeof(Head));
  if (!list.empty()) {
    std::memcpy(packet.bytes.data() + sizeof(Head), list.data(), list.size_bytes());
  }
  return packet;
}

// Calls `each` with so much of a list at a time as one packet may have.
template <typename T, typename F>
void ForEachPart(std::span<const T> list, F&& each) {
  constexpr size_t kMost = chunks::kMostAsked;
  for (; !list.empty(); list = list.subspan(std::min(kMost, list.size()))) {
    each(list.first(std::min(kMost, list.size())));
  }
}

}  // namespace kvstrata
