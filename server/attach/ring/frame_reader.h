// SPDX-License-Identifier: Apache-2.0
// Reading a frame that was copied out of a ring: its struct, then its arrays. False: the frame is
// shorter than what it promises.
#ifndef KVSTRATA_SERVER_ATTACH_RING_FRAME_READER_H_
#define KVSTRATA_SERVER_ATTACH_RING_FRAME_READER_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvstrata {

// Reads a POD from the front of a frame and takes it off.
template <typename T>
bool Take(std::span<const std::byte>* in, T* out) {
  if (in->size() < sizeof(T)) return false;
  std::memcpy(out, in->data(), sizeof(T));
  *in = in->subspan(sizeof(T));
  return true;
}

// The same where it is all of the frame.
template <typename T>
bool TakeWhole(std::span<const std::byte> in, T* out) {
  return Take(&in, out) && in.empty();
}

// Takes `n` values; the frame's buffer is aligned and all arrays start at a multiple of 4.
template <typename T>
bool TakeArray(std::span<const std::byte>* in, uint64_t n, std::span<const T>* out) {
  if (n > in->size() / sizeof(T)) return false;
  *out = {reinterpret_cast<const T*>(in->data()), n};
  *in = in->subspan(n * sizeof(T));
  return true;
}

template <typename T>
std::span<const std::byte> BytesOf(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_ATTACH_RING_FRAME_READER_H_
