// SPDX-License-Identifier: Apache-2.0
// How extents are laid out and read back: places for arrays at multiples of kExtentAlign, and
// addresses of arrays that have been held against the extent's size. Private to codecs.
//
// Threads: a writer belongs to one thread until Allocate; then any thread may fill its own arrays.
#pragma once

#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/codec/extent.h"

namespace kvstrata {

// What an extent may weigh where its writer can choose: an arena must have room for it, and a
// worker holds one in its own memory first.
inline constexpr int64_t kExtentBytesGoal = int64_t{128} << 20;

inline constexpr int64_t AlignExtent(int64_t bytes) {
  return (bytes + kExtentAlign - 1) / kExtentAlign * kExtentAlign;
}

// The header of an extent of `bytes` bytes, without a checksum.
ExtentHeader HeaderOf(ExtentKind kind, const Geometry& geometry, Run tokens, uint32_t flags,
                      int64_t bytes);

// The first bytes of an extent, and how long it is. Nothing has been checked yet: numbers may be
// anything.
class ExtentFront {
 public:
  ExtentFront(std::span<const std::byte> front, int64_t bytes) : front_(front), bytes_(bytes) {}

  ExtentHeader header() const { return At<ExtentHeader>(0); }
  // The struct at `at`; zeros where the front is too short.
  template <typename T>
  T At(uint64_t at) const {
    T value = {};
    if (front_.size() >= at + sizeof(T)) std::memcpy(&value, front_.data() + at, sizeof(T));
    return value;
  }
  // Where `count` elements at `offset` end; the extent's end for numbers that no extent holds.
  int64_t EndOf(uint64_t offset, int64_t count, size_t element) const;

 private:
  const std::span<const std::byte> front_;
  const int64_t bytes_;
};

// Reserve places, Allocate once, fill, Finish.
class ExtentWriter {
 public:
  // A place for `bytes`; its offset.
  uint64_t Reserve(int64_t bytes) {
    const int64_t at = end_;
    end_ = AlignExtent(end_ + bytes);
    return static_cast<uint64_t>(at);
  }
  // Bytes of the whole extent as reserved so far.
  int64_t bytes() const { return end_ + kExtentAlign; }

  // All zero.
  void Allocate() { data_.resize(static_cast<size_t>(bytes())); }

  template <typename T>
  T* At(uint64_t offset) {
    return reinterpret_cast<T*>(data_.data() + offset);
  }

  // Header and checksum. The writer is empty afterwards.
  std::vector<std::byte> Finish(ExtentKind kind, const Geometry& geometry, Run tokens,
                                uint32_t flags);

 private:
  int64_t end_ = sizeof(ExtentHeader);
  std::vector<std::byte> data_;
};

// Reads an extent that CheckExtent accepts.
class ExtentReader {
 public:
  static Result<ExtentReader> Open(const ExtentView& extent, const Geometry& geometry,
                                   ExtentKind kind);

  const ExtentHeader& header() const { return header_; }
  Run tokens() const { return {header_.begin, header_.end}; }
  int64_t bytes() const { return static_cast<int64_t>(header_.bytes); }

  // The address of `count` elements at `offset`, which the host may not be able to read (extent.h,
  // description); null when they are not all inside, slack excluded, or not
  // aligned. count * sizeof(T) may be anything, also negative.
  template <typename T>
  const T* Array(uint64_t offset, int64_t count) const {
    const uint64_t end = header_.bytes - kExtentAlign;
    if (offset % kExtentAlign != 0 || offset < sizeof(ExtentHeader) || offset > end) return nullptr;
    if (count < 0 || static_cast<uint64_t>(count) > (end - offset) / sizeof(T)) return nullptr;
    return reinterpret_cast<const T*>(data_ + offset);
  }

  // As Array, to be read by the host; null also when the description does not reach so far.
  template <typename T>
  const T* Read(uint64_t offset, int64_t count) const {
    if (Array<T>(offset, count) == nullptr) return nullptr;
    if (offset + static_cast<uint64_t>(count) * sizeof(T) > readable_bytes_) return nullptr;
    return reinterpret_cast<const T*>(readable_ + offset);
  }

 private:
  const std::byte* data_ = nullptr;
  const std::byte* readable_ = nullptr;
  uint64_t readable_bytes_ = 0;
  ExtentHeader header_;
};

// DATA_LOSS EXTENT_INVALID: what of the extent of `tokens` is wrong.
Status DamagedExtent(Run tokens, std::string_view what);

}  // namespace kvstrata
