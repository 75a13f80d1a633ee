// SPDX-License-Identifier: Apache-2.0
// BlockWorkspace: what a BlockAttention keeps on a GPU between and during steps, as pieces of one
// allocation that the engine makes, inside its own budget. First all pieces are asked for, then the
// memory is given, all zero. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstrata {

class BlockWorkspace {
 public:
  // A piece, by its offset.
  template <typename T>
  struct Piece {
    int64_t offset = 0;
  };

  template <typename T>
  Piece<T> Add(int64_t count) {
    const Piece<T> piece{bytes_};
    bytes_ += (count * int64_t{sizeof(T)} + kAlignment - 1) / kAlignment * kAlignment;
    return piece;
  }
  int64_t bytes() const { return bytes_; }

  // REQUIRES: aligned to 256 bytes, as cudaMalloc's memory is.
  void Give(void* memory) { memory_ = static_cast<std::byte*>(memory); }
  bool is_given() const { return memory_ != nullptr; }
  template <typename T>
  T* At(Piece<T> piece) const {
    return reinterpret_cast<T*>(memory_ + piece.offset);
  }

 private:
  static constexpr int64_t kAlignment = 256;

  int64_t bytes_ = 0;
  std::byte* memory_ = nullptr;
};

}  // namespace kvstrata
